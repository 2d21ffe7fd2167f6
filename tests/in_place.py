"""How calls that change states in place are compared with their references."""

import torch

from problem import Error


def in_float64(value):
    """A tensor of numbers on the CPU in fp64; all else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    if not (value.is_floating_point() or value.is_complex()):
        return value
    return value.to(torch.complex128 if value.is_complex() else torch.float64, copy=True)


def check_in_place(function, reference, arguments: dict, states: str, arithmetic: float):
    """Asserts that a call is within `arithmetic` and one rounding of the reference in fp64, by the
    relative L2 error of its result and of the argument `states`, and that slots which the reference
    leaves alone keep their bits. Returns the result, and which slots these are."""
    before = arguments[states].clone()
    exact = {name: in_float64(value) for name, value in arguments.items()}
    exact_out = reference(**exact)
    out = function(**arguments)
    after = arguments[states]
    for name, actual, expected in (("out", out, exact_out), (states, after, exact[states])):
        error = Error.of(actual.cpu().to(expected.dtype), expected)
        assert error.relative_l2 < arithmetic + torch.finfo(actual.dtype).eps, f"{name}: {error}"
    is_untouched = (exact[states] == in_float64(before)).flatten(1).all(1)
    assert torch.equal(after.cpu()[is_untouched], before.cpu()[is_untouched])
    return out, is_untouched
