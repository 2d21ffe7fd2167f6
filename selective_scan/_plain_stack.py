"""Stacks of mixers that are no more than their weights: a few steps through them are one operator.

Nothing is kept from one call to the next, so that whatever changes a module, a weight or its dtype
is seen: a call looks at all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from . import _pytorch
from ._checks import MAX_WIDTH
from ._plain_mixer import is_as_made
from ._s6_step import MAX_STATES, S6_STEP, StackTensors
from .cache import MixerCache, check_rows
from .mamba_inner import OPAQUE_TYPES
from .step_projection import StepProjection

if TYPE_CHECKING:
    from .mamba_mixer import MambaMixer

# What calls take the operator: steps, and steps of all rows together, on a type of devices.
MAX_STEPS = 8
MAX_ROWS = {"cpu": 64, "cuda": 16}


def step_in_one(
    layers: Sequence[MambaMixer],
    kind: type[MambaMixer],
    hidden: Tensor,
    caches: Sequence[MixerCache],
    norm_f: nn.RMSNorm | None = None,
) -> Tensor | None:
    """Takes the steps of hidden, (batch, steps, d_model), through all layers by one operator.

    Args:
        layers: those of a stack, with norms and residuals if there is a norm_f; or a mixer without.
        kind: what their type must be.
        hidden: of the layers' dtype.
        caches: where each layer goes on, changed in place.
        norm_f: the stack's.

    Returns:
        The output; None where the operator does not compute what the modules do, or is not made for
        such a call.
    """
    batch, steps, d_model = hidden.shape
    device_type = hidden.device.type
    if (
        not 0 < steps <= MAX_STEPS
        or batch * steps > MAX_ROWS.get(device_type, 0)
        or not S6_STEP.has_kernels_for(device_type)
        or _pytorch.may_have_process_wide_hooks()
        or _pytorch.are_transforms_active()
    ):
        return None
    first = layers[0]
    options = _options_of(first, caches[0])
    eps = 0.0 if norm_f is None else norm_f.eps
    norm_weights = [] if norm_f is None else [_norm_weight(norm_f, d_model, eps)]
    if first.bidirectional or first.d_conv > MAX_WIDTH or first.d_state > MAX_STATES:
        return None
    entries = []
    for layer, cache in zip(layers, caches, strict=True):
        own = vars(layer)
        modules, parameters = own["_modules"], own["_parameters"]
        in_proj, conv1d, x_proj = modules["in_proj"], modules["conv1d"], modules["x_proj"]
        dt_proj, out_proj = modules["dt_proj"], modules["out_proj"]
        if not (
            is_as_made(layer, kind)
            and is_as_made(in_proj, nn.Linear)
            and is_as_made(conv1d, nn.Conv1d)
            and is_as_made(x_proj, nn.Linear)
            and is_as_made(dt_proj, StepProjection, nn.Linear)
            and is_as_made(out_proj, nn.Linear)
            and isinstance(cache, MixerCache)
            and _options_of(layer, cache) == options
        ):
            return None
        check_rows(cache, hidden, (layer.d_inner, layer.d_state, layer.d_conv))
        if norm_f is not None:
            norm_weights.append(_norm_weight(modules["norm"], d_model, eps))
        of_in, of_conv, of_x = in_proj._parameters, conv1d._parameters, x_proj._parameters
        of_dt, of_out = dt_proj._parameters, out_proj._parameters
        entries.append(
            (
                of_in.get("weight"),
                of_in.get("bias"),
                of_conv.get("weight"),
                of_conv.get("bias"),
                of_x.get("weight"),
                of_dt.get("weight"),
                of_dt.get("bias"),
                parameters.get("A_log"),
                parameters.get("D"),
                of_out.get("weight"),
                of_out.get("bias"),
                cache.conv_state,
                cache.state,
            )
        )
    ...
