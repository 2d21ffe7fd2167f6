"""What was read of modules, and the check that all of it is unchanged.

Inspecting whether weights fully describe a stack of modules takes longer than a small stack's
kernels. The result is therefore kept with everything that was inspected for it, and holds as long
as all of that is unchanged, which loops in C check.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import NamedTuple

from torch import nn

FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
ALL_HOOKS = (*FORWARD_HOOKS, "_backward_pre_hooks", "_backward_hooks")
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


class Inspected:
    """The state in which modules were inspected."""

    def __init__(
        self,
        read: Mapping[nn.Module, Collection[str]],
        called: Collection[nn.Module],
        kinds_of_hooks: Collection[str],
    ) -> None:
        """Remembers the present state.

        Args:
            read: the modules whose submodules and parameters were read, each with the names of the
                options that were read.
            called: those of the modules that an operator replaces a call of, which must have no
                hooks.
            kinds_of_hooks: the attributes that hold the hooks that matter.
        """
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
            self._seen.add(own, (*kinds_of_hooks, *_OWN_CALLS))
        self._hooks = [own[kind] for own in members for kind in kinds_of_hooks]

    def is_unchanged(self) -> bool:
        return (
            not any(self._hooks)
            and self._seen.is_still_so()
            and [*map(type, self._modules)] == self._types
        )


def are_the_same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Returns whether both sequences hold the same objects, by identity."""
    return len(these) == len(those) and all(map(is_, these, those))
