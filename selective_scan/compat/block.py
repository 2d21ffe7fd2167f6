"""The residual block around a mixer, with the signature of mamba_ssm's block module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._discretization import at_least_single
from .layer_norm import RMSNorm, layer_norm_fn


class Block(nn.Module):
    """Adds the residual, normalizes the sum and applies the mixer; then likewise the MLP, if any.

    The submodules are named as in mamba_ssm's ``Block``: mixer, norm, and with an MLP norm2 and
    mlp.

    Args:
        dim: number of channels.
        mixer_cls: creates the mixer from dim.
        mlp_cls: creates the MLP from dim; ``nn.Identity`` for none.
        norm_cls: creates a norm from dim.
        fused_add_norm: whether :func:`layer_norm_fn` computes the sum and the norm, in float32; the
            norm must then be an ``nn.LayerNorm`` or an :class:`RMSNorm`.
        residual_in_fp32: whether the residual is passed on in at least float32.

    Raises:
        TypeError: fused_add_norm is True and the norm is of another kind.

    Example:
        >>> import torch
        >>> from functools import partial
        >>> from selective_scan.compat.block import Block
        >>> from selective_scan.compat.mamba_simple import Mamba
        >>> block = Block(16, partial(Mamba, d_state=8), torch.nn.Identity)
        >>> hidden, residual = block(torch.randn(2, 10, 16))
        >>> hidden.shape, residual.shape
        (torch.Size([2, 10, 16]), torch.Size([2, 10, 16]))
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        mlp_cls: Callable[[int], nn.Module],
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.residual_in_fp32 = residual_in_fp32
        self.fused_add_norm = fused_add_norm
        self.norm = norm_cls(dim)
        self.mixer = mixer_cls(dim)
        self.mlp = None
        if mlp_cls is not nn.Identity:
            self.norm2 = norm_cls(dim)
            self.mlp = mlp_cls(dim)
        if fused_add_norm and not isinstance(self.norm, (nn.LayerNorm, RMSNorm)):
            got = type(self.norm).__name__
            raise TypeError(
                f"selective_scan: norm_cls must make an nn.LayerNorm or an RMSNorm where "
                f"fused_add_norm is True, got {got}"
            )

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        inference_params: object = None,
        **mixer_kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Runs the block.

        Args:
            hidden_states: the previous block's hidden_states, (batch, seqlen, dim).
            residual: the previous block's residual; None for the first block.
            inference_params: passed to the mixer.
            mixer_kwargs: passed to the mixer.

        Returns:
            (hidden_states, residual), for the next block.
        """
        options = (self.fused_add_norm, self.residual_in_fp32)
        hidden_states, residual = add_norm(self.norm, hidden_states, residual, *options)
        hidden_states = self.mixer(hidden_states, inference_params=inference_params, **mixer_kwargs)
        if self.mlp is not None:
            hidden_states, residual = add_norm(self.norm2, hidden_states, residual, *options)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: object
    ) -> tuple[Tensor, ...]:
        """Returns the mixer's inference cache."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)


def add_norm(
    norm: nn.Module,
    hidden: Tensor,
    residual: Tensor | None,
    fused_add_norm: bool,
    residual_in_fp32: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the norm of hidden + residual, and the sum, which is the next residual."""
    if fused_add_norm:
        return layer_norm_fn(
            hidden,
            norm.weight,
            norm.bias,
            residual=residual,
            eps=norm.eps,
            prenorm=True,
            residual_in_fp32=residual_in_fp32,
            is_rms_norm=isinstance(norm, RMSNorm),
        )
    total = hidden if residual is None else hidden + residual
    normed = norm(total.to(norm.weight.dtype))
    return normed, total.to(at_least_single(total.dtype)) if residual_in_fp32 else total
