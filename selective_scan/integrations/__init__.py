"""Runs other packages' models with selective_scan's kernels; imports those packages on demand.

transformers    Mamba, FalconMamba, Jamba and Zamba
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import transformers  # noqa: F401


def __getattr__(name: str) -> ModuleType:
    if name == "transformers":
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
