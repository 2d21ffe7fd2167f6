"""Profiles the elementary operations of the discretization methods, and their cost in the scan.

There are two parts, which both run unless one is named: the elementary operations (exp, expm1,
division, inverse of small matrices), and selective_scan_fn with each method, forward and backward,
kernel against reference.

Example:
    python benchmarks/profile_discretization.py --batch 2 --dim 256 --seqlen 512 --dstate 16 \\
        --json profile.json --plot profile.png
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from harness import plots, records, report
from harness.arguments import measuring_parser, parse, positive
from harness.operators import Scan, make_scan
from harness.problems import DTYPES, METHODS, Problem, Shape
from harness.timing import Timing, measure
from selective_scan import selective_scan_fn


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    # fmt: off
    add("--batch", type=positive, default=2)
    add("--dim", type=positive, default=256)
    add("--seqlen", type=positive, default=256)
    add("--dstate", type=positive, default=16)
    add("--n_trials", type=positive, default=10, help="timed runs (default: 10)")
    add("--profile_ops", action="store_true", help="only the elementary operations")
    add("--profile_scan", action="store_true", help="only the scan")
    add("--dtype", choices=DTYPES, default="float32")
    add("--seed", type=int, default=0)
    add("--plot", type=Path, metavar="FILE", help="write a bar chart")
    # fmt: on
    return parse(parser, arguments)


def cost(
    name: str, implementation: str, which: str, count: int, unit: str, time: Timing
) -> records.Row:
    """Returns the row of one operation or pass: its time for `count` elements or state updates."""
    return {
        "name": name,
        "implementation": implementation,
        "which": which,
        "count": count,
        "unit": unit,
        "time": dataclasses.asdict(time),
        "ns_per_unit": time.median * 1e6 / count,
        "units_per_s": count / time.median * 1e3,
    }


def profile_operations(problem: Problem, device: torch.device, trials: int) -> list[records.Row]:
    """Times elementwise operations on x = Δ·A of every state update, up to 2^24 elements.

    The inverse is that of 1 − Δ·A/2 for a full dstate × dstate matrix per channel, which a
    non-diagonal bilinear discretization would need at every step. It is computed in at least
    float32, since LAPACK has no half precision.
    """
    shape = problem.shape
    dtype = DTYPES[problem.dtype]
    elements = min(problem.updates, 1 << 24)
    x = -torch.rand(elements, device=device).to(dtype)
    divisor = 1 - x / 2
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    matrices = torch.randn(shape.batch * shape.dim, shape.dstate, shape.dstate, device=device)
    identity = torch.eye(shape.dstate, device=device, dtype=wide)
    systems = identity + 0.5 / shape.dstate * matrices.to(wide)

    out = torch.empty_like(x)
    inverses = torch.empty_like(systems)
    calls = {
        "copy": lambda: out.copy_(x),
        "multiply": lambda: torch.mul(x, divisor, out=out),
        "exp": lambda: torch.exp(x, out=out),
        "expm1": lambda: torch.expm1(x, out=out),
        "division": lambda: torch.div(x, divisor, out=out),
        "matrix inverse": lambda: torch.linalg.inv(systems, out=inverses),
    }
    times = measure(calls, device, warmup=2, runs=trials)
    inverse = times.pop("matrix inverse")
    unit = f"{shape.dstate} × {shape.dstate} matrix"
    return [
        *(cost(name, "torch", "", elements, "element", time) for name, time in times.items()),
        cost("matrix inverse", "torch", "", systems.shape[0], unit, inverse),
    ]


def scan_passes(scan: Scan, backend: str) -> dict[str, Callable[[], object]]:
    """Returns forward without gradients, and backward alone, whose graph is kept between calls."""
    leaves = {name: x.detach().requires_grad_() for name, x in scan.tensors.items()}
    out = selective_scan_fn(**scan.keywords(leaves), backend=backend)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return selective_scan_fn(**scan.keywords(), backend=backend)

    def backward() -> object:
        return torch.autograd.grad(out, list(leaves.values()), scan.dout, retain_graph=True)

    return {"forward": forward, "backward": backward}


def profile_scan(problem: Problem, device: torch.device, trials: int) -> list[records.Row]:
    costs = []
    for method in METHODS:
        scan = make_scan(dataclasses.replace(problem, method=method), device, torch.initial_seed())
        for implementation, backend in (("kernel", device.type), ("reference", "reference")):
            passes = scan_passes(scan, backend)
            times = measure(passes, device, warmup=1, runs=trials, budget=10)
            costs += [
                cost(method, implementation, which, problem.updates, "state update", time)
                for which, time in times.items()
            ]
    return costs


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.manual_seed(options.seed)
    shape = Shape("profile", options.batch, options.dim, options.seqlen, options.dstate)
    problem = Problem(shape, options.dtype)
    both = options.profile_ops == options.profile_scan
    operations, scan = [], []
    if both or options.profile_ops:
        operations = profile_operations(problem, options.device, options.n_trials)
    if both or options.profile_scan:
        scan = profile_scan(problem, options.device, options.n_trials)

    environment = records.environment(options.device)
    title = (
        f"{environment['device']}, {options.dtype}, (batch, dim, seqlen, dstate) = "
        f"{problem.sizes[:4]}"
    )
    print(f"{title}, torch {environment['torch']}, {environment['threads']} threads")
    names = "name implementation which time ns_per_unit units_per_s unit"
    parts = {"elementary operations": operations, "selective_scan_fn": scan}
    for part, costs in parts.items():
        if costs:
            report.print_table(f"{part}, ms: median (quartiles)", costs, names)
    content = {
        "environment": environment,
        "shape": dataclasses.asdict(shape),
        "dtype": options.dtype,
        "operations": operations,
        "scan": scan,
    }
    records.write(options.json, content)
    if options.plot:
        plots.plot_bars(
            options.plot, title, parts, "ns per element, matrix or state update",
            label=lambda cost: cost["name"], length=lambda cost: cost["ns_per_unit"],
            group=lambda cost: f"{cost['implementation']} {cost['which']}".strip(),
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
