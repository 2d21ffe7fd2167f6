"""Runs other packages' models with selective_scan's kernels; imports those packages on demand.

transformers    Mamba, FalconMamba, Jamba and Zamba
"""

from typing import TYPE_CHECKING

from .._lazy import importer

if TYPE_CHECKING:
    from . import transformers  # noqa: F401
else:
    __getattr__ = importer(__name__, "transformers")
