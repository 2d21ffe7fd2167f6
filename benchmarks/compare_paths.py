"""Times every path of the CUDA kernels on the scans that published models make, and fails if the
path that the plan chooses is not close to the best one.

csrc/cuda/plan/figures.h has the thresholds, measured on one generation of GPUs; this program shows
whether they suit another GPU. A process takes its path from the environment once, so each path has
a separate process, and the processes alternate. A path that cannot run a pass has no time. The
chosen path may be faster than all others, since it runs some calls on copies of their rows. Needs
only PyTorch.

Example:
    python benchmarks/compare_paths.py --json h100_paths.json
    python benchmarks/compare_paths.py --only vmamba --rounds 5
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import sys
from collections.abc import Callable
from itertools import chain

import torch

from harness.arguments import find_device, measuring_parser, positive
from harness.operators import make_scan
from harness.users import ScanCall, calls
from harness.workers import Worker, alternate, serve

PATHS = ("dstate1", "narrow", "streamed", "floor", "prompt")
_VARIABLE = "SELECTIVE_SCAN_CUDA_KERNELS"
_REFUSAL = f"{_VARIABLE}="  # identifies the error of a path that cannot run a call
_WARMUP = 3
_COLUMNS = ("chosen", *PATHS)


def scans(options: argparse.Namespace) -> list[ScanCall]:
    device_type = options.device.partition(":")[0]
    return [call for call in calls(device_type, options.quick) if isinstance(call, ScanCall)]


def runnable_passes(call: ScanCall, device: torch.device) -> dict[str, Callable[[], object]]:
    """Returns the passes that this process's path can run."""
    scan = make_scan(call.problem, device, seed=0)
    passes: dict[str, Callable[[], object]] = {}
    try:
        saved = scan.forward(True)[2]
        passes["forward"] = lambda: scan.forward(False)
        scan.backward(saved)
        passes["backward"] = lambda: scan.backward(saved)
    except RuntimeError as error:
        if _REFUSAL not in str(error):
            raise
    return passes


def work(options: argparse.Namespace) -> None:
    from harness.user_calls import Timed

    device = find_device(options.device)
    cases = scans(options)
    timed: Timed | None = None

    def describe() -> str:
        return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"

    def prepare(case: int) -> list[str]:
        nonlocal timed
        timed = None
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the other processes need the previous case's memory
        passes = runnable_passes(cases[case], device)
        timed = Timed({"": passes}, device)
        return list(passes)

    def measure() -> dict[str, list[float]]:
        return timed.sample(warmup=_WARMUP, runs=options.runs).get("", {})

    serve(describe=describe, prepare=prepare, measure=measure)


def rate(times: dict[str, float]) -> dict[str, object]:
    """Compares the chosen path's time with those of the paths that can run the pass, by name."""
    best = min((name for name in times if name != "chosen"), key=times.__getitem__)
    return {"times_ms": times, "best": best, "ratio": times["chosen"] / times[best]}


def line_of(row: dict[str, object]) -> str:
    times = row["times_ms"]
    columns = " ".join(f"{times[it]:9.4f}" if it in times else f"{'-':>9}" for it in _COLUMNS)
    return f"{row['name']:28} {row['which']:8} {columns} {row['ratio']:6.3f} {row['best']}"


def compare(options: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--device", options.device, "--runs", str(options.runs)]
    command += ["--work", *(["--quick"] if options.quick else [])]
    names = {"chosen": "", **{path: path for path in PATHS}}
    workers = [Worker(name, command, {_VARIABLE: path}) for name, path in names.items()]
    for worker in workers:
        worker.send("describe")
    devices = [worker.receive() for worker in workers]  # all workers start concurrently
    print(
        f"{devices[0]}, torch {torch.__version__}: medians of {options.rounds} rounds of "
        f"{options.runs} runs in turns, ms; ratio: chosen / best"
    )
    heads = " ".join(f"{name:>9}" for name in _COLUMNS)
    print(f"{'call':28} {'pass':8} {heads} {'ratio':>6} best")
    rows, failures = [], []
    for number, call in enumerate(scans(options)):
        if not re.search(options.only, call.name):
            continue
        try:
            _, samples = alternate(workers, number, options.rounds)
        except RuntimeError as error:
            failures.append(f"{call}: {error}")
            print(f"FAILED {failures[-1]}", flush=True)
            continue
        for which in samples[0]:
            times = {
                worker.name: statistics.median(chain(*own[which]))
                for worker, own in zip(workers, samples, strict=True)
                if which in own
            }
            facts = {"name": call.name, "sizes": list(call.sizes), "dtype": call.dtype}
            rows.append({**facts, "which": which, **rate(times)})
            print(line_of(rows[-1]), flush=True)
    for worker in workers:
        worker.close()
    slower = [row for row in rows if row["ratio"] > options.limit]
    print(f"{len(slower)} of {len(rows)} passes above {options.limit} × the best path")
    for row in slower:
        print(line_of(row))
    if options.json:
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        content = {
            "environment": {"device": devices[0], "torch": torch.__version__, "date": date},
            "settings": {"rounds": options.rounds, "runs": options.runs, "limit": options.limit},
            "rows": rows,
            "failures": failures,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if slower or failures or not rows else 0


def main() -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    # fmt: off
    add("--limit", type=float, default=1.1,
        help="largest ratio of the chosen path's time to the best one's (default: 1.1)")
    add("--rounds", type=positive, default=3, help="turns of each path (default: 3)")
    add("--runs", type=positive, default=10, help="timed runs of a pass in each turn (default: 10)")
    add("--only", default="", metavar="REGEX", help="only the calls whose name matches")
    add("--quick", action="store_true", help="small shapes: a test of the program")
    add("--work", action="store_true", help=argparse.SUPPRESS)
    # fmt: on
    options = parser.parse_args()
    if options.work:
        work(options)
        return 0
    try:
        return compare(options)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    sys.exit(main())
