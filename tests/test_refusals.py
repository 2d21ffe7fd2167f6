"""Whether all that is in the tables of bad calls is refused in their words, by every way in."""

import pytest

from refusals import PYTHON
from refusals_of_layers import (
    BIMAMBA,
    CONVOLUTION,
    CONVOLUTION_DERIVATIVE,
    CONVOLUTION_UPDATE,
    CROSS_SCAN,
    LAYER_OP,
    NORM,
    POOL,
    ROTATION,
    ROWS_OF_LAYER,
    of_layer,
)
from refusals_of_scans import (
    DERIVATIVE,
    DIAGONAL,
    DIAGONAL_DERIVATIVE,
    GIVEN_GRADIENTS,
    MATRIX,
    PREFILL,
    SCAN,
    STATE_GRADIENT,
    TRAPEZOID,
    UNITARY,
    UNITARY_OP,
    UPDATE,
)

TABLES = {
    "scan": SCAN,
    "scan's derivative": DERIVATIVE,
    "scan's derivative into given tensors": GIVEN_GRADIENTS,
    "gradient of the initial state": STATE_GRADIENT,
    "matrix scan": MATRIX,
    "exponential trapezoid": TRAPEZOID,
    "diagonal scan": DIAGONAL,
    "diagonal scan's derivative": DIAGONAL_DERIVATIVE,
    "unitary scan": UNITARY,
    "unitary scan's op": UNITARY_OP,
    "convolution": CONVOLUTION,
    "convolution's derivative": CONVOLUTION_DERIVATIVE,
    "convolution over a pool": POOL,
    "convolution's update": CONVOLUTION_UPDATE,
    "update": UPDATE,
    "prefill": PREFILL,
    "layer": of_layer(bidirectional=False),
    "layer of two directions": of_layer(bidirectional=True),
    "layer's op": LAYER_OP,
    "rows of a layer": ROWS_OF_LAYER,
    "layer of Vim's fork": BIMAMBA,
    "cross scan": CROSS_SCAN,
    "rotation": ROTATION,
    "norm": NORM,
}
each_way = pytest.mark.parametrize(
    ("table", "way"), [(name, way) for name, table in TABLES.items() for way in table.ways]
)


@each_way
def test_good_calls_pass(table, way, device):
    """The tables are about what differs from these."""
    call = TABLES[table].ways[way]
    call(TABLES[table].call(device))
    if table == "scan":
        call(SCAN.call(device, is_complex=True))


@each_way
def test_bad_calls_are_refused_in_the_same_words(table, way, device):
    TABLES[table].check(way, device)


@pytest.mark.parametrize("table", [name for name, it in TABLES.items() if "reference" in it.ways])
def test_the_backend_must_match_the_device(table, device):
    other = "cuda" if device == "cpu" else "cpu"
    refusals = TABLES[table]
    arguments = refusals.call(device)
    given = arguments[refusals.anchor].device
    message = f"^selective_scan: backend '{other}' needs tensors on {other}, got {given}$"
    for way in PYTHON:
        names = refusals.ways[way].names
        if names is None or "backend" in names:
            with pytest.raises(ValueError, match=message):
                refusals.ways[way](arguments | {"backend": other})
    refusals.ways["function"](arguments | {"backend": device})
