"""The projection to the step sizes of a Mamba layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ._discretization import at_least_single
from ._marks import MarkedModule
from ._plain_mixer import has_plain_weights, parameter, product


class StepProjection(MarkedModule, nn.Linear):
    """A linear layer that computes the step sizes, with Mamba's initialization.

    Its bias has mamba_ssm's mark ``_no_reinit = True``: initializations of whole models, which set
    the biases of linear layers to 0, leave out marked ones.

    Args:
        rank: number of input channels.
        dim: number of output channels.
        bias: whether there is a bias, which is initialized from the initial step sizes.
        constant_weight: whether all weights start as rank^-0.5·scale; else they are drawn uniformly
            between minus and plus this value.
        scale: see constant_weight.
        step_range: the range of the initial step sizes, which are log-uniform.
        floor: the minimum of the initial step sizes.
        softplus: whether the step size is the softplus of this projection.
    """

    _marked = ("bias",)
    _mark_name = "_no_reinit"

    def __init__(
        self,
        rank: int,
        dim: int,
        *,
        bias: bool,
        constant_weight: bool,
        scale: float,
        step_range: tuple[float, float],
        floor: float,
        softplus: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # nn.Linear's constructor calls reset_parameters.
        self.constant_weight = constant_weight
        self.scale = scale
        self.step_range = step_range
        self.floor = floor
        self.softplus = softplus
        super().__init__(rank, dim, bias=bias, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        bound = self.in_features**-0.5 * self.scale
        if self.constant_weight:
            self.weight.fill_(bound)
        else:
            self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            low, high = map(math.log, self.step_range)
            step = torch.empty_like(self.bias, dtype=at_least_single(self.bias.dtype))
            step = step.uniform_(low, high).exp().clamp(min=self.floor)
            # The inverse of softplus, log(exp(step) - 1), without overflow for large steps.
            self.bias.copy_(step + torch.log(-torch.expm1(-step)) if self.softplus else step)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, softplus={self.softplus}"


def is_plain_projection(dt_proj: nn.Module) -> bool:
    """Returns whether calling dt_proj does nothing but apply its weight and bias."""
    return has_plain_weights(dt_proj, StepProjection, nn.Linear)


def project_steps(dt_proj: nn.Module, dt: Tensor) -> tuple[Tensor, Tensor | None]:
    """Projects (..., rank) to (..., dim); also returns the bias, which the scan is to add.

    Only the product of a plain layer is computed here, because the scan adds the bias in full
    precision. Any other layer is called, and the returned bias is None: a module that replaces the
    linear layer computes the whole projection, including its bias.
    """
    if is_plain_projection(dt_proj):
        return product(dt, parameter(dt_proj, "weight")), parameter(dt_proj, "bias")
    return dt_proj(dt), None
