"""Profiles what the discretization methods are made of, and what they cost in the scan.

Two parts, both run unless one is named: the elementary operations (exp, expm1, division, inverse
of small matrices), and selective_scan_fn with each method, forward and backward, kernel against
reference.

Example:
    python benchmarks/profile_discretization.py --batch 2 --dim 256 --seqlen 512 --dstate 16 \\
        --json profile.json --plot profile.png
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from rich.console import Console

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import report
from arguments import find_device, make_parser, positive
from problems import DTYPES, METHODS, Inputs, Problem, Shape, make_inputs
from selective_scan import selective_scan_fn
from timing import Timing, measure


@dataclass(frozen=True)
class Cost:
    """One operation or pass: its time, for how many elements or state updates."""

    name: str
    implementation: str
    which: str
    count: int
    unit: str
    time: Timing

    @property
    def ns_per_unit(self) -> float:
        return self.time.median * 1e6 / self.count

    @property
    def units_per_s(self) -> float:
        return self.count / self.time.median * 1e3

    def as_json(self) -> dict[str, object]:
        derived = {"ns_per_unit": self.ns_per_unit, "units_per_s": self.units_per_s}
        return {**dataclasses.asdict(self), **derived}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    # fmt: off
    add("--batch", type=positive, default=2)
    add("--dim", type=positive, default=256)
    add("--seqlen", type=positive, default=256)
    add("--dstate", type=positive, default=16)
    add("--n_trials", type=positive, default=10, help="timed runs (default: 10)")
    add("--profile_ops", action="store_true", help="only the elementary operations")
    add("--profile_scan", action="store_true", help="only the scan")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N (default: cuda where there is one)")
    add("--dtype", choices=DTYPES, default="float32")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write costs and environment")
    add("--plot", type=Path, metavar="FILE", help="write a bar chart")
    # fmt: on
    options = parser.parse_args(arguments)
    try:
        options.device = find_device(options.device)
    except RuntimeError as error:
        parser.error(str(error))
    return options


def profile_operations(problem: Problem, device: torch.device, trials: int) -> list[Cost]:
    """Elementwise on x = Δ·A of one step of every state, at seqlen steps as far as 2^24 elements.

    The inverse is that of 1 − Δ·A/2 for a full dstate × dstate matrix per channel, which a
    non-diagonal bilinear discretization would need at every step; LAPACK has no half precision, so
    it is done in float32 at least.
    """
    shape = problem.shape
    dtype = DTYPES[problem.dtype]
    elements = min(shape.updates, 1 << 24)
    x = -torch.rand(elements, device=device).to(dtype)
    divisor = 1 - x / 2
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    matrices = torch.randn(shape.batch * shape.dim, shape.dstate, shape.dstate, device=device)
    identity = torch.eye(shape.dstate, device=device, dtype=wide)
    systems = identity + 0.5 / shape.dstate * matrices.to(wide)

    out = torch.empty_like(x)
    inverses = torch.empty_like(systems)
    calls: dict[str, tuple[Callable[[], object], int, str]] = {
        "copy": (lambda: out.copy_(x), elements, "element"),
        "multiply": (lambda: torch.mul(x, divisor, out=out), elements, "element"),
        "exp": (lambda: torch.exp(x, out=out), elements, "element"),
        "expm1": (lambda: torch.expm1(x, out=out), elements, "element"),
        "division": (lambda: torch.div(x, divisor, out=out), elements, "element"),
        "matrix inverse": (
            lambda: torch.linalg.inv(systems, out=inverses), systems.shape[0],
            f"{shape.dstate} × {shape.dstate} matrix",
        ),
    }  # fmt: skip
    times = measure({name: call[0] for name, call in calls.items()}, device, warmup=2, runs=trials)
    return [
        Cost(name, "torch", "", count, unit, times[name])
        for name, (_, count, unit) in calls.items()
    ]


def scan_passes(inputs: Inputs, backend: str) -> dict[str, Callable[[], object]]:
    """Forward without gradients, and backward alone: the graph is kept between calls."""
    keywords = inputs.keywords()
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.tensors().items()}
    out = selective_scan_fn(**{**keywords, **leaves}, backend=backend)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return selective_scan_fn(**keywords, backend=backend)

    def backward() -> object:
        return torch.autograd.grad(out, list(leaves.values()), inputs.dout, retain_graph=True)

    return {"forward": forward, "backward": backward}


def profile_scan(shape: Shape, dtype: str, device: torch.device, trials: int) -> list[Cost]:
    costs = []
    for method in METHODS:
        inputs = make_inputs(Problem(shape, dtype, method=method), device, torch.initial_seed())
        for implementation, backend in (("kernel", device.type), ("reference", "reference")):
            times = measure(scan_passes(inputs, backend), device, warmup=1, runs=trials, budget=10)
            costs += [
                Cost(method, implementation, which, shape.updates, "state update", time)
                for which, time in times.items()
            ]
    return costs


def print_costs(console: Console, title: str, name: str, costs: list[Cost]) -> None:
    reference = {
        (cost.name, cost.which): cost.time.median
        for cost in costs
        if cost.implementation == "reference"
    }
    lines = []
    for cost in costs:
        other = reference.get((cost.name, cost.which))
        is_kernel = cost.implementation == "kernel" and other is not None
        lines.append(
            (
                cost.name, cost.implementation, cost.which, report.format_ms(cost.time.median),
                f"{report.format_ms(cost.time.q1)}–{report.format_ms(cost.time.q3)}",
                f"{cost.ns_per_unit:.3f}", f"{cost.units_per_s:.3g}", cost.unit,
                report.format_ratio(other / cost.time.median) if is_kernel else "",
            )
        )  # fmt: skip
    header = (name, "implementation", "pass", "ms", "q1–q3", "ns each", "per second", "unit",
              "× ref")  # fmt: skip
    report.print_table(console, title, header, lines)


def plot_costs(operations: list[Cost], scan: list[Cost], title: str, path: Path) -> None:
    parts = [part for part in (operations, scan) if part]
    figure, all_axes = plt.subplots(
        1, len(parts), figsize=(6.5 * len(parts), 4.2), squeeze=False, layout="constrained"
    )
    for axes, part in zip(all_axes[0], parts, strict=True):
        groups = list(dict.fromkeys((cost.implementation, cost.which) for cost in part))
        names = list(dict.fromkeys(cost.name for cost in part))
        width = 0.8 / len(groups)
        for index, group in enumerate(groups):
            chosen = [cost for cost in part if (cost.implementation, cost.which) == group]
            places = [names.index(cost.name) + index * width for cost in chosen]
            label = " ".join(filter(None, group))
            axes.bar(places, [cost.ns_per_unit for cost in chosen], width, label=label)
        axes.set_xticks([i + 0.4 - width / 2 for i in range(len(names))], names, rotation=20)
        axes.set_yscale("log")
        is_scan = part is scan
        axes.set_ylabel("ns per state update" if is_scan else "ns per element or matrix")
        axes.set_title("selective_scan_fn" if is_scan else "elementary operations")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


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
        scan = profile_scan(shape, options.dtype, options.device, options.n_trials)

    environment = report.environment(options.device)
    console = report.console()
    title = (
        f"{environment['device']}, {options.dtype}, (batch, dim, seqlen, dstate) = "
        f"{shape.sizes[:-1]}"
    )
    console.print(f"{title}, torch {environment['torch']}, {environment['threads']} threads")
    if operations:
        print_costs(console, "Elementary operations", "operation", operations)
    if scan:
        print_costs(console, "selective_scan_fn", "method", scan)
    if options.json:
        content = {
            "environment": environment,
            "shape": dataclasses.asdict(shape),
            "dtype": options.dtype,
            "operations": [cost.as_json() for cost in operations],
            "scan": [cost.as_json() for cost in scan],
        }
        report.write_json(options.json, content)
        console.print(f"Wrote {options.json}")
    if options.plot:
        plot_costs(operations, scan, title, options.plot)
        console.print(f"Drew {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
