"""The depthwise causal convolution that precedes a Mamba layer's scan."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple, get_args, overload

import torch
from torch import Tensor

from ._checks import INTEGER, REAL, Call, fail
from ._operator import Operator
from ._packed import PackedSequences, zeroed
from ._result import Result
from ._sharding import are_distributed
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
    """Counts one product per tap and step, and two in the backward pass, for dx and dweight."""
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
    """Returns whether conv_states is given; refuses arguments that need it or exclude it."""
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
    """Runs the reference over a pool of states; `values` are the op's arguments and the backend."""
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
    """Steps to look up, three tensors (batch, number): the step, the first step of its sequence,
    and the index of that sequence's states."""

    step: Tensor
    first: Tensor
    sequence: Tensor


def _values_at(x: Tensor, states: Tensor, steps: _Steps) -> Tensor:
    """Returns x at these steps, (batch, dim, number); before a sequence's first step, its state."""
    batch, dim, _ = x.shape
    history = states.shape[2]
    # Both get a leading zero, which every position outside of them reads.
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
    """Computes the depthwise causal convolution tap by tap in plain PyTorch.

    It has the arguments, result and errors of :func:`causal_conv1d_fn`; `backend` is checked but
    has no other effect. It runs on any device and can be differentiated any number of times.
    Out-of-range boundaries in cu_seqlens are clamped to 0 and seqlen.

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
    if are_distributed((x,)):
        given = (x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out)
        return causal_conv1d_fn(*given, activation, cu_seqlens=cu_seqlens, backend="reference")
    call = CAUSAL_CONV1D.check(
        (
            *(x, weight, bias, seq_idx, cu_seqlens, initial_states),
            *(return_final_states, activation, final_states_out, backend),
        )
    )
    dtype, history = call.compute_dtype, call.sizes["width"] - 1
    (batch, dim, seqlen), sequences = x.shape, call.sizes["sequences"]
    states = x.new_zeros(sequences, dim, history) if initial_states is None else initial_states
    # One more state, of zeros, for steps that belong to no sequence.
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
        packed = PackedSequences.of(cu_seqlens, seqlen, False)
        is_padding, begins, ends = packed.are_none[None], packed.first[None], packed.last[None] + 1
        each = torch.arange(sequences, device=x.device)[None]
        sequence = torch.where(is_padding, sequences, packed.sequence)
        firsts = torch.nn.functional.pad(packed.first, (0, 1))
        first = torch.where(is_padding, step, firsts[sequence])

    inputs = zeroed(is_padding[:, None], inputs)
    out = torch.zeros_like(inputs) if bias is None else bias.to(dtype)[:, None].expand(x.shape)
    for k in range(history + 1):
        seen = _values_at(inputs, states, _Steps(step - history + k, first, sequence))
        out = out + taps[:, k, None] * seen
    if activation is not None:
        out = torch.nn.functional.silu(out)
    out = zeroed(is_padding[:, None], out).to(x.dtype)
    if not return_final_states:
        return out

    # A row per batch entry holds the last steps of all its sequences, one sequence after another.
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
    r"""Convolves each channel causally with its own taps and optionally applies SiLU.

    With x before a sequence's first step taken from initial_states, or 0::

        out[t] = activation(bias + Σ_k weight[k]·x[t - (width - 1) + k])        k = 0 ... width - 1

    Tensors may have any strides. If x is dense, out has x's layout. Channel-last tensors, which are
    transposes of (batch, seqlen, dim), work as well as tensors with contiguous steps. Arithmetic is
    float32, or float64 if any tensor is float64. The results can be differentiated once with
    respect to x, weight, bias and initial_states; each gradient has its input's dtype, and the same
    bits on every run. Only the inputs are kept for the backward pass, which recomputes the sum
    before the activation.

    There are two ways to put several sequences into one row. seq_idx gives each step the number of
    its sequence, as in the package causal_conv1d: a step sees only the steps of its own run of
    equal numbers, steps with a negative number belong to no sequence and their out is 0, and states
    are not supported. cu_seqlens gives the boundaries of the sequences, each of which has states.

    These states may be slots of a pool, conv_states, which is changed in place: sequence i starts
    from slot cache_indices[i] if has_initial_state[i], else from 0, and its final state is written
    to that slot. A sequence whose index is negative or pad_slot_id is padding: no state is read or
    changed for it, and its out is 0. Such a call has no derivative. :func:`selective_scan_prefill`
    does the same for the scan; it also describes which slots are refused.

    Args:
        x: (batch, dim, seqlen), float32, float16, bfloat16 or float64; with cu_seqlens batch is 1.
        weight: (dim, width) with a width of 1 to 8, any of these dtypes; the last tap is that of
            the current step.
        bias: (dim,), any of these dtypes.
        seq_idx: the sequence of each step, (batch, seqlen), int32 or int64.
        initial_states: x at the width - 1 steps before the first, (batch, dim, width - 1), any of
            the dtypes above; with cu_seqlens (sequences, dim, width - 1). Not with seq_idx.
        return_final_states: whether to also return the last width - 1 steps of initial_states
            followed by x, which are the initial_states of a call that continues from here. Not with
            seq_idx.
        final_states_out: a tensor that receives the final states and is returned in their place.
        activation: None, "silu", or its other name, "swish".
        cu_seqlens: boundaries of packed sequences, (sequences + 1,), int32 or int64, on x's device,
            non-decreasing. Sequence i has the steps from cu_seqlens[i] up to, but not including,
            cu_seqlens[i + 1]. out is 0 at steps that belong to no sequence. A sequence without
            steps keeps its state. On CUDA the values are not read back to the host, and values out
            of order or range are clamped to valid ones.
        conv_states: pool of states, (slots, dim, width - 1), any of the dtypes above. Needs
            cu_seqlens; not with seq_idx, initial_states or return_final_states.
        cache_indices, has_initial_state, pad_slot_id: the slot of each sequence, (sequences,), and
            whether it starts from the state there; as in :func:`selective_scan_prefill`.
        backend: as in :func:`selective_scan_fn`; "reference" runs :func:`causal_conv1d_ref`.

    Returns:
        out, (batch, dim, seqlen), in x's dtype. With return_final_states, a tuple of out and the
        final states, which have the shape of initial_states and x's dtype.

    Raises:
        TypeError, ValueError, torch.OutOfMemoryError, ImportError: see :func:`selective_scan_fn`.
        RuntimeError: the activation is unknown, an argument has a wrong layout, device, dtype or
            shape, arguments exclude each other, or, on a CPU, cu_seqlens is out of order or range;
            the message names the argument, the expected and the actual value. Also raised when the
            result is differentiated twice.

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
    has_kernels = CAUSAL_CONV1D.has_kernels(values)
    if final_states_out is not None:
        CAUSAL_CONV1D.check(values)  # the op does not take final_states_out
    if has_kernels:
        out, final_states = CAUSAL_CONV1D(*arguments, activation)
    else:
        values = (*arguments, activation, None, backend)
        results = CAUSAL_CONV1D.run_reference(causal_conv1d_ref, values)
        out, final_states = results if return_final_states else (results, None)
    if not return_final_states:
        return out
    if final_states_out is not None:
        final_states = final_states_out.copy_(final_states)
    return out, final_states
