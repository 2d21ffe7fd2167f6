"""Times two builds of the library alternately on one device, and reports their differences.

Each folder holds an importable selective_scan package with its libraries. Two builds register the
same operators, so each runs in a separate process. For every problem both create the same inputs,
then the processes alternate; a row compares the medians of all runs of a pass. "same bits" tells
whether all results of the two builds are equal. --users times the calls that published models make,
which must not get slower; otherwise methods, variants and other operators are timed. Needs only
PyTorch.

Example:
    python benchmarks/compare_revisions.py ../old . --users
    python benchmarks/compare_revisions.py ../old . --json revisions.json
    python benchmarks/compare_revisions.py ../old . --only 'mamba-130m.*zoh' --rounds 9
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch

from harness.arguments import find_device, measuring_parser, positive
from harness.operators import make_scan
from harness.problems import METHODS, SHAPES, Problem, Shape, parse_shape, product, select_problems
from harness.timing import REST_SECONDS, sample
from harness.users import Call, calls
from harness.workers import Worker, alternate, serve

_SHAPES = (
    "mamba-130m", "launch-bound", "1,2048,65536,16", "1,256,1048576,16", "2,1024,800,16",
    *(f"8,1536,2048,{dstate}" for dstate in (1, 4, 8, 32, 64)),
)  # fmt: skip
_DTYPES = ("bfloat16", "float32")
_VARIANTS = ("complex", "constant", "channel-last", "reverse")
_WARMUP = 3
_NOTED_RATIO = 1.02


def problems(quick: bool) -> list[Problem]:
    base = SHAPES["small" if quick else "mamba-130m"]
    shapes: list[Shape] = [base] if quick else [parse_shape(shape) for shape in _SHAPES]
    return [
        *product(shapes, _DTYPES),
        *product([base], _DTYPES, _VARIANTS),
        *product([base], _DTYPES[:1], methods=METHODS[1:]),
        *product([base], ("float16",)),
        *product([base], ("float16", "float32"), methods=("foh",)),
        *select_problems("cuda", ("diagonal", "adaptive_unitary"), quick=quick),
    ]


def checksum(tensor: torch.Tensor) -> int:
    """Returns a checksum of all bits and their positions."""
    bits = tensor.detach().reshape(-1).view(torch.uint8).view(torch.int16)
    columns = 1021
    whole = bits.numel() // columns * columns
    sums = bits[:whole].view(-1, columns).sum(0, dtype=torch.int64)
    weights = torch.arange(1, columns + 1, device=bits.device)
    return int((weights * sums).sum()) + int((weights[: bits.numel() - whole] * bits[whole:]).sum())


def find_cases(options: argparse.Namespace) -> list[Problem | Call]:
    if options.users:
        return calls(options.device.partition(":")[0], options.quick)
    return problems(options.quick)


Samples = dict[str, list[float]]


def make_problem(
    case: Problem, device: torch.device, seed: int, runs: int
) -> tuple[dict[str, list[torch.Tensor]], Callable[[], Samples]]:
    """Returns the results of a problem's passes, and a function that times a turn of runs."""
    scan = make_scan(case, device, seed)
    passes = scan.passes(backward=True)
    return scan.results(), lambda: sample(passes, device, warmup=_WARMUP, runs=runs)


def make_call(
    case: Call, device: torch.device, seed: int, runs: int
) -> tuple[dict[str, list[torch.Tensor]], Callable[[], Samples]]:
    """Returns the results of a user's call, and a function that times a turn of runs."""
    from harness.user_calls import Timed, prepare  # they import the library

    prepared = prepare(case, device, seed)
    results = prepared.results()
    timed = Timed({"": prepared.passes}, device)
    return results, lambda: timed.sample(warmup=_WARMUP, runs=runs)[""]


def work(options: argparse.Namespace) -> None:
    import selective_scan

    found = Path(selective_scan.__file__).resolve().parents[1]
    if found != Path(options.work).resolve():
        raise RuntimeError(f"selective_scan came from {found}, not from {options.work}")
    device = find_device(options.device)
    cases = find_cases(options)
    make = make_call if options.users else make_problem
    turn: Callable[[], Samples] | None = None

    def describe() -> dict[str, object]:
        is_cuda = device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(device) if is_cuda else "CPU",
            "version": selective_scan.__version__,
            "build": dict(selective_scan.backends()[device.type].build),
        }

    def prepare(case: int) -> dict[str, list[int]]:
        nonlocal turn
        turn = None
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the other build needs the previous case's memory
        results, turn = make(cases[case], device, case, options.runs)
        return {which: [checksum(x) for x in tensors] for which, tensors in results.items()}

    def measure() -> Samples:
        samples = turn()
        if device.type == "cpu":
            time.sleep(REST_SECONDS)
        return samples

    serve(describe=describe, prepare=prepare, measure=measure)


def facts_of(case: Problem | Call) -> dict[str, object]:
    facts = {"problem": str(case), "sizes": case.sizes, "dtype": case.dtype}
    if isinstance(case, Problem):
        more = {"operator": case.operator, "variant": case.variant.name, "method": case.method}
        return {**facts, **more}
    return {**facts, "kind": case.kind}


def line_of(row: dict[str, object]) -> str:
    ratios = row["ratios_of_rounds"]
    return (
        f"{row['problem']:48} {row['which']:18} {row['old_ms']:9.4f} {row['new_ms']:9.4f} "
        f"{row['ratio']:8.3f} {min(ratios):6.3f}–{max(ratios):.3f}  "
        f"{'yes' if row['same_bits'] else 'no'}"
    )


def compare(options: argparse.Namespace) -> int:
    cases = {
        number: problem
        for number, problem in enumerate(find_cases(options))
        if re.search(options.only, str(problem))
    }
    command = [sys.executable, __file__, "--device", options.device, "--runs", str(options.runs)]
    command += [f"--{name}" for name in ("quick", "users") if getattr(options, name)]
    paths = os.environ.get("PYTHONPATH", "")
    workers = [
        Worker(
            name,
            [*command, "--work", str(folder)],
            {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder.resolve()), paths]))},
        )
        for name, folder in (("old", options.old), ("new", options.new))
    ]
    for worker in workers:
        worker.send("describe")
    builds = [worker.receive() for worker in workers]  # both workers start concurrently
    for worker, build in zip(workers, builds, strict=True):
        print(f"{worker.name}: {build['version']}, {build['build']}")
    print(
        f"{builds[0]['device']}, torch {torch.__version__}: medians of {options.rounds} rounds of "
        f"{options.runs} runs in turns, ms; from–to: the rounds' own ratios"
    )
    heads = ("problem", "pass", "old", "new", "new/old", "from–to", "same bits")
    print("{:48} {:18} {:>9} {:>9} {:>8} {:>13}  {}".format(*heads))
    rows, failures = [], []
    for number, problem in cases.items():
        try:
            facts, samples = alternate(workers, number, options.rounds)
        except RuntimeError as error:
            failures.append(f"{problem}: {error}")
            print(f"FAILED {failures[-1]}", flush=True)
            continue
        for which in samples[0]:
            old, new = (own[which] for own in samples)
            old_ms, new_ms = (statistics.median(chain(*lists)) for lists in (old, new))
            ratios = [
                statistics.median(b) / statistics.median(a) for a, b in zip(old, new, strict=True)
            ]
            key = which if which in facts[0] else "forward"
            row = {
                **facts_of(problem), "which": which, "old_ms": old_ms, "new_ms": new_ms,
                "ratio": new_ms / old_ms, "ratios_of_rounds": ratios,
                "same_bits": facts[0][key] == facts[1][key],
            }  # fmt: skip
            rows.append(row)
            print(line_of(row), flush=True)
    for worker in workers:
        worker.close()
    by_ratio = sorted(rows, key=lambda row: row["ratio"])
    notable = {"median": by_ratio[len(rows) // 2], "worst": by_ratio[-1]} if rows else {}
    for name, row in notable.items():
        print(f"{name} of {len(rows)} rows: {row['ratio']:.3f}, {row['problem']} {row['which']}")
    slower = [row for row in by_ratio if row["ratio"] > _NOTED_RATIO]
    print(f"{len(slower)} rows above {_NOTED_RATIO}, {len(failures)} problems failed")
    for row in slower:
        print(line_of(row))
    if options.json:
        content = {
            "environment": {
                "device": builds[0]["device"],
                "torch": torch.__version__,
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "old": builds[0],
                "new": builds[1],
            },
            "settings": {"rounds": options.rounds, "runs": options.runs, "warmup": _WARMUP},
            "rows": rows,
            **notable,
            "failures": failures,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if failures or not rows else 0


def main() -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    # fmt: off
    add("old", type=Path, nargs="?", help="folder that holds the old selective_scan package")
    add("new", type=Path, nargs="?", help="folder that holds the new one")
    add("--users", action="store_true",
        help="the calls that published models make (harness/users.py)")
    add("--rounds", type=positive, default=5, help="turns of each build (default: 5)")
    add("--runs", type=positive, default=10, help="timed runs of a pass in each turn (default: 10)")
    add("--only", default="", metavar="REGEX", help="only the problems whose printed name matches")
    add("--quick", action="store_true", help="small shapes: a test of the program")
    add("--work", help=argparse.SUPPRESS)
    # fmt: on
    options = parser.parse_args()
    if options.work:
        work(options)
        return 0
    if options.new is None:
        parser.error("two folders are required")
    try:
        return compare(options)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    sys.exit(main())
