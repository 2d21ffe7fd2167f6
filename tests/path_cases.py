"""Cases of the selective scan that vary one axis, for CUDA paths that take particular shapes."""

from collections.abc import Iterator

from problem import DTYPES, METHODS, Case

FLOATS = DTYPES[:3]


def optional(base: Case) -> Iterator[Case]:
    """Yields cases without each of the optional inputs, and for losses of one output only."""
    for name in ("D", "z", "delta_bias", "initial_state"):
        yield base.with_(**{name: False})
    yield from base.each(cotangents=(("out",), ("last_state",)))


def one_axis(base: Case) -> Iterator[Case]:
    """Yields a case for every method, and those of optional()."""
    yield from base.each(method=METHODS)
    yield from optional(base)
    yield base.with_(delta_softplus=False, method="bilinear")
