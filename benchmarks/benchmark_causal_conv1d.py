"""Times the causal convolution against a copy of its bytes, against torch's convolution and, if it
is installed, against the package causal_conv1d.

Example:
    python benchmarks/benchmark_causal_conv1d.py --device cpu --threads 2 --dtypes float32 bfloat16
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from harness import records, report
from harness.arguments import measuring_parser, parse, positive
from harness.ceilings import copy_bandwidth
from harness.checks import relative_l2
from harness.problems import DTYPES
from harness.timing import keep_freed_memory, measure
from selective_scan import causal_conv1d_fn, causal_conv1d_ref

_LAYOUTS = ("contiguous", "channel_last")
_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


def shape(text: str) -> tuple[int, int, int]:
    sizes = tuple(int(part) for part in text.split(",") if part.isdecimal())
    if len(sizes) != 3 or 0 in sizes:
        raise argparse.ArgumentTypeError(f"expected batch,dim,seqlen, got {text!r}")
    return sizes


def torch_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    width = weight.shape[1]
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    return F.silu(F.conv1d(F.pad(x, (width - 1, 0)), weight[:, None], bias, groups=len(weight)))


def find_peers(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    def ours(x, weight, bias):
        return causal_conv1d_fn(x, weight, bias, activation="silu")

    peers = {"ours": ours, "torch": torch_convolution}
    try:
        import causal_conv1d
    except ImportError:
        return peers
    if device.type == "cuda":
        peers["causal_conv1d"] = lambda x, weight, bias: causal_conv1d.causal_conv1d_fn(
            x, weight, bias, activation="silu"
        )
    return peers


def check(out: Tensor, inputs: tuple[Tensor, ...], dtype: str) -> float:
    """Returns the error of the outputs against the reference, on a few channels in float64."""
    x, weight, bias = (tensor.detach().double() for tensor in inputs)
    channels = slice(0, 8)
    exact = causal_conv1d_ref(x[:, channels], weight[channels], bias[channels], activation="silu")
    error = relative_l2(out[:, channels].double(), exact)
    if not error <= _TOLERANCE[dtype]:
        raise SystemExit(f"the output is off by {error:.1e}")
    return error


def measure_case(
    options: argparse.Namespace, sizes: tuple[int, int, int], dtype: str, layout: str
) -> list[records.Row]:
    batch, dim, seqlen = sizes
    device = options.device
    x = torch.randn(batch, seqlen, dim, device=device).to(getattr(torch, dtype)).transpose(1, 2)
    x = x.contiguous() if layout == "contiguous" else x
    weight = torch.randn(dim, options.width, device=device)
    leaves = tuple(t.requires_grad_() for t in (x, weight, torch.randn(dim, device=device)))
    cotangent = torch.randn_like(x)
    calls, error = {}, math.nan
    for name, conv in find_peers(device).items():
        out = conv(*leaves)
        if name == "ours":
            error = check(out.detach(), leaves, dtype)

        def forward(conv=conv):
            with torch.no_grad():
                conv(*leaves)

        def backward(out=out):
            torch.autograd.grad(out, leaves, cotangent, retain_graph=True)

        calls |= {(name, "forward"): forward, (name, "backward"): backward}
    times = measure(calls, device, warmup=2, runs=options.runs)
    rows = []
    for which, arrays in (("forward", 2), ("backward", 3)):
        bytes_moved = arrays * x.numel() * x.element_size()
        floor_ms = bytes_moved / options.copy_bytes_per_s * 1e3
        row = {"sizes": list(sizes), "dtype": dtype, "layout": layout, "which": which}
        found = {name: time for (name, pass_name), time in times.items() if pass_name == which}
        row |= {name: dataclasses.asdict(time) for name, time in found.items()}
        ours = found["ours"]
        row |= {
            "error": error,
            "floor_ms": floor_ms,
            "GB_per_s": bytes_moved / ours.median / 1e6,
            "of_copy": floor_ms / ours.median,
            "best_of_copy": floor_ms / ours.best,
        }
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    # fmt: off
    add("--shapes", nargs="+", type=shape, metavar="SHAPE",
        help="batch,dim,seqlen (default: 8,1536,2048 on CUDA, 2,1536,2048 on a CPU)")
    add("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    add("--layouts", nargs="+", choices=_LAYOUTS, default=list(_LAYOUTS))
    add("--width", type=positive, default=4)
    add("--threads", type=positive, default=torch.get_num_threads())
    add("--runs", type=positive, default=20)
    # fmt: on
    options = parse(parser, arguments)
    is_cuda = options.device.type == "cuda"
    if not is_cuda:
        keep_freed_memory()
    options.shapes = options.shapes or [(8 if is_cuda else 2, 1536, 2048)]
    torch.set_num_threads(options.threads)
    options.copy_bytes_per_s = copy_bandwidth(options.device)
    rows = []
    for case in itertools.product(options.shapes, options.dtypes, options.layouts):
        rows += measure_case(options, *case)
    environment = records.environment(options.device)
    title = (
        f"Causal convolution of width {options.width} with SiLU, {environment['device']}, "
        f"{options.threads} threads, ms, copy {options.copy_bytes_per_s / 1e9:.0f} GB/s"
    )
    columns = (
        "sizes dtype layout which ours torch causal_conv1d GB_per_s of_copy best_of_copy error"
    )
    report.print_table(title, rows, columns)
    copy = {"copy_bytes_per_s": options.copy_bytes_per_s}
    records.write(options.json, {"environment": environment | copy, "rows": rows})


if __name__ == "__main__":
    main()
