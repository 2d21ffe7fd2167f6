from __future__ import annotations
import os
from collections.abc import Sequence
from typing import Any
import torch
from torch import nn
from .._checks import fail
from ._program import decompose
from ._recurrence import DOMAIN, NEWEST_OPSET, OLDEST_OPSET


def export(model, args, path=None, *, dynamic=None, opset=NEWEST_OPSET, **options):
    from onnxscript import version_converter
    program = torch.export.export(model, args, dynamic_shapes=dynamic, strict=False)
    made = torch.onnx.export(decompose(program, opset=opset), dynamo=True, opset_version=OLDEST_OPSET, verbose=False, **options)
    version_converter.convert_version(made.model, opset, fallback=True)
    if made.model.opset_imports.get("") != opset: fail("x")
    for node in made.model.graph.all_nodes():
        if node.domain == DOMAIN:
            node.domain, node.version = "", None
    made.model.opset_imports.pop(DOMAIN, None)
    if path is not None:
        made.save(path)
    return made
