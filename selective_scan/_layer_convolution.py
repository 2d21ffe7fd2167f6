"""The convolution of a Mamba layer, of any width, and by a module that replaces it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ._checks import MAX_WIDTH
from ._module_arguments import refuse
from .causal_conv1d import causal_conv1d_fn


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """Returns silu of the depthwise causal convolution of x, (batch, dim, seqlen); weight is
    (dim, 1, width)."""
    width = weight.shape[2]
    if width <= MAX_WIDTH:
        return causal_conv1d_fn(
            x, weight.squeeze(1), bias, activation="silu", cu_seqlens=cu_seqlens
        )
    refuse_boundaries(cu_seqlens, f"the convolution is wider than {MAX_WIDTH}")
    return convolve_widely(F.pad(x, (width - 1, 0)), weight, bias)


def convolve_widely(seen: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns silu of the depthwise convolution at all steps but the first width - 1, computed by
    PyTorch, whose convolution supports more taps than this package's."""
    padded = F.pad(seen, (0, 1))  # an extra step, since PyTorch's never returns an empty result
    return F.silu(F.conv1d(padded, weight, bias, groups=weight.shape[0])[..., :-1])


def convolve_by(conv1d: nn.Module, seen: Tensor, history: int = 0) -> Tensor:
    """Returns silu of a convolution module's output at all steps but the first `history`.

    The module pads with width - 1 zeros on both sides. With circular padding it would also see the
    extra step that avoids an empty result, so that step is left out.
    """
    is_circular = getattr(conv1d, "padding_mode", "zeros") == "circular"
    padded = seen if is_circular else F.pad(seen, (0, 1))
    return F.silu(conv1d(padded)[..., history : seen.shape[-1]])


def refuse_boundaries(cu_seqlens: Tensor | None, reason: str) -> None:
    if cu_seqlens is not None:
        refuse("cu_seqlens", f"None where {reason}", cu_seqlens)
