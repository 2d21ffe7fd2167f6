"""Packed sequences in the references: one behind the other along time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PackedSequences(NamedTuple):
    """What the references know of cu_seqlens, without reading it back to the host.

    Attributes:
        sequence: (steps,), that of each step.
        are_first: (steps,), whether a sequence's scan begins with it.
        are_none: (steps,), whether it belongs to no sequence, whatever `sequence` says.
        are_empty: (sequences,), which have no steps.
        last: (sequences,), the number of steps scanned before the last one.
    """

    sequence: Tensor
    are_first: Tensor
    are_none: Tensor
    are_empty: Tensor
    last: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, seqlen: int, reverse: bool) -> PackedSequences:
        bounds = cu_seqlens.long().clamp(0, seqlen)
        begins, ends = bounds[:-1], bounds[1:]
        count = len(begins)
        step = torch.arange(seqlen, device=bounds.device)
        sequence = torch.searchsorted(bounds, step, right=True) - 1
        are_none = (sequence < 0) | (sequence >= count)
        sequence = sequence.clamp(0, max(count - 1, 0))
        if reverse:
            first, last = ends - 1, seqlen - 1 - begins
        else:
            first, last = begins, ends - 1
        padded = torch.nn.functional.pad(first, (0, 1), value=-1)  # there may be no sequence
        return cls(sequence, ~are_none & (step == padded[sequence]), are_none, begins >= ends, last)

    def enter(self, step: int, first_states: Tensor, state: Tensor) -> Tensor:
        """The state before a step: `state`, or that which its sequence begins with.

        `first_states` have the sequences, and `state` a batch of 1, as their first dimension.
        """
        if len(first_states) == 0:
            return state
        first = first_states.index_select(0, self.sequence[step : step + 1])
        return torch.where(self.are_first[step], first, state)

    def last_states(self, first_states: Tensor, states: list[Tensor]) -> Tensor:
        """`states` are those after all steps, in the order of the scan."""
        if not states:
            return first_states
        last = torch.cat(states)[self.last.clamp(min=0)]
        are_empty = self.are_empty.reshape(-1, *[1] * (first_states.dim() - 1))
        return torch.where(are_empty, first_states, last)
