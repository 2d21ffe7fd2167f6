"""A layer in which each rank has its own steps, as one operator.

The op is that of a single device, which exchanges data with other ranks through the callbacks
defined here; see csrc/torch/ranks.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _memory
from .._checks import Call, size_of
from .._mamba_operators import has_second_scan, make_layer_operator, products_dtype, states_dtype
from .._result import Kept
from ._edges import (
    add_tail_gradient,
    exchange_maps,
    exchange_state_gradients,
    exchange_tails,
    exchange_window_gradients,
    window_of,
)
from ._groups import GroupName, Ranks


def _steps_before(x: Tensor, history: int, group: str) -> tuple[Tensor, Tensor]:
    ranks = Ranks.of(group, x.device)
    tails, counts = exchange_tails(x, history, ranks)
    return window_of(tails, None, counts, ranks.place), counts


def _exchange_step_gradients(dbefore: Tensor, counts: Tensor, dx: Tensor, group: str) -> None:
    ranks = Ranks.of(group, dx.device)
    add_tail_gradient(dx, exchange_window_gradients(dbefore, None, ranks), counts, ranks)


def _state_before(own: Tensor, reverse: bool, group: str) -> tuple[Tensor, Tensor]:
    entering, _, factors = exchange_maps(own, None, Ranks.of(group, own.device, reverse))
    return entering, factors


def _state_gradient_behind(own: Tensor, factors: Tensor, reverse: bool, group: str) -> Tensor:
    ranks = Ranks.of(group, own.device, reverse)
    leaving = exchange_state_gradients(own, None, factors, ranks)
    return torch.zeros_like(own) if leaving is None else leaving


_memory.define_callback(
    "_steps_before", "(Tensor x, int history, str group) -> (Tensor, Tensor)", _steps_before
)
_memory.define_callback(
    "_exchange_step_gradients",
    "(Tensor dbefore, Tensor counts, Tensor(a!) dx, str group) -> ()",
    _exchange_step_gradients,
)
_memory.define_callback(
    "_state_before", "(Tensor own, bool reverse, str group) -> (Tensor, Tensor)", _state_before
)
_memory.define_callback(
    "_state_gradient_behind",
    "(Tensor own, Tensor factors, bool reverse, str group) -> Tensor",
    _state_gradient_behind,
)


class _OfRanks(Kept):
    """A kept tensor with a leading dimension of all ranks."""

    def sizes(self, call: Call) -> list[int | torch.SymInt]:
        ranks = Ranks.of(call.options["group"], call["xz"].device)
        return [ranks.count, *(size_of(dim, call.sizes) for dim in self.dims)]


_STATE = ("batch", "dim", "dstate")
MAMBA_INNER_OF_RANKS = make_layer_operator(
    "mamba_inner_of_ranks",
    GroupName(),
    kept=[
        Kept("before", ("batch", "dim", "width-1"), products_dtype),
        _OfRanks("counts", (), lambda call: torch.int64),
        Kept("entering", _STATE, states_dtype),
        _OfRanks("factors", _STATE, states_dtype),
        Kept("second_entering", _STATE, states_dtype, is_asked=has_second_scan),
        _OfRanks("second_factors", _STATE, states_dtype, is_asked=has_second_scan),
    ],
)
