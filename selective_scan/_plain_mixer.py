"""Mixers that are no more than their weights: those run as one operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from . import _pytorch
from ._sharding import are_distributed
from .mamba_inner import OPAQUE_TYPES, LayerOptions, mamba_layer

# What a convolution has beside its weights that says which steps it sums up.
CONVOLUTION_OPTIONS = ("stride", "dilation", "groups", "padding", "padding_mode")

# A function that looks at its arguments stays one node in a graph of torch.fx.
fx.wrap("mamba_layer")


def run_in_one(
    mixer: nn.Module,
    hidden: Tensor,
    options: LayerOptions,
    residual: Tensor | None = None,
) -> Tensor:
    """Runs a mixer, whose parts and parameters have mamba_ssm's names, as one operator, and adds
    the residual. Where its in_proj is more than a linear layer, that goes first."""
    in_proj = mixer._modules["in_proj"]
    is_plain = has_plain_weights(in_proj, nn.Linear)
    weights = weights_of(mixer, in_proj if is_plain else None)
    return mamba_layer(hidden if is_plain else in_proj(hidden), weights, options, residual)


def weights_of(mixer: nn.Module, in_proj: nn.Module | None) -> tuple[Tensor | None, ...]:
    """Those of a mixer as `mamba_layer` takes them, and of in_proj, if that is part of the call."""
    parts = mixer._modules
    conv1d, dt_proj, out_proj = parts["conv1d"], parts["dt_proj"], parts["out_proj"]
    of_input = (None, None)
    if in_proj is not None:
        of_input = parameter(in_proj, "weight"), parameter(in_proj, "bias")
    return (
        *(*of_input, parameter(conv1d, "weight"), parameter(conv1d, "bias")),
        *(parameter(parts["x_proj"], "weight"), parameter(dt_proj, "weight")),
        *(parameter(out_proj, "weight"), parameter(out_proj, "bias")),
        *(parameter(mixer, "A_log"), parameter(mixer, "D"), parameter(dt_proj, "bias")),
    )


def parameter(module: nn.Module, name: str) -> Tensor | None:
    """module.name, for which nn.Module looks in many places, and a small layer waits."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def has_no_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does what its class says, as far as the module itself can tell:
    it has neither hooks nor a forward of its own, and was not compiled by its method for that."""
    own = module.__dict__
    return not (
        own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or own["_backward_pre_hooks"]
        or own["_backward_hooks"]
        or "forward" in own  # accelerate replaces it where it moves weights
        or own.get("_compiled_call_impl") is not None
    )


def can_be_called_in_vain(embedding: nn.Module) -> bool:
    """Whether nobody sees a call of it whose result is not used."""
    return (
        type(embedding).forward is nn.Embedding.forward
        and has_no_hooks(embedding)
        and not _pytorch.may_have_process_wide_hooks()
    )


def has_plain_weights(
    module: nn.Module, *kinds: type[nn.Module], can_be_called: bool = True
) -> bool:
    """Whether the numbers that are the module's weights tell what it does: no adapter, hook or
    parametrization, and no weight of another kind, whose own way of multiplying counts.

    What has such weights may be computed from them; anything else is called. Hooks for all modules
    do not reach one that cannot be.
    """
    own = vars(module)
    weights = own["_parameters"]
    return (
        type(module) in kinds
        and has_no_hooks(module)
        and not (can_be_called and _pytorch.may_have_process_wide_hooks())
        and (
            (
                type(weights.get("weight", own)) in OPAQUE_TYPES
                and type(weights.get("bias", own)) in OPAQUE_TYPES
            )
            or all(_is_of_numbers(own, name) for name in ("weight", "bias"))
        )
    )


def is_plain_convolution(conv1d: nn.Module, *, can_be_called: bool = True) -> bool:
    """Whether a convolution's weights tell what it does. A parametrization is told by the weight,
    which it computes wherever that is read."""
    kind = type(conv1d)
    return (
        kind.forward is nn.Conv1d.forward
        and kind._conv_forward is nn.Conv1d._conv_forward
        and is_of_neighbours(conv1d)
        and has_plain_weights(conv1d, kind, can_be_called=can_be_called)
    )


def is_of_neighbours(conv1d: nn.Conv1d) -> bool:
    """Whether it sums up neighbouring steps of each channel, behind as many zeros as it looks back,
    as Mamba's convolution does."""
    return (
        (conv1d.stride, conv1d.dilation) == ((1,), (1,))
        and conv1d.groups == conv1d.in_channels
        and conv1d.padding == (conv1d.kernel_size[0] - 1,)
        and conv1d.padding_mode == "zeros"
    )


def is_plain_product(projection: nn.Module) -> bool:
    """Whether it is a linear layer that its weight tells alone, without a bias."""
    return has_plain_weights(projection, nn.Linear) and parameter(projection, "bias") is None


def _is_of_numbers(own: dict[str, Any], name: str) -> bool:
    """Whether a weight is, wherever its module has put it; one that is nowhere is computed when it
    is read. Operators themselves know what to do with DTensors, which are sharded numbers."""
    places = (own["_parameters"], own["_buffers"], own)
    weight = next((place[name] for place in places if name in place), None)
    return (
        type(weight) in OPAQUE_TYPES
        or isinstance(weight, _pytorch.TRACED)
        or are_distributed((weight,))
    )
