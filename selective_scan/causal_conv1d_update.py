"""Steps of the causal convolution with states that stay in memory between calls, for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import INTEGER, REAL, Call, fail
from ._operator import Operator
from ._result import out_unless_given
from ._state_slots import pool_of, slots_of_rows
from ._table import BackendName, DtypeOf, Number, Shape, Table, TensorArgument
from .causal_conv1d import ACTIVATION, BIAS, WEIGHT, Activation


def _check_history(call: Call) -> None:
    history, state = call.sizes["width"] - 1, call["conv_state"]
    if call.sizes["state_len"] < history:
        wanted = f"at least width-1 = {history}"
        fail(f"conv_state must have state_len of {wanted}, got {tuple(state.shape)}")


_CAUSAL_CONV1D_UPDATE = Operator(
    "causal_conv1d_update",
    Table(
        TensorArgument("x", REAL, Shape((("batch", "dim"), ("batch", "dim", "steps")))),
        TensorArgument(
            "conv_state",
            REAL,
            pool_of("dim", "state_len", indices="conv_state_indices", rows="batch"),
            is_changed=True,
        ),
        WEIGHT,
        BIAS,
        ACTIVATION,
        TensorArgument("cache_seqlens", INTEGER, ("batch",), optional=True),
        TensorArgument("conv_state_indices", INTEGER, ("batch",), optional=True),
        Number("pad_slot_id", -1),
        TensorArgument(
            "out", DtypeOf("x"), ("batch", "dim", "steps?"), optional=True, is_changed=True
        ),
        anchor="x",
        relations=_check_history,
    ),
    results=[out_unless_given("x", ("...",))],
    flops=lambda call: (2 * call["x"].numel() * call["weight"].shape[1], 0),
)


def causal_conv1d_update_ref(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Takes one or a few steps of the causal convolution in plain PyTorch.

    It has the arguments, result and errors of :func:`causal_conv1d_update`; `backend` is checked
    but has no other effect. It runs on any device. Indices of slots that do not exist are refused,
    also on CUDA.

    Example:
        >>> import torch
        >>> from selective_scan import causal_conv1d_update_ref
        >>> state = torch.tensor([[[1.0, 2.0]]])
        >>> causal_conv1d_update_ref(torch.tensor([[3.0]]), state, torch.tensor([[1.0, 10.0]]))
        tensor([[32.]])
        >>> state
        tensor([[[2., 3.]]])
    """
    options = (activation, cache_seqlens, conv_state_indices, pad_slot_id, out)
    call = _CAUSAL_CONV1D_UPDATE.check((x, conv_state, weight, bias, *options, backend))
    dtype, history = call.compute_dtype, call.sizes["width"] - 1
    state_len = conv_state.shape[2]
    new = x.unsqueeze(-1) if x.dim() == 2 else x
    _, dim, steps = new.shape

    slot, is_live = slots_of_rows(call, "conv_state_indices", conv_state)
    slot, new = slot[is_live], new[is_live].to(dtype)
    state = conv_state[slot].to(dtype)
    if cache_seqlens is None:
        joined = torch.cat([state, new], -1)
        seen, state = joined[..., state_len - history :], joined[..., steps:]
    else:
        step = cache_seqlens[is_live].long()[:, None]

        def places(first: int, number: int) -> Tensor:
            offsets = torch.arange(first, first + number, device=x.device)
            return ((step + offsets) % max(state_len, 1))[:, None].expand(-1, dim, -1)

        seen = torch.cat([state.gather(2, places(-history, history)), new], -1)
        kept = min(steps, state_len)
        state = state.scatter(2, places(steps - kept, kept), new[..., steps - kept :])
    live = torch.zeros_like(new) if bias is None else bias.to(dtype)[:, None].expand(new.shape)
    for k, tap in enumerate(weight.to(dtype).unbind(1)):
        live = live + tap[:, None] * seen[..., k : k + steps]
    if activation is not None:
        live = torch.nn.functional.silu(live)
    conv_state[slot] = state.to(conv_state.dtype)
    result = torch.empty_like(x) if out is None else out
    result.zero_()
    result[is_live] = (live.squeeze(-1) if x.dim() == 2 else live).to(x.dtype)
    return result


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Takes one or a few steps of the causal convolution and updates its states in place.

    The state of a row is x at its last state_len steps, at least width - 1 of them. A call that
    continues from the final states of :func:`causal_conv1d_fn` returns what a single call with all
    steps would have returned. `conv_state` may be a pool, of which a batch uses some slots:
    `conv_state_indices` gives the slot of each row. A row whose index is negative or `pad_slot_id`
    is padding: no state is read or changed for it, and its out is 0.

    With `cache_seqlens`, a state is a ring buffer: x of step t is at position t modulo state_len,
    so that no value moves. Without `cache_seqlens`, the last step is at the end of the state.

    If two rows have the same slot, the result is undefined. An index of a slot that does not exist
    is refused on a CPU; on CUDA, where the host does not read the indices, it counts as padding.
    Tensors may have any strides. Dtypes may be mixed: arithmetic is float32, or float64 if any
    tensor is float64, also under torch.autocast. There is no derivative: a call that would need one
    is refused.

    Args:
        x: (batch, dim) or (batch, dim, steps), float32, float16, bfloat16 or float64.
        conv_state: (batch, dim, state_len); with `conv_state_indices` (slots, dim, state_len); any
            of these dtypes. Changed in place.
        weight: (dim, width) with a width of 1 to 8, any of these dtypes; the last tap is that of
            the current step.
        bias: (dim,), any of these dtypes.
        activation: None, "silu", or its other name, "swish".
        cache_seqlens: the number of each row's steps before this call, (batch,), int32 or int64.
        conv_state_indices: the slot of each row, (batch,), int32 or int64. None means that row b
            has slot b.
        pad_slot_id: an index that marks padding, like every negative index.
        out: a tensor that receives the result, with x's shape and dtype; may be x itself. None
            allocates one.
        backend: as in :func:`selective_scan_fn`; "reference" runs :func:`causal_conv1d_update_ref`.

    Returns:
        `out` if it is given, else a new tensor with x's shape and dtype and, if x is dense, x's
        layout.

    Raises:
        TypeError, ValueError, torch.OutOfMemoryError, ImportError: see :func:`selective_scan_fn`.
        RuntimeError: the activation is unknown, an argument has a wrong layout, device, dtype or
            shape, the call needs a gradient, or, on a CPU, an index names a slot that does not
            exist; the message names the argument, the expected and the actual value.

    References:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
        arXiv:2312.00752, figure 3. The positional arguments are those of the package causal_conv1d.

    Example:
        >>> import torch
        >>> from selective_scan import causal_conv1d_fn, causal_conv1d_update
        >>> x, weight = torch.randn(2, 64, 100), torch.randn(64, 4)
        >>> out, state = causal_conv1d_fn(x, weight, return_final_states=True)
        >>> causal_conv1d_update(torch.randn(2, 64), state, weight).shape
        torch.Size([2, 64])
    """
    options = (activation, cache_seqlens, conv_state_indices, pad_slot_id, out)
    arguments = (x, conv_state, weight, bias, *options)
    if not _CAUSAL_CONV1D_UPDATE.has_kernels((*arguments, backend)):
        return _CAUSAL_CONV1D_UPDATE.run_reference(causal_conv1d_update_ref, (*arguments, backend))
    result = _CAUSAL_CONV1D_UPDATE(*arguments)
    return result if out is None else out
