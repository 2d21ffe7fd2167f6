"""Mixers that are no more than their weights: those run as one operator."""

from __future__ import annotations

from torch import Tensor, fx, nn

from ._discretization import Method
from .mamba_inner import mamba_layer

# A function that looks at its arguments stays one node in a graph of torch.fx.
fx.wrap("mamba_layer")


def run_in_one(
    mixer: nn.Module,
    hidden: Tensor,
    delta_softplus: bool,
    discretization_method: Method,
    bidirectional: bool,
    cu_seqlens: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """Runs a mixer, whose parts and parameters have mamba_ssm's names, as one operator, and adds
    the residual. Where its in_proj is more than a linear layer, that goes first."""
    parts = mixer._modules
    in_proj, conv1d = parts["in_proj"], parts["conv1d"]
    dt_proj, out_proj = parts["dt_proj"], parts["out_proj"]
    if has_plain_weights(in_proj, nn.Linear):
        weight, bias = parameter(in_proj, "weight"), parameter(in_proj, "bias")
    else:
        hidden, weight, bias = in_proj(hidden), None, None
    return mamba_layer(
        hidden,
        weight,
        bias,
        parameter(conv1d, "weight"),
        parameter(conv1d, "bias"),
        parameter(parts["x_proj"], "weight"),
        parameter(dt_proj, "weight"),
        parameter(out_proj, "weight"),
        parameter(out_proj, "bias"),
        parameter(mixer, "A_log"),
        parameter(mixer, "D"),
        parameter(dt_proj, "bias"),
        delta_softplus,
        discretization_method,
        bidirectional,
        cu_seqlens,
        residual,
    )


def parameter(module: nn.Module, name: str) -> Tensor | None:
    """module.name, for which nn.Module looks in many places, and a small layer waits."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


def has_plain_weights(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module's weights tell what it does: no adapter, hook or parametrization."""
    own = vars(module)
    return (
        type(module) is kind
        and "forward" not in own  # accelerate replaces it where it moves weights
        and not own["_forward_pre_hooks"]
        and not own["_forward_hooks"]
        and not own["_backward_pre_hooks"]
        and not own["_backward_hooks"]
    )
