"""Repeated steps of a stack: prepared calls, and the check that they are still valid.

Inspecting whether a stack's weights fully describe it, and passing them to the op, takes longer
than a small stack's kernels. A cache therefore keeps the prepared call with everything that was
inspected for it. As long as all of that is unchanged, which loops in C check, the call is valid.
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

# Hooks of backward passes are left out, since they do nothing without gradients.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Attributes of a module that, if set, run in place of its class's forward.
_OWN_CALLS = ("forward", "_compiled_call_impl")
_MISSING = object()


class _Seen(NamedTuple):
    """The values seen in mappings, in columns: value i was that of keys[i] in mappings[i]."""

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


def are_the_same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Returns whether both sequences hold the same objects, by identity."""
    return len(these) == len(those) and all(map(is_, these, those))


class PreparedStep:
    """A call of s6_step that is repeated with other values of hidden."""

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
            around: the objects that the caller passes anew with each call.
            read: the modules whose submodules and parameters were read, each with the names of the
                options that were read.
            called: those of the modules that the op replaces a call of, which must have no hooks.
            changed: the tensors that the op changes, which are among `around`.
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
        """Returns the op's result; None, without changing anything, if the call is no longer valid.

        A hidden of another shape is a different call.
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
    """Runs an op unseen by the dispatch modes that are active when garbage is collected."""
    with _pytorch.no_modes():
        op(number)
