"""Exports a model as an ONNX program."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .._checks import fail
from .._module_arguments import refuse
from ._program import decompose
from ._recurrence import DOMAIN, NEWEST_OPSET, OLDEST_OPSET

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

_PACKAGES = ("onnx", "onnxscript")


def export(
    model: nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] = (),
    path: str | os.PathLike[str] | None = None,
    *,
    dynamic: dict[str, Any] | tuple[Any, ...] | None = None,
    opset: int = NEWEST_OPSET,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> ONNXProgram:
    r"""Exports a model of this package's layers and functions and anything else PyTorch exports.

    It calls torch.export.export, then :func:`selective_scan.onnx.decompose`, which replaces this
    package's operators by PyTorch's and ONNX's, then torch.onnx.export(dynamo=True). The program
    has the model's dtypes, and its arithmetic if that is wider.

    With opset 27 the selective scan is ONNX's LinearAttention, every channel being a head, and the
    convolution is CausalConvWithState. A long sequence runs in chunks of 256 steps that pass the
    state on, since LinearAttention's inputs are dstate times as large as the layer's. With an older
    opset, for complex A and in float64, the scan is ONNX's Scan with one step as its body.
    docs/deployment.md lists which runtimes support which form, and their speed.

    States, including those of caches, are inputs and outputs: a module whose forward takes, copies
    and returns them is the step of a language model, as in `examples/onnx_language_model.py`.

    Args:
        model: called as ``model(*args)`` without gradients, in its current mode; or the result of
            torch.export.export, in which case args are ignored.
        args: example inputs.
        path: the file to write the program to; None writes nothing.
        dynamic: sizes that may differ from the example's, as torch.export.export's dynamic_shapes.
        opset: from 18 to 27.
        input_names, output_names: the names in the program; by default PyTorch chooses them.

    Returns:
        PyTorch's ONNXProgram, which ``save(path)`` also writes.

    Raises:
        ValueError: opset is out of range.
        RuntimeError: a call has no form in ONNX: one with cu_seqlens, except for one sequence over
            a pool of states, seq_idx, indices into pools of steps, a matrix A, a complex diagonal
            scan, or adaptive_unitary_scan_fn. The message names the argument or the operator. Also
            if the program cannot be converted to the opset.
        ImportError: the package onnx or onnxscript is missing.

    Example:
        >>> import torch
        >>> from selective_scan import S6
        >>> from selective_scan.onnx import export
        >>> batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
        >>> model, x = S6(d_model=8).eval(), torch.randn(2, 20, 8)
        >>> program = export(model, (x,), dynamic=({0: batch, 1: length},))
        >>> program.model.opset_imports
        {'': 27}
    """
    is_number = isinstance(opset, int) and not isinstance(opset, bool)
    if not is_number or not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        refuse("opset", f"from {OLDEST_OPSET} to {NEWEST_OPSET}", opset)
    for package in _PACKAGES:
        _require(package)
    with torch.no_grad():
        if not isinstance(model, torch.export.ExportedProgram):
            model = torch.export.export(model, args, dynamic_shapes=dynamic, strict=False)
        program = torch.onnx.export(
            decompose(model, opset=opset),
            dynamo=True,
            opset_version=OLDEST_OPSET,
            dynamic_shapes=dynamic,
            input_names=input_names,
            output_names=output_names,
            verbose=False,
        )
    _raise_opset(program, opset)
    if path is not None:
        program.save(path)
    return program


def _require(package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        wanted = " ".join(_PACKAGES)
        raise ImportError(
            f"selective_scan: export needs the package {package}; pip install {wanted}"
        ) from error


def _raise_opset(program: ONNXProgram, opset: int) -> None:
    """Converts a program that PyTorch exported with the oldest opset, whose operators the exporter
    and ONNX's converter support best. Afterwards the newest operators can move to ONNX's domain."""
    from onnxscript import version_converter

    model = program.model
    version_converter.convert_version(model, opset, fallback=True)
    if model.opset_imports[""] != opset:
        fail(f"the program could not be converted to opset {opset}; try opset {OLDEST_OPSET}")
    for node in model.graph.all_nodes():
        if node.domain == DOMAIN:
            node.domain, node.version = "", None
    model.opset_imports.pop(DOMAIN, None)
