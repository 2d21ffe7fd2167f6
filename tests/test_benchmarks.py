"""The benchmark programs in their quick form: their records and reports are consistent."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
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
    # Programs on a CPU run with this setting, and restart without it, as the test below shows.
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
}
PASSES = ("forward", "backward", "forward + backward")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
def test_a_program_starts_anew_to_keep_freed_memory():
    code = "import os; from harness.timing import keep_freed_memory; keep_freed_memory(); "
    code += "print(os.environ['GLIBC_TUNABLES'])"
    environment = {"GLIBC_TUNABLES": "glibc.malloc.check=0"}
    done = programs.run_python("-c", code, paths=[BENCHMARKS], environment=environment)
    kept = f"{environment['GLIBC_TUNABLES']}:{ENVIRONMENT['GLIBC_TUNABLES']}\n"
    assert done.stdout == kept, done.stderr


def run_program(
    name: str, *arguments: str | Path, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a benchmark program; it and its subprocesses import the package under test."""
    done = programs.run(BENCHMARKS / name, *arguments, environment=ENVIRONMENT)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a program that ends before it measures, in this process, and returns its exit status."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run(name: str, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        return stop.value.code

    return run


def entries(value: Any) -> Iterator[dict[str, Any]]:
    """Yields all dictionaries of a record."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from entries(part)


def timings(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns all times of a record. Asserts that the record has no failures and no result far from
    the one that it is compared with."""
    assert record.get("failures", []) == []
    is_cuda = "--device cuda" in record.get("environment", {}).get("command", "")
    differences = []
    for entry in entries(record):
        # On a GPU the backward pass of a user's scan is the difference of two times, which other
        # programs on the GPU may make negative.
        if is_cuda and (entry.get("kind"), entry.get("which")) == ("scan", "backward"):
            differences.append(entry.get("time"))
        is_half = any("float16" in str(value) for value in entry.values())
        for name, bound in (("error", 1e-4), ("difference", 1e-5)):
            assert 0 <= (entry.get(name) or 0) < (2e-2 if is_half else bound), entry
    found = [entry for entry in entries(record) if "q1" in entry]
    for time in found:
        assert time["best"] > 0 or time in differences
        assert time["best"] <= time["q1"] <= time["median"] <= time["q3"]
        assert time["runs"] > 0
    return found


def measure(folder: Path, name: str, *arguments: str | Path) -> tuple[str, dict[str, Any]]:
    """Returns what a program prints and the record that it writes into a folder."""
    path = folder / "record.json"
    printed = run_program(name, *arguments, "--json", path).stdout
    record = json.loads(path.read_text())
    timings(record)
    return printed, record


def assert_is_png(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


SCAN = "benchmark_selective_scan.py --device cpu --quick --host-calls 0"
DECODING = (
    "benchmark_decoding.py --device cpu --d-model 16 --depth 2 --prompt 9 --threads 1 --runs 2"
)
# The least number of times in a program's record, and its smallest arguments. A file is appended to
# a final --plot.
PROGRAMS = [
    (16, "benchmark_causal_conv1d.py --device cpu --shapes 1,20,40 --runs 2 --threads 1"),
    (4, "benchmark_cross_scan.py --device cpu --batch 1 --dim 768 --dtype float32 --runs 2"),
    (5, f"{DECODING} --vocabulary 50"),
    (5, f"{DECODING} --vocabulary 0"),
    (21, "benchmark_denormals.py --threads 1 --runs 2 --budget 1"),
    (12, "benchmark_layer.py --device cpu --shapes 1,20,16,2 --runs 2 --threads 1 --plot"),
    (4, "benchmark_matrix_scan.py --shapes 1,4,8,3 --runs 2 --threads 1"),
    (8, "benchmark_packed.py --device cpu --sequences 5 --mean 9 --longest 40 --dim 8 --runs 2"),
    (2, "benchmark_serving.py --device cpu --batch 1 3 --dim 8 --state float32 --runs 2 --plot"),
    (20, f"{SCAN} --cliffs --backward --plot"),
    (15, f"{SCAN} --operators diagonal adaptive_unitary --backward --threads 2 --plot"),
    (16, f"{SCAN} --layouts --shapes 1,8,16,2 --dtype float32 --threads 1 --reference-runs 0"),
    (3, f"{SCAN} --variants constant channel-last reverse --shapes 2,6,33,5,3 --dtype bfloat16"),
    (30, "profile_discretization.py --device cpu --dim 8 --seqlen 16 --n_trials 3 --plot"),
]
# Programs that other tests run, that write no record, or that need something not installed here.
OTHERS = {"benchmark_distributed.py", "compare_ipex.py", "compare_paths.py", "compare_revisions.py"}
OTHERS |= {"compare_transformers.py", "one_pass.py", "tables.py"}
RECORDED = {command.split()[0] for _, command in PROGRAMS}


@pytest.mark.slow
@pytest.mark.parametrize(("fewest", "command"), PROGRAMS)
def test_program(fewest, command, tmp_path):
    name, *arguments = command.split()
    picture = [tmp_path / "plot.png"] if arguments[-1] == "--plot" else []
    printed, record = measure(tmp_path, name, *arguments, *picture)
    assert len(timings(record)) >= fewest
    assert record["environment"]["torch"] == torch.__version__
    assert record["environment"]["device"] in printed
    pictures = list(tmp_path.glob("*.png"))
    assert len(pictures) == len(picture)
    for path in pictures:
        assert_is_png(path)


def test_every_program_is_tested():
    assert {path.name for path in BENCHMARKS.glob("*.py")} == RECORDED | OTHERS


def test_one_pass():
    printed = run_program("one_pass.py", "--shape", "1,4,8,2").stdout
    assert "64 state updates forward" in printed


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mamba", "falcon_mamba"])
def test_models_of_transformers_are_compared(tmp_path, model):
    pytest.importorskip("transformers", reason="needs the package transformers")
    few = ("--model", model, "--device", "cpu", "--hidden", "32", "--seqlen", "9", "--runs", "1")
    _, record = measure(tmp_path, "compare_transformers.py", *few, "--passes", "forward")
    assert len(timings(record)) == 3


@pytest.mark.slow
def test_benchmark_measures_the_product_of_what_is_named(tmp_path):
    printed, content = measure(
        tmp_path, "benchmark_selective_scan.py", "--device", "cpu", "--quick", "--backward",
        "--methods", "zoh", "bilinear", "--variants", "plain", "complex", "--runs", "3",
        "--threads", "1", "2", "--host-calls", "20", "--plot", tmp_path / "cpu",
    )  # fmt: skip
    axes = ("shape", "variant", "method", "threads", "which")
    values = ("small", "medium"), ("plain", "complex"), ("zoh", "bilinear"), (1, 2), PASSES
    rows = {tuple(row[axis] for axis in axes): row for row in content["rows"]}
    assert rows.keys() == {*itertools.product(*values)}
    assert len(content["rows"]) == len(rows)
    for row in rows.values():
        assert row["time"]["runs"] == 3
        assert row["ratio_to_floor"] == pytest.approx(row["time"]["median"] / row["floor_ms"])
        assert 0 < row["error"] < 1e-4
        assert (row["peak_fraction"] is None) == (row["variant"] == "complex")
    compared = {key for key, row in rows.items() if row["reference"] and row["textbook"]}
    passes = ("forward", "forward + backward")
    assert compared == {*itertools.product(values[0], ["plain"], ["zoh"], [2], passes)}
    assert [entry["us_per_call"]["runs"] for entry in content["host_overhead"]] == [5] * 3
    environment = content["environment"]
    assert environment["selective_scan"] == selective_scan.__version__
    assert environment["command"].startswith("python benchmarks/benchmark_selective_scan.py --dev")
    for text in ("Medians of 3 runs", "no_grad call", "bilinear", "medium", " × floor "):
        assert text in printed
    assert_is_png(tmp_path / "cpu_speedup.png")


def test_users(tmp_path, device):
    printed, content = measure(
        tmp_path, "benchmark_selective_scan.py", "--users", "--device", device, "--quick", "--only",
        "vim-small$|vim-small fp16|N=2$|transformers|layers-512|130m token$",
        "--plot", tmp_path / "small",
    )  # fmt: skip
    rows, versions = content["rows"], content["environment"]["peers"]
    assert set(versions) <= {"mamba_ssm", "causal_conv1d"}
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


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        *(
            ("benchmark_selective_scan.py", ("--device", "cpu", *arguments), sentence)
            for *arguments, sentence in (
                ("--operators", "lru", "invalid choice: 'lru'"),
                ("--device", "tpu", "device must be cpu, cuda or cuda:N, got 'tpu'"),
                ("--shapes", "1,2,3", "shape must be one of small, medium"),
                ("--shapes", "1,5,3,2,2", "groups must divide dim = 5, got 2"),
                ("--runs", "0", "expected at least 1, got 0"),
                ("--anchors", "no-such-file.json", "no-such-file.json"),
            )
        ),
        *(
            (name, ("--device", "cuda:99"), "device 'cuda:99' is not there")
            for name in ("benchmark_selective_scan.py", "profile_discretization.py")
        ),
        *(
            (f"benchmark_{name}.py", ("--method", "euler"), "invalid choice: 'euler'")
            for name in ("distributed", "packed", "serving")
        ),
    ],
)
def test_programs_refuse_what_is_not_there(stops, capsys, name, arguments, sentence):
    assert stops(name, *arguments) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("name", sorted((RECORDED | OTHERS) - {"compare_transformers.py"}))
def test_help_has_an_example(name, stops, capsys):
    assert stops(name, "--help") == 0
    printed = capsys.readouterr().out
    assert f" benchmarks/{name}" in printed.partition("example:")[2]


@pytest.mark.slow
def test_ranks_are_set_against_one_of_them(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    program, record = BENCHMARKS / "benchmark_distributed.py", tmp_path / "rows.json"
    sizes = ("--device", "cpu", "--shape", "1,16,101,4", "--runs", "2", "--json", record)
    done = programs.run_python(*torchrun, program, *sizes, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, (1, 16, 101, 4), float32, zoh" in done.stdout
    record = json.loads(record.read_text())
    rows = {row["what"]: row for row in record["rows"]}
    assert len(timings(record)) == len(rows)
    for name in ("forward", "forward + backward", "layer"):
        assert {f"all ranks, {name}", f"one rank, {name}"} <= rows.keys()
        assert rows[f"all ranks, {name}"]["ratio"] > 0
    assert rows["all ranks, forward"]["error"] < 1e-5


@pytest.mark.slow
def test_two_revisions_are_timed_in_turns(tmp_path):
    """compare_revisions.py runs two revisions in turns. Here both are the revision under test, so
    all results have the same bits."""
    printed, content = measure(
        tmp_path, "compare_revisions.py", PACKAGE, PACKAGE, "--device", "cpu", "--quick",
        "--rounds", "2", "--runs", "3", "--only", "float32 (complex|channel-last)|adaptive",
    )  # fmt: skip
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
    assert [(row["name"], row["which"]) for row in content["rows"]] == [
        ("small rl", which) for which in PASSES[:2]
    ]
    for row in content["rows"]:
        times = dict(row["times_ms"])
        assert row["ratio"] == pytest.approx(times.pop("chosen") / min(times.values()))
        assert times[row["best"]] == min(times.values())
        # dstate1 does not run calls of 16 states. A CPU has no such paths, so all of them "run".
        assert {"floor", "streamed"} <= times.keys()
        assert ("prompt" in times) == (device == "cpu" or row["which"] == "forward")
        assert ("dstate1" in times) == (device == "cpu")
    assert "0 of 2 passes above 1000.0 × the best path" in printed


class StandIn:
    """Replaces a worker that is only asked for its device."""

    def __init__(self, name: str, *_: object) -> None:
        self.name = name

    def send(self, question: str) -> None:
        pass

    def receive(self) -> str:
        return "CPU"

    def close(self) -> None:
        pass


def test_a_chosen_path_that_is_too_slow_is_told(monkeypatch, capsys):
    """compare_paths.py reports a chosen path that is too slow, here by given times: two rounds of
    the chosen path and of the paths that run the call."""
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


@pytest.mark.slow
def test_revisions_are_taken_from_the_folders_that_are_named(tmp_path):
    arguments = (PACKAGE, tmp_path, "--device", "cpu", "--quick")
    done = run_program("compare_revisions.py", *arguments, status=1)
    assert f"not from {tmp_path}" in done.stderr
