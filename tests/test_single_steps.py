"""One step through the public function, for |x| = |Δ·A| from 1e-6 to 80: in whatever form kernels
compute a step and its gradients, every single entry has the digits of its dtype."""

import math

import pytest
import torch

from problem import METHODS, generator
from selective_scan import selective_scan_fn
from selective_scan._discretization import phi1

SIZES = torch.logspace(-6, math.log10(80), 48, dtype=torch.float64)
DELTA = 0.75
NAMES = ("u", "A", "initial_state")
# The coefficients of b for the methods where it is a polynomial.
SERIES = {
    "zoh": (1,),
    "highorder": (1, 1 / 2),
    "poly": (1, 1 / 2, 1 / 6),
    "rk4": (1, 1 / 2, 1 / 6, 1 / 24),
}


def poles_of(dstate: int, is_complex: bool, dtype: torch.dtype) -> torch.Tensor:
    """Returns poles (dim, dstate) such that the states of a channel differ in size."""
    A = -torch.stack([SIZES.roll(7 * n) for n in range(dstate)], 1) / DELTA
    if not is_complex:
        return A.to(dtype)
    angle = 1.4 * (torch.rand(A.shape, generator=generator(dstate), dtype=A.dtype) - 0.5)
    A = A * torch.polar(torch.ones_like(A), angle)
    return A.to(torch.complex64 if dtype == torch.float32 else torch.complex128)


def take_step(A, dtype, method, device, backend="auto"):
    """Takes a step from state 1 by an input of 1. Returns out, (state, channel), for which entry n
    of the batch reads only state n, and its gradients in the same shape."""
    dim, dstate = A.shape
    inputs = {
        "u": torch.ones(dstate, dim, 1, dtype=dtype),
        "delta": torch.full((dstate, dim, 1), DELTA, dtype=dtype),
        "A": A,
        "B": torch.ones(dstate, dstate, 1, dtype=A.dtype),
        "C": torch.eye(dstate, dtype=A.dtype)[..., None],
        "initial_state": torch.ones(dstate, dim, dstate, dtype=A.dtype),
    }
    inputs = {name: value.to(device).requires_grad_() for name, value in inputs.items()}
    out = selective_scan_fn(**inputs, discretization_method=method, backend=backend)
    du, dA, dh = torch.autograd.grad(out.sum(), [inputs[name] for name in NAMES])
    results = {"out": out[..., 0], "u": du[..., 0], "A": dA.T}
    results["initial_state"] = dh.diagonal(dim1=0, dim2=2).T
    return {name: value.detach().cpu() for name, value in results.items()}


def terms_of(method, x):
    """Returns |a|, |b|, |a'| and |b'|; for sums, the sizes of their terms."""
    size = x.abs()
    if method in SERIES:
        a = x.exp().abs()
        b = sum(c * size**k for k, c in enumerate(SERIES[method]))
        slope = sum(k * c * size ** (k - 1) for k, c in enumerate(SERIES[method]) if k > 0)
        return a, b, a, slope
    if method == "foh":
        a, b = x.exp(), phi1(x)
        slope = torch.where(size < 1e-3, 0.5, (a - b) / x)
        return a.abs(), b.abs(), a.abs(), slope.abs()
    r = 1 / (1 - x / 2)
    # a = (1 + x/2)·r vanishes at -2, where rounding x changes it in proportion to its terms.
    return (1 + size / 2) * r.abs(), r.abs(), r.abs() ** 2, r.abs() ** 2 / 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dstate", [1, 3, 16])
def test_every_size_of_step_has_its_digits(dstate, dtype, is_complex, method, device):
    A = poles_of(dstate, is_complex, dtype)
    wide = A.to(torch.complex128 if is_complex else torch.float64)
    exact = take_step(wide, torch.float64, method, "cpu", "reference")
    x = DELTA * wide.T
    a, b, a_slope, b_slope = terms_of(method, x)
    twice = 2 if is_complex else 1  # out is 2·Re of a complex state's output
    scale = {
        "out": twice * (a + DELTA * b),
        "u": twice * DELTA * b,
        "A": twice * (DELTA * a_slope + DELTA**2 * b_slope),
        "initial_state": twice * a,
    }
    # Rounding x changes exp(x) in proportion to x; denormal numbers are flushed to zero.
    digits = torch.finfo(dtype).eps * (12 + 2 * x.abs())
    for name, actual in take_step(A, dtype, method, device).items():
        error = (actual.to(exact[name].dtype) - exact[name]).abs()
        worst = (error / (digits * scale[name] + 4 * torch.finfo(dtype).tiny)).max()
        assert worst <= 1, f"{name}: {worst.item():.1f} times what is allowed"
