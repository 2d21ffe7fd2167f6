"""What benchmark programs stand on: problems and their exact results, the tables of records."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import selective_scan
from test_benchmarks import BENCHMARKS, METHODS


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of the benchmarks' harness."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"harness.{name}")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("tables")


def test_the_points_of_the_sweep(harness):
    """Each differs from its neighbour, and neighbours are ordinary."""
    cliffs = harness("cliffs")
    for base in cliffs.BASES.values():
        points = cliffs.find_points(base)
        assert len({(point.axis, point.value) for point in points}) == len(points)
        for axis in {point.axis for point in points}:
            of_axis = [point for point in points if point.axis == axis]
            neighbours = {point.neighbour for point in of_axis}
            assert not neighbours & {point.problem for point in of_axis if not point.change}, axis
        for point in points:
            assert point.problem != point.neighbour or point.change, point
            assert point.problem.shape.dim % point.problem.shape.groups == 0


def small_scan(harness, operator="selective_scan", dtype="float32", variant="plain", method="zoh"):
    problems = harness("problems")
    shape = problems.Shape("odd", 3, 8, 45, 5, 2 if operator == "selective_scan" else 1)
    problem = problems.Problem(shape, dtype, problems.VARIANTS[variant], method, operator)
    return harness("operators").make_scan(problem, torch.device("cpu"), seed=1)


@pytest.mark.parametrize(
    ("operator", "variant"),
    [
        *(("selective_scan", v) for v in ("complex", "constant", "reverse", "initial-state")),
        *((operator, "plain") for operator in ("selective_scan", "diagonal", "adaptive_unitary")),
    ],
)
def test_check_accepts_the_kernels(harness, operator, variant):
    scan = small_scan(harness, operator, "float64", variant, "foh")
    errors = harness("checks").check(scan, backward=True)
    states = set() if operator == "diagonal" else {"last_state"}
    assert errors.keys() == {"out", *states, *(f"d{name}" for name in scan.tensors)}


@pytest.mark.parametrize("variant", ["plain", "no-z", "complex", "constant", "complex-constant",
                                     "channel-last", "reverse", "initial-state"])  # fmt: skip
@pytest.mark.parametrize("method", METHODS)
def test_exact_results_are_those_of_the_reference(harness, variant, method):
    scan = small_scan(harness, dtype="float64", variant=variant, method=method)
    expected = selective_scan.selective_scan_ref(**scan.keywords(), return_last_state=True)
    torch.testing.assert_close(scan.exact(scan.tensors), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("operator", ["diagonal", "adaptive_unitary"])
def test_exact_results_of_the_other_operators(harness, operator):
    scan = small_scan(harness, operator, "float64")
    out, _ = scan.exact(scan.tensors, torch.arange(8))
    torch.testing.assert_close(out, scan.reference(scan.tensors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
def test_textbook_scan_is_the_reference(harness, groups):
    scan = small_scan(harness)
    scan.tensors |= {name: scan.tensors[name][:, :groups] for name in "BC"}
    textbook_scan = harness("peers").textbook_scan
    torch.testing.assert_close(textbook_scan(**scan.keywords()), scan.reference(scan.tensors))
    with pytest.raises(ValueError, match="knows zoh"):
        textbook_scan(**{**scan.keywords(), "reverse": True})


@pytest.mark.parametrize("operator", ["selective_scan", "diagonal", "adaptive_unitary"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_check_refuses_a_wrong_kernel(harness, monkeypatch, operator, which):
    scan = small_scan(harness, operator)
    right = getattr(scan, which)

    def wrong(*arguments):
        result = right(*arguments)
        tensor = result[0] if which == "forward" else list(result.values())[1]
        tensor.mul_(1.01)
        return result

    monkeypatch.setattr(scan, which, wrong)
    with pytest.raises(RuntimeError, match=r"relative error of (out|ddelta|db|ddt) 1\.0e-02"):
        harness("checks").check(scan, backward=True)


def test_old_records_are_read_as_the_new_ones(tables):
    rows = tables.load("h200_siblings")["rows"]
    assert {row["operator"] for row in rows} == {"diagonal", "adaptive_unitary"}
    assert {row["variant"] for row in rows} == {"plain", "channel-last"}
    assert {row["operator"] for row in tables.load("h200")["rows"]} == {"selective_scan"}


def test_tables_are_those_of_the_records(tables, monkeypatch, capsys, tmp_path):
    texts = {path: path.read_text() for path in tables._FILES}
    for name in tables.TABLES:
        assert sum(text.count(f"<!-- {name} table -->\n") for text in texts.values()) == 1, name
    assert tables.main(["--check"]) == 0

    row = next(row for row in tables.load("h200")["rows"] if row["shape"] == "mamba-130m")
    copies = [tmp_path / path.name for path in texts]
    for copy, text in zip(copies, texts.values(), strict=True):
        copy.write_text(text.replace(f"| {row['time']['median']:.3f} (", "| 0.001 ("))
    monkeypatch.setattr(tables, "_FILES", copies)
    assert tables.main(["--check"]) == 1
    assert "README.md is not up to date" in capsys.readouterr().err
    assert tables.main([]) == 0
    assert [copy.read_text() for copy in copies] == list(texts.values())


def test_a_table_that_is_not_there_is_refused(tables, monkeypatch, capsys, tmp_path):
    path = tmp_path / "text.md"
    monkeypatch.setattr(tables, "_FILES", [path])
    path.write_text("<!-- sped table -->\n<!-- end of sped table -->\n")
    with pytest.raises(ValueError, match="there is no table 'sped', there are speed, scan"):
        tables.main([])
    path.write_text("no table\n")
    assert tables.main(["--check"]) == 1
    assert "text.md has no place for a table" in capsys.readouterr().err
