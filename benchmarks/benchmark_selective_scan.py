"""Times the selective scan against the machine's limits, other kernels and the reference.

The kernels are called through torch.ops without autograd, after a check of their results against
fp64 in the same run. Without --shapes the device's whole suite is measured; --shapes, --dtype,
--variants and --methods measure the product of what they name. --operators adds the diagonal and
the adaptive unitary scan, or measures them alone.

Example:
    python benchmarks/benchmark_selective_scan.py --device cuda --backward \\
        --anchors benchmarks/anchors/h200_mamba_ssm.json --json h200.json --plot h200
    python benchmarks/benchmark_selective_scan.py --device cpu --backward --threads 1 2 \\
        --shapes laptop-512 1,768,512,16 --methods zoh foh
    python benchmarks/benchmark_selective_scan.py --device cuda --backward \\
        --operators diagonal adaptive_unitary --json siblings.json --plot h200
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from tqdm import tqdm

import plots
import report
from arguments import count, find_device, make_parser, positive
from ceilings import Ceilings, find_ceilings
from checks import check_oracle, check_problem
from peers import Anchors, MambaSsm, textbook_scan
from problems import (
    DTYPES,
    METHODS,
    SHAPES,
    VARIANTS,
    Inputs,
    Problem,
    Shape,
    bytes_moved,
    make_inputs,
    parse_shape,
)
from report import Row
from selective_scan import selective_scan_fn, selective_scan_ref
from siblings import OPERATORS, SiblingAnchors, SiblingRow, run_sibling, select_siblings
from suite import select_problems
from timing import Timing, host_overhead_us, keep_freed_memory, measure

# Above this many state updates one run of the reference takes longer than is worth waiting for.
_MOST_REFERENCE_UPDATES = 1 << 25
_MOST_COMPILED_STEPS = 128  # the compiler unrolls the reference's loop over time
_HOST_SHAPES = {"cuda": "launch-bound", "cpu": "one-call"}
_MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    device: torch.device
    backward: bool
    warmup: int
    runs: int
    budget: float
    cold_l2: bool
    threads: tuple[int, ...]
    is_whole_suite: bool
    reference_runs: int
    compile_reference: bool

    def threads_of(self, problem: Problem) -> tuple[int, ...]:
        """The whole suite compares methods and variants with the most threads only."""
        is_special = problem.method != "zoh" or problem.variant.name not in ("plain", "no-z")
        return self.threads[-1:] if self.is_whole_suite and is_special else self.threads

    def measure(self, calls: dict[str, Callable[[], object]], **changes: int) -> dict[str, Timing]:
        values = {"warmup": self.warmup, "runs": self.runs, **changes}
        return measure(calls, self.device, budget=self.budget, cold_l2=self.cold_l2, **values)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    names = ", ".join(SHAPES)
    add = parser.add_argument
    # fmt: off
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda or cuda:N (default: cuda where there is one)")
    add("--operators", nargs="+", choices=OPERATORS, default=OPERATORS[:1],
        help="what is measured (default: selective_scan)")
    add("--shapes", nargs="+", type=_shape, metavar="SHAPE",
        help=f"batch,dim,seqlen,dstate[,groups] or one of {names}")
    add("--dtype", nargs="+", choices=DTYPES,
        help="of u, delta, z, and variable B and C; of a and b; of u, dt and z")
    add("--variants", nargs="+", choices=VARIANTS, help="what differs from the plain problem")
    add("--methods", nargs="+", choices=METHODS, help="discretization methods")
    add("--backward", action="store_true", help="measure the backward pass too")
    add("--quick", action="store_true", help="small shapes and few runs: a test of the program")
    add("--warmup", type=count, help="untimed runs (default: 5, quick: 1)")
    add("--runs", type=positive, help="timed runs (default: 30, quick: 3)")
    add("--budget", type=float, default=20, metavar="SECONDS",
        help="of each measurement, after which runs are cut short, to 5 at least (default: 20)")
    add("--threads", nargs="+", type=positive, help="CPU threads (default: 1 and all)")
    add("--cold-l2", action="store_true", help="overwrite the GPU's L2 cache before each run")
    add("--reference-runs", type=count,
        help="runs of selective_scan_ref and of the textbook's loop on plain problems "
        "(default: 5 on a CPU, 0 on a GPU)")
    add("--compile-reference", action="store_true",
        help="also time torch.compile of the reference, for up to "
        f"{_MOST_COMPILED_STEPS} steps (slow to compile)")
    add("--host-calls", type=count, default=1000,
        help="calls in a row to measure the host's overhead with, 0 for none (default: 1000)")
    add("--anchors", type=Path, metavar="FILE",
        help="JSON with mamba_ssm's times and the ceilings of a GPU")
    add("--copy-bandwidth", type=float, metavar="GB/S", help="ceiling (default: anchors, measured)")
    add("--exp-rate", type=float, metavar="PER_SECOND",
        help="the GPU's exponentials per second (default: anchors, from the clock)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write rows and environment")
    add("--plot", type=Path, metavar="PREFIX",
        help="write PREFIX_speedup.png, PREFIX_roofline.png and PREFIX_siblings.png")
    # fmt: on
    options = parser.parse_args(arguments)

    try:
        options.device = find_device(options.device)
        options.anchors = Anchors.load(options.anchors) if options.anchors else Anchors()
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    return options


def _shape(text: str) -> Shape:
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def own_passes(inputs: Inputs, settings: Settings) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {"forward": lambda: inputs.forward_op(False)}
    if settings.backward:
        if settings.device.type == "cuda":
            calls["training forward"] = lambda: inputs.forward_op(True)
        states = inputs.forward_op(True)[2]
        calls["backward"] = lambda: inputs.backward_op(states)
        if settings.device.type == "cpu":
            calls["forward + backward"] = lambda: inputs.backward_op(inputs.forward_op(True)[2])
    return calls


def peer_passes(
    problem: Problem, inputs: Inputs, settings: Settings, peer: MambaSsm | None
) -> dict[str, Callable[[], object]]:
    if peer is None or not peer.supports(problem):
        return {}
    calls: dict[str, Callable[[], object]] = {"forward": lambda: peer.forward(inputs)}
    if settings.backward:
        saved = peer.forward(inputs)
        calls["backward"] = lambda: peer.backward(inputs, saved)
    return calls


def time_reference(
    inputs: Inputs, settings: Settings, function: Callable[..., torch.Tensor]
) -> dict[str, Timing]:
    keywords = inputs.keywords()
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.tensors().items()}

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return function(**keywords)

    def forward_backward() -> object:
        out = function(**{**keywords, **leaves})
        return torch.autograd.grad(out, list(leaves.values()), inputs.dout)

    calls = {"forward": forward}
    if settings.backward:
        calls["forward + backward"] = forward_backward
    return settings.measure(calls, warmup=1, runs=settings.reference_runs)


def run_problem(
    problem: Problem,
    settings: Settings,
    ceilings: Ceilings,
    anchors: Anchors,
    peer: MambaSsm | None,
) -> list[Row]:
    """Checks the kernels on a problem, then times every pass with each number of threads."""
    inputs = make_inputs(problem, settings.device, seed=torch.initial_seed())
    error = max(check_problem(problem, inputs, settings.backward).values())
    calls = own_passes(inputs, settings)
    peer_calls = peer_passes(problem, inputs, settings, peer)
    rows = []
    for threads in settings.threads_of(problem):
        torch.set_num_threads(threads)
        times = settings.measure({**calls, **{f"peer {k}": f for k, f in peer_calls.items()}})
        for which in calls:
            moved = bytes_moved(inputs, which)
            rate = ceilings.updates_per_s(problem, which, threads)
            arithmetic = problem.shape.updates / rate if rate else 0.0
            floor = max(moved / ceilings.copy_bytes_per_s, arithmetic)
            fraction = None
            if rate and settings.device.type == "cpu":
                fraction = arithmetic / times[which].median * 1e3
            peer_time = times.get(f"peer {which.removeprefix('training ')}")
            anchor_ms = anchors.milliseconds(problem, which)
            if peer_time:
                peer_name, peer_ms = peer.name, peer_time.median
            else:
                peer_name = f"mamba_ssm ({anchors.device})" if anchor_ms else None
                peer_ms = anchor_ms
            rows.append(
                Row(
                    problem.shape.name, problem.shape.sizes, problem.dtype, problem.variant.name,
                    problem.method, which, threads, times[which], moved, problem.shape.updates,
                    floor * 1e3, fraction, error, peer_name, peer_ms,
                )
            )  # fmt: skip

    is_plain = problem.variant.name == "plain" and problem.method == "zoh"
    if is_plain and problem.shape.updates <= _MOST_REFERENCE_UPDATES and settings.reference_runs:
        reference = time_reference(inputs, settings, selective_scan_ref)
        textbook = time_reference(inputs, settings, textbook_scan)
        compiled = {}
        if settings.compile_reference and problem.shape.seqlen <= _MOST_COMPILED_STEPS:
            compiled = time_reference(inputs, settings, torch.compile(selective_scan_ref))
        for row in rows[-len(calls) :]:  # measured with as many threads
            row.reference = reference.get(row.which)
            row.compiled_reference = compiled.get(row.which)
            row.textbook = textbook.get(row.which)
    return rows


def run_siblings(
    operators: Sequence[str],
    options: argparse.Namespace,
    settings: Settings,
    ceilings: Ceilings,
    failures: list[str],
) -> list[SiblingRow]:
    """The rows of the other operators; what goes wrong is added to `failures`."""
    device = settings.device
    is_cuda = device.type == "cuda"
    anchors = SiblingAnchors(torch.cuda.get_device_name(device) if is_cuda else "")
    problems = select_siblings(operators, device.type, options.dtype, quick=options.quick)
    rows = []
    for problem in tqdm(problems, disable=not sys.stderr.isatty(), leave=False):
        try:
            rows += run_sibling(
                problem, device, settings.measure, backward=settings.backward,
                threads=settings.threads, copy_bytes_per_s=ceilings.copy_bytes_per_s,
                anchors=anchors, reference_runs=settings.reference_runs,
            )  # fmt: skip
        except RuntimeError as error:  # a wrong result, or memory that does not suffice
            failures.append(f"{problem}: {error}")
    return rows


def measure_memory(problem: Problem, settings: Settings, anchors: Anchors) -> dict[str, object]:
    """MiB that the passes allocate on the GPU beside inputs and dout."""
    inputs = make_inputs(problem, settings.device, seed=torch.initial_seed())

    def peak(call: Callable[[], object]) -> float:
        torch.cuda.synchronize(settings.device)
        torch.cuda.reset_peak_memory_stats(settings.device)
        before = torch.cuda.memory_allocated(settings.device)
        call()
        torch.cuda.synchronize(settings.device)
        return (torch.cuda.max_memory_allocated(settings.device) - before) / _MIB

    def both() -> object:
        out, _, states = inputs.forward_op(True)
        return out, inputs.backward_op(states)

    _, _, states = inputs.forward_op(True)
    return {
        "shape": problem.shape.name,
        "dtype": problem.dtype,
        "variant": problem.variant.name,
        "saved_states_MiB": states.numel() * states.element_size() / _MIB,
        "forward_MiB": peak(lambda: inputs.forward_op(False)),
        "backward_MiB": peak(lambda: inputs.backward_op(states)),
        "forward_backward_MiB": peak(both),
        "peer_backward_MiB": anchors.backward_mib(problem),
    }


class _NoWork(torch.autograd.Function):
    """Hands out results that are there already: what remains is autograd's own time."""

    @staticmethod
    def forward(ctx, out: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.gradients = leaves
        return out.detach()

    @staticmethod
    def backward(ctx, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.gradients)


def measure_host(settings: Settings, seed: int, calls: int) -> list[dict[str, object]]:
    """Microseconds per call of the public function on a problem that costs almost nothing."""
    problem = Problem(SHAPES[_HOST_SHAPES[settings.device.type]])
    inputs = make_inputs(problem, settings.device, seed)
    keywords = inputs.keywords()
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.tensors().items()}

    def inference() -> None:
        with torch.no_grad():
            selective_scan_fn(**keywords)

    def training() -> None:
        out = selective_scan_fn(**{**keywords, **leaves})
        torch.autograd.grad(out, list(leaves.values()), inputs.dout)

    def autograd() -> None:
        out = _NoWork.apply(inputs.dout, *leaves.values())
        torch.autograd.grad(out, list(leaves.values()), inputs.dout)

    def on_this_thread(call: Callable[[], None]) -> Callable[[], None]:
        """Autograd otherwise wakes a thread of its own, one per GPU, for every backward pass."""

        def run() -> None:
            with torch.autograd.set_multithreading_enabled(False):
                call()

        return run

    rows = {
        "no_grad call": inference,
        "forward + backward through autograd": training,
        "of that autograd without any work": autograd,
    }
    if settings.device.type == "cuda":
        rows |= {
            "forward + backward, autograd on the calling thread": on_this_thread(training),
            "of that autograd without any work, likewise": on_this_thread(autograd),
        }
    return [
        {
            "what": what,
            "shape": problem.shape.name,
            "dtype": problem.dtype,
            "calls": calls,
            "us_per_call": dataclasses.asdict(host_overhead_us(call, settings.device, calls=calls)),
        }
        for what, call in rows.items()
    ]


def print_memory(console: Console, rows: list[dict[str, object]]) -> None:
    header = ("shape", "dtype", "variant", "saved states", "forward", "backward",
              "forward + backward", "peer's backward")  # fmt: skip
    figures = [name for name in rows[0] if name.endswith("_MiB")]
    lines = [
        (row["shape"], row["dtype"], row["variant"],
         *("" if row[name] is None else f"{row[name]:.0f}" for name in figures))
        for row in rows
    ]  # fmt: skip
    report.print_table(console, "Memory beside inputs and dout, MiB", header, lines)


def print_host(console: Console, rows: list[dict[str, object]]) -> None:
    lines = [
        (row["shape"], row["dtype"], row["what"], f"{row['us_per_call']['median']:.1f}",
         f"{row['us_per_call']['q1']:.1f}–{row['us_per_call']['q3']:.1f}")
        for row in rows
    ]  # fmt: skip
    header = ("shape", "dtype", "call", "µs", "q1–q3")
    report.print_table(console, "Public function, host's time per call", header, lines)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    device: torch.device = options.device
    is_cuda = device.type == "cuda"
    if not is_cuda and arguments is None:  # else the program is not ours to start anew
        keep_freed_memory()
    all_threads = torch.get_num_threads()

    def default(value, usual, quick):
        return value if value is not None else quick if options.quick else usual

    settings = Settings(
        device=device,
        backward=options.backward,
        warmup=default(options.warmup, 5, 1),
        runs=default(options.runs, 30, 3),
        budget=options.budget,
        cold_l2=options.cold_l2,
        threads=(all_threads,) if is_cuda else tuple(options.threads or sorted({1, all_threads})),
        is_whole_suite=not (options.shapes or options.quick),
        reference_runs=default(options.reference_runs, 0 if is_cuda else 5, 1),
        compile_reference=options.compile_reference,
    )
    operators = list(dict.fromkeys(options.operators))
    problems = []
    if "selective_scan" in operators:
        operators.remove("selective_scan")
        problems = select_problems(
            device.type, shapes=options.shapes, dtypes=options.dtype, variants=options.variants,
            methods=options.methods, quick=options.quick,
        )  # fmt: skip
    console = report.console()
    environment = report.environment(device)
    peer = MambaSsm.find() if is_cuda else None
    torch.manual_seed(options.seed)
    check_oracle(device)
    ceilings = find_ceilings(
        device, options.anchors.ceilings, options.copy_bandwidth, options.exp_rate
    )

    rows, memory, failures = [], [], []
    for problem in tqdm(problems, disable=not sys.stderr.isatty(), leave=False):
        try:
            rows += run_problem(problem, settings, ceilings, options.anchors, peer)
            if is_cuda and settings.backward:
                memory.append(measure_memory(problem, settings, options.anchors))
        except RuntimeError as error:  # a wrong result, or memory that does not suffice
            failures.append(f"{problem}: {error}")
    sibling_rows = run_siblings(operators, options, settings, ceilings, failures)
    torch.set_num_threads(all_threads)
    host = []
    if problems and options.host_calls:
        host = measure_host(settings, options.seed, options.host_calls)
    found = report.ratios(rows)

    console.print(
        f"{environment['device']}, torch {environment['torch']}, selective_scan "
        f"{environment['selective_scan']} ({environment['revision']}), {environment['date']}"
    )
    limits = f"copy {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s"
    if ceilings.exp_per_s:
        limits += f", {ceilings.exp_per_s:.3g} exponentials/s"
    if ceilings.fma_flops_per_s:
        limits += f", {ceilings.fma_flops_per_s / 1e9:.1f} GF/s multiply-add on one core"
    console.print(f"Ceilings: {limits} ({ceilings.source})")
    console.print(
        "Results are checked against fp64 on sampled channels of the full problem over the whole "
        "sequence; error is the largest relative L2 error."
    )
    if rows:
        report.print_times(console, f"Medians of {settings.runs} runs, ms", rows, device.type)
    report.print_ratios(console, found)
    if sibling_rows:
        title = f"The other operators, medians of {settings.runs} runs, ms"
        report.print_siblings(console, title, sibling_rows, device.type)
    if memory:
        print_memory(console, memory)
    if host:
        print_host(console, host)
    if options.json:
        content = {
            "environment": environment,
            "ceilings": dataclasses.asdict(ceilings),
            "settings": {**dataclasses.asdict(settings), "device": str(device)},
            "rows": [row.as_json() for row in rows],
            "ratios": found,
            "siblings": [row.as_json() for row in sibling_rows],
            "memory": memory,
            "host_overhead": host,
            "failures": failures,
        }
        report.write_json(options.json, content)
        console.print(f"Wrote {options.json}")
    if options.plot:
        name = environment["device"]
        drawn = []
        if rows:
            drawn += [
                plots.plot_speedups(rows, name, Path(f"{options.plot}_speedup.png")),
                plots.plot_roofline(rows, ceilings, name, Path(f"{options.plot}_roofline.png")),
            ]
        if sibling_rows:
            path = Path(f"{options.plot}_siblings.png")
            drawn.append(plots.plot_siblings(sibling_rows, name, path))
        for path in filter(None, drawn):
            console.print(f"Drew {path}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
