"""The scalar functions of the operator in many digits, by mpmath."""

import mpmath
import numpy as np

mpmath.mp.dps = 50


def number(value):
    """An mpmath number of exactly this value."""
    if np.iscomplexobj(value):
        return mpmath.mpc(float(value.real), float(value.imag))
    return mpmath.mpf(float(value))


def phi1(x):
    return mpmath.mpf(1) if x == 0 else mpmath.expm1(x) / x


def phi1_derivative(x):
    if abs(x) < 1e-6:  # where the quotient loses too many digits
        return mpmath.fsum((k + 1) * x**k / mpmath.factorial(k + 2) for k in range(12))
    return (mpmath.exp(x) * (x - 1) + 1) / x**2


def _truncated_hold(terms):
    def b(x):
        return mpmath.fsum(x**k / mpmath.factorial(k + 1) for k in range(terms))

    def slope(x):
        return mpmath.fsum(k * x ** (k - 1) / mpmath.factorial(k + 1) for k in range(1, terms))

    return b, slope


# b(x) and b'(x) of bbar = delta * b(delta * A)
HOLDS = {
    "zoh": _truncated_hold(1),
    "highorder": _truncated_hold(2),
    "poly": _truncated_hold(3),
    "rk4": _truncated_hold(4),
    "foh": (phi1, phi1_derivative),
    "bilinear": (lambda x: 1 / (1 - x / 2), lambda x: 1 / (2 * (1 - x / 2) ** 2)),
}


def coefficients(method, delta, A):
    x = delta * A
    abar = (1 + x / 2) / (1 - x / 2) if method == "bilinear" else mpmath.exp(x)
    return abar, delta * HOLDS[method][0](x)


def derivatives(method, delta, A):
    """Of abar by delta and A, then of bbar by delta and A."""
    x = delta * A
    abar_slope = 1 / (1 - x / 2) ** 2 if method == "bilinear" else mpmath.exp(x)
    b, b_slope = (f(x) for f in HOLDS[method])
    return A * abar_slope, delta * abar_slope, b + x * b_slope, delta**2 * b_slope


def ulps(actual, exact):
    """Distance in units of the last place of the exact value: where complex, the distance of the
    worse component in units of the last place of the modulus."""
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
