"""Times the CPU kernel against that of Intel Extension for PyTorch 2.8, which is forward only.

That package needs PyTorch 2.8 and thus a separate environment. Each side runs this file in a
separate process with its own interpreter, and the processes alternate.

Example:
    python -m venv ipex
    ipex/bin/pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0
    python benchmarks/compare_ipex.py --ipex-python ipex/bin/python --threads 1 2
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch

from harness.arguments import make_parser, positive, shape
from harness.operators import make_scan
from harness.problems import Problem
from harness.timing import REST_SECONDS, Timing, sample
from harness.workers import Worker, alternate, serve

_DTYPES = ("float32", "bfloat16")
_SHAPES = ("2,512,1024,16", "1,1536,2048,16")
_SIDES = ("ours", "ipex")
# Allows for a different order of sums, and the rounding of the output.
_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def load_kernel(name: str) -> Callable[..., torch.Tensor]:
    """Returns one side's scan as a function of the inputs, with delta_softplus."""
    if name == "ipex":
        import intel_extension_for_pytorch  # noqa: F401  registers the op

        op = torch.ops.torch_ipex.selective_scan_fn
        return lambda *inputs: op(*inputs, True, False)[0]
    import selective_scan

    return lambda *inputs: selective_scan.selective_scan_fn(*inputs, True, backend="cpu")


def cases(options: argparse.Namespace) -> list[tuple[Problem, int]]:
    sizes = itertools.product(options.shapes, _DTYPES, options.threads)
    return [(Problem(shape, dtype), threads) for shape, dtype, threads in sizes]


def work(options: argparse.Namespace) -> None:
    kernel = load_kernel(options.worker)
    found = cases(options)
    call: Callable[[], torch.Tensor] | None = None

    def prepare(case: int) -> dict[str, object]:
        nonlocal call
        problem, threads = found[case]
        torch.set_num_threads(threads)
        scan = make_scan(problem, torch.device("cpu"), seed=case)
        scan.tensors["delta"] = scan.tensors["delta"].float()  # the peer supports no other dtype
        # The peer does not support groups.
        scan.tensors |= {name: scan.tensors[name][:, 0] for name in "BC"}
        inputs = scan.arguments()[:8]
        call = lambda: kernel(*inputs)  # noqa: E731
        torch.save(call(), options.outputs / f"{options.worker}.pt")
        return {"torch": torch.__version__}

    def measure() -> dict[str, list[float]]:
        samples = sample({"forward": call}, torch.device("cpu"), warmup=2, runs=options.runs)
        time.sleep(REST_SECONDS)
        return samples

    with torch.no_grad():
        serve(prepare=prepare, measure=measure)


def compare(options: argparse.Namespace, outputs: Path) -> None:
    # Imported here, since the peer's environment lacks the packages that these need.
    from harness import records, report
    from harness.checks import relative_l2

    shapes = [",".join(map(str, Problem(each).sizes)) for each in options.shapes]
    arguments = ["--outputs", str(outputs), "--runs", str(options.runs), "--shapes", *shapes]
    arguments += ["--threads", *map(str, options.threads)]
    interpreters = {"ours": sys.executable, "ipex": options.ipex_python}
    workers = [
        Worker(name, [interpreters[name], __file__, "--worker", name, *arguments], {})
        for name in _SIDES
    ]
    rows = []
    for number, (problem, threads) in enumerate(cases(options)):
        facts, samples = alternate(workers, number, options.rounds)
        ours, theirs = (torch.load(outputs / f"{name}.pt").double() for name in _SIDES)
        difference = relative_l2(ours, theirs)
        if not difference <= _TOLERANCE[problem.dtype]:
            sys.exit(f"{problem}: outputs differ by {difference:.1e}")
        times = {
            name: dataclasses.asdict(Timing.of(list(chain(*own["forward"]))))
            for name, own in zip(_SIDES, samples, strict=True)
        }
        ns = {name: time["median"] * 1e6 / problem.updates for name, time in times.items()}
        rows.append(
            {
                "shape": problem.sizes[:4],
                "dtype": problem.dtype,
                "threads": threads,
                **times,
                "difference": difference,
                "speedup": times["ipex"]["median"] / times["ours"]["median"],
                "ns_per_update": ns,
            }
        )
    for worker in workers:
        worker.close()
    environment = {**records.environment(torch.device("cpu")), "ipex_torch": facts[1]["torch"]}

    title = f"Forward, {environment['device']}, ms, medians over {options.rounds} rounds in turn"
    report.print_table(title, rows, "shape dtype threads ours ipex speedup difference")
    records.write(options.json, {"environment": environment, "rows": rows})


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    # fmt: off
    add("--ipex-python", metavar="FILE", help="interpreter of the other environment")
    add("--shapes", nargs="+", type=shape, default=[shape(text) for text in _SHAPES],
        metavar="SHAPE", help=f"batch,dim,seqlen,dstate (default: {' '.join(_SHAPES)})")
    add("--threads", nargs="+", type=positive, default=[1, 2])
    add("--rounds", type=positive, default=5, help="how often each side runs (default: 5)")
    add("--runs", type=positive, default=6, help="timed runs in each round (default: 6)")
    add("--json", type=Path, metavar="FILE")
    add("--worker", choices=_SIDES, help=argparse.SUPPRESS)
    add("--outputs", type=Path, help=argparse.SUPPRESS)
    # fmt: on
    options = parser.parse_args()
    if options.worker:
        work(options)
    elif options.ipex_python is None:
        parser.error("--ipex-python is required")
    else:
        with tempfile.TemporaryDirectory() as outputs:
            compare(options, Path(outputs))


if __name__ == "__main__":
    main()
