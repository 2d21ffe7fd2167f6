"""The projection to the step sizes of a Mamba layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ._discretization import at_least_single
from ._marks import MarkedModule
from ._module_arguments import check_choice, check_flag, check_positive, refuse
from ._plain_mixer import has_plain_weights, parameter, product

DT_MIN, DT_MAX, DT_INIT_FLOOR = 1e-3, 0.1, 1e-4


class InitialSteps(NamedTuple):
    """The initialization of a layer's step sizes; the fields are arguments of MambaMixer."""

    dt_min: float = DT_MIN
    dt_max: float = DT_MAX
    dt_init: str = "random"
    dt_scale: float = 1.0
    dt_init_floor: float = DT_INIT_FLOOR

    def check(self, dt_proj_bias: bool) -> None:
        """Raises a ValueError if a field is invalid, or would have no effect without the bias."""
        check_positive("dt_min", self.dt_min)
        check_positive("dt_max", self.dt_max)
        if self.dt_min > self.dt_max:
            refuse("dt_min", f"at most dt_max = {self.dt_max}", self.dt_min)
        check_choice("dt_init", self.dt_init, ("random", "constant"))
        check_positive("dt_scale", self.dt_scale)
        check_positive("dt_init_floor", self.dt_init_floor, or_zero=True)
        check_flag("dt_proj_bias", dt_proj_bias)
        for name in () if dt_proj_bias else ("dt_min", "dt_max", "dt_init_floor"):
            value, default = getattr(self, name), self._field_defaults[name]
            if value != default:
                wanted = f"{default} where dt_proj_bias=False, since it has no effect then"
                refuse(name, wanted, value)


class StepProjection(MarkedModule, nn.Linear):
    """A linear layer that computes the step sizes, with Mamba's initialization.

    Its bias has mamba_ssm's mark ``_no_reinit = True``: initializations of whole models, which set
    the biases of linear layers to 0, leave out marked ones.

    Args:
        rank: number of input channels.
        dim: number of output channels.
        initial: the initialization of the weight, and of the bias if there is one.
        bias: whether there is a bias.
        softplus: whether the step size is the softplus of this projection.
    """

    _marked = ("bias",)
    _mark_name = "_no_reinit"

    def __init__(
        self,
        rank: int,
        dim: int,
        initial: InitialSteps,
        *,
        bias: bool,
        softplus: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # nn.Linear's constructor calls reset_parameters.
        self.initial = initial
        self.softplus = softplus
        super().__init__(rank, dim, bias=bias, device=device, dtype=dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        dt_min, dt_max, dt_init, scale, floor = self.initial
        bound = self.in_features**-0.5 * scale
        if dt_init == "constant":
            self.weight.fill_(bound)
        else:
            self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            step = torch.empty_like(self.bias, dtype=at_least_single(self.bias.dtype))
            step = step.uniform_(math.log(dt_min), math.log(dt_max)).exp().clamp(min=floor)
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
