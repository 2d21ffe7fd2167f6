"""Stacks of mixers that are no more than their weights: a few steps through them are one operator.

Nothing is kept from one call to the next, so that whatever changes a module, a weight or its dtype
is seen: a call looks at all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from . import _pytorch
from ._checks import MAX_WIDTH
from ._plain_mixer import is_as_made
from ._s6_step import MAX_STATES, S6_STEP, StackTensors
from .cache import MixerCache
from .mamba_inner import OPAQUE_TYPES
from .step_projection import StepProjection

if TYPE_CHECKING:
    from .mamba_mixer import MambaMixer

# What calls take the operator: so many steps, and steps of all rows together, by type of device.
MAX_STEPS = 8
MAX_ROWS = {"cpu": 64, "cuda": 16}

# The lists of StackTensors that layers may lack.
_BIASES = ("in_proj_bias", "conv1d_bias", "dt_proj_bias", "out_proj_bias")
# Those that the modules' way takes in hidden's dtype alone, and those that it takes in any.
_OF_ONE_DTYPE = (
    *("norm", "in_proj", "in_proj_bias", "conv1d", "x_proj", "dt_proj"),
    *("out_proj", "out_proj_bias"),
)
_OF_ANY_DTYPE = ("conv1d_bias", "dt_proj_bias", "A_log", "D", "conv_state", "state")


def step_in_one(
    layers: Sequence[MambaMixer],
    hidden: Tensor,
    caches: Sequence[MixerCache],
    norm_f: nn.RMSNorm | None = None,
) -> Tensor | None:
    """Takes the steps of hidden, (batch, steps, d_model), through all layers by one operator.

    Args:
        layers: those of a stack, with norms and residuals, if there is a norm_f; else one mixer.
        hidden: the input.
        caches: where each layer goes on, changed in place.
        norm_f: the stack's final norm.

    Returns:
        The output; None where the operator does not compute what the modules do, or is not made for
        such a call, or would not refuse it as the modules do. Nothing has changed then.
    """
    batch, steps, d_model = hidden.shape
    device_type = hidden.device.type
    if (
        not 0 < steps <= MAX_STEPS
        or not 0 < batch * steps <= MAX_ROWS.get(device_type, 0)
        or not S6_STEP.has_kernels_for(device_type)
        or torch.is_autocast_enabled(device_type)
        or _pytorch.may_have_process_wide_hooks()
        or _pytorch.are_transforms_active()
    ):
        return None
    options = _options_of(layers[0])
    width, dstate = options[1:3]
    if options[0] or width > MAX_WIDTH or dstate > MAX_STATES:
        return None
    norms, eps = [], 0.0
    if norm_f is not None:
        norms, eps = [norm_f, *[layer._modules["norm"] for layer in layers]], norm_f.eps
        if eps is None or not all(
            is_as_made(norm, nn.RMSNorm) and norm.eps == eps and norm.normalized_shape == (d_model,)
            for norm in norms
        ):
            return None
    entries = [
        _entry_of(layer, cache, options, batch)
        for layer, cache in zip(layers, caches, strict=True)
    ]
    if None in entries:
        return None
    weights = [norm._parameters.get("weight") for norm in norms]
    stack = StackTensors(weights[1:], *[list(column) for column in zip(*entries, strict=True)])
    stack = stack._replace(**{name: _present(getattr(stack, name)) for name in _BIASES})
    if not _are_alike(stack, hidden, weights[:1]):
        return None
    softplus, method = options[-2:]
    final = weights[0] if weights else None
    return S6_STEP(hidden, *stack, final, None, None, None, eps, softplus, method)


def _options_of(layer: MambaMixer) -> tuple:
    """What is the same in all layers of a stack."""
    return (
        layer.bidirectional,
        layer.d_conv,
        layer.d_state,
        layer.d_inner,
        layer.dt_rank,
        layer.dt_soft_plus,
        layer.discretization_method,
    )


def _entry_of(
    layer: MambaMixer, cache: MixerCache, options: tuple, batch: int
) -> tuple[Tensor | None, ...] | None:
    """The tensors of a layer in the order of StackTensors, but for the norm's; None if it does more
    than they tell, or is unlike the others."""
    modules, own = layer._modules, layer._parameters
    in_proj, conv1d, x_proj = modules["in_proj"], modules["conv1d"], modules["x_proj"]
    dt_proj, out_proj = modules["dt_proj"], modules["out_proj"]
    if not (
        is_as_made(in_proj, nn.Linear)
        and is_as_made(conv1d, nn.Conv1d)
        and is_as_made(x_proj, nn.Linear)
        and is_as_made(dt_proj, StepProjection, nn.Linear)
        and is_as_made(out_proj, nn.Linear)
        and isinstance(cache, MixerCache)
        and _options_of(layer) == options
    ):
        return None
    _, width, dstate, d_inner, *_ = options
    conv_state, state = cache.conv_state, cache.state
    if conv_state.shape != (batch, d_inner, width - 1) or state.shape != (batch, d_inner, dstate):
        return None
    # What stands elsewhere than among the parameters is told by its type.
    of_in, of_conv, of_x = in_proj._parameters, conv1d._parameters, x_proj._parameters
    of_dt, of_out = dt_proj._parameters, out_proj._parameters
    if of_x.get("bias", of_x) is not None:
        return None
    return (
        of_in.get("weight"),
        of_in.get("bias", of_in),
        of_conv.get("weight"),
        of_conv.get("bias", of_conv),
        of_x.get("weight"),
        of_dt.get("weight"),
        of_dt.get("bias", of_dt),
        own.get("A_log"),
        own.get("D"),
        of_out.get("weight"),
        of_out.get("bias", of_out),
        conv_state,
        state,
    )


def _present(biases: list[Tensor | None]) -> list[Tensor | None]:
    return [] if all(bias is None for bias in biases) else biases


def _are_alike(stack: StackTensors, hidden: Tensor, norm_f: list[Tensor]) -> bool:
    """Whether there are all tensors of a stack that has some such, each of numbers, and of the
    dtypes and strides that the operator takes as the modules do."""
    kinds = {type(tensor) for tensors in (*stack, norm_f, [hidden]) for tensor in tensors}
    if not all(
        (kind in OPAQUE_TYPES and kind is not type(None)) or issubclass(kind, _pytorch.TRACED)
        for kind in kinds
    ):
        return False
    same = (norm_f, *[getattr(stack, name) for name in _OF_ONE_DTYPE])
    return (
        all(_dtypes(tensors) <= {hidden.dtype} for tensors in same)
        and all(len(_dtypes(getattr(stack, name))) <= 1 for name in _OF_ANY_DTYPE)
        and all(
            len({tensor.stride() for tensor in states}) == 1
            for states in (stack.conv_state, stack.state)
        )
    )


def _dtypes(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors}
