"""Norms with a residual, with the signatures of mamba_ssm's layer_norm module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._add_norm import add_rms_norm
from .._discretization import at_least_single
from .._module_arguments import refuse


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: None = None,
    weight1: None = None,
    bias1: None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalizes x + residual over the last dimension; with `prenorm`, also returns the sum.

    Arithmetic is float32, or float64 if x is float64. Dropout, row scales and a second input are
    not supported.

    Args:
        x: (..., hidden_size), any floating dtype.
        weight: (hidden_size,).
        bias: (hidden_size,) or None.
        residual: shaped like x, or None.
        eps: added to the variance, or to the mean square.
        prenorm: whether to return (out, sum), with the sum in the residual's dtype.
        residual_in_fp32: whether the sum is at least float32, rather than in x's dtype, if no
            residual is given. It is float64 if x is, which upstream's rounds to float32.
        is_rms_norm: whether to only divide by the root mean square, without subtracting the mean.

    Returns:
        out, with x's shape and dtype; with `prenorm` (out, sum).

    Raises:
        ValueError: an unsupported argument does not have its default value, a tensor has a wrong
            shape, or x does not have a floating dtype.

    References:
        Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467. The
        arguments are those of mamba_ssm 2's function.

    Example:
        >>> import torch
        >>> from selective_scan.compat.layer_norm import layer_norm_fn
        >>> x, residual = torch.randn(2, 3, 8)
        >>> out, total = layer_norm_fn(x, torch.ones(8), None, residual, prenorm=True)
        >>> torch.equal(total, x + residual)
        True
    """
    not_covered = {"x1": x1, "weight1": weight1, "bias1": bias1, "rowscale": rowscale}
    for name, value in not_covered.items():
        if value is not None:
            refuse(name, "None", value)
    if dropout_p != 0:
        refuse("dropout_p", "0", dropout_p)
    if return_dropout_mask:
        refuse("return_dropout_mask", "False", return_dropout_mask)

    if not x.is_floating_point():
        refuse("x", "of a floating dtype", x.dtype)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != x.shape[-1:]:
            refuse(name, f"(hidden_size,) = {tuple(x.shape[-1:])}", tuple(tensor.shape))
    if residual is not None and residual.shape != x.shape:
        refuse("residual", f"of the shape of x, {tuple(x.shape)}", tuple(residual.shape))
    kept_dtype = at_least_single(x.dtype) if residual_in_fp32 else x.dtype
    if residual is not None:
        kept_dtype = residual.dtype
    if is_rms_norm and bias is None:
        total_dtype = kept_dtype if prenorm else None
        normed, total = add_rms_norm(x, residual, weight, eps, x.dtype, total_dtype)
        return (normed, total) if prenorm else normed
    dtype = at_least_single(x.dtype)
    total = x.to(dtype)
    if residual is not None:
        total = total + residual.to(dtype)
    scale = weight.to(dtype)
    shift = None if bias is None else bias.to(dtype)
    if is_rms_norm:
        normed = F.rms_norm(total, weight.shape, scale, eps) + shift
    else:
        normed = F.layer_norm(total, weight.shape, scale, shift, eps)
    normed = normed.to(x.dtype)
    return (normed, total.to(kept_dtype)) if prenorm else normed


def _layer_norm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: None = None,
    *,
    residual_dtype: None = None,
    is_rms_norm: bool = False,
) -> tuple[Tensor]:
    """Returns the normalized x as the only element of a tuple, without a graph.

    Copies of mamba_ssm's scans, from version 2.2.3 on, import this name and use the first result.
    """
    with torch.no_grad():
        return (layer_norm_fn(x, weight, bias, residual, eps=eps, is_rms_norm=is_rms_norm),)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: None = None,
    weight1: None = None,
    bias1: None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Calls :func:`layer_norm_fn` with `is_rms_norm`.

    Example:
        >>> import torch
        >>> from selective_scan.compat.layer_norm import rms_norm_fn
        >>> rms_norm_fn(torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.ones(4), None)
        tensor([1.2000, 1.6000, 0.0000, 0.0000])
    """
    before = (x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm)
    return layer_norm_fn(*before, residual_in_fp32, True, return_dropout_mask)


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: None = None,
    weight1: None = None,
    bias1: None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: None = None,
    prenorm: bool = False,
    dropout_mask: None = None,
    dropout_mask1: None = None,
    upcast: bool = False,
    *,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Calls :func:`layer_norm_fn`; with `prenorm` the sum has x's dtype, or with `upcast` at least
    float32. Arithmetic is at least float32 in any case."""
    for name, mask in (("dropout_mask", dropout_mask), ("dropout_mask1", dropout_mask1)):
        if mask is not None:
            refuse(name, "None", mask)
    wide = at_least_single(x.dtype)
    added = None if residual is None else residual.to(wide)
    before = (x, weight, bias, added, x1, weight1, bias1, eps, dropout_p, rowscale, True)
    out, total = layer_norm_fn(*before, is_rms_norm=is_rms_norm)
    return (out, total.to(wide if upcast else x.dtype)) if prenorm else out


def rms_norm_ref(*arguments: object, **options: object) -> Tensor | tuple[Tensor, Tensor]:
    """Calls :func:`layer_norm_ref` with `is_rms_norm`."""
    return layer_norm_ref(*arguments, **options, is_rms_norm=True)


def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Applies a linear layer, whose weights are cast to x's dtype, to the result of
    :func:`layer_norm_fn`; with `prenorm`, also returns the sum."""
    options = {"residual_in_fp32": residual_in_fp32, "is_rms_norm": is_rms_norm}
    normed, total = layer_norm_fn(
        x, norm_weight, norm_bias, residual, eps=eps, prenorm=True, **options
    )
    bias = None if linear_bias is None else linear_bias.to(x.dtype)
    out = F.linear(normed, linear_weight.to(x.dtype), bias)
    return (out, total) if prenorm else out


class RMSNorm(nn.Module):
    """The RMS norm over the last dimension, after adding a residual: see :func:`layer_norm_fn`.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        dropout_p: must be 0.
        device: the weight's device.
        dtype: the weight's dtype.

    Example:
        >>> import torch
        >>> from selective_scan.compat.layer_norm import RMSNorm
        >>> RMSNorm(8)(torch.randn(2, 3, 8)).shape
        torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dropout_p != 0:
            refuse("dropout_p", "0", dropout_p)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalizes x + residual.

        Args:
            x, residual, prenorm, residual_in_fp32: see :func:`layer_norm_fn`.

        Returns:
            out, with x's shape and dtype; with `prenorm` (out, sum).

        Example:
            >>> import torch
            >>> from selective_scan.compat.layer_norm import RMSNorm
            >>> x, residual = torch.randn(2, 3, 8)
            >>> out, total = RMSNorm(8)(x, residual, prenorm=True)
            >>> torch.equal(total, x + residual)
            True
        """
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual=residual,
            eps=self.eps,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )
