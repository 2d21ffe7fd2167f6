"""Forward-mode differentiation, which the kernels do not have."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd import forward_ad


def refuse_tangents(tensors: Iterable[Tensor | None], reference: str) -> None:
    """PyTorch drops the tangents of an operator's inputs without a word, and zeros come out.

    Raises:
        RuntimeError: a tensor has a tangent.
    """
    if forward_ad._current_level < 0:  # outside dual_level and torch.func.jvp
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                "forward-mode differentiation is not supported by the kernels; "
                f"{reference}, or backend='reference', supports it"
            )
