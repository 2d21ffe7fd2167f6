"""Exports models to ONNX, which run without PyTorch and this package; see docs/deployment.md."""

from ._export import export
from ._program import decompose

__all__ = ["decompose", "export"]
