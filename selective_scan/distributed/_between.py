"""A scan that asks between finding what its steps do to a state, and scanning them: what enters?

That is asked by the ops, of which kernels find the first in the midst of a pass.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .. import _memory
from .._ops import add_op_namespace_prefix, ops

Enter = Callable[[Tensor], Tensor]
_numbers = itertools.count()
_entrances: dict[int, Enter] = {}


def _enter(own: Tensor, entrance: int) -> Tensor:
    return _entrances[entrance](own)


_memory.define_callback("_enter", "(Tensor own, int entrance) -> Tensor", _enter)


@contextlib.contextmanager
def _numbered(enter: Enter) -> Iterator[int]:
    number = next(_numbers)
    _entrances[number] = enter
    try:
        yield number
    finally:
        del _entrances[number]


def scan_forward(
    scanned: tuple, enter: Enter, *, is_told: bool, is_saved: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, the last state and saved states, as the op of one device gives them.

    Args:
        scanned: its arguments, without cu_seqlens.
        enter: gets what the steps do to the state that enters them, (batch, 2, dim, dstate), and
            gives that state; whoever needs nothing of the first need not be told: it gets that of
            no steps.
    """
    with _numbered(enter) as entrance:
        return ops.selective_scan_between_fwd(*scanned, is_told, entrance, is_saved)


def scan_backward(
    dout: Tensor | None, scanned: tuple, states: Tensor | None, enter: Enter, *, is_told: bool
) -> tuple[Tensor | None, ...]:
    """All gradients. `enter` gets that of the state in front, of the steps' outputs alone, and
    gives that of the one behind."""
    with _numbered(enter) as entrance:
        return ops.selective_scan_between_bwd(dout, *scanned, states, is_told, entrance)


def _forward_fake(*arguments):
    *scanned, input_delta, _, entrance, is_saved = arguments
    made = ops.selective_scan_fwd(*scanned, None, input_delta, is_saved)
    _enter(torch.stack([made[1], made[1]], 1), entrance)
    return made


def _backward_fake(dout, *arguments):
    *scanned, input_delta, states, _, entrance = arguments
    _, last_state, _ = ops.selective_scan_fwd(*scanned, None, input_delta, False)
    leaving = _enter(last_state, entrance)
    return ops.selective_scan_bwd(dout, leaving, *scanned, None, input_delta, states)


for _name, _fake in (("fwd", _forward_fake), ("bwd", _backward_fake)):
    torch.library.register_fake(add_op_namespace_prefix(f"selective_scan_between_{_name}"), _fake)
