"""Every bad call in the tables is refused with its message, in every way to call the operator."""

import pytest

import refusals_of_layers
import refusals_of_scans
from refusals import PYTHON, Refusals

TABLES = {
    name: table
    for module in (refusals_of_layers, refusals_of_scans)
    for name, table in vars(module).items()
    if isinstance(table, Refusals)
}


@pytest.fixture(autouse=True)
def _kernel_of_the_table(request):
    if request.node.callspec.params["table"] == "STEP":
        request.getfixturevalue("step_kernel")


each_way = pytest.mark.parametrize(
    ("table", "way"), [(name, way) for name, table in TABLES.items() for way in table.ways]
)


@each_way
def test_good_calls_pass(table, way, device):
    """The good calls, which the tables change, are accepted."""
    call = TABLES[table].ways[way]
    call(TABLES[table].call(device))
    if table == "SCAN":
        call(TABLES[table].call(device, is_complex=True))


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
