#!/usr/bin/env python3
"""Times calls whose numbers become denormal against the same calls with ordinary numbers, on a CPU.

The kernels flush denormal numbers, PyTorch's own operations do not. Therefore each call is timed a
third time while the calling thread flushes them, which is the lower bound. Many processors take a
hundred times as long for an operation with denormal numbers; on a processor that takes no longer,
all ratios are 1 regardless of the kernels.

Example:
    python benchmarks/benchmark_denormals.py --threads 1 --json denormals.json
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from harness import arguments, records, report, timing
from selective_scan import (
    MambaMixer,
    causal_conv1d_fn,
    diagonal_scan_fn,
    selective_scan_fn,
    selective_state_update,
)

_BATCH, _DIM, _SEQLEN, _DSTATE = 4, 64, 4000, 16
_DENORMAL = 2.0**-130

Call = Callable[[], object]


# --- the calls, each as a pair: with ordinary numbers, and with denormal ones ---------------------


def gradient_of_the_last_step() -> tuple[Call, Call]:
    """Returns a classifier's calls: the gradient decays from the last step back to the first."""
    layer, h = MambaMixer(_DIM), torch.randn(1, _SEQLEN, _DIM)
    return lambda: layer(h).sum().backward(), lambda: layer(h)[:, -1].sum().backward()


def _scans(*inputs: Tensor) -> tuple[Call, Call]:
    """Returns calls of both passes of the scan, one for each input."""
    delta = 0.1 * torch.rand(_BATCH, _DIM, _SEQLEN)
    A = -torch.arange(1.0, _DSTATE + 1).expand(_DIM, -1)
    B, C = torch.randn(2, _BATCH, _DSTATE, _SEQLEN)

    def both_passes(u: Tensor) -> Call:
        leaf = u.clone().requires_grad_()
        ones = torch.ones_like(u)
        return lambda: torch.autograd.grad(selective_scan_fn(leaf, delta, A, B, C), leaf, ones)

    ordinary, other = map(both_passes, inputs)
    return ordinary, other


def impulse_and_silence() -> tuple[Call, Call]:
    u = torch.randn(_BATCH, _DIM, _SEQLEN)
    return _scans(u, u * (torch.arange(_SEQLEN) == 0))


def padding_on_the_right() -> tuple[Call, Call]:
    """Returns scans of sequences of which the first fills the batch's length, and each other one
    half of the previous one's length."""
    u = torch.randn(_BATCH, _DIM, _SEQLEN)
    lengths = _SEQLEN >> torch.arange(_BATCH)
    return _scans(u, u * (torch.arange(_SEQLEN) < lengths[:, None, None]))


def denormal_inputs() -> tuple[Call, Call]:
    u = torch.randn(_BATCH, _DIM, _SEQLEN)
    return _scans(u, u * _DENORMAL)


def convolution() -> tuple[Call, Call]:
    x, weight = torch.randn(_BATCH, _DIM, _SEQLEN), torch.randn(_DIM, 4)
    small = x * _DENORMAL
    return (
        lambda: causal_conv1d_fn(x, weight, activation="silu"),
        lambda: causal_conv1d_fn(small, weight, activation="silu"),
    )


def diagonal_scan() -> tuple[Call, Call]:
    a, b = torch.rand(_BATCH * _DIM, _SEQLEN), torch.randn(_BATCH * _DIM, _SEQLEN)
    small = b * _DENORMAL
    return lambda: diagonal_scan_fn(a, b), lambda: diagonal_scan_fn(a, small)


def decoding_step() -> tuple[Call, Call]:
    dim = 1536
    x, dt = torch.randn(_BATCH, dim), 0.1 * torch.rand(_BATCH, dim)
    A = -torch.arange(1.0, _DSTATE + 1).expand(dim, -1)
    B, C = torch.randn(2, _BATCH, _DSTATE)
    state = torch.empty(_BATCH, dim, _DSTATE)

    def step(scale: float) -> Call:
        before, scaled = scale * torch.randn_like(state), scale * x
        return lambda: selective_state_update(state.copy_(before), scaled, dt, A, B, C)

    return step(1.0), step(_DENORMAL)


_CALLS = (
    gradient_of_the_last_step,
    impulse_and_silence,
    padding_on_the_right,
    denormal_inputs,
    convolution,
    diagonal_scan,
    decoding_step,
)


# --- measurement ----------------------------------------------------------------------------------


def flushing(call: Call) -> Call:
    def run() -> None:
        torch.set_flush_denormal(True)
        try:
            call()
        finally:
            torch.set_flush_denormal(False)

    return run


def measure(options: argparse.Namespace) -> list[records.Row]:
    rows = []
    for make in _CALLS:
        ordinary, other = make()
        calls = {"ordinary": ordinary, "denormal": other, "flushed": flushing(other)}
        times = timing.measure(
            calls, torch.device("cpu"), warmup=2, runs=options.runs, budget=options.budget
        )
        medians = {name: time.median for name, time in times.items()}
        rows.append(
            {
                "call": make.__name__.replace("_", " "),
                **{name: dataclasses.asdict(time) for name, time in times.items()},
                "ratio": medians["denormal"] / medians["ordinary"],
                "over_flushed": medians["denormal"] / medians["flushed"],
            }
        )
    return rows


def main(command_line: list[str] | None = None) -> None:
    parser = arguments.make_parser(__doc__)
    parser.add_argument("--threads", type=arguments.positive, default=torch.get_num_threads())
    parser.add_argument("--runs", type=arguments.positive, default=30)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each call")
    parser.add_argument("--json", type=Path, help="where to write the record")
    options = parser.parse_args(command_line)
    timing.keep_freed_memory()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    if not torch.set_flush_denormal(False):
        parser.error("this processor has no mode for denormal numbers")
    rows = measure(options)
    environment = records.environment(torch.device("cpu"))
    report.print_table(
        f"Denormal numbers, {environment['device']}, {options.threads} threads, ms",
        rows,
        "call ordinary denormal flushed ratio=denormal/ordinary over_flushed=denormal/flushed",
    )
    records.write(options.json, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
