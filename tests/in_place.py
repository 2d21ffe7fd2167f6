"""Compares calls that change states in place with their references."""

import torch

from accuracy import Error


def in_float64(value):
    """Returns a tensor of numbers on the CPU in fp64, and any other value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    if not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(torch.complex128 if value.is_complex() else torch.float64, copy=True)


def in_float32(value):
    """Returns a tensor of numbers on the CPU in fp32 or, if it was, fp64; other values as they
    are."""
    wide = in_float64(value)
    if wide is value or value.dtype == wide.dtype:
        return wide
    return wide.to(torch.complex64 if wide.is_complex() else torch.float32)


def check_in_place(function, reference, arguments: dict, states: str, arithmetic: float):
    """Asserts that a call agrees with the reference in fp64: the relative L2 errors of its result
    and of the argument `states` are within `arithmetic` and one rounding, or, if terms cancel,
    within four times the error of the reference in fp32. Slots that the reference leaves alone must
    keep their bits. Returns the result and a mask of these slots."""
    before = arguments[states].clone()
    exact = {name: in_float64(value) for name, value in arguments.items()}
    plain = {name: in_float32(value) for name, value in arguments.items()}
    exact_out, plain_out = reference(**exact), reference(**plain)
    out = function(**arguments)
    for name, actual, expected, by_plain in (
        ("out", out, exact_out, plain_out),
        (states, arguments[states], exact[states], plain[states]),
    ):
        error = Error.of(actual.cpu().to(expected.dtype), expected)
        plain_error = Error.of(by_plain.to(expected.dtype), expected).relative_l2
        bound = max(arithmetic, 4 * plain_error) + torch.finfo(actual.dtype).eps
        assert error.relative_l2 < bound, f"{name}: {error}"
    after = arguments[states]
    is_untouched = (exact[states] == in_float64(before)).flatten(1).all(1)
    assert torch.equal(after.cpu()[is_untouched], before.cpu()[is_untouched])
    return out, is_untouched
