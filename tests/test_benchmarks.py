"""The benchmark programs, run in their quick form: what they print and write makes sense."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import selective_scan

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PASSES = ("forward", "backward", "forward + backward")
METHODS = ("zoh", "foh", "bilinear", "poly", "highorder", "rk4")


def run_program(
    name: str, *arguments: str | Path, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a program of the benchmarks folder with the package that is under test."""
    package = str(Path(selective_scan.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def assert_is_png(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def assert_is_timing(timing: dict[str, float], runs: int) -> None:
    assert 0 < timing["best"] <= timing["q1"] <= timing["median"] <= timing["q3"]
    assert timing["runs"] == runs


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, Path]:
    """What the quick benchmark prints, the JSON it writes, and the folder of its plots."""
    folder = tmp_path_factory.mktemp("benchmark")
    done = run_program(
        "benchmark_selective_scan.py", "--device", "cpu", "--quick", "--backward",
        "--methods", "zoh", "bilinear", "--variants", "plain", "complex", "--runs", "3",
        "--threads", "1", "2", "--host-calls", "20", "--json", folder / "rows.json",
        "--plot", folder / "cpu",
    )  # fmt: skip
    return done.stdout, json.loads((folder / "rows.json").read_text()), folder


def test_benchmark_measures_the_product_of_what_is_named(quick_run):
    _, content, _ = quick_run
    measured = {
        (row["shape"], row["variant"], row["method"], row["threads"], row["which"])
        for row in content["rows"]
    }
    expected = {
        (shape, variant, method, threads, which)
        for shape in ("small", "medium")
        for variant in ("plain", "complex")
        for method in ("zoh", "bilinear")
        for threads in (1, 2)
        for which in PASSES
    }
    assert measured == expected
    assert len(content["rows"]) == len(expected)
    assert content["failures"] == []


def test_benchmark_rows_are_consistent(quick_run):
    _, content, _ = quick_run
    for row in content["rows"]:
        batch, dim, seqlen, dstate, groups = row["sizes"]
        time = row["time"]
        assert_is_timing(time, runs=3)
        assert row["updates"] == batch * dim * seqlen * dstate
        assert row["ns_per_update"] == pytest.approx(time["median"] * 1e6 / row["updates"])
        assert row["GB_per_s"] == pytest.approx(row["bytes_moved"] / time["median"] / 1e6)
        assert row["ratio_to_floor"] == pytest.approx(time["median"] / row["floor_ms"])
        assert 0 < row["error"] < 1e-4
        if row["variant"] == "plain" and row["which"] == "forward":
            sequences = 4 * batch * dim * seqlen  # u, delta, z and out
            projections = 2 * batch * groups * dstate * seqlen
            states = dim * dstate + batch * dim * dstate  # A and the last state
            assert row["bytes_moved"] == 4 * (sequences + projections + states + 2 * dim)
        if row["variant"] == "plain":
            assert 0 < row["peak_fraction"] < 1
        else:
            assert row["peak_fraction"] is None


def test_benchmark_compares_with_the_reference(quick_run):
    _, content, _ = quick_run
    compared = [row for row in content["rows"] if row["reference"]]
    assert {(row["shape"], row["which"]) for row in compared} == {
        (shape, which) for shape in ("small", "medium") for which in PASSES if which != "backward"
    }
    for row in compared:
        assert (row["variant"], row["method"], row["threads"]) == ("plain", "zoh", 2)
        for name in ("reference", "textbook"):
            assert_is_timing(row[name], runs=1)
            speedup = row[name]["median"] / row["time"]["median"]
            assert row[f"speedup_over_{name}"] == pytest.approx(speedup)


def test_benchmark_ratios_follow_from_the_rows(quick_run):
    _, content, _ = quick_run
    medians = {
        (row["shape"], row["variant"], row["method"], row["threads"], row["which"]): row["time"][
            "median"
        ]
        for row in content["rows"]
    }
    found = {
        (entry["what"], entry["shape"], entry["variant"], entry["method"]): entry["ratio"]
        for entry in content["ratios"]
        if entry["pass"] == "forward"
    }
    threads = "1 thread / 2 threads"
    key = ("medium", "plain", "zoh")
    assert found[(threads, *key)] == pytest.approx(
        medians[(*key, 1, "forward")] / medians[(*key, 2, "forward")]
    )
    assert {what for what, *_ in found} == {threads, "bilinear / zoh", "complex / plain"}


def test_benchmark_describes_its_environment(quick_run):
    printed, content, _ = quick_run
    environment = content["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["selective_scan"] == selective_scan.__version__
    assert environment["command"].startswith("python benchmarks/benchmark_selective_scan.py --dev")
    assert environment["device"] in printed
    assert content["ceilings"]["copy_bytes_per_s"] > 1e8
    assert content["ceilings"]["fma_flops_per_s"] > 1e8
    assert [entry["us_per_call"]["runs"] for entry in content["host_overhead"]] == [5] * 3
    assert all(entry["us_per_call"]["best"] > 0 for entry in content["host_overhead"])


def test_benchmark_prints_tables_and_draws_plots(quick_run):
    printed, content, folder = quick_run
    for text in ("Medians of 3 runs", "Ratios of medians", "no_grad call", "bilinear", "medium"):
        assert text in printed
    assert printed.count("│ small ") >= len(content["rows"]) // 2
    assert_is_png(folder / "cpu_speedup.png")
    assert_is_png(folder / "cpu_roofline.png")


def test_benchmark_takes_sizes_as_a_shape(tmp_path):
    path = tmp_path / "rows.json"
    run_program(
        "benchmark_selective_scan.py", "--device", "cpu", "--quick", "--shapes", "2,6,33,5,3",
        "--dtype", "bfloat16", "--variants", "constant", "channel-last", "reverse",
        "--host-calls", "0", "--reference-runs", "0", "--json", path,
    )  # fmt: skip
    rows = json.loads(path.read_text())["rows"]
    assert {tuple(row["sizes"]) for row in rows} == {(2, 6, 33, 5, 3)}
    assert {row["variant"] for row in rows} == {"constant", "channel-last", "reverse"}
    assert {row["which"] for row in rows} == {"forward"}


def test_benchmark_measures_the_other_operators(tmp_path):
    done = run_program(
        "benchmark_selective_scan.py", "--device", "cpu", "--quick", "--backward", "--operators",
        "diagonal", "adaptive_unitary", "--runs", "3", "--threads", "2", "--json",
        tmp_path / "rows.json", "--plot", tmp_path / "cpu",
    )  # fmt: skip
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["failures"] == content["rows"] == content["host_overhead"] == []
    rows = content["siblings"]
    assert {(row["operator"], row["dtype"], row["layout"], row["which"]) for row in rows} == {
        *(
            ("diagonal", dtype, layout, which)
            for dtype in ("float32", "bfloat16")
            for layout in ("contiguous", "channel-last")
            for which in ("forward", "backward")
        ),
        *(
            ("adaptive_unitary", "float32", "contiguous", which)
            for which in ("forward", "backward")
        ),
    }
    for row in rows:
        time = row["time"]
        assert_is_timing(time, runs=3)
        moved = row["bytes_moved"] / time["median"] / 1e6
        assert row["GB_per_s"] == pytest.approx(moved)
        ceiling = content["ceilings"]["copy_bytes_per_s"]
        assert row["fraction_of_copy_bandwidth"] == pytest.approx(moved * 1e9 / ceiling)
        assert 0 < row["error"] < (1e-4 if row["dtype"] == "float32" else 2e-2)
        assert (row["reference"] is not None) == (row["which"] == "forward")
        if row["operator"] == "diagonal":
            values = 3 if row["which"] == "forward" else 5  # a, b, h; or a, h, dh, da, db
            width = 4 if row["dtype"] == "float32" else 2
            assert row["bytes_moved"] == values * width * math.prod(row["sizes"])
    assert "adaptive_unitary" in done.stdout
    assert_is_png(tmp_path / "cpu_siblings.png")


@pytest.mark.parametrize("operator", ["diagonal", "adaptive_unitary"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_check_refuses_a_wrong_sibling(monkeypatch, operator, which):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    siblings = importlib.import_module("siblings")
    problem = siblings.select_siblings([operator], "cpu", ["float32"], quick=True)[0]
    inputs = siblings._INPUTS[operator](problem, torch.device("cpu"), seed=1)
    assert inputs.check(backward=True)
    name = which if operator == "diagonal" or which == "backward" else "_forward"
    right = getattr(inputs, name)

    def wrong(*arguments):
        result = right(*arguments)
        (result if isinstance(result, torch.Tensor) else result[0]).mul_(1.01)
        return result

    monkeypatch.setattr(inputs, name, wrong)
    with pytest.raises(RuntimeError, match=r"relative error of"):
        inputs.check(backward=True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "cpu", "--operators", "lru"], "invalid choice: 'lru'"),
        (["--device", "tpu"], "device must be cpu, cuda or cuda:N, got 'tpu'"),
        (["--device", "cpu", "--shapes", "1,2,3"], "shape must be one of small, medium"),
        (["--device", "cpu", "--shapes", "1,5,3,2,2"], "groups must divide dim = 5, got 2"),
        (["--device", "cpu", "--runs", "0"], "expected at least 1, got 0"),
        (["--device", "cpu", "--anchors", "no-such-file.json"], "no-such-file.json"),
    ],
)
def test_benchmark_refuses_what_is_not_there(monkeypatch, capsys, arguments, sentence):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = importlib.import_module("benchmark_selective_scan")
    with pytest.raises(SystemExit) as stop:
        program.main(arguments)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("name", ["benchmark_selective_scan.py", "profile_discretization.py"])
def test_programs_fail_on_a_device_that_is_not_there(name):
    done = run_program(name, "--device", "cuda:99", status=2)
    assert "device 'cuda:99' is not there" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "name",
    ["benchmark_selective_scan.py", "profile_discretization.py", "compare_ipex.py"],
)
def test_help_has_an_example(name):
    printed = run_program(name, "--help").stdout
    assert f"python benchmarks/{name} --" in printed.partition("example:")[2]


def test_profile_of_the_discretizations(tmp_path):
    done = run_program(
        "profile_discretization.py", "--device", "cpu", "--batch", "1", "--dim", "8", "--seqlen",
        "16", "--dstate", "4", "--n_trials", "3", "--json", tmp_path / "profile.json", "--plot",
        tmp_path / "profile.png",
    )  # fmt: skip
    content = json.loads((tmp_path / "profile.json").read_text())
    operations = {cost["name"]: cost for cost in content["operations"]}
    assert {"exp", "expm1", "division", "matrix inverse"} <= operations.keys()
    assert operations["exp"]["count"] == 1 * 8 * 16 * 4
    assert operations["matrix inverse"]["count"] == 1 * 8
    assert {(cost["name"], cost["implementation"], cost["which"]) for cost in content["scan"]} == {
        (method, implementation, which)
        for method in METHODS
        for implementation in ("kernel", "reference")
        for which in ("forward", "backward")
    }
    for cost in content["operations"] + content["scan"]:
        assert_is_timing(cost["time"], runs=3)
        assert math.isclose(cost["ns_per_unit"] * cost["units_per_s"], 1e9, rel_tol=1e-9)
    assert "matrix inverse" in done.stdout
    assert "rk4" in done.stdout
    assert_is_png(tmp_path / "profile.png")


def test_profile_of_one_part_alone(tmp_path):
    path = tmp_path / "profile.json"
    run_program(
        "profile_discretization.py", "--device", "cpu", "--dim", "4", "--seqlen", "8",
        "--n_trials", "2", "--profile_ops", "--dtype", "bfloat16", "--json", path,
    )  # fmt: skip
    content = json.loads(path.read_text())
    assert content["operations"]
    assert not content["scan"]
    assert content["dtype"] == "bfloat16"


def test_the_anchors_cover_every_shape_that_they_are_for():
    content = json.loads((BENCHMARKS / "anchors" / "h200_mamba_ssm.json").read_text())
    shapes = {row["shape"] for row in content["rows"]}
    assert {"mamba-130m", "mamba-790m", "mamba-2.8b", "vim-small", "vmamba-t", "long-1m"} <= shapes
    for row in content["rows"]:
        assert 0 < row["mamba_ssm_fwd_ms"] < row["mamba_ssm_bwd_ms"]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """The benchmarks' own checks and problems."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("checks"), importlib.import_module("problems")


@pytest.mark.parametrize("variant", ["plain", "complex", "constant", "reverse", "initial-state"])
def test_check_accepts_the_kernels(modules, variant):
    checks, problems = modules
    shape = problems.Shape("odd", 3, 8, 45, 5, 2)
    problem = problems.Problem(shape, "float64", problems.VARIANTS[variant], "foh")
    inputs = problems.make_inputs(problem, torch.device("cpu"), seed=1)
    errors = checks.check_problem(problem, inputs, backward=True)
    assert errors.keys() == {"out", "last_state", *(f"d{name}" for name in inputs.tensors())}


def test_parallel_scan_is_the_reference(modules):
    checks, _ = modules
    checks.check_oracle(torch.device("cpu"))


@pytest.mark.parametrize("groups", [1, 2])
def test_textbook_scan_is_the_reference(modules, groups):
    _, problems = modules
    peers = importlib.import_module("peers")
    problem = problems.Problem(problems.Shape("odd", 3, 8, 45, 5, groups))
    inputs = problems.make_inputs(problem, torch.device("cpu"), seed=1)
    expected = selective_scan.selective_scan_ref(**inputs.keywords())
    torch.testing.assert_close(peers.textbook_scan(**inputs.keywords()), expected)
    with pytest.raises(ValueError, match="knows zoh"):
        peers.textbook_scan(**{**inputs.keywords(), "reverse": True})


@pytest.mark.parametrize("which", ["forward_op", "backward_op"])
def test_check_refuses_a_wrong_kernel(modules, monkeypatch, which):
    checks, problems = modules
    problem = problems.Problem(problems.Shape("odd", 3, 8, 45, 5, 2))
    inputs = problems.make_inputs(problem, torch.device("cpu"), seed=1)
    right = getattr(problems.Inputs, which)

    def wrong(*arguments, **keywords):
        result = right(*arguments, **keywords)
        first = result[0] if which == "forward_op" else result["B"]
        first.mul_(1.001)
        return result

    monkeypatch.setattr(problems.Inputs, which, wrong)
    with pytest.raises(RuntimeError, match=r"relative error of (out|dB) 1\.0e-03"):
        checks.check_problem(problem, inputs, backward=True)
