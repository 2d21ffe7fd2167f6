"""The namespace that this build's ops are registered in, as csrc/torch/op_namespace.h has it.

A hub of kernels replaces this file by its own, of the same two names, whose namespace no other
build has (packaging/hub).
"""

from __future__ import annotations

import torch

ops = torch.ops.selective_scan


def add_op_namespace_prefix(op_name: str) -> str:
    """The qualified name of an op."""
    return f"{ops.name}::{op_name}"
