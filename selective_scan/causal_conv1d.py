"""The depthwise causal convolution that stands before a Mamba layer's scan."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, get_args, overload

import torch
from torch import Tensor

from ._checks import INTEGER, REAL, Call, fail
from ._operator import Operator
from ._result import Result
from ._state_slots import SLOTS, boundaries_of, first_states, pool_of, slots_of
from ._table import CU_SEQLENS, BackendName, Option, Table, TensorArgument
from ._typing import typed_as

Activation = Literal["silu", "swish"]
_STATES = ("sequences", "dim", "width-1")


def _check_relations(call: Call) -> None:
    if "seq_idx" in call.tensors:
        for name in ("cu_seqlens", "initial_states"):
            if name in call.tensors:
                fail(f"{name} must be None where seq_idx is given")
        if call.options.get("return_final_states"):
            fail("return_final_states must be False where seq_idx is given")
    if "final_states_out" in call.tensors and not call.options["return_final_states"]:
        fail("final_states_out must be None unless return_final_states is True")


_X = TensorArgument("x", REAL, ("batch", "dim", "seqlen"))
WEIGHT = TensorArgument("weight", REAL, ("dim", "width"))
BIAS = TensorArgument("bias", REAL, ("dim",), optional=True)
_SEQ_IDX = TensorArgument("seq_idx", INTEGER, ("batch", "seqlen"), optional=True)
_INITIAL_STATES = TensorArgument("initial_states", REAL, _STATES, optional=True)
_FINAL_STATES_OUT = TensorArgument("final_states_out", REAL, _STATES, optional=True)
_RETURN_FINAL_STATES = Option("return_final_states")
ACTIVATION = Option("activation", get_args(Activation), optional=True)


def _arguments(*arguments: TensorArgument | Option) -> Table:
    return Table(*arguments, anchor="x", relations=_check_relations)


def _flops(call: Call) -> tuple[int, int]:
    """A product for each tap and step; backward two, for the gradients of x and weight."""
    products = 2 * call["x"].numel() * call["weight"].shape[1]
    return products, 2 * products


_TENSORS = (_X, WEIGHT, BIAS, _SEQ_IDX, CU_SEQLENS, _INITIAL_STATES)
CAUSAL_CONV1D = Operator(
    "causal_conv1d",
    _arguments(*_TENSORS, _RETURN_FINAL_STATES, ACTIVATION),
    results=[
        Result("out", ("batch", "dim", "seqlen"), lambda call: call["x"].dtype, like="x"),
        Result(
            "final_states",
            _STATES,
            lambda call: call["x"].dtype,
            is_asked=lambda call: call.options["return_final_states"],
        ),
    ],
    backward="dout dfinal_states x weight bias seq_idx cu_seqlens initial_states activation",
    function_arguments=_arguments(*_TENSORS, _RETURN_FINAL_STATES, ACTIVATION, _FINAL_STATES_OUT),
    backward_arguments=_arguments(*_TENSORS, ACTIVATION),
    flops=_flops,
    given_gradients="x",
)


_PREFILL = Operator(
    "causal_conv1d_prefill",
    Table(
        _X,
        WEIGHT,
        TensorArgument("conv_states", REAL, pool_of("dim", "width-1"), is_changed=True),
        BIAS,
        ACTIVATION,
        replace(CU_SEQLENS, optional=False),
        *SLOTS,
        anchor="x",
    ),
    results=[Result("out", ("batch", "dim", "seqlen"), lambda call: call["x"].dtype, like="x")],
    flops=lambda call: (_flops(call)[0], 0),
    reference="causal_conv1d_ref",
)


def _is_over_pool(
    pool: tuple[Tensor | None, ...], others: tuple[Tensor | bool | None, ...]
) -> bool:
    """Whether conv_states are given; refuses what does not go with them, or without them."""
    conv_states, *of_pool = pool
    if conv_states is None:
        for name, value in zip(("cache_indices", "has_initial_state"), of_pool, strict=True):
            if value is not None:
                fail(f"{name} must be None unless conv_states is given")
        return False
    names = ("seq_idx", "initial_states", "final_states_out", "return_final_states")
    for name, value in zip(names, others, strict=True):
        if value is not None and value is not False:
            wanted = "False" if name == "return_final_states" else "None"
            fail(f"{name} must be {wanted} where conv_states is given")
    return True


def _convolve_over_pool(values: tuple) -> Tensor:
    """`values` are the arguments of the op, and the backend."""
    call = _PREFILL.check(values)
    x, weight, pool, bias, activation = values[:5]
    slots, bounds = slots_of(call, pool), boundaries_of(call, x.shape[2])
    out = torch.zeros_like(x)
    states = first_states(call, pool, slots)
    for state, slot, (begin, end) in zip(states, slots, bounds, strict=True):
        if slot is None:
            continue
        steps, last_state = causal_conv1d_ref(
            *(x[..., begin:end].to(call.compute_dtype), weight, bias, None, state[None], True),
            activation=activation,
        )
        out[..., begin:end] = steps
        pool[slot] = last_state[0].to(pool.dtype)
    return out


class _Steps(NamedTuple):
    """The places of steps, (batch, number) each: which steps, the first one of the sequence that
    each belongs to, and the index of that sequence's states."""

    step: Tensor
    first: Tensor
    sequence: Tensor


def _values_at(x: Tensor, states: Tensor, steps: _Steps) -> Tensor:
    """x, (batch, dim, number), and the states of a sequence where a step lies before its first."""
    batch, dim, _ = x.shape
    history = states.shape[2]
    # A zero in front of both gives what is not there a place.
    x, states = (torch.nn.functional.pad(tensor, (1, 0)) for tensor in (x, states))
    place = steps.step.clamp(min=-1) + 1
    from_x = x.gather(2, place[:, None].expand(batch, dim, place.shape[1]))
    place = (history + steps.step - steps.first).clamp(-1, history - 1) + 1
    from_states = states[steps.sequence, :, place].movedim(2, 1)
    return torch.where((steps.step >= steps.first)[:, None], from_x, from_states)


@typed_as(lambda: causal_conv1d_fn)
def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: Activation | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    conv_states: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The depthwise causal convolution, tap by tap in plain PyTorch.

    Arguments, result and errors are those of :func:`causal_conv1d_fn`. It runs on any device,
    whatever the backend, and can be differentiated any number of times. Boundaries in cu_seqlens
    that are out of range are moved into it.

    Example:
        >>> import torch
        >>> from selective_scan import causal_conv1d_ref
        >>> causal_conv1d_ref(torch.arange(4.0).view(1, 1, 4), torch.tensor([[1.0, 10.0]]))
        tensor([[[ 0., 10., 21., 32.]]])
    """
    pool = (conv_states, cache_indices, has_initial_state)
    if _is_over_pool(pool, (seq_idx, initial_states, final_states_out, return_final_states)):
        slot_arguments = (cu_seqlens, cache_indices, has_initial_state, pad_slot_id)
        values = (x, weight, conv_states, bias, activation, *slot_arguments, backend)
        return _convolve_over_pool(values)
    call = CAUSAL_CONV1D.check(
        (
            *(x, weight, bias, seq_idx, cu_seqlens, initial_states),
            *(return_final_states, activation, final_states_out, backend),
        )
    )
    dtype, history = call.compute_dtype, call.sizes["width"] - 1
    (batch, dim, seqlen), sequences = x.shape, call.sizes["sequences"]
    states = x.new_zeros(sequences, dim, history) if initial_states is None else initial_states
    # One more, of zeros, for steps of no sequence.
    states = torch.nn.functional.pad(states.to(dtype), (0, 0, 0, 0, 0, 1))
    taps, inputs = weight.to(dtype), x.to(dtype)

    step = torch.arange(seqlen, device=x.device).expand(batch, seqlen)
    each = torch.arange(batch, device=x.device)[:, None]
    begins, ends = torch.zeros_like(each), torch.full_like(each, seqlen)
    first, sequence = begins.expand(batch, seqlen), each.expand(batch, seqlen)
    is_padding = torch.zeros_like(step, dtype=torch.bool)
    if seq_idx is not None:
        is_padding = seq_idx < 0
        is_new = seq_idx != seq_idx.roll(1, 1)
        first = torch.where(is_new, step, 0).cummax(1).values if seqlen > 0 else first
    if cu_seqlens is not None:
        bounds = cu_seqlens.long().clamp(0, seqlen)
        begins, ends = bounds[None, :-1], bounds[None, 1:]
        each = torch.arange(sequences, device=x.device)[None]
        sequence = torch.searchsorted(bounds, step, right=True) - 1
        is_padding = (sequence < 0) | (sequence >= sequences)
        sequence = torch.where(is_padding, sequences, sequence)
        first = torch.where(is_padding, step, bounds[sequence])

    out = torch.zeros_like(inputs) if bias is None else bias.to(dtype)[:, None].expand(x.shape)
    for k in range(history + 1):
        seen = _values_at(inputs, states, _Steps(step - history + k, first, sequence))
        out = out + taps[:, k, None] * seen
    if activation is not None:
        out = torch.nn.functional.silu(out)
    out = torch.where(is_padding[:, None], 0, out).to(x.dtype)
    if not return_final_states:
        return out

    # The last steps of every sequence are in a row for each batch entry.
    last = ends[..., None] - history + torch.arange(history, device=x.device)
    rows = (tensor[..., None].expand(last.shape) for tensor in (begins, each))
    at_end = _values_at(inputs, states, _Steps(*(t.flatten(1) for t in (last, *rows))))
    final_states = at_end.unflatten(2, last.shape[1:]).movedim(2, 1).flatten(0, 1).to(x.dtype)
    if final_states_out is not None:
        return out, final_states_out.copy_(final_states)
    return out, final_states


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: Literal[False] = False,
    final_states_out: Tensor | None = None,
    activation: Activation | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    conv_states: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    backend: BackendName = "auto",
) -> Tensor: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    *,
    return_final_states: Literal[True],
    final_states_out: Tensor | None = None,
    activation: Activation | None = None,
    cu_seqlens: Tensor | None = None,
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: Activation | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    conv_states: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: Activation | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    conv_states: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Convolves every channel with taps of its own, looking back only, and applies SiLU.

    With x before a sequence's first step taken from initial_states, or 0::

        out[t] = activation(bias + Σ_k weight[k]·x[t - (width - 1) + k])        k = 0 ... width - 1

    Any strides will do, and where x is dense, out is laid out as x is: channels that are neighbours
    in memory, (batch, seqlen, dim) transposed, are as good as steps that are. Arithmetic is
    float32, or float64 if any tensor is float64. The results can be differentiated once with
    respect to x, weight, bias and initial_states; each gradient has its input's dtype, and the same
    bits on every run. Nothing but the inputs is kept for it: the sum before the activation is
    computed again.

    Several sequences may lie in one row, in one of two ways. seq_idx marks the steps of each by a
    number of its own, as in the package causal_conv1d; a step sees the steps of its run of equal
    numbers, a negative number marks steps of none, whose out is 0, and there are no states.
    cu_seqlens has the boundaries, and every sequence has states.

    These may lie in slots of a pool, conv_states, which is changed in place: sequence i begins with
    what is in slot cache_indices[i] where has_initial_state[i], else with 0, and leaves its final
    state there. A sequence whose index is negative or pad_slot_id is padding: no state is read or
    changed for it, and its out is 0. Such a call has no derivative. :func:`selective_scan_prefill`
    does the same for the scan, and says what of slots is refused.

    Args:
        x: (batch, dim, seqlen), float32, float16, bfloat16 or float64; with cu_seqlens batch is 1.
        weight: (dim, width) with a width of 1 to 8, any of these dtypes; the last tap is the one of
            the step itself.
        bias: (dim,), any of these dtypes.
        seq_idx: (batch, seqlen), int32 or int64.
        initial_states: x at the width - 1 steps before the first, (batch, dim, width - 1), any of
            the dtypes above; with cu_seqlens (sequences, dim, width - 1). Not with seq_idx.
        return_final_states: also return x, continued backwards by initial_states, at the last
            width - 1 steps: initial_states for a call that goes on from here. Not with seq_idx.
        final_states_out: a tensor that final states are written to, which is then the one returned.
        activation: None, "silu" or "swish", which is another name of silu.
        cu_seqlens: (sequences + 1,), int32 or int64, on x's device, rising: sequence i has the
            steps from cu_seqlens[i] to before cu_seqlens[i + 1]. Out is 0 at steps of no sequence.
            A sequence without steps keeps its state. On CUDA the values are not read back to the
            host, and those out of order or of range are moved to where they do no harm.
        conv_states: (slots, dim, width - 1), any of the dtypes above. With cu_seqlens, without
            seq_idx, initial_states and return_final_states.
        cache_indices: the slot of each sequence, (sequences,), int32 or int64. Without it there are
            as many slots as sequences, and sequence i has slot i.
        has_initial_state: whether each sequence goes on from its slot, (sequences,), bool. Without
            it none does.
        pad_slot_id: an index that marks padding, as every negative one does.
        backend: "auto" takes the kernels for the tensors' device; "cpu" and "cuda" do the same and
            insist on that device; "reference" takes :func:`causal_conv1d_ref`, on any device.

    Returns:
        out, (batch, dim, seqlen), in x's dtype; with return_final_states a tuple of it and the
        final states, of initial_states' shape and x's dtype.

    Raises:
        TypeError: an argument is not of the type above.
        ValueError: the backend is unknown, or does not match the tensors' device.
        RuntimeError: a wrong layout, device, dtype, shape or activation, arguments that do not go
            together, or, on a CPU, boundaries that do not rise; the message names the argument,
            what was expected and what came. Also a second differentiation.
        torch.OutOfMemoryError: there is no memory on the GPU; on a CPU, and from code that
            torch.compile made, it is a RuntimeError with the allocator's message.
        ImportError: the library for the tensors' device is missing.

    References:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
        arXiv:2312.00752, figure 3. The positional arguments are those of the package causal_conv1d.

    Example:
        >>> import torch
        >>> from selective_scan import causal_conv1d_fn
        >>> batch, dim, seqlen, width = 2, 64, 100, 4
        >>> x = torch.randn(batch, seqlen, dim).transpose(1, 2).requires_grad_()
        >>> weight, bias = torch.randn(dim, width), torch.randn(dim)
        >>> out = causal_conv1d_fn(x, weight, bias, activation="silu")
        >>> out.shape, out.stride() == x.stride()
        (torch.Size([2, 64, 100]), True)
        >>> out.sum().backward()
        >>> x.grad.shape
        torch.Size([2, 64, 100])
    """
    pool = (conv_states, cache_indices, has_initial_state)
    if _is_over_pool(pool, (seq_idx, initial_states, final_states_out, return_final_states)):
        slot_arguments = (cu_seqlens, cache_indices, has_initial_state, pad_slot_id)
        values = (x, weight, conv_states, bias, activation, *slot_arguments, backend)
        return (
            _PREFILL(*values[:-1]) if _PREFILL.has_kernels(values) else _convolve_over_pool(values)
        )
    arguments = (x, weight, bias, seq_idx, cu_seqlens, initial_states, return_final_states)
    values = (*arguments, activation, final_states_out, backend)
    if not CAUSAL_CONV1D.has_kernels(values):
        return CAUSAL_CONV1D.run_reference(causal_conv1d_ref, values)
    if final_states_out is not None:
        CAUSAL_CONV1D.check(values)  # the op is not given it
    out, final_states = CAUSAL_CONV1D(*arguments, activation)
    if not return_final_states:
        return out
    if final_states_out is not None:
        final_states = final_states_out.copy_(final_states)
    return out, final_states
