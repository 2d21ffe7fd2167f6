"""The data that a rank's steps need from the ranks before and after them, each by one collective.

From the ranks before: the last steps, which a convolution looks back at, and the entering state. In
the backward pass, from the ranks after: the gradients of both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..diagonal_scan import diagonal_scan_fn
from ._groups import Ranks

# --- steps ----------------------------------------------------------------------------------------

# A tail is the last `history` steps of a rank, after zeros if it has fewer. The initial states are
# tail 0, and the tail of rank r is tail r + 1. A window is the last `history` steps before a rank:
# window r precedes rank r, and one more window follows the last rank.


def exchange_tails(x: Tensor, history: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Returns the tails of all ranks, (rank, batch, dim, step), and the number of steps of each,
    for an x of (batch, dim, seqlen)."""
    batch, dim, seqlen = x.shape
    count = min(seqlen, history)
    row = x.new_full((batch * dim * history + 1,), count)  # every dtype represents count exactly
    tail = row[:-1].view(batch, dim, history)
    own = tail
    if count < history:
        tail[:, :, : history - count].zero_()
        own = tail[:, :, history - count :]
    own.copy_(x[:, :, seqlen - count :])
    rows = ranks.gather(row)
    return rows[:, :-1].view(ranks.count, *tail.shape), rows[:, -1].long()


def window_of(tails: Tensor, initial: Tensor | None, counts: Tensor, place: int) -> Tensor:
    """Returns window `place` from the tails and the initial states, which are 0 if None. It may be
    a view of the tails."""
    if initial is not None:
        tails = torch.cat([initial[None], tails[:place]])
        return _sum_of_shifted(tails, counts, slice(place + 1), place)
    if place == 0:
        return tails.new_zeros(tails.shape[1:])
    return _sum_of_shifted(tails[:place], counts, slice(1, place + 1), place)


def exchange_window_gradients(own: Tensor, of_last: Tensor | None, ranks: Ranks) -> Tensor:
    """Returns the gradients of all windows, (window, batch, dim, step), from that of the rank's own
    window and its part of the last window's, which is left out if `of_last` is None."""
    if of_last is None:
        return ranks.gather(own)
    gathered, of_all = ranks.gather(torch.stack([own, of_last])).unbind(1)
    return torch.cat([gathered, of_all.sum(0)[None]])


def tail_gradient(tail: int, windows: Tensor, counts: Tensor) -> Tensor:
    """Returns the gradient of a tail from those of all windows after it."""
    return _sum_of_shifted(windows[tail:], counts, slice(tail, len(windows)), tail)


def add_tail_gradient(dx: Tensor, windows: Tensor, counts: Tensor, ranks: Ranks) -> None:
    """Adds the gradient of the rank's own tail to that of its steps, (batch, dim, seqlen)."""
    if len(windows) == ranks.place + 1:
        return
    history = windows.shape[-1]
    count = min(dx.shape[2], history)
    gradient = tail_gradient(ranks.place + 1, windows, counts)
    dx[:, :, dx.shape[2] - count :].add_(gradient[:, :, history - count :])


def _sum_of_shifted(parts: Tensor, counts: Tensor, numbers: slice, place: int) -> Tensor:
    """Returns the sum of the tails or windows `numbers`, (number, batch, dim, step), each shifted
    to the steps of window or tail `place`. A single one is number `place` and needs no shift."""
    if len(parts) == 1:
        return parts[0]
    history = parts.shape[-1]
    ends = F.pad(counts.cumsum(0), (1, 0))  # of the tails, and of the windows
    step = torch.arange(history, device=parts.device) + (ends[place] - ends[numbers])[:, None]
    is_there = (step >= 0) & (step < history)
    step = step.clamp(0, history - 1)[:, None, None].expand_as(parts)
    # masked_fill_, since torch.where would copy a 0 to the device, and the host would wait for it.
    return parts.gather(3, step).masked_fill_(~is_there[:, None, None], 0).sum(0)


# --- states ---------------------------------------------------------------------------------------


def exchange_maps(
    own: Tensor, initial: Tensor | None, ranks: Ranks, *, is_last_wanted: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the state that enters the rank's steps, the last state of all steps if wanted, and
    all ranks' factors, (rank, batch, dim, dstate).

    Args:
        own: the map that the rank's steps apply to the entering state, h → factor·h + offset:
            (batch, 2, dim, dstate).
        initial: the state before the first step of all; None is 0.
    """
    factors, offsets = ranks.gather(own).unbind(2)
    wanted = ranks.count if is_last_wanted else ranks.place
    if wanted > 0:
        behind = _compose(factors[:wanted], offsets[:wanted], initial)
    # Results of an op must not share memory.
    if not ranks.is_first:
        entering = behind[ranks.place - 1].clone()
    elif initial is None:
        entering = torch.zeros_like(offsets[0])
    else:
        entering = initial.to(offsets.dtype, copy=True)
    return entering, behind[-1].clone() if is_last_wanted else None, factors.clone()


def exchange_state_gradients(
    own: Tensor, of_last: Tensor | None, factors: Tensor, ranks: Ranks
) -> Tensor | None:
    """Returns the gradient of the state that leaves the rank's steps; None is 0.

    Args:
        own: the gradient of the state that enters the rank's steps, from its own outputs alone.
        of_last: the rank's part of the last state's gradient, if that state was returned.
        factors: the result of exchange_maps.
    """
    gathered = ranks.gather(own if of_last is None else torch.stack([own, of_last]))
    leaving = None
    if of_last is not None:
        gathered, of_all = gathered.unbind(1)
        leaving = of_all.sum(0)
    first = ranks.place + 1
    if first == ranks.count:
        return leaving
    return _compose(factors[first:], gathered[first:], leaving, backwards=True)[0]


def _compose(
    factors: Tensor, offsets: Tensor, initial: Tensor | None, *, backwards: bool = False
) -> Tensor:
    """Returns the states after every part of a sequence, (part, batch, dim, dstate); if
    `backwards`, the gradients of the states before the parts, from the last part on."""
    if len(offsets) == 1 and initial is None:
        return offsets
    if backwards:
        factors = factors.conj().resolve_conj()
    across = (tensor.movedim(0, -1) for tensor in (factors, offsets))
    return diagonal_scan_fn(*across, initial_state=initial, reverse=backwards).movedim(-1, 0)
