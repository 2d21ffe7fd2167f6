"""The selective scan of chunks of prompts, over a pool of states: prefill."""

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
    """Gives for every sequence (begin, end, slot): steps, and where the state behind them goes."""
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
    """The scan of chunks over a pool of states, piece by piece with :func:`selective_scan_ref`.

    Arguments, result and errors are those of :func:`selective_scan_prefill`; `backend` is checked
    as there, but chooses nothing here. It runs on any device, reads boundaries, indices and
    positions back to the host, and refuses slots that there are not on any.

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
    options = (*options, input_delta)
    arguments = (u, states, delta, A, B, C, D, z, delta_bias, delta_softplus)
    call = _PREFILL.check((*arguments, *slot_arguments, *options, backend))
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
            given = {name: call.tensors.get(name) for name in ("A", "B", "C", "D", "z")}
            given |= {name: call.tensors.get(name) for name in ("u", "delta", "delta_bias")}
            given["input_delta"] = input_delta
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
    r"""Scans chunks of several sequences, whose states stay in a pool between the calls: prefill.

    The sequences lie one behind the other in `total` steps, as in :func:`selective_scan_fn` with
    cu_seqlens, and each goes on where it is: it begins with the state in its slot where
    `has_initial_state` says so, else with 0, and the state behind its steps goes back to the slot,
    rounded to the states' dtype. out is computed from states before that. A sequence that comes
    in several calls, cut wherever, gives what it gives in one, but for rounding.

    `cache_indices` names the slot of each sequence. One that is negative or `pad_slot_id` is
    padding: no state is read or changed for that sequence, and its out is 0. At steps of no
    sequence out is 0, too. A sequence without steps keeps its state, or has it set to 0 where it
    has none.

    With `checkpoint_every` = k > 0 further states are kept, as a cache of prefixes wants them: that
    after the first (j + 1)·k steps of sequence i goes to slot `checkpoint_slots[i, j]`, if those
    steps end in this call, or nowhere if that index is padding. Steps count from the first one of
    all calls: `first_position[i]` of them were before this one. So where checkpoints lie does not
    depend on how a sequence is cut, and a sequence's row of `checkpoint_slots` is the same in every
    call, such as its row in an engine's table of blocks.

    Two sequences or checkpoints that write to one slot, or a sequence that begins from a slot which
    another one writes, have no defined result. On a CPU, boundaries that do not rise, indices of
    slots that there are not, positions below 0 and checkpoints behind the last column are refused.
    On CUDA, where the host does not read them, boundaries are moved to where they do no harm, and
    the others are taken for padding or 0. There a call can be captured in a CUDA graph, and takes
    other values of all these tensors when it is replayed.

    Any strides will do. Dtypes may be mixed: arithmetic is float32, or float64 if any tensor is
    float64 or complex128, also under torch.autocast. There is no derivative: a call that would need
    one is refused.

    Args:
        u: input, (dim, total), float32, float16, bfloat16 or float64.
        states: (slots, dim, dstate), float32, float16, bfloat16 or float64; complex64 or complex128
            for complex A. Changed in place. On CUDA dstate is at most 256.
        delta: step sizes, shaped like u.
        A: poles, (dim, dstate), float32, float64, complex64 or complex128.
        B: input projection, (groups, dstate, total), where groups divides dim and channel d belongs
            to group d // (dim/groups); or constant, (dim, dstate). For complex A complex, or, with
            steps, real and of last dimension 2·total with real and imaginary parts interleaved.
        C: output projection, like B. With steps in both, it has as many groups.
        D: skip connection, (dim,).
        z: gate, shaped like u.
        delta_bias: added to delta, (dim,).
        delta_softplus: whether Δ is softplus(delta + delta_bias), the identity above 20.
        cu_seqlens: the sequences' boundaries, (sequences + 1,), int32 or int64: sequence i has the
            steps from cu_seqlens[i] up to cu_seqlens[i + 1].
        cache_indices: the slot of each sequence, (sequences,), int32 or int64. Without it there are
            as many slots as sequences, and sequence i has slot i.
        has_initial_state: whether each sequence goes on from its slot, (sequences,), bool. Without
            it none does.
        pad_slot_id: an index that marks padding, as every negative one does.
        checkpoint_every: the number of steps from one checkpoint to the next; 0 keeps none.
        first_position: the number of each sequence's steps before this call, (sequences,), int32 or
            int64. Without it 0.
        checkpoint_slots: where checkpoints go, (sequences, checkpoints), int32 or int64; needed
            where checkpoint_every is not 0.
        discretization_method: "zoh", "foh", "bilinear", "poly", "highorder" or "rk4"; see
            :func:`selective_scan_fn`.
        input_delta: steps of the input's own, (dim, total), as there.
        out: where to write the result, if it is not to be a new tensor: shaped like u, of its
            dtype. It must share no memory with the other arguments.
        backend: "auto" takes the kernels for the tensors' device; "cpu" and "cuda" do the same and
            insist on that device; "reference" takes :func:`selective_scan_prefill_ref`, on any
            device.

    Returns:
        out, shaped and, where u is dense, laid out like u, in u's dtype; `out` itself if it is
        given.

    Raises:
        TypeError: an argument is not of the type above.
        ValueError: the backend is unknown, or does not match the tensors' device.
        RuntimeError: an unknown method, a wrong layout, device, dtype or shape; the message names
            the argument, what was expected and what came. Also a call that needs a gradient, and,
            on a CPU, what is said above.
        torch.OutOfMemoryError: there is no memory on the GPU; on a CPU, and from code that
            torch.compile made, it is a RuntimeError with the allocator's message.
        ImportError: the library for the tensors' device is missing.

    References:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
        arXiv:2312.00752. Slots, padding and initial states are as inference engines call
        ``selective_scan_fn``, such as vLLM.

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
    options = (*options, input_delta)
    arguments = (u, states, delta, A, B, C, D, z, delta_bias, delta_softplus)
    arguments = (*arguments, *slot_arguments, *options)
    if not _PREFILL.has_kernels((*arguments, backend)):
        return _PREFILL.run_reference(selective_scan_prefill_ref, (*arguments, backend))
    result = _PREFILL(*arguments)
    return result if out is None else out
