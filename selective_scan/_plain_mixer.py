"""Mixers that their weights fully describe, which run as one operator."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from . import _pytorch
from ._sharding import are_distributed
from .mamba_inner import OPAQUE_TYPES, LayerOptions, mamba_layer

# The attributes of a convolution, other than its weights, that determine which steps it sums.
CONVOLUTION_OPTIONS = ("stride", "dilation", "groups", "padding", "padding_mode")

# A function that inspects its arguments stays one node in a torch.fx graph.
fx.wrap("mamba_layer")


def run_in_one(
    mixer: nn.Module,
    name: str,
    hidden: Tensor,
    options: LayerOptions,
    residual: Tensor | None = None,
) -> Tensor:
    """Runs a mixer, whose parts and parameters have mamba_ssm's names, as one operator, and adds
    the residual. An in_proj that is not a plain linear layer is called first. Errors call `hidden`
    by the given name."""
    in_proj = mixer._modules["in_proj"]
    is_plain = has_plain_weights(in_proj, nn.Linear)
    weights = weights_of(mixer, in_proj if is_plain else None)
    return mamba_layer(hidden if is_plain else in_proj(hidden), weights, options, residual, name)


def weights_of(mixer: nn.Module, in_proj: nn.Module | None) -> tuple[Tensor | None, ...]:
    """Returns a mixer's weights in the order of `mamba_layer`, including those of in_proj unless it
    is None."""
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
    """Returns module.name faster than nn.Module's own lookup, whose time a small layer notices."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def has_no_hooks(module: nn.Module) -> bool:
    """Returns whether a call of the module runs its class's forward and nothing else: it has no
    hooks and no forward of the instance, and module.compile() was not called. Hooks that are
    registered for all modules are not considered."""
    own = module.__dict__
    return not (
        own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or own["_backward_pre_hooks"]
        or own["_backward_hooks"]
        or "forward" in own  # accelerate replaces forward when it moves weights
        or own.get("_compiled_call_impl") is not None
    )


def can_be_called_in_vain(embedding: nn.Module) -> bool:
    """Returns whether a call of the embedding whose result is unused has no observable effect."""
    return (
        type(embedding).forward is nn.Embedding.forward
        and has_no_hooks(embedding)
        and not _pytorch.may_have_process_wide_hooks()
    )


def has_plain_weights(
    module: nn.Module, *kinds: type[nn.Module], can_be_called: bool = True
) -> bool:
    """Returns whether the values of the module's weights fully determine what it computes.

    This excludes adapters, hooks, parametrizations and tensor subclasses with their own matrix
    product. A module with plain weights may be computed from them; any other must be called. Hooks
    registered for all modules count only if the module can be called at all.
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
    """Returns whether a convolution's weights fully determine what it computes. A parametrization
    is allowed, since it computes the weight whenever that is read."""
    kind = type(conv1d)
    return (
        kind.forward is nn.Conv1d.forward
        and kind._conv_forward is nn.Conv1d._conv_forward
        and is_of_neighbours(conv1d)
        and has_plain_weights(conv1d, kind, can_be_called=can_be_called)
    )


def is_of_neighbours(conv1d: nn.Conv1d) -> bool:
    """Returns whether a convolution sums neighboring steps of each channel, after a zero padding of
    width - 1 steps, as Mamba's does."""
    return (
        (conv1d.stride, conv1d.dilation) == ((1,), (1,))
        and conv1d.groups == conv1d.in_channels
        and conv1d.padding == (conv1d.kernel_size[0] - 1,)
        and conv1d.padding_mode == "zeros"
    )


def project(projection: nn.Module, x: Tensor) -> Tensor:
    """Calls a projection, unless it is plain: then its product is computed."""
    if not has_plain_weights(projection, nn.Linear):
        return projection(x)
    return product(x, parameter(projection, "weight"), parameter(projection, "bias"))


@fx.wrap
def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies x by a projection's weights, which are cast to its dtype as by mamba_inner_fn."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def is_plain_product(projection: nn.Module) -> bool:
    """Returns whether a projection is a plain linear layer without a bias."""
    return has_plain_weights(projection, nn.Linear) and parameter(projection, "bias") is None


def _is_of_numbers(own: dict[str, Any], name: str) -> bool:
    """Returns whether a weight is a plain tensor, wherever its module stores it. A weight that is
    stored nowhere counts, since it is computed when it is read, and so does a DTensor, which the
    operators support."""
    places = (own["_parameters"], own["_buffers"], own)
    weight = next((place[name] for place in places if name in place), None)
    return (
        type(weight) in OPAQUE_TYPES
        or isinstance(weight, _pytorch.TRACED)
        or are_distributed((weight,))
    )
