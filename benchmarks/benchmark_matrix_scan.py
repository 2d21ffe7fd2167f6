"""Times the bilinear scan with full state matrices against its reference, a batched
torch.linalg.solve per step, and checks that both agree.

If the reference needs more memory than is available, --slices makes it process the channels in
slices, one after another; the reported memory is then that of one slice.

Example:
    python benchmarks/benchmark_matrix_scan.py --shapes 2,64,256,16 2,64,256,64
"""

from __future__ import annotations

import argparse
import dataclasses
import functools

import torch

from harness import records, report
from harness.arguments import measuring_parser, parse, positive, shape
from harness.checks import relative_l2
from harness.problems import Problem
from harness.timing import keep_freed_memory, measure, peak_mebibytes
from selective_scan import selective_scan_fn, selective_scan_ref

_SHAPES = ("2,64,256,16", "2,64,256,64")
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_TOLERANCE = {"float32": 1e-5, "float64": 1e-12}  # a different order of sums


def make_inputs(
    sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Returns u, delta, A, B and C; A is stable, and step sizes match its time scales."""
    batch, dim, seqlen, dstate = sizes
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=dtype, device=device)

    matrix = normal(dim, dstate, dstate) / dstate**0.5
    A = matrix - matrix.mT - 0.5 * torch.eye(dstate, dtype=dtype, device=device)
    delta = torch.rand(batch, dim, seqlen, generator=random, dtype=dtype, device=device)
    B, C = normal(2, batch, dstate, seqlen)
    u = normal(batch, dim, seqlen)
    return [tensor.detach().requires_grad_() for tensor in (u, delta, A, B, C)]


def time_shape(options: argparse.Namespace, sizes: tuple[int, ...]) -> list[records.Row]:
    device = options.device
    inputs = make_inputs(sizes, _DTYPES[options.dtype], device)
    u, delta, A, B, C = inputs
    sides = {"kernels": (selective_scan_fn, 1), "reference": (selective_scan_ref, options.slices)}

    def run(side, use):
        """Returns use() of the scan of each slice of channels."""
        scan, slices = sides[side]
        parts = zip(u.chunk(slices, 1), delta.chunk(slices, 1), A.chunk(slices), strict=True)
        return [use(scan(*part, B, C, discretization_method="bilinear")) for part in parts]

    def differentiate(side):
        gradients = run(side, lambda out: torch.autograd.grad(out.sum(), inputs))
        return [sum(each[1:], each[0]) for each in zip(*gradients, strict=True)]

    @torch.no_grad()
    def forward(side):
        return run(side, lambda out: out)

    pairs = [(*differentiate(side), torch.cat(forward(side), 1)) for side in sides]
    difference = max(relative_l2(ours, ref) for ours, ref in zip(*pairs, strict=True))
    if not difference <= _TOLERANCE[options.dtype]:
        raise SystemExit(f"{sizes}: results differ by {difference:.1e}")
    rows = []
    for name, call in (("forward", forward), ("forward + backward", differentiate)):
        calls = {side: functools.partial(call, side) for side in sides}
        memory = {side: peak_mebibytes(each, device) for side, each in calls.items()}
        timings = measure(calls, device, warmup=1, runs=options.runs, budget=options.budget)
        rows.append(
            {
                "shape": sizes,
                "dtype": options.dtype,
                "pass": name,
                **{side: dataclasses.asdict(timing) for side, timing in timings.items()},
                "speedup": timings["reference"].median / timings["kernels"].median,
                "kernels_MiB": memory["kernels"],
                "reference_MiB": memory["reference"],
                "difference": difference,
            }
        )
    return rows


def main() -> None:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    # fmt: off
    add("--shapes", nargs="+", type=shape, default=[shape(text) for text in _SHAPES],
        metavar="SHAPE", help=f"batch,dim,seqlen,dstate (default: {' '.join(_SHAPES)})")
    add("--dtype", choices=_DTYPES, default="float32")
    add("--threads", type=positive, default=torch.get_num_threads())
    add("--runs", type=positive, default=10)
    add("--slices", type=positive, default=1, help="slices of the channels of the reference")
    add("--budget", type=float, default=60, help="seconds for a pass (default: 60)")
    # fmt: on
    options = parse(parser, None)
    if options.device.type == "cpu":
        keep_freed_memory()
    torch.set_num_threads(options.threads)
    rows = []
    for each in options.shapes:
        rows += time_shape(options, Problem(each).sizes[:4])
    environment = records.environment(options.device)
    title = f"Full state matrices, bilinear, {environment['device']}, ms"
    report.print_table(
        title,
        rows,
        "shape dtype pass kernels reference speedup kernels_MiB reference_MiB difference",
    )
    records.write(options.json, {"environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
