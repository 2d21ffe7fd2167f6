"""Error measures and tolerances of results against exact ones, for the tests of all operators."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Error:
    """The error of `actual` against `exact`; every figure is relative."""

    relative_l2: float
    max_abs: float  # relative to the largest entry
    cosine: float
    bias: float  # signed: the error's component along the exact value, i.e. a wrong gain

    @staticmethod
    def of(actual: torch.Tensor, exact: torch.Tensor) -> "Error":
        difference = (actual - exact).flatten()
        exact, actual = exact.flatten(), actual.flatten()
        scale = exact.norm().item()
        if scale == 0:
            size = difference.norm().item()
            return Error(size, size, 1.0, 0.0)
        overlap = torch.vdot(exact, difference).real.item()
        cosine = torch.vdot(exact, actual).real.item() / scale / max(actual.norm().item(), 1e-300)
        return Error(
            difference.norm().item() / scale,
            (difference.abs().max() / exact.abs().max()).item(),
            cosine,
            overlap / scale / scale,
        )

    def __str__(self) -> str:
        return (
            f"relative L2 {self.relative_l2:.3g}, max abs {self.max_abs:.3g}, "
            f"1 - cosine {1 - self.cosine:.3g}, bias {self.bias:+.3g}"
        )


@dataclass(frozen=True)
class Tolerance:
    """The relative L2 error that arithmetic in the compute dtype may cost. A single entry may be
    off by ten times as much, relative to the largest entry. `rounding` is the unit roundoff of a
    result stored in a narrower dtype, and `tiny` the absolute error that denormal numbers may
    cause."""

    arithmetic: float
    rounding: float = 0.0
    tiny: float = 0.0


def flushed(is_double: bool) -> float:
    """Returns the error allowed for flushed denormals: the tasks of a CPU treat them as 0."""
    return 1000 * torch.finfo(torch.float64 if is_double else torch.float32).smallest_normal


def tolerance(name: str, dtype: torch.dtype, is_double: bool, device: str = "cpu") -> Tolerance:
    arithmetic = 3e-7 if name in ("out", "last_state") else 1e-6
    if device == "cuda" and name in ("dB", "dC") and dtype == torch.bfloat16:
        arithmetic = 2.0**-11  # tensor cores sum dB and dC over channels in tf32
    if device == "cuda" and name == "dA" and not is_double and not dtype.is_complex:
        arithmetic = 5e-6  # abar is up to 2e-8 too small on average; long memories accumulate it
    if is_double:
        arithmetic *= 1e-7
    real = dtype.to_real() if dtype.is_complex else dtype
    info = torch.finfo(real)
    if real == (torch.float64 if is_double else torch.float32):
        return Tolerance(arithmetic, tiny=flushed(is_double))
    # Only float16 keeps its denormals, with an error of half their spacing.
    tiny = info.smallest_normal * (info.eps / 2 if real == torch.float16 else 1)
    return Tolerance(arithmetic, info.eps / 2, tiny + flushed(is_double))


def worst_error(results: list[dict], exact: dict, name: str) -> float:
    """Returns the largest relative L2 error of the result `name`."""
    return max(Error.of(r[name].to(exact[name].dtype), exact[name]).relative_l2 for r in results)


def assert_accurate(name, value, exact: dict, allowed: float, rounding: float, plain) -> None:
    """Asserts that a result's relative L2 error is within `allowed` plus the rounding of the
    result. If terms cancel, eight times the error of the results that `plain` computes is allowed
    instead."""
    size = max(exact[name].norm().item(), 1e-300)
    is_double = value.dtype in (torch.float64, torch.complex128)
    rounding += flushed(is_double) * value.numel() ** 0.5 / size
    error = Error.of(value.detach().cpu().to(exact[name].dtype), exact[name].detach())
    if error.relative_l2 >= allowed + rounding:
        # If the result is a single number, four of them may all be accurate by chance.
        count = 12 if value.numel() == 1 else 4
        allowed = max(allowed, 8 * worst_error(plain(count=count), exact, name))
    assert error.relative_l2 < allowed + rounding, f"{name}: {error}"


def assert_same_bits(one, *others) -> None:
    """Asserts that sequences or dictionaries have equal tensors, some of which may be None."""
    first, *rest = (it if isinstance(it, dict) else dict(enumerate(it)) for it in (one, *others))
    for other in rest:
        assert other.keys() == first.keys()
        for name, expected in first.items():
            assert expected is other[name] is None or torch.equal(other[name], expected), name


def complaint(actual, exact, tol: Tolerance, plain_values=()) -> str | None:
    """Returns what is wrong with a result, or None if it is within the tolerance or within eight
    times the error of the plain results. If states grow, a single rounding early in the sequence
    can cause all of a sum's error, which then varies that much between results computed in
    different orders."""
    if actual.shape != exact.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    if exact.numel() == 0:
        return None
    actual = actual.detach().cpu().to(exact.dtype)
    if not torch.isfinite(torch.view_as_real(actual) if actual.is_complex() else actual).all():
        return "not finite"
    allowed_l2, allowed_max = tol.arithmetic, 10 * tol.arithmetic
    for value in plain_values:
        by_plain = Error.of(value.to(exact), exact)
        allowed_l2 = max(allowed_l2, 8 * by_plain.relative_l2)
        allowed_max = max(allowed_max, 8 * by_plain.max_abs)

    error = Error.of(actual, exact)
    magnitude = _magnitude(exact)
    rounding = tol.rounding * magnitude + tol.tiny  # upper bound per entry
    scale = magnitude.norm().item() or 1.0
    problems = []
    if error.relative_l2 > allowed_l2 + rounding.norm().item() / scale:
        problems.append(f"relative L2 exceeds {allowed_l2 + rounding.norm().item() / scale:.3g}")
    excess = _magnitude(actual - exact) - rounding - allowed_max * magnitude.max()
    if excess.max() > 0:
        index = tuple(int(i) for i in (excess == excess.max()).nonzero()[0])
        problems.append(f"entry {index} is off by more than rounding allows")
    # Rounding errors are independent, so their components along the exact value nearly cancel. Six
    # standard deviations are allowed; truncation instead of rounding does not pass.
    spread = 6 * (rounding * magnitude).norm().item() / scale**2
    if abs(error.bias) > allowed_l2 + spread:
        problems.append(f"bias exceeds {allowed_l2 + spread:.3g}")
    return f"{', '.join(problems)} ({error})" if problems else None


def _magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """Returns absolute values, of complex tensors per component, since components round alone."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).abs()
