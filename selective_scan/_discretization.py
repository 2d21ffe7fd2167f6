"""The six discretizations, for the references; the kernels' are in csrc/core/discretization/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def phi1(x: Tensor) -> Tensor:
    """Returns φ1(x) = (exp(x) − 1)/x, with φ1(0) = 1, for real and complex x.

    Near 0 the quotient suffers from cancellation, and its derivative even more. There
    φ1(x) = exp(h)·sinh(h)/h with h = x/2, and sinh(h)/h is a series in h² whose automatic
    derivative stays accurate. Elements that the other branch serves are replaced by a harmless
    argument in each branch, so no gradient is NaN.
    """
    is_near = x.abs() < 1
    h = torch.where(is_near, x, 0) / 2
    sinhc = torch.ones_like(h)
    for k in range(18, 0, -2):
        sinhc = 1 + h * h / (k * (k + 1)) * sinhc
    far = torch.where(is_near, 1, x)
    return torch.where(is_near, h.exp() * sinhc, (far.exp() - 1) / far)


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def poles(A_log: Tensor) -> Tensor:
    """Returns A = −exp(A_log), in float32 unless A_log is more precise."""
    return -A_log.to(at_least_single(A_log.dtype)).exp()


def step_size(delta: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Returns Δ from delta and its bias, which has delta's shape or is broadcast to it.

    An infinite Δ becomes NaN, since no method can use such a step.
    """
    if bias is not None:
        delta = delta + bias
    if softplus:
        delta = F.softplus(delta, beta=1, threshold=20)
    return delta + 0 * delta


def steps_of_sequences(
    delta: Tensor, delta_bias: Tensor | None, delta_softplus: bool, dtype: torch.dtype
) -> Tensor:
    """Returns Δ in `dtype`, from delta (batch, dim, seqlen) and a bias for each channel."""
    bias = None if delta_bias is None else delta_bias.to(dtype)[:, None]
    return step_size(delta.to(dtype), bias, delta_softplus)


Method = Literal["zoh", "foh", "bilinear", "poly", "highorder", "rk4"]
# A layer also supports the exponential trapezoid, which has its own function.
LayerMethod = Method | Literal["trapezoid"]

# Each formula maps the step of the input (Δ or input_delta) and x = Δ·A to the (abar, bbar) of
# h[t] = abar·h[t-1] + bbar·B[t]·u[t].
DISCRETIZATIONS: dict[Method, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "zoh": lambda delta, x: (x.exp(), delta),
    "foh": lambda delta, x: (x.exp(), delta * phi1(x)),
    "bilinear": lambda delta, x: ((1 + x / 2) / (1 - x / 2), delta / (1 - x / 2)),
    "poly": lambda delta, x: (x.exp(), delta * (1 + x / 2 + x**2 / 6)),
    "highorder": lambda delta, x: (x.exp(), delta * (1 + x / 2)),
    "rk4": lambda delta, x: (x.exp(), delta * (1 + x / 2 + x**2 / 6 + x**3 / 24)),
}

# The methods with abar = exp(x).
EXPONENTIAL = {"zoh", "foh", "poly", "highorder", "rk4"}

# In the order of kMethodNames in csrc/core/discretization/method.h.
METHODS = tuple(DISCRETIZATIONS)
LAYER_METHODS = (*METHODS, "trapezoid")
