"""The selective scan of chunks of prompts over a pool of states, for prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import INTEGER, REAL, Call, fail
from ._discretization import METHODS, Method
from ._operator import Operator
from ._result import out_unless_given
from ._selective_scan import POLE_DTYPES, POLES, scan_flops
from ._state_slots import SLOTS, boundaries_of, first_states, pool_of, slots_named, slots_of
from ._table import (
    PROJECTION_DTYPES,
    REAL_OR_COMPLEX,
    BackendName,
    DtypeOf,
    Number,
    Option,
    Shape,
    Table,
    TensorArgument,
)
from .functional import selective_scan_ref

_SEQUENCE = ("dim", "total")
_CHANNELS = ("dim",)


_PROJECTION = Shape((POLES, ("groups", "dstate", "total")), two_of="total", divided=("dim",))


def _check_checkpoints(call: Call) -> None:
    every, has_slots = call.options["checkpoint_every"], "checkpoint_slots" in call.tensors
    if every > 0 and not has_slots:
        fail("checkpoint_slots must be a Tensor where checkpoint_every is above 0, got None")
    if every == 0 and has_slots:
        fail("checkpoint_every must be at least 1 where checkpoint_slots is given, got 0")


_PREFILL = Operator(
    "selective_scan_prefill",
    Table(
        TensorArgument("u", REAL, _SEQUENCE),
        TensorArgument("states", REAL_OR_COMPLEX, pool_of(*POLES), is_changed=True),
        TensorArgument("delta", REAL, _SEQUENCE),
        TensorArgument("A", POLE_DTYPES, POLES),
        TensorArgument("B", PROJECTION_DTYPES, _PROJECTION),
        TensorArgument("C", PROJECTION_DTYPES, _PROJECTION),
        TensorArgument("D", REAL, _CHANNELS, optional=True),
        TensorArgument("z", REAL, _SEQUENCE, optional=True),
        TensorArgument("delta_bias", REAL, _CHANNELS, optional=True),
        Option("delta_softplus"),
        TensorArgument("cu_seqlens", INTEGER, ("sequences+1",)),
        *SLOTS,
        Number("checkpoint_every", 0, low=0),
        TensorArgument("first_position", INTEGER, ("sequences",), optional=True),
        TensorArgument("checkpoint_slots", INTEGER, ("sequences", "checkpoints"), optional=True),
        TensorArgument("out", DtypeOf("u"), _SEQUENCE, optional=True, is_changed=True),
        Option("discretization_method", METHODS),
        TensorArgument("input_delta", REAL, _SEQUENCE, optional=True),
        anchor="u",
        complex_by=("A",),
        relations=_check_checkpoints,
    ),
    results=[out_unless_given("u", _SEQUENCE)],
    flops=scan_flops,
)


def _pieces(call: Call, slots: list[int | None]) -> list[list[tuple[int, int, int]]]:
    """Returns each sequence's pieces (begin, end, slot), where the state at end goes to slot."""
    every = call.options["checkpoint_every"]
    first = call.tensors.get("first_position")
    positions = [0] * len(slots) if first is None else first.tolist()
    if min(positions, default=0) < 0 and every > 0:
        fail(f"first_position must be at least 0, got {min(p for p in positions if p < 0)}")
    pieces = []
    bounds = boundaries_of(call, call.sizes["total"])
    for i, (slot, position, (begin, end)) in enumerate(zip(slots, positions, bounds, strict=True)):
        of_sequence = []
        if slot is not None and every > 0:
            columns = call.sizes["checkpoints"]
            for column in range(position // every, (position + end - begin) // every):
                if column >= columns:
                    fail(
                        f"checkpoint_slots must have checkpoints of at least {column + 1} for the "
                        f"positions of sequence {i}, got {columns}"
                    )
                index = call["checkpoint_slots"][i, column : column + 1]
                [target] = slots_named(call, "checkpoint_slots", index, call["states"])
                if target is not None:
                    behind = begin + (column + 1) * every - position
                    of_sequence.append((begin, behind, target))
                    position, begin = (column + 1) * every, behind
        if slot is not None:
            of_sequence.append((begin, end, slot))
        pieces.append(of_sequence)
    return pieces


def selective_scan_prefill_ref(
    u: Tensor,
    states: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    cu_seqlens: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    checkpoint_every: int = 0,
    first_position: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    discretization_method: Method = "zoh",
    input_delta: Tensor | None = None,
    out: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Scans chunks over a pool of states, piece by piece with :func:`selective_scan_ref`.

    It has the arguments, result and errors of :func:`selective_scan_prefill`; `backend` is checked
    but has no other effect. It runs on any device, and reads boundaries, indices and positions back
    to the host. Indices of slots that do not exist are refused, also on CUDA.

    Example:
        >>> import torch
        >>> from selective_scan import selective_scan_prefill_ref
        >>> states, u = torch.zeros(1, 1, 1), torch.ones(1, 3)
        >>> A, B, C = torch.full((3, 1, 1), -1.0)
        >>> out = selective_scan_prefill_ref(u, states, u, A, B, C, cu_seqlens=torch.tensor([0, 3]))
        >>> torch.allclose(out[:, 2], -states[0, 0])
        True
    """
    slot_arguments = (cu_seqlens, cache_indices, has_initial_state, pad_slot_id)
    options = (checkpoint_every, first_position, checkpoint_slots, out, discretization_method)
    arguments = (u, states, delta, A, B, C, D, z, delta_bias, delta_softplus)
    call = _PREFILL.check((*arguments, *slot_arguments, *options, input_delta, backend))
    slots = slots_of(call, states)
    pieces = _pieces(call, slots)
    values_per_step = {
        name: call[name].shape[-1] // max(u.shape[1], 1)
        for name in ("u", "delta", "B", "C", "z", "input_delta")
        if name in call.tensors and not (name in "BC" and call[name].dim() == 2)
    }
    result = torch.zeros_like(u)
    for h, of_sequence in zip(first_states(call, states, slots), pieces, strict=True):
        for begin, end, slot in of_sequence:
            names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "input_delta")
            given = {name: call.tensors.get(name) for name in names}
            for name, values in values_per_step.items():
                given[name] = call[name][None, ..., begin * values : end * values]
            steps, h = selective_scan_ref(
                **given,
                delta_softplus=delta_softplus,
                return_last_state=True,
                discretization_method=discretization_method,
                initial_state=h.reshape(1, *states.shape[1:]),
            )
            result[:, begin:end] = steps[0]
            states[slot] = h[0].to(states.dtype)
    return result if out is None else out.copy_(result)


def selective_scan_prefill(
    u: Tensor,
    states: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    cu_seqlens: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    checkpoint_every: int = 0,
    first_position: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    discretization_method: Method = "zoh",
    input_delta: Tensor | None = None,
    out: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    r"""Scans chunks of several sequences, whose states stay in a pool between calls, for prefill.

    The sequences are packed into `total` steps, as in :func:`selective_scan_fn` with cu_seqlens.
    Each sequence starts from the state in its slot if `has_initial_state` says so, else from 0, and
    the state after its steps is written back to the slot, rounded to the states' dtype; out is
    computed from the states before rounding. A sequence may be cut anywhere and passed in several
    calls: except for rounding, the result is that of a single call.

    `cache_indices` gives the slot of each sequence. A sequence whose index is negative or
    `pad_slot_id` is padding: no state is read or changed for it, and its out is 0. out is also 0 at
    steps that belong to no sequence. A sequence without steps keeps its state, which becomes 0 if
    the sequence has no initial state.

    With `checkpoint_every` = k > 0, further states are stored, for example for a prefix cache: the
    state after the first (j + 1)·k steps of sequence i is written to slot `checkpoint_slots[i, j]`
    if the last of these steps is in this call and the index is not padding. Steps are counted from
    the sequence's start over all calls; `first_position[i]` of them precede this call. Therefore
    the positions of checkpoints do not depend on how a sequence is cut, and its row of
    `checkpoint_slots` is the same in every call; it can be the sequence's row in an engine's block
    table.

    If two sequences or checkpoints write to the same slot, or a sequence starts from a slot that
    another one writes, the result is undefined. On a CPU, boundaries out of order or range, indices
    of slots that do not exist, negative positions and checkpoints beyond the last column are
    refused. On CUDA, where the host does not read these values, boundaries are clamped to valid
    ones, and the others count as padding or 0. There a call can be captured in a CUDA graph, whose
    replays read the current values of all these tensors.

    Tensors may have any strides. Dtypes may be mixed: arithmetic is float32, or float64 if any
    tensor is float64 or complex128, also under torch.autocast. There is no derivative: a call that
    would need one is refused.

    Args:
        u: input, (dim, total), float32, float16, bfloat16 or float64.
        states: (slots, dim, dstate), float32, float16, bfloat16 or float64; complex64 or complex128
            for complex A. Changed in place. On CUDA dstate is at most 256.
        delta: step sizes, shaped like u.
        A: poles, (dim, dstate), float32, float64, complex64 or complex128.
        B: input projection: variable, (groups, dstate, total), where groups divides dim and channel
            d belongs to group d // (dim/groups); or constant, (dim, dstate). For complex A, a
            constant B is complex; a variable B is either complex or real with a last dimension of
            2·total, (re, im) interleaved.
        C: output projection, like B. If both are variable, they have the same number of groups.
        D: skip connection, (dim,).
        z: gate, shaped like u.
        delta_bias: added to delta, (dim,).
        delta_softplus: whether Δ is softplus(delta + delta_bias), the identity above 20.
        cu_seqlens: boundaries of the sequences, (sequences + 1,), int32 or int64, non-decreasing.
            Sequence i has the steps from cu_seqlens[i] up to, but not including, cu_seqlens[i + 1].
        cache_indices: the slot of each sequence, (sequences,), int32 or int64. None means that
            there are as many slots as sequences, and sequence i has slot i.
        has_initial_state: whether each sequence starts from the state in its slot, (sequences,),
            bool. None means that all start from 0.
        pad_slot_id: an index that marks padding, like every negative index.
        checkpoint_every: the number of steps from one checkpoint to the next; 0 stores none.
        first_position: the number of each sequence's steps before this call, (sequences,), int32 or
            int64. None means 0.
        checkpoint_slots: the slots of the checkpoints, (sequences, checkpoints), int32 or int64;
            required if checkpoint_every is not 0.
        discretization_method: "zoh", "foh", "bilinear", "poly", "highorder" or "rk4"; see
            :func:`selective_scan_fn`.
        input_delta: step sizes of the input, (dim, total); see :func:`selective_scan_fn`.
        out: a tensor that receives the result, with u's shape and dtype; must share no memory with
            the other arguments. None allocates one.
        backend: as in :func:`selective_scan_fn`; "reference" runs
            :func:`selective_scan_prefill_ref`.

    Returns:
        `out` if it is given, else a new tensor with u's shape and dtype and, if u is dense, u's
        layout.

    Raises:
        TypeError, ValueError, torch.OutOfMemoryError, ImportError: see :func:`selective_scan_fn`.
        RuntimeError: the method is unknown, an argument has a wrong layout, device, dtype or shape,
            the call needs a gradient, or, on a CPU, a value is one of those refused above; the
            message names the argument, the expected and the actual value.

    References:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
        arXiv:2312.00752. Slots, padding and initial states follow the calls of
        ``selective_scan_fn`` in inference engines such as vLLM.

    Example:
        >>> import torch
        >>> from selective_scan import selective_scan_prefill
        >>> slots, dim, dstate = 8, 64, 16
        >>> states = torch.zeros(slots, dim, dstate)
        >>> u, delta = torch.randn(dim, 100), torch.rand(dim, 100)
        >>> A, B, C = -torch.rand(dim, dstate), *torch.randn(2, 1, dstate, 100)
        >>> out = selective_scan_prefill(
        ...     u, states, delta, A, B, C,
        ...     cu_seqlens=torch.tensor([0, 60, 100]),  # two sequences, of 60 and 40 steps
        ...     cache_indices=torch.tensor([5, 2]),
        ...     has_initial_state=torch.tensor([False, True]),
        ... )
        >>> out.shape, states.flatten(1).any(1).nonzero().flatten().tolist()
        (torch.Size([64, 100]), [2, 5])
    """
    slot_arguments = (cu_seqlens, cache_indices, has_initial_state, pad_slot_id)
    options = (checkpoint_every, first_position, checkpoint_slots, out, discretization_method)
    arguments = (u, states, delta, A, B, C, D, z, delta_bias, delta_softplus)
    arguments = (*arguments, *slot_arguments, *options, input_delta)
    if not _PREFILL.has_kernels((*arguments, backend)):
        return _PREFILL.run_reference(selective_scan_prefill_ref, (*arguments, backend))
    result = _PREFILL(*arguments)
    return result if out is None else out
