"""Registers the ops' FLOP formulas with torch.utils.flop_counter.

That module imports Triton, which takes longer than importing all of this package. Therefore the
formulas are registered only when someone else imports the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

from ._library import warn_once

_MODULE = "torch.utils.flop_counter"
_pending: list[tuple[Callable[..., int], list[torch._ops.OpOverloadPacket]]] = []


def register(formula: Callable[..., int], ops: Collection[torch._ops.OpOverload]) -> None:
    """Registers a formula, which is called with the unchanged arguments of an op and its results as
    out_val."""
    _pending.append((formula, [op.overloadpacket for op in ops]))
    if _MODULE in sys.modules:
        _hand_over(sys.modules[_MODULE])
    elif _waiting not in sys.meta_path:
        sys.meta_path.insert(0, _waiting)


def _hand_over(module: ModuleType) -> None:
    while _pending:
        formula, ops = _pending.pop()
        try:
            module.register_flop_formula(ops, get_raw=True)(formula)
        except Exception as error:  # whoever imports the module may not need our formulas
            warn_once("%s does not count the operations of this package: %s", _MODULE, repr(error))


class _Waiting:
    """An import finder that notices the module's import and leaves finding it to the others."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_hand_over(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _hand_over(module)

            spec.loader.exec_module = execute_and_hand_over
        return spec


_waiting = _Waiting()
