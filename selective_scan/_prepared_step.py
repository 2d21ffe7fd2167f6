"""Repeated steps of a stack: prepared calls, and the check that they are still valid.

Inspecting a stack and passing its weights to the op takes longer than a small stack's kernels. A
cache therefore keeps the prepared call with the state of all modules that it depends on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from . import _memory, _pytorch
from ._inspected import Inspected, are_the_same
from ._ops import ops


class PreparedStep:
    """A call of s6_step that is repeated with other values of hidden."""

    def __init__(
        self,
        call: tuple,
        around: tuple[object, ...],
        inspected: Inspected,
        changed: Sequence[Tensor],
    ) -> None:
        """Prepares a call that has just been made.

        Args:
            call: the op's arguments.
            around: the objects that the caller passes anew with each call.
            inspected: the state of the modules from which the arguments were read.
            changed: the tensors that the op changes, which are among `around`.
        """
        self._around = around
        self._inspected = inspected
        self._changed = changed
        self._number = ops.s6_step_prepare(*call)
        self._again = _pytorch.shortest_call(ops.s6_step_again.default)
        forget = getattr(ops, f"{call[0].device.type}_s6_step_forget").default
        weakref.finalize(self, _run_unseen, forget, self._number).atexit = False

    def is_of(self, around: tuple[object, ...]) -> bool:
        return are_the_same(around, self._around)

    def take(self, hidden: Tensor) -> Tensor | None:
        """Returns the op's result; None, without changing anything, if the call is no longer valid.

        A hidden of another shape is a different call.
        """
        if not self._inspected.is_unchanged():
            return None
        out = _memory.call(self._again, (hidden, self._number))
        if out is not None:
            increment_version(self._changed)
        return out


def _run_unseen(op: Callable[[int], None], number: int) -> None:
    """Runs an op unseen by the dispatch modes that are active when garbage is collected."""
    with _pytorch.no_modes():
        op(number)
