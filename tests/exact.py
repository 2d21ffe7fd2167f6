"""The scalar functions of the operator in 50 digits, by mpmath: the truth for the core's tests."""

import mpmath
import numpy as np

mpmath.mp.dps = 50


def number(value):
    """Returns an mpmath number of exactly this value."""
    if np.iscomplexobj(value):
        return mpmath.mpc(float(value.real), float(value.imag))
    return mpmath.mpf(float(value))


def phi1(x):
    return mpmath.mpf(1) if x == 0 else mpmath.expm1(x) / x


def phi1_derivative(x):
    if abs(x) < 1e-6:  # the quotient would lose too many digits
        return mpmath.fsum((k + 1) * x**k / mpmath.factorial(k + 2) for k in range(12))
    return (mpmath.exp(x) * (x - 1) + 1) / x**2


def phi1_terms(count):
    """Returns the sum of the first terms of phi1's series, as a function of x."""

    def b(x):
        return mpmath.fsum(x**k / mpmath.factorial(k + 1) for k in range(count))

    return b


# a(x) and b(x), for abar = a(delta * A) and bbar = delta * b(delta * A)
FORMULAS = {
    "zoh": (mpmath.exp, phi1_terms(1)),
    "foh": (mpmath.exp, phi1),
    "bilinear": (lambda x: (1 + x / 2) / (1 - x / 2), lambda x: 1 / (1 - x / 2)),
    "poly": (mpmath.exp, phi1_terms(3)),
    "highorder": (mpmath.exp, phi1_terms(2)),
    "rk4": (mpmath.exp, phi1_terms(4)),
}


def coefficients(method, delta, A):
    a, b = FORMULAS[method]
    return a(delta * A), delta * b(delta * A)


def derivatives(method, delta, A):
    """Returns the derivatives of abar by delta and A, then those of bbar by delta and A."""
    x = delta * A
    a, b = FORMULAS[method]
    a_slope, b_slope = mpmath.diff(a, x), mpmath.diff(b, x)
    return A * a_slope, delta * a_slope, b(x) + x * b_slope, delta**2 * b_slope


def ulps(actual, exact):
    """Returns the distances in units of the last place of the exact value. For a complex value it
    is the distance of the worse component, in units of the last place of the modulus."""
    precision = np.finfo(actual.dtype)
    result = []
    for got, want in zip(actual, exact, strict=True):
        modulus = abs(want)
        exponent = mpmath.frexp(modulus)[1] if modulus else precision.minexp
        spacing = mpmath.ldexp(1, max(exponent - 1, precision.minexp) - precision.nmant)
        difference = number(got) - want if np.isfinite(got) else mpmath.inf
        distance = max(abs(mpmath.re(difference)), abs(mpmath.im(difference)))
        result.append(float(distance / spacing))
    return np.array(result)
