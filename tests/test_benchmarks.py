"""The benchmark programs, run in their quick form: what they print and write makes sense."""

from __future__ import annotations

import importlib
import json
import math
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import programs
import selective_scan
from gpu_kernels import skip_without_path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PACKAGE = Path(selective_scan.__file__).resolve().parents[1]
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")])),
    # As programs on a CPU have it; without it they start anew, for which there is a test below.
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
}
PASSES = ("forward", "backward", "forward + backward")
METHODS = ("zoh", "foh", "bilinear", "poly", "highorder", "rk4")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_a_program_starts_anew_to_keep_freed_memory():
    code = "import os; from harness.timing import keep_freed_memory; keep_freed_memory(); "
    code += "print(os.environ['GLIBC_TUNABLES'])"
    environment = {"PYTHONPATH": str(BENCHMARKS), "GLIBC_TUNABLES": "glibc.malloc.check=0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    kept = f"{environment['GLIBC_TUNABLES']}:{ENVIRONMENT['GLIBC_TUNABLES']}\n"
    assert done.stdout == kept, done.stderr


def run_program(
    name: str, *arguments: str | Path, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a program of the benchmarks folder; those that it starts have the package under test."""
    done = programs.run(BENCHMARKS / name, *arguments, environment=ENVIRONMENT)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The status of a program that ends before it measures, and so can be run in this process."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run(name: str, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        return stop.value.code

    return run


def measure(
    folder: Path, name: str, *arguments: str | Path, status: int = 0
) -> tuple[str, dict[str, Any]]:
    """What a program prints, and the record that it writes into a folder."""
    path = folder / "record.json"
    done = run_program(name, *arguments, "--json", path, status=status)
    return done.stdout, json.loads(path.read_text())


def assert_is_png(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def assert_is_timing(timing: dict[str, float], runs: int) -> None:
    assert 0 < timing["best"] <= timing["q1"] <= timing["median"] <= timing["q3"]
    assert timing["runs"] == runs


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, Path]:
    """What the quick benchmark prints, the JSON it writes, and the folder of its plots."""
    folder = tmp_path_factory.mktemp("benchmark")
    printed, content = measure(
        folder, "benchmark_selective_scan.py", "--device", "cpu", "--quick", "--backward",
        "--methods", "zoh", "bilinear", "--variants", "plain", "complex", "--runs", "3",
        "--threads", "1", "2", "--host-calls", "20", "--plot", folder / "cpu",
    )  # fmt: skip
    return printed, content, folder


with_quick_run = pytest.mark.xdist_group("quick_run")  # one process runs it for all of them


@with_quick_run
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


@with_quick_run
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


@with_quick_run
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


@with_quick_run
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


@with_quick_run
def test_benchmark_prints_tables_and_draws_plots(quick_run):
    printed, content, folder = quick_run
    for text in ("Medians of 3 runs", "no_grad call", "bilinear", "medium"):
        assert text in printed
    assert printed.count("│ small ") >= len(content["rows"]) // 2
    assert " × floor " in printed
    assert_is_png(folder / "cpu_speedup.png")


def test_benchmark_takes_sizes_as_a_shape(tmp_path):
    _, content = measure(
        tmp_path, "benchmark_selective_scan.py", "--device", "cpu", "--quick", "--shapes",
        "2,6,33,5,3", "--dtype", "bfloat16", "--variants", "constant", "channel-last", "reverse",
        "--host-calls", "0", "--reference-runs", "0",
    )  # fmt: skip
    rows = content["rows"]
    assert {tuple(row["sizes"]) for row in rows} == {(2, 6, 33, 5, 3)}
    assert {row["variant"] for row in rows} == {"constant", "channel-last", "reverse"}
    assert {row["which"] for row in rows} == {"forward"}


def test_benchmark_compares_layouts(tmp_path):
    _, content = measure(
        tmp_path, "benchmark_selective_scan.py", "--device", "cpu", "--quick", "--shapes",
        "1,8,16,2", "--dtype", "float32", "--layouts", "--threads", "1", "--host-calls", "0",
        "--reference-runs", "0",
    )  # fmt: skip
    plain, *others = content["rows"]
    assert plain["variant"] == "plain"
    assert len({row["variant"] for row in others}) == 15
    for row in others:
        ratio = row["time"]["median"] / plain["time"]["median"]
        assert row["ratio_to_contiguous"] == pytest.approx(ratio)


def test_cliffs(tmp_path):
    _, content = measure(
        tmp_path, "benchmark_selective_scan.py", "--cliffs", "--device", "cpu", "--quick",
        "--backward", "--plot", tmp_path / "cpu",
    )  # fmt: skip
    assert content["failures"] == []
    assert {row["which"] for row in content["rows"]} == {"forward", "backward"}
    for row in content["rows"]:
        assert_is_timing(row["time"], runs=3)
        more = max(1, math.prod(row["sizes"][:4]) / math.prod(row["neighbour"][:4]))
        assert row["ratio"] == pytest.approx(row["time"]["median"] / row["neighbour_ms"] / more)
        assert 0 < row["error"] < 2e-2
    assert_is_png(tmp_path / "cpu_cliffs.png")


def test_users(tmp_path, device):
    printed, content = measure(
        tmp_path, "benchmark_selective_scan.py", "--users", "--device", device, "--quick", "--only",
        "vim-small$|vim-small fp16|N=2$|transformers|layers-512|130m token$",
        "--plot", tmp_path / "small",
    )  # fmt: skip
    assert content["failures"] == []
    rows = content["rows"]
    names = ("vim-small", "vim-small fp16", "s-d-mamba N=2", "transformers 130m padded",
             "transformers 130m prompt 64", "transformers 130m prompt 512",
             "transformers 2.8b prompt", "transformers jamba autocast")  # fmt: skip
    assert [(row["name"], row["which"]) for row in rows] == [
        *((name, which) for name in names for which in PASSES[:2]),
        *(("layers-512", which) for which in ("forward", "forward + backward")),
        ("130m token", "token"),
    ]
    for row in rows:
        assert row["time"]["runs"] == 3
        assert row["name"] in printed
        assert row["error"] is None if row["kind"] == "token" else 0 < row["error"] < 2e-2
        ratio = row["peer_ms"] and pytest.approx(row["peer_ms"] / row["time"]["median"])
        assert row["speedup_over_peer"] == ratio
        if device == "cpu":
            assert row["peer"] == ("selective_scan_ref" if row["kind"] == "scan" else None)
    assert_is_png(tmp_path / "small_users.png")


def test_benchmark_measures_the_other_operators(tmp_path):
    printed, content = measure(
        tmp_path, "benchmark_selective_scan.py", "--device", "cpu", "--quick", "--backward",
        "--operators", "diagonal", "adaptive_unitary", "--runs", "3", "--threads", "2",
        "--plot", tmp_path / "cpu",
    )  # fmt: skip
    assert content["failures"] == content["host_overhead"] == []
    rows = content["rows"]
    assert {(row["operator"], row["dtype"], row["variant"], row["which"]) for row in rows} == {
        *(
            ("diagonal", dtype, layout, which)
            for dtype in ("float32", "bfloat16")
            for layout in ("plain", "channel-last")
            for which in ("forward", "backward")
        ),
        *(("adaptive_unitary", "float32", "plain", which) for which in ("forward", "backward")),
    }
    for row in rows:
        time = row["time"]
        assert_is_timing(time, runs=3)
        moved = row["bytes_moved"] / time["median"] / 1e6
        assert row["GB_per_s"] == pytest.approx(moved)
        ceiling = content["ceilings"]["copy_bytes_per_s"]
        assert 1 / row["ratio_to_floor"] == pytest.approx(moved * 1e9 / ceiling)
        assert 0 < row["error"] < (1e-4 if row["dtype"] == "float32" else 2e-2)
        assert (row["reference"] is not None) == (row["which"] == "forward")
        if row["operator"] == "diagonal":
            values = 3 if row["which"] == "forward" else 5  # a, b, h; or a, h, dh, da, db
            width = 4 if row["dtype"] == "float32" else 2
            assert row["bytes_moved"] == values * width * math.prod(row["sizes"])
    assert "adaptive_unitary" in printed
    assert_is_png(tmp_path / "cpu_siblings.png")


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
def test_benchmark_refuses_what_is_not_there(stops, capsys, arguments, sentence):
    assert stops("benchmark_selective_scan.py", *arguments) == 2
    assert sentence in capsys.readouterr().err


def test_benchmark_of_full_state_matrices(tmp_path):
    sizes = ("--shapes", "1,4,8,3", "--runs", "2", "--threads", "1")
    rows = measure(tmp_path, "benchmark_matrix_scan.py", *sizes)[1]["rows"]
    assert [row["pass"] for row in rows] == ["forward", "forward + backward"]
    for row in rows:
        assert_is_timing(row["kernels"], 2)
        assert_is_timing(row["reference"], 2)
        assert row["difference"] < 1e-5


def test_benchmark_of_the_causal_convolution(tmp_path):
    printed, content = measure(
        tmp_path, "benchmark_causal_conv1d.py", "--device", "cpu", "--shapes", "1,20,40",
        "--runs", "2", "--threads", "1",
    )  # fmt: skip
    assert "channel_last" in printed
    rows = content["rows"]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert_is_timing(row["ours"], 2)
        assert_is_timing(row["torch"], 2)
        bytes_moved = row["floor_ms"] * content["environment"]["copy_bytes_per_s"] / 1e3
        size = {"float32": 4, "bfloat16": 2}[row["dtype"]]
        arrays = {"forward": 2, "backward": 3}[row["which"]]
        assert bytes_moved == pytest.approx(arrays * 20 * 40 * size)


def test_benchmark_of_a_layer(tmp_path):
    printed, content = measure(
        tmp_path, "benchmark_layer.py", "--device", "cpu", "--shapes", "1,20,16,2", "--runs", "2",
        "--threads", "1", "--plot", tmp_path / "layer.png",
    )  # fmt: skip
    assert "matrix products" in printed
    assert_is_png(tmp_path / "layer.png")
    assert len(content["rows"]) == 2 * 3 * 2
    for row in content["rows"]:
        assert_is_timing(row["time"], 2)
        products = [
            other["time"]["median"]
            for other in content["rows"]
            if other["what"] == "matrix products"
            and (other["dtype"], other["which"]) == (row["dtype"], row["which"])
        ]
        assert row["over_products"] == pytest.approx(row["time"]["median"] / products[0])
    names = {part["part"] for part in content["parts"]}
    assert names > {"in_proj", "convolution", "x_proj", "dt_proj", "scan", "out_proj", "else"}
    assert all(part["ms"] >= 0 for part in content["parts"])


def test_benchmark_of_packed_sequences(tmp_path):
    _, content = measure(
        tmp_path, "benchmark_packed.py", "--device", "cpu", "--sequences", "5", "--mean", "9",
        "--longest", "40", "--dim", "8", "--dstate", "2", "--dtype", "float32", "--runs", "2",
        "--checkpoint-every", "16",
    )  # fmt: skip
    rows = content["rows"]
    assert [row["which"] for row in rows] == ["forward"] * 5 + ["train"] * 3
    for row in rows:
        assert_is_timing(row["time_ms"], 2)
        assert (row["error"] is None) == (row["implementation"] != "packed")
    steps = {row["implementation"]: row["steps"] for row in rows}
    assert steps["packed"] <= steps["dense, as many steps"] < steps["padded to the longest"] == 200


def test_benchmark_of_maps(tmp_path):
    sizes = ("--batch", "1", "--dim", "768", "--dtype", "float32", "--runs", "2")
    _, content = measure(tmp_path, "benchmark_cross_scan.py", "--device", "cpu", *sizes)
    rows = content["rows"]
    assert [row["which"] for row in rows] == ["forward"] * 2 + ["train"] * 2
    for row in rows:
        assert_is_timing(row["time_ms"], 2)
        assert (row["of_copies"] == 1) == (row["implementation"] != "cross_scan_fn")


def test_benchmark_of_the_state_update(tmp_path):
    _, content = measure(
        tmp_path, "benchmark_serving.py", "--device", "cpu", "--batch", "1", "3", "--dim", "8",
        "--dstate", "2", "--dtype", "float32", "--state", "float32", "--runs", "2",
        "--threads", "1", "--plot", tmp_path / "serving.png",
    )  # fmt: skip
    rows = content["rows"]
    assert [(row["implementation"], row["batch"]) for row in rows] == [
        ("selective_scan", 1), ("selective_scan", 3)
    ]  # fmt: skip
    for row in rows:
        assert_is_timing(row["time_us"], 2)
    assert_is_png(tmp_path / "serving.png")


@pytest.mark.parametrize("vocabulary", ["50", "0"])
def test_benchmark_of_decoding(vocabulary, tmp_path):
    _, content = measure(
        tmp_path, "benchmark_decoding.py", "--device", "cpu", "--d-model", "16", "--depth", "2",
        "--vocabulary", vocabulary, "--prompt", "9", "--runs", "2", "--threads", "1",
    )  # fmt: skip
    rows = {row["what"]: row for row in content["rows"]}
    own = {"its products", "its weights, read"}
    assert set(rows) == {"prompt", "token", "token, by parts"} | own
    for row in rows.values():
        assert_is_timing(row["time"], 2)
    ratio = rows["token"]["time"]["median"] / rows["its products"]["time"]["median"]
    assert rows["token"]["over_products"] == pytest.approx(ratio)
    assert rows["its weights, read"]["over_reading_weights"] == 1
    assert rows["prompt"]["tokens_per_s"] == pytest.approx(9e3 / rows["prompt"]["time"]["median"])


def test_benchmark_of_denormals(tmp_path):
    few = ("--threads", "1", "--runs", "2", "--budget", "1")
    _, content = measure(tmp_path, "benchmark_denormals.py", *few)
    rows = {row["call"]: row for row in content["rows"]}
    assert {"gradient of the last step", "impulse and silence", "decoding step"} <= set(rows)
    for row in rows.values():
        for name in ("ordinary", "denormal", "flushed"):
            assert_is_timing(row[name], 2)
        median = row["denormal"]["median"]
        assert row["ratio"] == pytest.approx(median / row["ordinary"]["median"])
        assert row["over_flushed"] == pytest.approx(median / row["flushed"]["median"])


@pytest.mark.parametrize("name", ["benchmark_selective_scan.py", "profile_discretization.py"])
def test_programs_fail_on_a_device_that_is_not_there(name, stops, capsys):
    assert stops(name, "--device", "cuda:99") == 2
    printed = capsys.readouterr()
    assert "device 'cuda:99' is not there" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    "name",
    [
        "benchmark_causal_conv1d.py",
        "benchmark_decoding.py",
        "benchmark_denormals.py",
        "benchmark_matrix_scan.py",
        "benchmark_layer.py",
        "benchmark_selective_scan.py",
        "profile_discretization.py",
        "compare_ipex.py",
        "compare_paths.py",
        "compare_revisions.py",
    ],
)
def test_help_has_an_example(name, stops, capsys):
    assert stops(name, "--help") == 0
    printed = capsys.readouterr().out
    assert f"python benchmarks/{name} " in printed.partition("example:")[2]


@pytest.mark.slow
def test_ranks_are_set_against_one_of_them(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    program, record = BENCHMARKS / "benchmark_distributed.py", tmp_path / "rows.json"
    sizes = ("--device", "cpu", "--shape", "1,16,101,4", "--runs", "2", "--json", record)
    done = subprocess.run(
        [*torchrun, str(program), *map(str, sizes)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, (1, 16, 101, 4), float32, zoh" in done.stdout
    rows = {row["what"]: row for row in json.loads(record.read_text())["rows"]}
    for row in rows.values():
        assert_is_timing(row["time"], 2)
    for name in ("forward", "forward + backward", "layer"):
        ours, alone = (
            rows[f"{who}, {name}"]["time"]["median"] for who in ("all ranks", "one rank")
        )
        assert rows[f"all ranks, {name}"]["ratio"] == pytest.approx(ours / alone)
    assert rows["all ranks, forward"]["error"] < 1e-5


def test_profile_of_the_discretizations(tmp_path):
    printed, content = measure(
        tmp_path, "profile_discretization.py", "--device", "cpu", "--batch", "1", "--dim", "8",
        "--seqlen", "16", "--dstate", "4", "--n_trials", "3", "--plot", tmp_path / "profile.png",
    )  # fmt: skip
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
    assert "matrix inverse" in printed
    assert "rk4" in printed
    assert_is_png(tmp_path / "profile.png")


def test_profile_of_one_part_alone(tmp_path):
    _, content = measure(
        tmp_path, "profile_discretization.py", "--device", "cpu", "--dim", "4", "--seqlen", "8",
        "--n_trials", "2", "--profile_ops", "--dtype", "bfloat16",
    )  # fmt: skip
    assert content["operations"]
    assert not content["scan"]
    assert content["dtype"] == "bfloat16"


def test_the_anchors_cover_every_shape_that_they_are_for():
    content = json.loads((BENCHMARKS / "anchors" / "h200_mamba_ssm.json").read_text())
    shapes = {row["shape"] for row in content["rows"]}
    assert {"mamba-130m", "launch-bound"} <= shapes
    for row in content["rows"]:
        assert 0 < row["mamba_ssm_fwd_ms"] < row["mamba_ssm_bwd_ms"]


@pytest.mark.slow
def test_two_revisions_are_timed_in_turns(tmp_path):
    """Here the revision under test with itself: all its results have the same bits."""
    printed, content = measure(
        tmp_path, "compare_revisions.py", PACKAGE, PACKAGE, "--device", "cpu", "--quick",
        "--rounds", "2", "--runs", "3", "--only", "float32 (complex|channel-last)|adaptive",
    )  # fmt: skip
    assert content["failures"] == []
    assert content["environment"]["old"] == content["environment"]["new"]
    rows = content["rows"]
    assert {(row["operator"], row["variant"], row["which"]) for row in rows} == {
        *(
            ("selective_scan", variant, which)
            for variant in ("complex", "channel-last")
            for which in PASSES
        ),
        *(("diagonal", "channel-last", which) for which in PASSES[:2]),
        *(("adaptive_unitary", "plain", which) for which in PASSES[:2]),
    }
    for row in rows:
        assert row["same_bits"]
        assert row["ratio"] == pytest.approx(row["new_ms"] / row["old_ms"])
        assert len(row["ratios_of_rounds"]) == 2
    assert content["worst"]["ratio"] == max(row["ratio"] for row in rows)
    assert "median of 10 rows" in printed


@pytest.mark.slow
def test_two_revisions_are_compared_by_what_users_call(tmp_path, device):
    printed, content = measure(
        tmp_path, "compare_revisions.py", PACKAGE, PACKAGE, "--users", "--device", device,
        "--quick", "--rounds", "2", "--runs", "3",
        "--only", "small rl|padded|layers-512|130m token$",
    )  # fmt: skip
    assert content["failures"] == []
    assert [(row["problem"], row["kind"], row["which"]) for row in content["rows"]] == [
        *(("small rl", "scan", which) for which in PASSES[:2]),
        *(("transformers 130m padded", "scan", which) for which in PASSES[:2]),
        *(("layers-512", "layer", which) for which in ("forward", "forward + backward")),
        ("130m token", "token", "token"),
    ]
    assert all(row["same_bits"] for row in content["rows"])
    slower = [row for row in content["rows"] if row["ratio"] > 1.02]
    summary = printed.partition(f"{len(slower)} rows above 1.02, 0 problems failed")[2]
    assert len(summary.split("\n")[1:-1]) == len(slower)
    assert all(row["problem"] in summary for row in slower)


@pytest.mark.slow
def test_the_chosen_path_is_set_against_the_others(tmp_path, device):
    if device == "cuda":
        skip_without_path("streamed")
    printed, content = measure(
        tmp_path, "compare_paths.py", "--device", device, "--quick", "--rounds", "2", "--runs",
        "3", "--only", "small rl", "--limit", "1000",
    )  # fmt: skip
    assert content["failures"] == []
    assert [(row["name"], row["which"]) for row in content["rows"]] == [
        ("small rl", which) for which in PASSES[:2]
    ]
    for row in content["rows"]:
        times = dict(row["times_ms"])
        assert row["ratio"] == pytest.approx(times.pop("chosen") / min(times.values()))
        assert times[row["best"]] == min(times.values())
        # dstate1 is for other calls than those of 16 states. A CPU has no such paths.
        assert {"floor", "streamed"} <= times.keys()
        assert ("prompt" in times) == (device == "cpu" or row["which"] == "forward")
        assert ("dstate1" in times) == (device == "cpu")
    assert "0 of 2 passes above 1000.0 × the best path" in printed


class StandIn:
    """For a worker that is asked for its device alone."""

    def __init__(self, name: str, *_: object) -> None:
        self.name = name

    def send(self, question: str) -> None:
        pass

    def receive(self) -> str:
        return "CPU"

    def close(self) -> None:
        pass


def test_a_chosen_path_that_is_too_slow_is_told(monkeypatch, capsys):
    """By times that are given: two rounds of the chosen path, and of those that run the call."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = importlib.import_module("compare_paths")
    milliseconds = {"chosen": 3.0, "streamed": 2.0, "floor": 9.0}
    samples = [
        {"forward": 2 * [[milliseconds[name]]]} if name in milliseconds else {}
        for name in ("chosen", *program.PATHS)
    ]
    monkeypatch.setattr(program, "Worker", StandIn)
    monkeypatch.setattr(program, "alternate", lambda *_: (None, samples))
    for limit, status in ((1.6, 0), (1.4, 1)):
        arguments = ("--device", "cpu", "--quick", "--only", "small rl", "--limit", str(limit))
        monkeypatch.setattr(sys, "argv", ["compare_paths.py", *arguments])
        assert program.main() == status
        summary = f"{status} of 1 passes above {limit} × the best path\n"
        slower = capsys.readouterr().out.partition(summary)[2].splitlines()
        assert [line.split()[-2:] for line in slower] == status * [["1.500", "streamed"]]


def test_revisions_are_taken_from_the_folders_that_are_named(tmp_path):
    arguments = (PACKAGE, tmp_path, "--device", "cpu", "--quick")
    done = run_program("compare_revisions.py", *arguments, status=1)
    assert f"not from {tmp_path}" in done.stderr
