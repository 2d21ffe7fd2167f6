"""Times two builds of the library in turns on one device, and says where they differ.

Each folder holds an importable selective_scan package with its libraries; two builds register the
same operators, so each runs in a process of its own. For every problem both make the same inputs,
then the processes take turns; a row compares the medians of all runs of a pass. "same bits" says
whether all results of the two builds are equal. Needs PyTorch alone.

Example:
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
from itertools import chain
from pathlib import Path

import torch

from harness.arguments import add_device, find_device, make_parser, positive
from harness.operators import Scan, make_scan
from harness.problems import METHODS, SHAPES, Problem, Shape, parse_shape, product, select_problems
from harness.timing import REST_SECONDS, sample
from harness.workers import Worker, alternate, serve

_SHAPES = (
    "mamba-130m", "mamba-790m", "mamba-2.8b", "vim-small", "vmamba-t", "vmamba-hi", "d-state64",
    "launch-bound", "long-64k", "long-1m", "2,1024,800,16", "64,384,197,16",
    *(f"8,1536,2048,{dstate}" for dstate in (1, 4, 8, 32)),
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
    """Of all bits, and of the places at which they are."""
    bits = tensor.detach().reshape(-1).view(torch.uint8).view(torch.int16)
    columns = 1021
    whole = bits.numel() // columns * columns
    sums = bits[:whole].view(-1, columns).sum(0, dtype=torch.int64)
    weights = torch.arange(1, columns + 1, device=bits.device)
    return int((weights * sums).sum()) + int((weights[: bits.numel() - whole] * bits[whole:]).sum())


def work(options: argparse.Namespace) -> None:
    import selective_scan

    found = Path(selective_scan.__file__).resolve().parents[1]
    if found != Path(options.work).resolve():
        raise RuntimeError(f"selective_scan came from {found}, not from {options.work}")
    device = find_device(options.device)
    cases = problems(options.quick)
    scan: Scan | None = None

    def describe() -> dict[str, object]:
        is_cuda = device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(device) if is_cuda else "CPU",
            "version": selective_scan.__version__,
            "build": dict(selective_scan.backends()[device.type].build),
        }

    def prepare(case: int) -> dict[str, list[int]]:
        nonlocal scan
        scan = None  # frees the memory of the case before
        scan = make_scan(cases[case], device, seed=case)
        *results, saved = scan.forward(True)
        gradients = scan.backward(saved)
        present = [result for result in results if result is not None]
        return {
            "forward": [checksum(result) for result in present],
            "backward": [checksum(gradient) for gradient in gradients.values()],
        }

    def measure() -> dict[str, list[float]]:
        calls = scan.passes(backward=True)
        samples = sample(calls, device, warmup=_WARMUP, runs=options.runs)
        if device.type == "cpu":
            time.sleep(REST_SECONDS)
        return samples

    serve(describe=describe, prepare=prepare, measure=measure)


def compare(options: argparse.Namespace) -> int:
    cases = {
        number: problem
        for number, problem in enumerate(problems(options.quick))
        if re.search(options.only, str(problem))
    }
    command = [sys.executable, __file__, "--device", options.device, "--runs", str(options.runs)]
    command += ["--quick"] if options.quick else []
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
    builds = [worker.receive() for worker in workers]  # both have been starting meanwhile
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
            key = "backward" if which == "backward" else "forward"
            row = {
                "problem": str(problem), "operator": problem.operator, "sizes": problem.sizes,
                "dtype": problem.dtype, "variant": problem.variant.name, "method": problem.method,
                "which": which, "old_ms": old_ms, "new_ms": new_ms, "ratio": new_ms / old_ms,
                "ratios_of_rounds": ratios, "same_bits": facts[0][key] == facts[1][key],
            }  # fmt: skip
            rows.append(row)
            print(
                f"{row['problem']:48} {which:18} {old_ms:9.4f} {new_ms:9.4f} {row['ratio']:8.3f} "
                f"{min(ratios):6.3f}–{max(ratios):.3f}  {'yes' if row['same_bits'] else 'no'}",
                flush=True,
            )
    for worker in workers:
        worker.close()
    by_ratio = sorted(rows, key=lambda row: row["ratio"])
    notable = {"median": by_ratio[len(rows) // 2], "worst": by_ratio[-1]} if rows else {}
    for name, row in notable.items():
        print(f"{name} of {len(rows)} rows: {row['ratio']:.3f}, {row['problem']} {row['which']}")
    slower = sum(row["ratio"] > _NOTED_RATIO for row in rows)
    print(f"{slower} rows above {_NOTED_RATIO}, {len(failures)} problems failed")
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
    parser = make_parser(__doc__)
    add_device(parser)
    add = parser.add_argument
    # fmt: off
    add("old", type=Path, nargs="?", help="folder that holds the old selective_scan package")
    add("new", type=Path, nargs="?", help="folder that holds the new one")
    add("--rounds", type=positive, default=5, help="turns of each build (default: 5)")
    add("--runs", type=positive, default=10, help="timed runs of a pass in each turn (default: 10)")
    add("--only", default="", metavar="REGEX", help="the problems whose printed name matches")
    add("--quick", action="store_true", help="small shapes: a test of the program")
    add("--json", type=Path, metavar="FILE", help="write rows and environment")
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
