"""The CPU kernels' vector functions (csrc/cpu/simd/vector_math.h) against mpmath, on every
instruction set that this processor has."""

import platform

import mpmath
import numpy as np
import pytest
import torch

import core_build
import exact

REAL = (np.float32, np.float64)
# The type of each capability, and the compiler's flags for its instructions.
CAPABILITIES = {
    "default": ("Baseline", ()),
    "avx2": ("Avx2", ("-mavx2", "-mfma")),
    "avx512": ("Avx512", ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma")),
}
# PyTorch's name of the best capability; a processor also has those that come before its best one.
FOUND = {"DEFAULT": "default", "AVX2": "avx2", "AVX512": "avx512"}
BEST = FOUND.get(torch.backends.cpu.get_cpu_capability(), "default")


def is_there(capability):
    names = list(CAPABILITIES)
    return names.index(capability) <= names.index(BEST)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name != BEST)) for name in CAPABILITIES],
)
def functions(request, bindings_folder):
    """The functions as a Python module, compiled once per version of the sources."""
    if not is_there(request.param):
        pytest.skip(f"this processor ({platform.machine()}) has no {request.param}")
    name, flags = CAPABILITIES[request.param]
    return core_build.load(
        bindings_folder,
        "vector_math_bindings",
        headers=("core", "cpu/simd"),
        flags=(f"-DCAPABILITY={name}", "-O2", *flags),
    )


@pytest.fixture
def random(seeded):
    return np.random.default_rng(torch.initial_seed())


def softplus(x):
    return x if x > 20 else mpmath.log1p(mpmath.exp(x))


def largest_exponent(dtype):
    """Returns the largest x for which exp is finite."""
    return np.nextafter(np.log(np.finfo(dtype).max), dtype(0))


def smallest_exponent(dtype):
    """Returns an x for which exp is subnormal."""
    return np.log(np.finfo(dtype).tiny) - np.finfo(dtype).nmant * np.log(2)


# By function: the exact one, and the lowest and highest argument for a dtype.
CASES = {
    "exp": (mpmath.exp, smallest_exponent, largest_exponent),
    "sin": (mpmath.sin, lambda dtype: -5e3, lambda dtype: 5e3),
    "cos": (mpmath.cos, lambda dtype: -5e3, lambda dtype: 5e3),
    "softplus": (softplus, lambda dtype: -80.0, lambda dtype: 80.0),
    "sigmoid": (lambda x: 1 / (1 + mpmath.exp(-x)), lambda dtype: -80.0, lambda dtype: 80.0),
}

# In ulp. In softplus and sigmoid the errors of exp and of later operations add up.
LIMITS = {name: 2.75 if name in ("softplus", "sigmoid") else 2 for name in CASES}


def arguments(random, dtype, low, high, count=2000):
    """Draws a third each: uniform, log-uniform in modulus down to 1e-12, around zero."""
    uniform = random.uniform(low, high, count)
    modulus = np.exp(random.uniform(np.log(1e-12), np.log(max(-low, high)), count))
    spread = np.clip(modulus * random.choice([-1, 1], count), low, high)
    near = np.clip(random.normal(0, 2, count), low, high)
    return np.concatenate([uniform, spread, near]).astype(dtype)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("name", CASES)
def test_ulps(functions, random, name, dtype):
    function, low, high = CASES[name]
    x = arguments(random, dtype, low(dtype), high(dtype))
    actual = getattr(functions, name)(x)
    errors = exact.ulps(actual, [function(exact.number(value)) for value in x])
    worst = int(np.argmax(errors))
    assert errors[worst] <= LIMITS[name], (
        f"{errors[worst]:.2f} ulp at {x[worst]!r}: {actual[worst]!r}"
    )


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_large_angles_stay_angles(functions, random, name, dtype):
    x = (10.0 ** random.uniform(3, 30, 500) * random.choice([-1, 1], 500)).astype(dtype)
    assert (np.abs(getattr(functions, name)(x)) <= 1).all()


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("name", ["exp_of", "exp_beside_growth"])
def test_exp_of_an_exponent(functions, random, name, dtype):
    """The kernels' exp rounds its argument once more, in another unit."""
    high = largest_exponent(dtype) - 1
    x = arguments(random, dtype, 2 - high, high)
    actual = getattr(functions, name)(x)
    errors = exact.ulps(actual, [mpmath.exp(exact.number(value)) for value in x])
    assert (errors <= 2 + 2 * np.abs(x)).all()


@pytest.mark.parametrize("dtype", REAL)
def test_growth_of_an_exponent(functions, random, dtype):
    """growth rounds its argument likewise, and is as accurate around 0 as elsewhere."""
    high = largest_exponent(dtype) - 1
    x = np.concatenate(
        [arguments(random, dtype, 2 - high, high), random.uniform(-1, 1, 4000).astype(dtype)]
    )
    errors = exact.ulps(functions.growth(x), [mpmath.expm1(exact.number(v)) for v in x])
    assert (errors <= 4 + 2 * np.maximum(x, 0)).all()


inf, nan = np.inf, np.nan
SPECIAL = {
    "exp": {0: 1, inf: inf, -inf: 0, 1e4: inf, -1e4: 0},
    "sin": {0: 0, inf: nan, -inf: nan},
    "cos": {0: 1, inf: nan, -inf: nan},
    "softplus": {inf: inf, -inf: 0, 1e4: 1e4, -1e4: 0},
    "sigmoid": {0: 0.5, inf: 1, -inf: 0, 1e4: 1, -1e4: 0},
    "exp_of": {0: 1, inf: inf, -inf: 0, 1e4: inf, -1e4: 0},
    "exp_beside_growth": {0: 1, inf: inf, -inf: 0, 1e4: inf, -1e4: 0},
    "growth": {0: 0, inf: inf, -inf: -1, 1e4: inf, -1e4: -1},
}


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(functions, name, dtype):
    table = {**SPECIAL[name], nan: nan}
    actual = getattr(functions, name)(np.array(list(table), dtype))
    np.testing.assert_array_equal(actual, np.array(list(table.values()), dtype))


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("name", SPECIAL)
def test_lanes_are_independent(functions, random, name, dtype):
    x = random.normal(0, 3, 64).astype(dtype)
    broken = x.copy()
    broken[::3] = nan
    broken[1::6] = inf
    healthy = np.isfinite(broken)
    function = getattr(functions, name)
    np.testing.assert_array_equal(function(broken)[healthy], function(x)[healthy])
