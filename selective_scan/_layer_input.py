"""Checks of a layer's input."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ._checks import REAL, check_dense, check_dtype


def autocast_dtype_of(device: torch.device) -> torch.dtype | None:
    # PyTorch raises an error if asked for a device type without autocast, such as meta.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Returns a context in which products are computed in the dtype of their factors."""
    if device.type == "meta":  # has no autocast, and PyTorch refuses to disable it
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def checked_sequence(
    name: str, tensor: Tensor, d_model: int, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Returns the tensor if it is (batch, seqlen, d_model) of a dtype that some layer supports, and
    if its batch is 1 where there are packed sequences.

    The dtype that a particular layer supports is known only when its projection is about to be
    called.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"selective_scan: {name} must be a Tensor, got {type(tensor).__name__}")
    check_dense(name, tensor)
    if tensor.dim() != 3 or tensor.shape[2] != d_model:
        raise ValueError(
            f"selective_scan: {name} must be (batch, seqlen, d_model) = (*, *, {d_model}), "
            f"got {tuple(tensor.shape)}"
        )
    if isinstance(cu_seqlens, Tensor) and tensor.shape[0] != 1:
        raise ValueError(
            f"selective_scan: {name} must have batch of 1 where cu_seqlens is given, "
            f"got {tuple(tensor.shape)}"
        )
    check_dtype(name, tensor, REAL)
    return tensor


def checked_factor(name: str, hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns `hidden` if it can be multiplied with the weight of a plain in_proj.

    Both factors of a product must have one dtype. Autocast casts them to it, except float64.
    """
    if hidden.dtype != weight.dtype:
        remark, can_be_cast = ", as in_proj.weight has", False
        if autocast_dtype_of(hidden.device) is not None:
            remark += ", for torch.autocast leaves float64 as it is"
            can_be_cast = torch.float64 not in (hidden.dtype, weight.dtype)
        if not can_be_cast:
            check_dtype(name, hidden, (weight.dtype,), remark)
    return hidden
