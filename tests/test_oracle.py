"""The oracle of the tests gives the outputs and gradients of the reference in float64."""

import itertools

import pytest
import torch

import oracle
from problem import COMPLEX_KINDS, METHODS, REAL_KINDS, Case, inputs_on, is_zero, make, results_of
from selective_scan import selective_scan_ref

OPTIONS = (
    {},
    {"D": False, "delta_bias": False},
    {"z": False, "initial_state": False},
    {"delta_softplus": False},
    {"input_delta": torch.float64},
)


def cases():
    for is_complex, method, reverse in itertools.product((False, True), METHODS, (False, True)):
        base = Case(complex=is_complex, method=method, reverse=reverse, dtype=torch.float64)
        yield from (base.with_(dstate=5, seqlen=33, **options) for options in OPTIONS)
    for is_complex, reverse in itertools.product((False, True), repeat=2):
        base = Case(complex=is_complex, method="foh", reverse=reverse, dtype=torch.float64)
        for B, C in itertools.product(COMPLEX_KINDS if is_complex else REAL_KINDS, repeat=2):
            yield base.with_(B=B, C=C, groups=1, seqlen=9)
        yield from (base.with_(groups=groups, seqlen=9) for groups in (3, 6))
        yield from (base.with_(seqlen=seqlen) for seqlen in (0, 1, 2, 300))
        yield base.with_(cotangents=("out",))
        yield base.with_(cotangents=("last_state",))


@pytest.mark.slow
@pytest.mark.parametrize("case", dict.fromkeys(cases()), ids=str)
def test_oracle(case):
    inputs, options = inputs_on(case, "cpu"), make(case).options
    by_reference = selective_scan_ref(**inputs, **options, return_last_state=True)
    expected, actual = (
        results_of(scanned, inputs, make(case).cotangents)
        for scanned in (by_reference, oracle.scan(**inputs, **options))
    )
    for name, value in expected.items():
        if value is None or actual[name] is None:
            assert is_zero(value)
            assert is_zero(actual[name])
            continue
        error = (actual[name] - value).norm() / value.norm().clamp(min=1e-300)
        assert error < 1e-13, f"{name}: {error:.3g}"
