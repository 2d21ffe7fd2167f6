"""The scalar core (csrc/core) against mpmath: values, derivatives, steps, conversions."""

import mpmath
import numpy as np
import pytest
import torch

import exact
from problem import METHODS

REAL = (np.float32, np.float64)
COMPLEX = (np.complex64, np.complex128)


@pytest.fixture
def random(seeded):
    return np.random.default_rng(torch.initial_seed())


def spread(random, count, dtype, low=1e-12, high=80.0):
    """Draws numbers of either sign or any phase: half log-uniform in modulus, half uniform."""
    modulus = np.where(
        random.random(count) < 0.5,
        np.exp(random.uniform(np.log(low), np.log(high), count)),
        random.uniform(low, high, count),
    )
    if np.issubdtype(dtype, np.complexfloating):
        return (modulus * np.exp(2j * np.pi * random.random(count))).astype(dtype)
    return (modulus * random.choice([-1, 1], count)).astype(dtype)


def test_the_methods_are_those_of_the_matrix(core):
    assert tuple(core.method_names()) == METHODS


def assert_within(errors, x, limit=4.0):
    """Asserts a limit in ulps. Complex values accumulate more roundings: one in a thousand may
    exceed the limit by half an ulp."""
    worst = int(np.argmax(errors))
    text = f"{errors[worst]:.2f} ulp at {x[worst]!r}"
    if np.iscomplexobj(x):
        assert np.quantile(errors, 0.999) <= limit, text
        limit += 0.5
    assert errors[worst] <= limit, text


@pytest.mark.parametrize("dtype", REAL + COMPLEX)
def test_phi1_logarithmic_derivative(core, random, dtype):
    x = spread(random, 1000, dtype)
    x = np.concatenate([x[np.abs(x) < 1], np.array([0.0, -0.0, 1e-30, -1e-9], dtype)])
    numbers = [exact.number(value) for value in x]
    expected = [exact.phi1_derivative(value) / exact.phi1(value) for value in numbers]
    assert_within(exact.ulps(core.phi1_logarithmic_derivative(x), expected), x)


SERIES = ("poly", "highorder", "rk4")
# The series methods also run by the formula that takes their coefficients at run time.
FORMULAS = (*METHODS, *(f"series:{method}" for method in SERIES))


def method_of(formula):
    return formula.removeprefix("series:")


def poles(random, count, dtype):
    """Draws steps and poles with |x| from 1e-9 to 20; some are exactly 0, some unstable."""
    real = np.finfo(dtype).dtype
    delta = np.exp(random.uniform(np.log(1e-5), np.log(2), count)).astype(real)
    A = spread(random, count, dtype, 1e-4, 10.0)
    A[:5] = 0
    delta[3:8] = 0
    return delta, A


def assert_close(actual, expected, name):
    """Asserts closeness relative to the exact value, allowing for the rounding of x = delta * A."""
    epsilon = np.finfo(actual.dtype).eps
    for got, (want, condition) in zip(actual, expected, strict=True):
        error = abs(exact.number(got) - want)
        assert error <= 8 * epsilon * (abs(want) + condition), f"{name}: {got!r}, expected {want}"


@pytest.mark.parametrize("dtype", REAL + COMPLEX)
@pytest.mark.parametrize("formula", FORMULAS)
def test_coefficients(core, random, formula, dtype):
    method = method_of(formula)
    delta, A = poles(random, 300, dtype)
    expected = [], []
    for step, pole in zip(delta, A, strict=True):
        step, pole = exact.number(step), exact.number(pole)
        abar, bbar = exact.coefficients(method, step, pole)
        slopes = exact.derivatives(method, step, pole)
        # x = delta * A is rounded before it is used, which acts like an error of one ulp of A. The
        # series of some methods cancel for x < 0; their terms are at most those at |x|.
        largest = exact.coefficients(method, step, abs(pole))[1] if method in SERIES else 0
        expected[0].append((abar, abs(pole * slopes[1])))
        expected[1].append((bbar, abs(pole * slopes[3]) + largest))
    for actual, want, name in zip(
        core.coefficients(formula, delta, A), expected, ("abar", "bbar"), strict=True
    ):
        assert_close(actual, want, name)


@pytest.mark.parametrize("dtype", REAL + COMPLEX)
@pytest.mark.parametrize("formula", FORMULAS)
def test_derivatives(core, random, formula, dtype):
    method = method_of(formula)
    delta, A = poles(random, 300, dtype)
    names = ("dabar/ddelta", "dabar/dA", "dbbar/ddelta", "dbbar/dA")
    expected = [], [], [], []
    for step, pole in zip(delta, A, strict=True):
        step, pole = exact.number(step), exact.number(pole)
        values = exact.derivatives(method, step, pole)
        # How much each derivative changes with a relative change of x, and its largest terms.
        tiny = mpmath.mpf(10) ** -20
        moved = exact.derivatives(method, step, pole * (1 + tiny))
        largest = exact.derivatives(method, step, abs(pole)) if method in SERIES else [0] * 4
        for column, value, other, terms in zip(expected, values, moved, largest, strict=True):
            column.append((value, 2 * abs(other - value) / tiny + abs(terms)))
    for actual, want, name in zip(
        core.derivatives(formula, delta, A), expected, names, strict=True
    ):
        assert_close(actual, want, name)


@pytest.mark.parametrize("dtype", REAL + COMPLEX)
@pytest.mark.parametrize("formula", FORMULAS)
def test_step_gradient_chains_the_derivatives(core, random, formula, dtype):
    """A step's gradients are conjugate Wirtinger derivatives, like those of PyTorch's autograd."""
    delta, A = poles(random, 100, dtype)
    dabar, dbbar = spread(random, 100, dtype, 0.1, 3), spread(random, 100, dtype, 0.1, 3)
    ddelta, dA = core.step_gradient(formula, delta, A, dabar, dbbar)
    abar_delta, abar_A, bbar_delta, bbar_A = core.derivatives(formula, delta, A)
    size = np.abs(dabar) + np.abs(dbbar)
    scale = size * (np.abs(abar_delta) + np.abs(bbar_delta))
    expected = (dabar * abar_delta.conj() + dbbar * bbar_delta.conj()).real
    epsilon = np.finfo(dtype).eps
    assert (np.abs(ddelta - expected) <= 8 * epsilon * scale).all()
    expected = dabar * abar_A.conj() + dbbar * bbar_A.conj()
    scale = size * (np.abs(abar_A) + np.abs(bbar_A))
    assert (np.abs(dA - expected) <= 8 * epsilon * scale).all()


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize(
    ("formula", "forms"),
    [
        *((formula, "own") for formula in FORMULAS),
        *((method, "derived") for method in METHODS),
        ("foh", "increments"),
    ],
)
def test_steps_and_their_gradients_follow_from_the_value_and_its_derivatives(
    core, random, formula, forms, dtype
):
    """Every form of a step that scans use agrees with the value and the derivatives: each formula's
    own forms, the derived ones, and ExactIncrements."""
    count = 300
    delta, A = poles(random, count, dtype)
    u = spread(random, count, np.float64, 0.1, 3)
    B, h, g = (spread(random, count, dtype, 0.1, 3) for _ in range(3))
    actual = core.step_forms(formula, forms, delta, u, A, B, h, g)

    abar, bbar = core.coefficients(formula, delta, A)
    abar_delta, abar_A, bbar_delta, bbar_A = core.derivatives(formula, delta, A)
    dabar, dbbar = g * h.conj(), g * (u * B).conj()
    after = (abar * h, bbar * u * B)
    expected = {
        "stepped": after,
        "advanced": after,
        "h": (g * abar.conj(),),
        "B": (u * g * bbar.conj(),),
        "A": (dabar * abar_A.conj(), dbbar * bbar_A.conj()),
        "delta": (dabar * abar_delta.conj(), dbbar * bbar_delta.conj()),
        "u": (g * (bbar * B).conj(),),
    }
    # If abar, bbar/Δ or their derivatives are small, they may be differences of numbers near 1.
    near_one = {
        "stepped": np.abs(h) + delta * np.abs(u * B),
        "h": np.abs(g),
        "B": delta * np.abs(u * g),
        "A": delta * np.abs(dabar) + delta**2 * np.abs(dbbar),
        "delta": np.abs(A * dabar) + (1 + delta * np.abs(A)) * np.abs(dbbar),
        "u": delta * np.abs(g * B),
    }
    near_one["advanced"] = near_one["stepped"]
    assert actual.keys() == expected.keys()
    for name, terms in expected.items():
        size = sum(np.abs(term) for term in terms) + near_one[name]
        want = sum(terms)
        error = np.abs(actual[name] - (want.real if name in ("delta", "u") else want))
        assert (error <= 1e-13 * size).all(), f"{name}: {np.max(error / size)}"


ACTIVATIONS = {
    "softplus": lambda x: x if x > 20 else mpmath.log1p(mpmath.exp(x)),
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "silu_derivative": lambda x: (1 + x * (1 - 1 / (1 + mpmath.exp(-x)))) / (1 + mpmath.exp(-x)),
}


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(core, random, name, dtype):
    x = np.concatenate([spread(random, 500, dtype, 1e-6, 60), np.array([0, 20, 20.01], dtype)])
    actual = getattr(core, name)(x)
    expected = [(ACTIVATIONS[name](exact.number(value)), 0) for value in x]
    if name == "silu_derivative":  # 1 - sigmoid(x) is rounded before it is multiplied by x
        values = (value for value, _ in expected)
        expected = [(value, abs(exact.number(at))) for value, at in zip(values, x, strict=True)]
    assert_close(actual, expected, name)


def test_softplus_is_the_identity_strictly_above_the_threshold(core):
    threshold = core.softplus_threshold
    assert threshold == 20
    at, above = np.array([threshold]), np.nextafter(np.array([threshold]), 30)
    assert core.softplus(at)[0] > threshold
    assert core.softplus(above)[0] == above[0]


STORED = {"half": torch.float16, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("name", STORED)
def test_every_16_bit_pattern_converts_as_in_torch(core, name):
    bits = np.arange(2**16, dtype=np.uint16)
    stored = torch.from_numpy(bits.view(np.int16)).view(STORED[name])
    floats = getattr(core, f"float_from_{name}")(bits)
    np.testing.assert_array_equal(floats, stored.float().numpy())
    back = getattr(core, f"float_to_{name}")(floats)
    finite = ~np.isnan(floats)
    np.testing.assert_array_equal(back[finite], bits[finite])
    again = getattr(core, f"float_from_{name}")(back)
    assert np.isnan(again[~finite]).all()


@pytest.mark.parametrize("name", STORED)
def test_rounding_to_16_bits_is_that_of_torch(core, random, name):
    """Random bit patterns of floats, and the midpoints between stored numbers with their neighbors,
    round as in torch; ties go to even."""
    patterns = random.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    ordered = getattr(core, f"float_from_{name}")(np.arange(2**15, dtype=np.uint16))
    ordered = ordered[np.isfinite(ordered)].astype(np.float64)
    middle = ((ordered[1:] + ordered[:-1]) / 2).astype(np.float32)
    edges = np.array([65504, 65519.99, 65520, 65536, np.inf, 3.4e38], np.float32)
    infinity = np.float32(np.inf)
    values = np.concatenate(
        [patterns, middle, np.nextafter(middle, infinity), np.nextafter(middle, -infinity), edges]
    )
    values = np.concatenate([values, -values])
    actual = getattr(core, f"float_to_{name}")(values)
    expected = torch.from_numpy(values).to(STORED[name]).view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(actual[~nan], expected[~nan])
    assert np.isnan(getattr(core, f"float_from_{name}")(actual[nan])).all()


def test_number_of_saved_states(core):
    chunk = core.state_chunk
    for seqlen in (0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, 1000):
        assert core.num_saved_states(seqlen) == max(0, -(-seqlen // chunk) - 1)
