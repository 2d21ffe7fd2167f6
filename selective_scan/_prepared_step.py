"""Steps that a stack takes again and again: what they were found to be, looked up in C's loops.

To find out whether a stack is no more than its weights, and to hand these over, takes longer than a
small stack's kernels. A cache keeps what was found, and all that was looked at for it: as long as
this is what it was, so is the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import increment_version

from . import _memory, _pytorch
from ._ops import ops

# Those of backward passes do nothing where there is no gradient.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# What a module runs in place of its class's forward, if it has such.
_OWN_CALLS = ("forward", "_compiled_call_impl")
_MISSING = object()


class _Seen(NamedTuple):
    """What mappings held, in columns."""

    mappings: list[Mapping[str, object]]
    keys: list[str]
    values: list[object]

    def add(self, mapping: Mapping[str, object], keys: Iterable[str]) -> None:
        for key in keys:
            self.mappings.append(mapping)
            self.keys.append(key)
            self.values.append(mapping.get(key, _MISSING))

    def is_still_so(self) -> bool:
        now = map(dict.get, self.mappings, self.keys, repeat(_MISSING))
        return all(map(is_, now, self.values))


class NotCopied:
    """What an owner keeps for itself: where the owner is copied or pickled, None goes along."""

    def __reduce__(self) -> tuple[type[None], tuple]:
        return type(None), ()


def are_the_same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Whether these are the very objects that those are."""
    return len(these) == len(those) and all(map(is_, these, those))


class PreparedStep(NotCopied):
    """A call of s6_step that is made again with other values of hidden."""

    def __init__(
        self,
        call: tuple,
        around: tuple[object, ...],
        read: Mapping[nn.Module, Collection[str]],
        called: Collection[nn.Module],
        changed: Sequence[Tensor],
    ) -> None:
        """Prepares a call that has just been made.

        Args:
            call: the op's arguments.
            around: all of which whoever calls gives it anew.
            read: the modules whose parts and parameters these are, and which options of theirs.
            called: those of them that are no longer called, and so must have no hooks.
            changed: the tensors that the op changes, which are around it, too.
        """
        self._around = around
        self._modules = [*read]
        self._types = [*map(type, read)]
        self._seen = _Seen([], [], [])
        for module, options in read.items():
            own = vars(module)
            containers = [name for name in ("_parameters", "_modules") if own[name]]
            self._seen.add(own, (*containers, *options))
            for name in containers:
                self._seen.add(own[name], [*own[name]])
        members = [*map(vars, called)]
        for own in members:
            self._seen.add(own, (*_HOOKS, *_OWN_CALLS))
        self._hooks = [own[kind] for own in members for kind in _HOOKS]
        self._changed = changed
        self._number = ops.s6_step_prepare(*call)
        self._again = _pytorch.shortest_call(ops.s6_step_again.default)
        forget = getattr(ops, f"{call[0].device.type}_s6_step_forget").default
        weakref.finalize(self, _run_unseen, forget, self._number).atexit = False

    def is_of(self, around: tuple[object, ...]) -> bool:
        return are_the_same(around, self._around)

    def take(self, hidden: Tensor) -> Tensor | None:
        """The op's result; None where the call is no longer what it was, and nothing has changed.

        A hidden of another shape is another call.
        """
        if (
            any(self._hooks)
            or not self._seen.is_still_so()
            or [*map(type, self._modules)] != self._types
        ):
            return None
        out = _memory.call(self._again, (hidden, self._number))
        if out is not None:
            increment_version(self._changed)
        return out


def _run_unseen(op: Callable[[int], None], number: int) -> None:
    """Whatever runs where garbage is collected is not to see it."""
    with _pytorch.no_modes():
        op(number)
