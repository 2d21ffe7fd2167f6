"""A scan that exchanges states with other ranks in its middle.

It first finds the map that its steps apply to a state, then passes it to a callback that returns
the entering state, and scans from there. The ops call the callback, since some kernels find the map
in the midst of a pass.
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
    """Returns out, the last state and saved states, as the op of one device does.

    Args:
        scanned: the op's arguments, without cu_seqlens.
        enter: takes the map that the steps apply to the entering state, (batch, 2, dim, dstate),
            and returns that state.
        is_told: whether `enter` needs the map; if not, it gets the map of no steps.
        is_saved: whether to save states for the backward pass.
    """
    with _numbered(enter) as entrance:
        return ops.selective_scan_between_fwd(*scanned, is_told, entrance, is_saved)


def scan_backward(
    dout: Tensor | None, scanned: tuple, states: Tensor | None, enter: Enter, *, is_told: bool
) -> tuple[Tensor | None, ...]:
    """Returns all gradients. `enter` takes the gradient of the entering state, of the steps'
    outputs alone, and returns the gradient of the leaving state."""
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
