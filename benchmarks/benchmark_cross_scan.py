#!/usr/bin/env python3
"""Times the scan of a map in four directions against VMamba's way: copies of the map in four
orders, one scan of all copies, and a merge of its results, in PyTorch around the same kernels.

The shapes are the stages of VMamba-T for an image of 224 x 224 pixels. For both, step sizes and
projections are in the order of their direction, since projections can be computed in any order. A
call is forward, or forward and backward; results are compared first. On a GPU a call is timed
eagerly and in a CUDA graph, which shows the time with a fast enough host.

Example:
    python benchmarks/benchmark_cross_scan.py --json cross_scan.json
    python benchmarks/benchmark_cross_scan.py --device cpu --batch 4 --dtype float32
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness import arguments, records, report, timing
from harness.checks import relative_l2
from selective_scan import selective_scan_fn
from selective_scan.vision import cross_scan_fn

_ERROR_ALLOWED = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
_STAGES = {96: 56, 192: 28, 384: 14, 768: 7}  # the side length of the map by channels


@dataclass(frozen=True)
class Problem:
    batch: int
    dim: int
    side: int
    dstate: int
    dtype: str

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Returns the inputs; delta, B and C of four directions, (batch, 4, ...), are sequences in
        the order of their direction."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        steps, dtype = self.side**2, getattr(torch, self.dtype)
        return {
            "x": normal(self.batch, self.dim, self.side, self.side).to(dtype),
            "delta": normal(self.batch, 4, self.dim, steps).to(dtype),
            "B": normal(self.batch, 4, self.dstate, steps).to(dtype),
            "C": normal(self.batch, 4, self.dstate, steps).to(dtype),
            "A": -torch.rand(4, self.dim, self.dstate, device=device) - 0.5,
            "D": normal(4, self.dim),
            "delta_bias": normal(4, self.dim) - 4,
        }


class Copied:
    """VMamba's way in PyTorch, around one scan of four times the channels."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        joined = {"delta": 1, "A": 0, "D": 0, "delta_bias": 0}  # the first dimension to flatten
        self.tensors = {
            name: (value.flatten(joined[name], joined[name] + 1) if name in joined else value)
            .clone()
            .requires_grad_()
            for name, value in tensors.items()
        }
        self.leaves = list(self.tensors.values())

    def forward(self) -> Tensor:
        x, *others = self.tensors.values()
        batch, dim, height, width = x.shape
        ordered = torch.stack([x.flatten(-2), x.mT.flatten(-2)], 1)
        u = torch.cat([ordered, ordered.flip(-1)], 1).flatten(1, 2)
        delta, B, C, A, D, delta_bias = others
        y = selective_scan_fn(u, delta, A, B, C, D, delta_bias=delta_bias, delta_softplus=True)
        y = y.view(batch, 4, dim, height * width)
        y = y[:, :2] + y[:, 2:].flip(-1)
        return y[:, 0].unflatten(-1, (height, width)) + y[:, 1].unflatten(-1, (width, height)).mT


class Crossed:
    """One call of cross_scan_fn, whose inputs are maps instead of sequences."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        height, width = tensors["x"].shape[-2:]

        def placed(k: int, sequence: Tensor) -> Tensor:
            sequence = sequence.flip(-1) if k >= 2 else sequence.clone()
            by_rows = sequence.unflatten(-1, (height, width))
            return (sequence.unflatten(-1, (width, height)).mT if k % 2 else by_rows).detach()

        def leaf(name: str, value: Tensor) -> Tensor | list[Tensor]:
            if name not in ("delta", "B", "C"):
                return value.clone().requires_grad_()
            return [placed(k, part).requires_grad_() for k, part in enumerate(value.unbind(1))]

        self.tensors = {name: leaf(name, value) for name, value in tensors.items()}
        values = self.tensors.values()
        self.leaves = [t for v in values for t in (v if isinstance(v, list) else [v])]

    def forward(self) -> Tensor:
        return cross_scan_fn(**self.tensors, delta_softplus=True)


def measure(problem: Problem, options: argparse.Namespace) -> list[records.Row]:
    device = options.device
    tensors = problem.tensors(device)
    dout = torch.randn_like(tensors["x"])
    implementations = {"copies, scan, merge": Copied(tensors), "cross_scan_fn": Crossed(tensors)}
    (base, base_dx), (out, dx) = (
        (out.detach(), *torch.autograd.grad(out, [it.tensors["x"]], dout))
        for it in implementations.values()
        for out in (it.forward(),)
    )
    error = max(relative_l2(out, base), relative_l2(dx, base_dx))
    if not error < _ERROR_ALLOWED[problem.dtype]:
        raise RuntimeError(f"{problem} is wrong: relative error {error}")

    def forward(it: Copied | Crossed) -> Callable[[], object]:
        return torch.no_grad()(it.forward)

    def train(it: Copied | Crossed) -> Callable[[], object]:
        return lambda: torch.autograd.grad(it.forward(), it.leaves, dout)

    rows = []
    is_cuda = device.type == "cuda"
    for which, is_graph in itertools.product((forward, train), (False, True)[: 1 + is_cuda]):
        calls = {name: which(it) for name, it in implementations.items()}
        if is_graph:
            calls = {name: timing.in_graph(call) for name, call in calls.items()}
        times = timing.measure(calls, device, warmup=2, runs=options.runs, budget=options.budget)
        rows += [
            {
                "operator": "cross_scan_fn",
                **dataclasses.asdict(problem),
                "which": which.__name__,
                "graph": is_graph,
                "implementation": name,
                "time_ms": dataclasses.asdict(times[name]),
                "of_copies": times[name].median / times["copies, scan, merge"].median,
                "error": error,
            }
            for name in implementations
        ]
    return rows


def parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = arguments.measuring_parser(__doc__)
    positive = arguments.positive
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--dim", type=int, nargs="+", default=list(_STAGES), choices=_STAGES)
    parser.add_argument("--dstate", type=positive, nargs="+", default=[1])
    parser.add_argument("--dtype", nargs="+", default=["float16"], choices=_ERROR_ALLOWED)
    parser.add_argument("--runs", type=positive, default=20)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for each pass")
    return arguments.parse(parser, command_line)


def main(command_line: list[str] | None = None) -> None:
    options = parse(command_line)
    if options.device.type == "cpu":
        timing.keep_freed_memory()
    rows = []
    for dim, dstate, dtype in itertools.product(options.dim, options.dstate, options.dtype):
        rows += measure(Problem(options.batch, dim, _STAGES[dim], dstate, dtype), options)
    report.print_table(
        f"Maps in four directions on {records.device_name(options.device)}",
        rows,
        "which graph implementation batch dim side dstate dtype time_ms=time,_ms of_copies error",
    )
    records.write(options.json, {"environment": records.environment(options.device), "rows": rows})


if __name__ == "__main__":
    main()
