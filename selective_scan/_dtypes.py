"""What a call computes in, and the sizes that follow from its inputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
_DOUBLE = (torch.float64, torch.complex128)


def compute_dtype(tensors: Iterable[Tensor | None]) -> torch.dtype:
    """The dtype of all arithmetic: float32, or float64 if any input is float64 or complex128."""
    is_double = any(tensor is not None and tensor.dtype in _DOUBLE for tensor in tensors)
    return torch.float64 if is_double else torch.float32


def state_dtype(tensors: Iterable[Tensor | None], A: Tensor) -> torch.dtype:
    """The compute dtype, its complex counterpart if A is complex."""
    dtype = compute_dtype(tensors)
    return dtype.to_complex() if A.is_complex() else dtype


def num_saved_values(u: Tensor, A: Tensor) -> int | torch.SymInt:
    """The length of the forward op's `states`: the state at every inner chunk boundary, and two
    zeros (csrc/torch/scan_ops.h says why)."""
    batch, dim, seqlen = u.shape
    num_states = (torch.sym_max(seqlen, 1) - 1) // torch.ops.selective_scan.state_chunk()
    return num_states * batch * dim * A.shape[1] + 2
