"""The namespace in which this build's ops are registered, as in csrc/torch/op_namespace.h.

A kernel hub replaces this file by its own, which defines the same two names and a namespace that no
other build uses (packaging/hub).
"""

from __future__ import annotations

import torch

ops = torch.ops.selective_scan


def add_op_namespace_prefix(op_name: str) -> str:
    """Returns the qualified name of an op."""
    return f"{ops.name}::{op_name}"
