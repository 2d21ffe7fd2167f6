"""What a rank's steps take of the ranks before and behind them, each by one collective.

Of those before: the last steps, which a convolution looks back at, and the state that is entered.
Backward, of those behind: the gradients of both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..diagonal_scan import diagonal_scan_fn
from ._groups import Ranks

# --- steps ----------------------------------------------------------------------------------------

# A tail is the last `history` steps that a rank has, behind zeros where it has fewer. The initial
# states are tail 0, and rank r's is tail r + 1. A window is the last `history` steps before a rank;
# window r is before rank r, and one more is behind all.


def exchange_tails(x: Tensor, history: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The tails of all ranks, (rank, batch, dim, step), and how many steps each has, for an x of
    (batch, dim, seqlen)."""
    batch, dim, seqlen = x.shape
    count = min(seqlen, history)
    row = x.new_full((batch * dim * history + 1,), count)  # a dtype holds such a number
    tail = row[:-1].view(batch, dim, history)
    own = tail
    if count < history:
        tail[:, :, : history - count].zero_()
        own = tail[:, :, history - count :]
    own.copy_(x[:, :, seqlen - count :])
    rows = ranks.gather(row)
    return rows[:, :-1].view(ranks.count, *tail.shape), rows[:, -1].long()


def window_of(tails: Tensor, initial: Tensor | None, counts: Tensor, place: int) -> Tensor:
    """Window `place`, of the tails and the states before all, which are 0 where there are none. It
    may lie in the tails' memory."""
    if initial is not None:
        tails = torch.cat([initial[None], tails[:place]])
        return _sum_of_shifted(tails, counts, slice(place + 1), place)
    if place == 0:
        return tails.new_zeros(tails.shape[1:])
    return _sum_of_shifted(tails[:place], counts, slice(1, place + 1), place)


def exchange_window_gradients(own: Tensor, of_last: Tensor | None, ranks: Ranks) -> Tensor:
    """The gradients of all windows, (window, batch, dim, step), of that of a rank's own, and of its
    part of the last one's, without which that is left out."""
    if of_last is None:
        return ranks.gather(own)
    gathered, of_all = ranks.gather(torch.stack([own, of_last])).unbind(1)
    return torch.cat([gathered, of_all.sum(0)[None]])


def tail_gradient(tail: int, windows: Tensor, counts: Tensor) -> Tensor:
    """That of a tail, from those of all windows behind it."""
    return _sum_of_shifted(windows[tail:], counts, slice(tail, len(windows)), tail)


def add_tail_gradient(dx: Tensor, windows: Tensor, counts: Tensor, ranks: Ranks) -> None:
    """Adds that of a rank's own tail to the gradient of its steps, (batch, dim, seqlen)."""
    if len(windows) == ranks.place + 1:
        return
    history = windows.shape[-1]
    count = min(dx.shape[2], history)
    gradient = tail_gradient(ranks.place + 1, windows, counts)
    dx[:, :, dx.shape[2] - count :].add_(gradient[:, :, history - count :])


def _sum_of_shifted(parts: Tensor, counts: Tensor, numbers: slice, place: int) -> Tensor:
    """The sum of tails or windows of these numbers, (number, batch, dim, step), where their steps
    lie in window or tail `place`. One alone has the same number, and lies where it does."""
    if len(parts) == 1:
        return parts[0]
    history = parts.shape[-1]
    ends = F.pad(counts.cumsum(0), (1, 0))  # of the tails, and of the windows
    step = torch.arange(history, device=parts.device) + (ends[place] - ends[numbers])[:, None]
    is_there = (step >= 0) & (step < history)
    step = step.clamp(0, history - 1)[:, None, None].expand_as(parts)
    # A 0 as torch.where's argument would be copied to the device, for which the host would wait.
    return parts.gather(3, step).masked_fill_(~is_there[:, None, None], 0).sum(0)


# --- states ---------------------------------------------------------------------------------------


def exchange_maps(
    own: Tensor, initial: Tensor | None, ranks: Ranks, *, is_last_wanted: bool = False
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The state that enters a rank's steps, and the one behind all if wanted; and all ranks'
    factors, (rank, batch, dim, dstate).

    Args:
        own: what the rank's steps do to the state that enters them, h → factor·h + offset:
            (batch, 2, dim, dstate).
        initial: the state before all; None is 0.
    """
    factors, offsets = ranks.gather(own).unbind(2)
    wanted = ranks.count if is_last_wanted else ranks.place
    if wanted > 0:
        behind = _compose(factors[:wanted], offsets[:wanted], initial)
    # Results of an op share no memory.
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
    """The gradient of the state that leaves a rank's steps; None is 0.

    Args:
        own: the gradient of the state that enters the rank's steps, of its own outputs alone.
        of_last: the rank's part of the gradient of the state behind all, if that was asked for.
        factors: as above.
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
    """The states behind every part of a sequence, (part, batch, dim, dstate); or the gradients of
    those in front, from the last part on."""
    if len(offsets) == 1 and initial is None:
        return offsets
    if backwards:
        factors = factors.conj().resolve_conj()
    across = (tensor.movedim(0, -1) for tensor in (factors, offsets))
    return diagonal_scan_fn(*across, initial_state=initial, reverse=backwards).movedim(-1, 0)
