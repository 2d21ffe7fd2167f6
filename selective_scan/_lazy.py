"""Modules of a package that are imported when they are first used."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType


def importer(package: str, *names: str) -> Callable[[str], ModuleType]:
    """Returns the ``__getattr__`` of a package with these modules. Those that a build does not
    ship, as one for the hub, do not exist."""

    def import_module(name: str) -> ModuleType:
        module = f"{package}.{name}"
        if name in names and importlib.util.find_spec(module) is not None:
            return importlib.import_module(module)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return import_module
