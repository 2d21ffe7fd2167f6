"""The residual addition and the RMS norm between two layers of a stack, as one autograd node.

The tensors are read once and written once: the sum in the residual's dtype, the norm in the dtype
of the product that follows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _library, _memory, _pytorch
from ._checks import REAL
from ._discretization import at_least_single
from ._layer_input import autocast_dtype_of
from ._ops import ops
from ._plain_mixer import has_no_hooks, has_plain_weights
from .mamba_inner import OPAQUE_TYPES

# The longest row that each device's kernels support; csrc/cuda/launch.h has the same limit.
_MOST_CHANNELS = {"cpu": None, "cuda": 8192}


def add_rms_norm(
    hidden: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    total_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the RMS norm of hidden + residual over the last dimension, and the sum.

    Arithmetic is float32, or float64 if any tensor is float64, and the norm is taken of the
    unrounded sum. Eager calls run the kernels. All other calls are composed of PyTorch ops, which
    compilers fuse with their surroundings and which can be differentiated any number of times.

    Args:
        hidden: (..., channels).
        residual: shaped like hidden, or None.
        weight: (channels,).
        eps: added to the mean square.
        dtype: the dtype of the norm.
        total_dtype: the dtype of the sum, or None if the caller does not need the sum.

    Returns:
        (normed, total); total is hidden itself if nothing is added and the dtype stays the same.
    """
    if not is_one_node(hidden, residual, weight):
        total = hidden
        if residual is not None:
            wide = at_least_single(_sum_dtype(hidden, residual))
            total = hidden.to(wide) + residual.to(wide)
        normed = _normed(total, weight, eps, dtype)
        return normed, None if total_dtype is None else total.to(total_dtype)
    given = (hidden, residual, weight, eps, dtype)
    if torch.is_grad_enabled() and (
        hidden.requires_grad
        or weight.requires_grad
        or (residual is not None and residual.requires_grad)
    ):
        if total_dtype is None:  # the backward pass needs the sum
            total_dtype = _sum_dtype(hidden, residual)
        return _apply(*given, total_dtype)
    is_made = residual is not None or total_dtype != hidden.dtype
    normed, total = _run_forward(*given, total_dtype if is_made else None)
    return normed, total if is_made else hidden


def is_one_node(hidden: Tensor, residual: Tensor | None, weight: Tensor | None) -> bool:
    """Returns whether this is an eager call on tensors that the kernels support."""
    device_type = hidden.device.type
    most = _MOST_CHANNELS.get(device_type)
    return (
        weight is not None
        and _pytorch.is_plain_call()
        and {type(hidden), type(residual), type(weight)} <= OPAQUE_TYPES
        and device_type in _MOST_CHANNELS
        and device_type in _library.devices
        and (most is None or hidden.shape[-1] <= most)
        and hidden.shape[-1:] == weight.shape
        and hidden.device == weight.device
        and (residual is None or _are_alike(hidden, residual))
        and hidden.dtype in REAL
        and weight.dtype in REAL
    )


def _are_alike(hidden: Tensor, residual: Tensor) -> bool:
    return (
        residual.shape == hidden.shape
        and residual.device == hidden.device
        and residual.dtype in REAL
    )


def _sum_dtype(hidden: Tensor, residual: Tensor | None) -> torch.dtype:
    if residual is None or residual.dtype == hidden.dtype:
        return hidden.dtype
    return torch.promote_types(hidden.dtype, residual.dtype)


def _run_forward(*given: object) -> tuple[Tensor, Tensor | None]:
    return _memory.call(_pytorch.shortest_call(ops.add_rms_norm_fwd.default), given)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, residual, weight, eps, dtype, total_dtype):
        is_made = residual is not None or total_dtype != hidden.dtype
        made_dtype = total_dtype if is_made else None
        normed, total = _run_forward(hidden, residual, weight, eps, dtype, made_dtype)
        if not is_made:
            # hidden is returned as a second result so that its gradient arrives at this node, where
            # the kernel adds it.
            total = hidden
            if not ctx.needs_input_grad[0]:
                ctx.mark_non_differentiable(total)
        ctx.save_for_backward(total, weight)
        ctx.dtypes = hidden.dtype, None if residual is None else residual.dtype
        ctx.options = eps, dtype
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(ctx, dnormed, dtotal):
        total, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        hidden_dtype, residual_dtype = (
            dtype if is_needed else None
            for dtype, is_needed in zip(ctx.dtypes, needed[:2], strict=True)
        )
        if dnormed is None or _pytorch.needs_composition(dnormed, dtotal):
            gradient, dweight = _differentiate(total, weight, *ctx.options, dnormed, dtotal)
            dhidden, dresidual = (
                None if dtype is None or gradient is None else gradient.to(dtype)
                for dtype in (hidden_dtype, residual_dtype)
            )
        else:
            is_shared = hidden_dtype == residual_dtype
            own_dtype = None if is_shared else residual_dtype
            options = (ctx.options[0], hidden_dtype, own_dtype, needed[2])
            op = _pytorch.shortest_call(ops.add_rms_norm_bwd.default)
            made = _memory.call(op, (dnormed, dtotal, total, weight, *options))
            dhidden, dresidual, dweight = made
            if is_shared:
                dresidual = dhidden
        return dhidden, dresidual, dweight, None, None, None


_apply = _pytorch.apply_outside_transforms(_AddNorm)


def _differentiate(
    total: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    dnormed: Tensor | None,
    dtotal: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of the sum and of the weight by differentiating the composition."""
    if dnormed is None:
        return dtotal, None
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # With the sum itself, autograd would continue to the weight through the node that made it.
        own = total.view_as(total) if total.requires_grad else total.detach().requires_grad_()
        weight = weight.view_as(weight)
        tensors = [own, weight] if weight.requires_grad else [own]
        normed = _normed(own, weight, eps, dtype)
        gradient, *others = torch.autograd.grad(normed, tensors, dnormed, create_graph=create_graph)
    return gradient if dtotal is None else gradient + dtotal, others[0] if others else None


def _normed(total: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    wide = at_least_single(torch.promote_types(total.dtype, weight.dtype))
    return F.rms_norm(total.to(wide), weight.shape, weight.to(wide), eps).to(dtype)


# --- in a stack -----------------------------------------------------------------------------------


class JoinedNorms(NamedTuple):
    """The norms of a stack, each of which can run fused with the residual addition before it.

    Attributes:
        weights, eps: the norms' parameters, in the order of the stack.
        dtype: the dtype of the residual stream.
        product_dtype: the dtype of the inputs of the layers' input projections.
    """

    weights: Sequence[Tensor]
    eps: Sequence[float]
    dtype: torch.dtype
    product_dtype: torch.dtype

    def in_front(self, place: int, hidden: Tensor, residual: Tensor | None) -> tuple:
        """Returns a layer's normalized input, and the stream to which the next norm adds the
        layer's output."""
        total_dtype = _sum_dtype(hidden, residual)
        given = (hidden, residual, self.weights[place], self.eps[place])
        return add_rms_norm(*given, self.product_dtype, total_dtype)

    def behind(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Applies the last norm, to the stream after all layers."""
        given = (hidden, residual, self.weights[-1], self.eps[-1])
        return add_rms_norm(*given, self.dtype, None)[0]


def join_norms(
    norms: Collection[nn.Module], projections: Collection[nn.Module], x: Tensor
) -> JoinedNorms | None:
    """Returns the norms of a residual stream that begins with x, some of which feed `projections`.

    Returns None if one of these modules or the call is not plain, so that the modules must be
    called.
    """
    if (
        not _pytorch.is_plain_call()
        or type(x) not in OPAQUE_TYPES
        or {*map(type, norms)} != {nn.RMSNorm}
        or not all(map(has_no_hooks, norms))
        or not all(has_plain_weights(projection, nn.Linear) for projection in projections)
    ):
        return None
    weights = [norm._parameters.get("weight") for norm in norms]
    eps = [norm.eps for norm in norms]
    if None in eps or not all(
        weight is not None and is_one_node(x, None, weight) for weight in weights
    ):
        return None
    dtype, autocast_dtype = x.dtype, autocast_dtype_of(x.device)
    # On some devices, autocast makes norms return float32 for every input dtype.
    dtypes = {weight.dtype for weight in weights} | {it.weight.dtype for it in projections}
    if dtypes != {dtype} or (autocast_dtype is not None and dtype != torch.float32):
        return None
    return JoinedNorms(weights, eps, dtype, autocast_dtype or dtype)
