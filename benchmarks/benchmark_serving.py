#!/usr/bin/env python3
"""Times the state update, which a server runs for every token, against the time of moving its bytes
once, and against mamba_ssm's Triton kernel if that is importable.

The bytes are those of the states, read and written, and of the inputs and the output. On a GPU
several calls are timed in a CUDA graph, which a decoder would replay, and the host's time of eager
calls is measured. On a CPU the host's clock times the whole Python call. Results are compared with
the reference in fp64 first.

Example:
    python benchmarks/benchmark_serving.py --device cpu --threads 1 2 --batch 1 64
    python benchmarks/benchmark_serving.py --dim 1536 5120 --json serving.json --plot serving.png
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from harness import arguments, ceilings, plots, records, report, timing
from harness.checks import relative_l2
from harness.problems import METHODS
from selective_scan import selective_state_update, selective_state_update_ref

_GRAPH_CALLS = 10  # calls in one graph, so that the graph's launch is negligible
_ERROR_ALLOWED = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}


@dataclass(frozen=True)
class UpdateProblem:
    batch: int
    dim: int
    dstate: int
    state: str
    dtype: str  # of x, dt, z, B and C
    method: str

    @property
    def bytes_moved(self) -> int:
        size, of_state = (getattr(torch, name).itemsize for name in (self.dtype, self.state))
        of_rows = self.batch * (4 * self.dim + 2 * self.dstate) * size
        of_channels = self.dim * (self.dstate + 2) * 4  # A, D and dt_bias
        return 2 * of_state * self.batch * self.dim * self.dstate + of_rows + of_channels

    def make(self, device: torch.device) -> dict[str, Tensor]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(getattr(torch, self.dtype))

        rows = (self.batch, self.dim)
        return {
            "state": torch.randn(*rows, self.dstate, device=device).to(getattr(torch, self.state)),
            "x": normal(*rows),
            "dt": normal(*rows),
            "A": -torch.rand(self.dim, self.dstate, device=device) - 0.5,
            "B": normal(self.batch, self.dstate),
            "C": normal(self.batch, self.dstate),
            "D": torch.randn(self.dim, device=device),
            "z": normal(*rows),
            "dt_bias": torch.randn(self.dim, device=device) - 4,
        }


def relative_error(problem: UpdateProblem, tensors: dict[str, Tensor]) -> float:
    """Returns the relative error of out against the reference in fp64."""
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    options = {"dt_softplus": True, "discretization_method": problem.method}
    exact = selective_state_update_ref(**wide, **options)
    out = selective_state_update(**tensors, **options)
    return relative_l2(out, exact)


def mamba_ssm_step() -> Callable[..., Tensor] | None:
    """Returns mamba_ssm's Triton kernel, None if it is not importable."""
    try:
        module = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
    except ImportError:
        return None
    return module.selective_state_update


def measure(
    problem: UpdateProblem,
    threads: int,
    options: argparse.Namespace,
    copy_bytes_per_s: float,
) -> list[records.Row]:
    """Returns a row for this package, and one for mamba_ssm if it is available."""
    device = options.device
    tensors = problem.make(device)
    error = relative_error(problem, tensors)
    if not error < _ERROR_ALLOWED[problem.dtype]:
        raise RuntimeError(f"{problem} is wrong: relative error {error}")
    positional = tuple(tensors.values())
    calls = {
        "selective_scan": lambda: selective_state_update(
            *positional, True, discretization_method=problem.method
        )
    }
    other = mamba_ssm_step() if device.type == "cuda" and problem.method == "zoh" else None
    if other is not None:
        calls["mamba_ssm"] = lambda: other(*positional, True)
    is_cuda = device.type == "cuda"
    timed = (
        {name: timing.in_graph(call, _GRAPH_CALLS) for name, call in calls.items()}
        if is_cuda
        else calls
    )
    times = timing.sample(timed, device, warmup=3, runs=options.runs, budget=options.budget)
    per_call = _GRAPH_CALLS if is_cuda else 1
    rows = []
    for name, call in calls.items():
        time = timing.Timing.of([1e3 * milliseconds / per_call for milliseconds in times[name]])
        host = timing.host_overhead_us(call, device, calls=options.host_calls) if is_cuda else None
        floor_us = problem.bytes_moved / copy_bytes_per_s * 1e6
        rows.append(
            {
                "operator": "selective_state_update",
                **dataclasses.asdict(problem),
                "implementation": name,
                "threads": threads,
                "time_us": dataclasses.asdict(time),
                "host_us": host and dataclasses.asdict(host),
                "bytes_moved": problem.bytes_moved,
                "GB_per_s": problem.bytes_moved / time.median / 1e3,
                "of_copy_bandwidth": floor_us / time.median,
                "error": error if name == "selective_scan" else None,
            }
        )
    return rows


def parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = arguments.measuring_parser(__doc__)
    positive = arguments.positive
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--dim", type=positive, nargs="+", default=[1536])
    parser.add_argument("--dstate", type=positive, nargs="+", default=[16])
    parser.add_argument("--state", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--dtype", nargs="+", help="dtypes of x, dt, z, B and C (default: bfloat16)"
    )
    parser.add_argument("--method", nargs="+", default=["zoh"], choices=METHODS)
    parser.add_argument("--threads", type=positive, nargs="+", help="CPU threads")
    parser.add_argument("--runs", type=positive, default=30)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for each problem")
    parser.add_argument("--host-calls", type=positive, default=1000)
    parser.add_argument("--plot", type=Path, help="where to draw the times")
    options = arguments.parse(parser, command_line)
    options.dtype = options.dtype or ["bfloat16"]
    for name in (*options.dtype, *options.state):
        if name not in _ERROR_ALLOWED:
            parser.error(f"dtypes are {', '.join(_ERROR_ALLOWED)}, got {name!r}")
    return options


@torch.no_grad()
def main(command_line: list[str] | None = None) -> None:
    options = parse(command_line)
    if options.device.type == "cpu":
        timing.keep_freed_memory()
    threads_of = options.threads or [torch.get_num_threads()]
    rows = []
    for threads in threads_of if options.device.type == "cpu" else [1]:
        if options.device.type == "cpu":
            torch.set_num_threads(threads)
        copy = ceilings.copy_bandwidth(options.device)
        sizes = (options.batch, options.dim, options.dstate)
        kinds = (options.state, options.dtype, options.method)
        for axes in itertools.product(*sizes, *kinds):
            rows += measure(UpdateProblem(*axes), threads, options, copy)
        print(f"copy bandwidth: {copy / 1e9:.0f} GB/s")
    title = f"selective_state_update on {records.device_name(options.device)}"
    report.print_table(
        title,
        rows,
        "implementation batch dim dstate state dtype method threads time_us=time,_µs "
        "host_us=host,_µs GB_per_s=GB/s of_copy_bandwidth error",
    )
    records.write(options.json, {"environment": records.environment(options.device), "rows": rows})
    if options.plot:
        panels = {
            f"dim {dim}, dstate {dstate}": [
                row for row in rows if (row["dim"], row["dstate"]) == (dim, dstate)
            ]
            for dim, dstate in itertools.product(options.dim, options.dstate)
        }
        plots.plot_bars(
            options.plot, title, panels, "µs for a step",
            label=lambda row: f"batch {row['batch']}, {row['method']}, {row['dtype']}, "
                              f"states {row['state']}",
            group=lambda row: f"{row['implementation']}, {row['threads']} threads"
                              if options.device.type == "cpu" else row["implementation"],
            length=lambda row: row["time_us"]["median"],
        )  # fmt: skip


if __name__ == "__main__":
    main()
