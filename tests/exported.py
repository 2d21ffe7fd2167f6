"""Exports models to ONNX and runs them by onnxruntime, for the tests of selective_scan.onnx."""

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from onnxscript.values import TracedOnnxFunction
from torch import Tensor, nn

from selective_scan.onnx import export

# It has no release for Python 3.10 that can run these models.
onnxruntime = pytest.importorskip("onnxruntime", minversion="1.32")

OPSETS = (27, 18)

# At each export PyTorch reads this property of 500 functions, and onnxscript parses the source of
# each one again, which takes a second in all.
TracedOnnxFunction.function_ir = property(functools.cache(TracedOnnxFunction.function_ir.fget))


class Call(nn.Module):
    """Wraps a function in the module that PyTorch's exporter expects."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor):
        return self.function(*tensors)


class Program:
    """A model exported to ONNX and run by onnxruntime. It is called like the model."""

    def __init__(self, model, args, path: Path, *, opset: int, dynamic=None, **names) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own warnings
            export(model, args, path, dynamic=dynamic, opset=opset, **names)
        onnx.checker.check_model(path, full_check=True)
        self.model = onnx.load(path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options)
        self._names = [given.name for given in self._session.get_inputs()]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        given = {n: t.numpy() for n, t in zip(self._names, tensors, strict=True)}
        return [torch.from_numpy(result) for result in self._session.run(None, given)]

    @property
    def opset(self) -> int:
        return {entry.domain: entry.version for entry in self.model.opset_import}[""]

    @property
    def operators(self) -> Counter[str]:
        """Counts the operators in the graph and in the bodies of its loops."""
        found, graphs = Counter(), [self.model.graph]
        while graphs:
            for node in graphs.pop().node:
                found[node.op_type] += 1
                graphs += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        return found


def assert_close(actual: list[Tensor], expected, bound: float = 1e-5) -> None:
    expected = [expected] if isinstance(expected, Tensor) else [*expected]
    assert len(actual) == len(expected)
    for place, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert got.shape == wanted.shape
        error, size = (got.double() - wanted.double()).norm(), wanted.double().norm()
        assert error <= bound * size, (place, error, size)
