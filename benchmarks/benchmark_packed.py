#!/usr/bin/env python3
"""Times the selective scan of packed sequences against a dense batch of as many steps, against
padding all sequences to the longest, and against prefill, which keeps the states in a pool.

Lengths are drawn from a log-normal distribution, except for one long sequence. All tensors are
channel-last, as in a Mamba layer. A call is forward, or forward and backward. Before timing, packed
results are compared with those of separate sequences, and those of prefill with the packed ones.

Example:
    python benchmarks/benchmark_packed.py --json packed.json
    python benchmarks/benchmark_packed.py --device cpu --sequences 16 --mean 64 --longest 512
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness import arguments, records, report, timing
from harness.checks import relative_l2
from harness.problems import METHODS
from selective_scan import selective_scan_fn, selective_scan_prefill

_ERROR_ALLOWED = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
_SPREAD = 1.0  # standard deviation of the lengths' logarithms


@dataclass(frozen=True)
class Problem:
    sequences: int
    mean: int
    longest: int
    dim: int
    dstate: int
    dtype: str
    method: str

    def lengths(self) -> list[int]:
        """Returns the sequences' lengths, the same on every run."""
        random = torch.Generator().manual_seed(self.sequences)
        normal = torch.randn(self.sequences - 1, generator=random, dtype=torch.float64)
        scaled = torch.exp(_SPREAD * normal - _SPREAD**2 / 2) * self.mean
        others = scaled.round().clamp(1, self.longest).long().tolist()
        place = self.sequences // 3
        return [*others[:place], self.longest, *others[place:]]

    def tensors(self, batch: int, seqlen: int, device: torch.device) -> dict[str, Tensor]:
        def rows(channels: int) -> Tensor:
            values = torch.randn(batch, seqlen, channels, device=device)
            return values.to(getattr(torch, self.dtype)).transpose(1, 2)

        tensors = {
            "u": rows(self.dim),
            "delta": rows(self.dim),
            "A": -torch.rand(self.dim, self.dstate, device=device) - 0.5,
            "B": rows(self.dstate),
            "C": rows(self.dstate),
            "D": torch.randn(self.dim, device=device),
            "z": rows(self.dim),
            "delta_bias": torch.randn(self.dim, device=device) - 4,
        }
        return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


class Batch:
    """One call on a batch of sequences, possibly packed."""

    def __init__(
        self,
        problem: Problem,
        batch: int,
        seqlen: int,
        device: torch.device,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        self.tensors = problem.tensors(batch, seqlen, device)
        self.steps = batch * seqlen
        self.options = {
            "delta_softplus": True,
            "discretization_method": problem.method,
            "cu_seqlens": cu_seqlens,
        }
        self._dout = torch.randn_like(self.tensors["u"])

    def forward(self) -> Tensor:
        with torch.no_grad():
            return selective_scan_fn(**self.tensors, **self.options)

    def train(self) -> tuple[Tensor, ...]:
        out = selective_scan_fn(**self.tensors, **self.options)
        return torch.autograd.grad(out, list(self.tensors.values()), self._dout)

    def error_of_sequences(self, lengths: list[int]) -> float:
        """Returns the largest error of a packed sequence against its separate scan."""
        out, largest = self.forward(), 0.0
        options = self.options | {"cu_seqlens": None}
        for begin, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
            alone = {
                name: tensor[..., begin:end] if tensor.dim() == 3 else tensor
                for name, tensor in self.tensors.items()
            }
            with torch.no_grad():
                expected = selective_scan_fn(**alone, **options)
            largest = max(largest, relative_l2(out[..., begin:end], expected))
        return largest


class Prefill:
    """The same packed sequences, each continuing from its slot of a pool in u's dtype."""

    def __init__(self, packed: Batch, lengths: list[int], every: int) -> None:
        """`every` is the number of steps between two states that are kept, 0 for none."""
        u, A = packed.tensors["u"], packed.tensors["A"]
        count, columns = len(lengths), max(lengths) // every if every else 0
        slots = torch.arange(count * (1 + columns), device=u.device)
        self.steps = packed.steps
        self._tensors = packed.tensors | {
            name: packed.tensors[name][0] for name in ("u", "delta", "z")
        }
        self._options = packed.options | {
            "states": torch.zeros(len(slots), *A.shape, dtype=u.dtype, device=u.device),
            "cache_indices": slots[:count],
            "has_initial_state": torch.ones(count, dtype=torch.bool, device=u.device),
            "checkpoint_every": every,
            "checkpoint_slots": slots[count:].view(count, columns) if every else None,
        }

    def forward(self) -> Tensor:
        with torch.no_grad():
            return selective_scan_prefill(**self._tensors, **self._options)


def measure(problem: Problem, options: argparse.Namespace) -> list[records.Row]:
    device, lengths = options.device, problem.lengths()
    total, count = sum(lengths), len(lengths)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    packed = Batch(problem, 1, total, device, cu_seqlens)
    error = packed.error_of_sequences(lengths)
    if not error < _ERROR_ALLOWED[problem.dtype]:
        raise RuntimeError(f"{problem} is wrong: relative error {error}")
    kept = f"prefill, states kept every {options.checkpoint_every}"
    batches = {
        "packed": packed,
        "prefill": Prefill(packed, lengths, 0),
        kept: Prefill(packed, lengths, options.checkpoint_every),
        "dense, as many steps": Batch(problem, count, math.ceil(total / count), device),
        "padded to the longest": Batch(problem, count, max(lengths), device),
    }
    expected = packed.forward()[0]
    for name in ("prefill", kept):  # the first call starts from zero states
        difference = relative_l2(batches[name].forward(), expected)
        if not difference < _ERROR_ALLOWED[problem.dtype]:
            raise RuntimeError(f"{name}, {problem}, is wrong: relative error {difference}")
    rows = []
    for which in ("forward", "train"):
        calls: dict[str, Callable[[], object]] = {
            name: getattr(batch, which) for name, batch in batches.items() if hasattr(batch, which)
        }
        times = timing.measure(calls, device, warmup=2, runs=options.runs, budget=options.budget)
        rows += [
            {
                "operator": "selective_scan_fn",
                **dataclasses.asdict(problem),
                "which": which,
                "implementation": name,
                "steps": batch.steps,
                "time_ms": dataclasses.asdict(times[name]),
                "of_packed": times[name].median / times["packed"].median,
                "error": error if name == "packed" else None,
            }
            for name, batch in batches.items()
            if name in times
        ]
    return rows


def parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = arguments.measuring_parser(__doc__)
    positive = arguments.positive
    parser.add_argument("--sequences", type=positive, default=64)
    parser.add_argument("--mean", type=positive, default=512, help="mean length")
    parser.add_argument("--longest", type=positive, default=8192, help="longest length")
    parser.add_argument("--dim", type=positive, nargs="+", default=[1536])
    parser.add_argument("--dstate", type=positive, nargs="+", default=[16])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=_ERROR_ALLOWED)
    parser.add_argument("--method", nargs="+", default=["zoh"], choices=METHODS)
    parser.add_argument("--checkpoint-every", type=positive, default=512, help="steps in prefill")
    parser.add_argument("--runs", type=positive, default=20)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for each pass")
    return arguments.parse(parser, command_line)


def main(command_line: list[str] | None = None) -> None:
    options = parse(command_line)
    if options.device.type == "cpu":
        timing.keep_freed_memory()
    rows = []
    for axes in itertools.product(options.dim, options.dstate, options.dtype, options.method):
        lengths = (options.sequences, options.mean, options.longest)
        rows += measure(Problem(*lengths, *axes), options)
    report.print_table(
        f"Packed sequences on {records.device_name(options.device)}",
        rows,
        "which implementation sequences steps dim dstate dtype method time_ms=time,_ms of_packed",
    )
    records.write(options.json, {"environment": records.environment(options.device), "rows": rows})


if __name__ == "__main__":
    main()
