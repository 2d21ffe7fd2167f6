"""Times the CPU kernel against that of Intel Extension for PyTorch 2.8, which is forward only.

That package needs PyTorch 2.8, so it lives in an environment of its own. This file runs under both
interpreters: it starts itself as a worker under each in turn, several times, and compares medians.

Example:
    python -m venv ipex
    ipex/bin/pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0
    python benchmarks/compare_ipex.py --ipex-python ipex/bin/python --threads 1 2
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SHAPES = ((2, 512, 1024, 16), (1, 1536, 2048, 16))  # batch, dim, seqlen, dstate
# A different order of sums, and the rounding of the output.
_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """u, delta, A, B, C, D, z and delta_bias: the same under both interpreters.

    delta is float32 throughout: the peer takes no other dtype for it.
    """
    batch, dim, seqlen, dstate = shape
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    u, z = (randn(batch, dim, seqlen).to(dtype) for _ in range(2))
    delta = randn(batch, dim, seqlen)
    B, C = (randn(batch, dstate, seqlen).to(dtype) for _ in range(2))
    A = -torch.arange(1.0, dstate + 1).repeat(dim, 1)
    step = torch.exp(math.log(1e-3) + torch.rand(dim, generator=generator) * math.log(100))
    return u, delta / 2, A, B, C, randn(dim), z, step + torch.log(-torch.expm1(-step))


def load_kernel(name: str) -> Callable[..., torch.Tensor]:
    """A function of the inputs and delta_softplus."""
    if name == "ipex":
        import intel_extension_for_pytorch  # noqa: F401  registers the op

        op = torch.ops.torch_ipex.selective_scan_fn
        return lambda *inputs: op(*inputs, True, False)[0]
    import selective_scan

    return lambda *inputs: selective_scan.selective_scan_fn(*inputs, True, backend="cpu")


def work(options: argparse.Namespace) -> None:
    """Prints the times of every case as JSON, and saves the first outputs for the comparison."""
    kernel = load_kernel(options.worker)
    cases = []
    with torch.no_grad():
        for shape, dtype, threads in itertools.product(_SHAPES, _DTYPES, options.threads):
            torch.set_num_threads(threads)
            inputs = make_inputs(shape, _DTYPES[dtype])
            out = kernel(*inputs)
            kernel(*inputs)
            samples = []
            for _ in range(options.runs):
                begin = time.perf_counter()
                kernel(*inputs)
                samples.append((time.perf_counter() - begin) * 1e3)
            case = {"shape": shape, "dtype": dtype, "threads": threads, "samples_ms": samples}
            cases.append(case)
            torch.save(out, options.outputs / f"{options.worker}-{len(cases)}.pt")
    print(json.dumps({"torch": torch.__version__, "cases": cases}))


def run_worker(name: str, options: argparse.Namespace, outputs: Path) -> dict[str, object]:
    interpreter = options.ipex_python if name == "ipex" else sys.executable
    command = [str(interpreter), __file__, "--worker", name, "--outputs", str(outputs)]
    command += ["--runs", str(options.runs), "--threads", *map(str, options.threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the worker {name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(options: argparse.Namespace) -> None:
    # Only this side has them: the other environment holds the peer and nothing else.
    import report

    names = ("ours", "ipex")
    with tempfile.TemporaryDirectory() as scratch:
        outputs = Path(scratch)
        rounds = [
            {name: run_worker(name, options, outputs) for name in names}
            for _ in range(options.rounds)
        ]
        rows = []
        for index, case in enumerate(rounds[0]["ours"]["cases"]):
            ours, theirs = (
                torch.load(outputs / f"{name}-{index + 1}.pt").double() for name in names
            )
            difference = ((ours - theirs).norm() / theirs.norm()).item()
            if not difference <= _TOLERANCE[case["dtype"]]:
                sys.exit(f"{case['shape']} {case['dtype']}: outputs differ by {difference:.1e}")
            times = {}
            for name in names:
                samples = [x for one in rounds for x in one[name]["cases"][index]["samples_ms"]]
                q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
                times[name] = {"median": median, "q1": q1, "q3": q3, "runs": len(samples)}
            row = {name: case[name] for name in ("shape", "dtype", "threads")}
            updates = math.prod(case["shape"])
            rows.append(
                {
                    **row,
                    **times,
                    "difference": difference,
                    "speedup": times["ipex"]["median"] / times["ours"]["median"],
                    "ns_per_update": {n: times[n]["median"] * 1e6 / updates for n in names},
                }
            )

    environment = report.environment(torch.device("cpu"))
    environment["ipex_torch"] = rounds[0]["ipex"]["torch"]
    console = report.console()
    lines = [
        (
            str(tuple(row["shape"])), row["dtype"], str(row["threads"]),
            *(
                text
                for name in names
                for text in (
                    f"{row[name]['median']:.2f}",
                    f"{row[name]['q1']:.2f}–{row[name]['q3']:.2f}",
                    f"{row['ns_per_update'][name]:.2f}",
                )
            ),
            f"{row['speedup']:.2f}×", f"{row['difference']:.0e}",
        )
        for row in rows
    ]  # fmt: skip
    header = ("shape", "dtype", "threads", "ours, ms", "q1–q3", "ns/update", "IPEX, ms", "q1–q3",
              "ns/update", "speedup", "difference")  # fmt: skip
    title = f"Forward, {environment['device']}, medians over {options.rounds} rounds in turn"
    report.print_table(console, title, header, lines)
    if options.json:
        report.write_json(options.json, {"environment": environment, "rows": rows})


def main() -> None:
    description, _, example = __doc__.partition("Example:")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"example:{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    # fmt: off
    add("--ipex-python", metavar="FILE", help="interpreter of the other environment")
    add("--threads", nargs="+", type=int, default=[1, 2])
    add("--rounds", type=int, default=5, help="how often each side runs (default: 5)")
    add("--runs", type=int, default=6, help="timed runs in each round (default: 6)")
    add("--json", type=Path, metavar="FILE")
    add("--worker", choices=("ours", "ipex"), help=argparse.SUPPRESS)
    add("--outputs", type=Path, help=argparse.SUPPRESS)
    # fmt: on
    options = parser.parse_args()
    if options.worker:
        work(options)
    elif options.ipex_python is None:
        parser.error("--ipex-python is required")
    else:
        compare(options)


if __name__ == "__main__":
    main()
