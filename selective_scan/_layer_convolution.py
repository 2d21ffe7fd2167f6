"""The convolution of a Mamba layer, of any width and by whatever stands in its place."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ._checks import MAX_WIDTH
from ._module_arguments import refuse
from .causal_conv1d import causal_conv1d_fn


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """silu of the depthwise convolution of x, (batch, dim, seqlen); weight is (dim, 1, width)."""
    width = weight.shape[2]
    if width <= MAX_WIDTH:
        return causal_conv1d_fn(
            x, weight.squeeze(1), bias, activation="silu", cu_seqlens=cu_seqlens
        )
    refuse_boundaries(cu_seqlens, f"the convolution is wider than {MAX_WIDTH}")
    return convolve_widely(F.pad(x, (width - 1, 0)), weight, bias)


def convolve_widely(seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu of the depthwise convolution at all steps but the first width - 1, by PyTorch's, which
    takes more taps than ours."""
    padded = F.pad(seen, (0, 1))  # one step more, since PyTorch's gives no empty result
    return F.silu(F.conv1d(padded, weight, bias, groups=weight.shape[0])[..., :-1])


def convolve_by(conv1d: nn.Module, seen: Tensor, history: int = 0) -> Tensor:
    """Does the same by calling a module, which pads with width - 1 zeros on both sides, at all
    steps but the first `history`. One that goes around in circles would see one step more."""
    is_circular = getattr(conv1d, "padding_mode", "zeros") == "circular"
    padded = seen if is_circular else F.pad(seen, (0, 1))
    return F.silu(conv1d(padded)[..., history : seen.shape[-1]])


def refuse_boundaries(cu_seqlens: Tensor | None, reason: str) -> None:
    if cu_seqlens is not None:
        refuse("cu_seqlens", f"None where {reason}", cu_seqlens)
