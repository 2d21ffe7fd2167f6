"""The loop of the references over time steps, including packed sequences, which follow one another
along time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class PackedSequences(NamedTuple):
    """The layout of packed sequences, computed from cu_seqlens without reading it back to the host.

    Attributes:
        sequence: (steps,), the sequence of each step.
        are_first: (steps,), whether a sequence's scan begins with the step.
        are_none: (steps,), whether the step belongs to no sequence; `sequence` is arbitrary then.
        are_empty: (sequences,), whether the sequence has no steps.
        first, last: (sequences,), the sequence's first and last step in the order of the scan; any
            number if it has no steps.
    """

    sequence: Tensor
    are_first: Tensor
    are_none: Tensor
    are_empty: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, seqlen: int, reverse: bool) -> PackedSequences:
        bounds = cu_seqlens.long().clamp(0, seqlen)
        begins, ends = bounds[:-1], bounds[1:]
        count = begins.shape[0]  # len() would make the number a constant of an exported program
        step = torch.arange(seqlen, device=bounds.device)
        sequence = torch.searchsorted(bounds, step, right=True) - 1
        are_none = (sequence < 0) | (sequence >= count)
        sequence = sequence.clamp(0, max(count - 1, 0))
        first, last = (ends - 1, begins) if reverse else (begins, ends - 1)
        padded = torch.nn.functional.pad(first, (0, 1), value=-1)  # there may be no sequence
        are_first = ~are_none & (step == padded[sequence])
        return cls(sequence, are_first, are_none, begins >= ends, first, last)


def outside(cu_seqlens: Tensor | None, seqlen: int) -> Tensor | None:
    """Returns a mask of the steps that belong to no sequence, None without packed sequences."""
    return None if cu_seqlens is None else PackedSequences.of(cu_seqlens, seqlen, False).are_none


def zeroed(are_none: Tensor | None, steps: Tensor) -> Tensor:
    """Returns steps, (..., seqlen), with 0 in those that belong to no sequence, because the zero
    gradient of a step that contains NaN would become NaN in the gradients of its factors."""
    if are_none is None:
        return steps
    if steps.is_complex():  # AOTInductor cannot compile the complex number 0
        parts = (zeroed(are_none, part) for part in (steps.real, steps.imag))
        return torch.complex(*parts)
    return torch.where(are_none, 0, steps)


def scan_steps(
    take_step: Callable[[int, Tensor], Tensor],
    states: Tensor,
    seqlen: int,
    reverse: bool,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Returns the last states.

    Args:
        take_step: returns the state after step t from t and the state before it. The first
            dimension of a state is the batch.
        states: the initial states. With cu_seqlens, the first dimension of the initial and of the
            last states is the sequences.
        seqlen, reverse, cu_seqlens: as in the function.
    """
    steps = reversed(range(seqlen)) if reverse else range(seqlen)
    if cu_seqlens is None:
        for t in steps:
            states = take_step(t, states)
        return states
    sequences = PackedSequences.of(cu_seqlens, seqlen, reverse)
    state, after = states.new_zeros(1, *states.shape[1:]), []
    for t in steps:
        if len(states) > 0:
            first = states.index_select(0, sequences.sequence[t : t + 1])
            state = torch.where(sequences.are_first[t], first, state)
        state = take_step(t, state)
        after.append(state)
    if after:
        last = seqlen - 1 - sequences.last if reverse else sequences.last
        last = torch.cat(after)[last.clamp(min=0)]
        are_empty = sequences.are_empty.reshape(-1, *[1] * (states.dim() - 1))
        states = torch.where(are_empty, states, last)
    return states
