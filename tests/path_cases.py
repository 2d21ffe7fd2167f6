"""Cases of the selective scan for CUDA kernels that take particular shapes."""

from collections.abc import Iterator

from problem import DTYPES, METHODS, Case

FLOATS = DTYPES[:3]


def optional(base: Case) -> Iterator[Case]:
    """Without each of what a call may lack, and for a loss of one output alone."""
    for name in ("D", "z", "delta_bias", "initial_state"):
        yield base.with_(**{name: False})
    yield from base.each(cotangents=(("out",), ("last_state",)))


def one_axis(base: Case) -> Iterator[Case]:
    """Every method, and what is optional."""
    yield from base.each(method=METHODS)
    yield from optional(base)
    yield base.with_(delta_softplus=False, method="bilinear")
