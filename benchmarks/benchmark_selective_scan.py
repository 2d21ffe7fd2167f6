"""Times the selective scan against the machine's limits, other kernels and the reference.

--users times the calls that published models make, against mamba_ssm if that is importable, on a
CPU against the reference. Only these calls must be fast; the other modes give more detail.

The kernels are called through torch.ops without autograd, after a check of their results against
fp64 in the same run. Without --shapes the device's whole suite is measured; --shapes, --dtype,
--variants and --methods measure the product of their values. --operators adds the diagonal and the
adaptive unitary scan, or measures only these. --layouts times every combination of arrays that are
contiguous along time or along channels, and compares it with arrays that all are so along time.
--cliffs instead times problems around every threshold, one axis at a time, against the nearest
ordinary problem.

Example:
    python benchmarks/benchmark_selective_scan.py --users --json h200_users.json --plot h200
    python benchmarks/benchmark_selective_scan.py --device cuda --backward \\
        --anchors benchmarks/anchors/h200_mamba_ssm.json --json h200.json --plot h200
    python benchmarks/benchmark_selective_scan.py --device cpu --backward --threads 1 2 \\
        --shapes laptop-512 1,768,512,16 --methods zoh foh
    python benchmarks/benchmark_selective_scan.py --device cuda --backward --layouts \\
        --shapes mamba-130m --host-calls 0
    python benchmarks/benchmark_selective_scan.py --device cuda --backward \\
        --operators diagonal adaptive_unitary --json siblings.json --plot h200
    python benchmarks/benchmark_selective_scan.py --cliffs --backward --json cliffs.json --plot h200
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import track

from harness import plots, records, report
from harness.arguments import count, measuring_parser, parse, positive, shape
from harness.ceilings import Ceilings, find_ceilings
from harness.checks import check
from harness.cliffs import choose_points, measure_point
from harness.operators import Scan, Tensors, make_scan, nbytes
from harness.peers import (
    Anchors,
    imported_versions,
    is_for_the_reference,
    mamba_ssm_passes,
    textbook_scan,
)
from harness.problems import (
    DTYPES,
    LAYOUTS,
    METHODS,
    OPERATORS,
    SHAPES,
    VARIANTS,
    Problem,
    select_problems,
)
from harness.timing import Timing, host_overhead_us, keep_freed_memory, measure, peak_mebibytes
from harness.user_calls import Timed, prepare
from harness.users import Call, ScanCall, calls
from selective_scan import selective_scan_fn, selective_scan_ref

_MOST_COMPILED_STEPS = 128  # the compiler unrolls the reference's loop over time
_HOST_SHAPES = {"cuda": "launch-bound", "cpu": "one-call"}


_COLUMNS = (
    "operator shape dtype variant method threads which=pass time=ms "
    "ratio_to_contiguous=×_contiguous floor_ms=floor ratio_to_floor=×_floor "
    "GB_per_s=GB/s ns_per_update=ns/update peak_fraction=of_peak peer_ms "
    "speedup_over_peer=×_peer reference=ref speedup_over_reference=×_ref "
    "compiled_reference=compiled speedup_over_compiled_reference=×_compiled textbook "
    "speedup_over_textbook=×_textbook error"
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = measuring_parser(__doc__)
    names = ", ".join(SHAPES)
    add = parser.add_argument
    # fmt: off
    add("--operators", nargs="+", choices=OPERATORS, default=OPERATORS[:1],
        help="operators to measure (default: selective_scan)")
    add("--shapes", nargs="+", type=shape, metavar="SHAPE",
        help=f"batch,dim,seqlen,dstate[,groups] or one of {names}")
    add("--dtype", nargs="+", choices=DTYPES,
        help="dtypes of u, delta, z, variable B and C, of a and b, or of u, dt and z")
    add("--variants", nargs="+", choices=VARIANTS, help="changes of the plain problem")
    add("--layouts", action="store_const", const=LAYOUTS, dest="variants",
        help="every layout of u, delta, z and dout, instead of --variants")
    add("--methods", nargs="+", choices=METHODS, help="discretization methods")
    lists = parser.add_mutually_exclusive_group()
    lists.add_argument("--users", action="store_true",
        help="the calls that published models make (harness/users.py), both passes")
    lists.add_argument("--cliffs", action="store_true",
        help="states, steps, channels, groups, types and layouts around every threshold, against "
        "the nearest ordinary problem. --shapes and --dtype name another base")
    add("--only", default="", metavar="REGEX", help="only the --users calls whose name matches")
    add("--backward", action="store_true", help="measure the backward pass too")
    add("--quick", action="store_true", help="small shapes and few runs: a test of the program")
    add("--warmup", type=count, help="untimed runs (default: 5, quick: 1)")
    add("--runs", type=positive, help="timed runs (default: 30, --users: 11, quick: 3)")
    add("--budget", type=float, default=20, metavar="SECONDS",
        help="for each measurement; fewer runs, but at least 5, after that (default: 20)")
    add("--threads", nargs="+", type=positive, help="CPU threads (default: 1 and all)")
    add("--cold-l2", action="store_true", help="overwrite the GPU's L2 cache before each run")
    add("--reference-runs", type=count,
        help="runs of the reference and of the textbook's loop on plain problems "
        "(default: 5 on a CPU, 0 on a GPU)")
    add("--compile-reference", action="store_true",
        help="also time torch.compile of the reference, for up to "
        f"{_MOST_COMPILED_STEPS} steps (slow to compile)")
    add("--host-calls", type=count, default=1000,
        help="consecutive calls to measure the host's overhead, 0 for none (default: 1000)")
    add("--anchors", type=Path, metavar="FILE",
        help="JSON with mamba_ssm's times and the ceilings of a GPU")
    add("--copy-bandwidth", type=float, metavar="GB/S", help="ceiling (default: anchors, measured)")
    add("--exp-rate", type=float, metavar="PER_SECOND",
        help="the GPU's exponentials per second (default: anchors, from the clock)")
    add("--seed", type=int, default=0)
    add("--plot", type=Path, metavar="PREFIX",
        help="write PREFIX_speedup.png and PREFIX_siblings.png, PREFIX_users.png or "
        "PREFIX_cliffs.png")
    # fmt: on
    options = parse(parser, arguments)
    try:
        options.anchors = Anchors.load(options.anchors, records.device_name(options.device))
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    is_cuda = options.device.type == "cuda"
    runs = 11 if options.users else 30
    usual = {"warmup": (5, 1), "runs": (runs, 3), "reference_runs": (0 if is_cuda else 5, 1)}
    for name, values in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.quick])
    threads = torch.get_num_threads()
    options.threads = [threads] if is_cuda else options.threads or sorted({1, threads})
    return options


def time_references(scan: Scan, options: argparse.Namespace) -> dict[str, dict[str, Timing]]:
    """Times the reference and the selective scan's other PyTorch versions, by name and pass."""
    problem = scan.problem
    is_scan = problem.operator == "selective_scan"
    is_plain = problem.variant.name == "plain" and problem.method == "zoh"
    is_asked_for = options.reference_runs > 0 and (is_plain or not is_scan)
    if not (is_asked_for and is_for_the_reference(problem)):
        return {}
    leaves = {name: x.detach().requires_grad_() for name, x in scan.tensors.items()}
    functions = {"reference": scan.reference}
    if is_scan:
        functions["textbook"] = lambda tensors: textbook_scan(**scan.keywords(tensors))
    if is_scan and options.compile_reference and problem.shape.seqlen <= _MOST_COMPILED_STEPS:
        compiled = torch.compile(selective_scan_ref)
        functions["compiled_reference"] = lambda tensors: compiled(**scan.keywords(tensors))

    def time_passes(function: Callable[[Tensors], torch.Tensor]) -> dict[str, Timing]:
        def forward() -> torch.Tensor:
            with torch.no_grad():
                return function(scan.tensors)

        def forward_backward() -> object:
            return torch.autograd.grad(function(leaves), list(leaves.values()), scan.dout)

        calls = {"forward": forward}
        if options.backward and is_scan:
            calls["forward + backward"] = forward_backward
        return time_calls(calls, options, warmup=1, runs=options.reference_runs)

    return {name: time_passes(function) for name, function in functions.items()}


def time_calls(
    calls: dict[str, Callable[[], object]], options: argparse.Namespace, **changes: int
) -> dict[str, Timing]:
    values = {name: getattr(options, name) for name in ("warmup", "runs", "budget", "cold_l2")}
    return measure(calls, options.device, **(values | changes))


def run_problem(
    problem: Problem, options: argparse.Namespace, ceilings: Ceilings, anchors: Anchors
) -> list[records.Row]:
    """Checks the kernels on a problem, then times every pass with each number of threads."""
    scan = make_scan(problem, options.device, options.seed)
    error = max(check(scan, options.backward).values())
    calls = scan.passes(options.backward)
    is_cuda = options.device.type == "cuda"
    peers = mamba_ssm_passes(scan, options.backward) if is_cuda else {}
    # The whole suite compares methods and variants with the most threads only.
    is_special = problem.method != "zoh" or problem.variant.name not in ("plain", "no-z")
    is_suite = not (options.shapes or options.quick)
    rows = []
    for threads in options.threads[-1:] if is_suite and is_special else options.threads:
        torch.set_num_threads(threads)
        times = time_calls({**calls, **{f"peer {k}": f for k, f in peers.items()}}, options)
        is_last = threads == options.threads[-1]  # the references run with the most threads only
        compared = time_references(scan, options) if is_last else {}
        for which in calls:
            moved = scan.bytes_moved(which)
            rate = ceilings.updates_per_s(problem, which, threads)
            arithmetic = problem.updates / rate if rate else 0.0
            floor = max(moved / ceilings.copy_bytes_per_s, arithmetic)
            fraction = arithmetic / times[which].median * 1e3 if rate and not is_cuda else None
            peer, peer_ms = anchors.milliseconds(problem, which)
            peer_time = times.get(f"peer {which.removeprefix('training ')}")
            if peer_time:
                peer, peer_ms = "mamba_ssm", peer_time.median
            rows.append(
                records.make_row(
                    problem, which, threads, times[which], bytes_moved=moved,
                    floor_ms=floor * 1e3, peak_fraction=fraction, error=error, peer=peer,
                    peer_ms=peer_ms,
                    compared={name: by.get(which) for name, by in compared.items()},
                )
            )  # fmt: skip
    return rows


def compare_layouts(rows: list[records.Row]) -> None:
    """Adds to rows of other layouts the ratio of their time to that of contiguous arrays."""
    names = ("operator", "shape", "dtype", "method", "threads", "which")
    plain = {
        tuple(row[name] for name in names): row["time"]["median"]
        for row in rows
        if row["variant"] == "plain"
    }
    for row in rows:
        time = plain.get(tuple(row[name] for name in names))
        if time and row["variant"] in LAYOUTS[1:]:
            row["ratio_to_contiguous"] = row["time"]["median"] / time


def measure_memory(problem: Problem, options: argparse.Namespace, anchors: Anchors) -> records.Row:
    """Measures the MiB that the passes allocate on the GPU besides inputs and dout."""
    device = options.device
    scan = make_scan(problem, device, options.seed)

    def both() -> object:
        out, _, states = scan.forward(True)
        return out, scan.backward(states)

    states = scan.forward(True)[2]
    return {
        "shape": problem.shape.name,
        "dtype": problem.dtype,
        "variant": problem.variant.name,
        "saved_states_MiB": nbytes([states]) / 2**20,
        "forward_MiB": peak_mebibytes(lambda: scan.forward(False), device),
        "backward_MiB": peak_mebibytes(lambda: scan.backward(states), device),
        "forward_backward_MiB": peak_mebibytes(both, device),
        "peer_backward_MiB": anchors.find(problem).get("mamba_ssm_bwd_extra_MiB"),
    }


class _NoWork(torch.autograd.Function):
    """Returns existing results, so that only autograd's own time remains."""

    @staticmethod
    def forward(ctx, out: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.gradients = leaves
        return out.detach()

    @staticmethod
    def backward(ctx, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.gradients)


def measure_host(options: argparse.Namespace) -> list[records.Row]:
    """Measures the microseconds per call of the public function on an almost trivial problem."""
    problem = Problem(SHAPES[_HOST_SHAPES[options.device.type]])
    scan = make_scan(problem, options.device, options.seed)
    leaves = {name: x.detach().requires_grad_() for name, x in scan.tensors.items()}

    def inference() -> None:
        with torch.no_grad():
            selective_scan_fn(**scan.keywords())

    def training() -> None:
        out = selective_scan_fn(**scan.keywords(leaves))
        torch.autograd.grad(out, list(leaves.values()), scan.dout)

    def autograd() -> None:
        out = _NoWork.apply(scan.dout, *leaves.values())
        torch.autograd.grad(out, list(leaves.values()), scan.dout)

    # Autograd wakes a separate thread, one per GPU, for every backward pass.
    cases = [
        ("no_grad call", inference, True),
        ("forward + backward through autograd", training, True),
        ("of that autograd without any work", autograd, True),
        ("forward + backward, autograd on the calling thread", training, False),
        ("of that autograd without any work, likewise", autograd, False),
    ]
    rows = []
    for what, call, with_threads in cases if options.device.type == "cuda" else cases[:3]:
        with torch.autograd.set_multithreading_enabled(with_threads):
            time = host_overhead_us(call, options.device, calls=options.host_calls)
        row = {"what": what, "shape": problem.shape.name, "dtype": problem.dtype}
        rows.append({**row, "calls": options.host_calls, "us_per_call": dataclasses.asdict(time)})
    return rows


def measure_call(call: Call, options: argparse.Namespace) -> list[records.Row]:
    """Checks a user's call, then alternates between timing its passes and its peer's."""
    prepared = prepare(call, options.device, options.seed)
    error = prepared.check()
    peer = "mamba_ssm" if options.device.type == "cuda" else "selective_scan_ref"
    parties = {"ours": prepared.passes, peer: prepared.peer()}
    limits = {name: getattr(options, name) for name in ("warmup", "runs", "budget")}
    times = Timed(parties, options.device).sample(**limits)
    rows = []
    for which, samples in times["ours"].items():
        time = Timing.of(samples)
        theirs = times.get(peer, {}).get(which)
        peer_ms = Timing.of(theirs).median if theirs else None
        rows.append(
            {
                "kind": call.kind,
                "name": call.name,
                "model": call.model,
                "sizes": list(call.sizes),
                "dtype": call.dtype,
                "variant": call.variant if isinstance(call, ScanCall) else None,
                "which": which,
                "threads": torch.get_num_threads(),
                "time": dataclasses.asdict(time),
                "error": error,
                "peer": peer if theirs else None,
                "peer_ms": peer_ms,
                "speedup_over_peer": peer_ms and peer_ms / time.median,
            }
        )
    return rows


def choose_calls(options: argparse.Namespace) -> list[Call]:
    found = calls(options.device.type, options.quick)
    return [call for call in found if re.search(options.only, call.name)]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A list of cases that is measured instead of the suite."""

    choose: Callable[[argparse.Namespace], list]
    measure: Callable[..., list[records.Row]]
    columns: str
    plot: Callable[[list[records.Row], str, Path], None]


SWEEPS = {
    "users": Sweep(
        choose_calls,
        measure_call,
        "name sizes dtype variant which=pass time=ms peer peer_ms speedup_over_peer=×_peer error",
        plots.plot_users,
    ),
    "cliffs": Sweep(
        choose_points,
        measure_point,
        "axis value sizes dtype variant which=pass time=ms neighbour neighbour_ms ratio error",
        plots.plot_cliffs,
    ),
}


def run_sweep(name: str, options: argparse.Namespace) -> int:
    sweep = SWEEPS[name]
    environment = records.environment(options.device)
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads[-1])
    settings = {name: value for name, value in vars(options).items() if name != "anchors"}
    rows, failures = [], []
    try:
        for each in track(sweep.choose(options), disable=not sys.stderr.isatty(), transient=True):
            try:
                rows += sweep.measure(each, options)
            except RuntimeError as error:  # a wrong result, or out of memory
                failures.append(f"{each}: {error}")
            if options.device.type == "cuda":
                torch.cuda.empty_cache()  # frees the pools of destroyed graphs
    finally:  # an interrupted program leaves what it has measured
        if options.json:
            with_peers = {**environment, "peers": imported_versions()}
            content = {"environment": with_peers, "settings": settings, "rows": rows}
            records.write(options.json, {**content, "failures": failures})
    print(
        f"{environment['device']}, torch {environment['torch']}, selective_scan "
        f"{environment['selective_scan']} ({environment['revision']}), {environment['date']}"
    )
    title = f"Medians of {options.runs} runs (quartiles), ms"
    report.print_table(title, rows, sweep.columns)
    if options.plot and rows:
        sweep.plot(rows, environment["device"], Path(f"{options.plot}_{name}.png"))
    return report_failures(failures)


def report_failures(failures: list[str]) -> int:
    """Prints the failures and returns the program's exit status."""
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    device: torch.device = options.device
    is_cuda = device.type == "cuda"
    if not is_cuda and arguments is None:  # otherwise a caller's program would be restarted
        keep_freed_memory()
    for name in SWEEPS:
        if getattr(options, name):
            return run_sweep(name, options)
    anchors = options.anchors
    all_threads = torch.get_num_threads()
    problems = select_problems(
        device.type, options.operators, shapes=options.shapes, dtypes=options.dtype,
        variants=options.variants, methods=options.methods, quick=options.quick,
    )  # fmt: skip
    environment = records.environment(device)
    torch.manual_seed(options.seed)
    ceilings = find_ceilings(device, anchors.ceilings, options.copy_bandwidth, options.exp_rate)

    rows, memory, failures = [], [], []
    for problem in track(problems, disable=not sys.stderr.isatty(), transient=True):
        try:
            rows += run_problem(problem, options, ceilings, anchors)
            if is_cuda and options.backward and problem.operator == "selective_scan":
                memory.append(measure_memory(problem, options, anchors))
        except RuntimeError as error:  # a wrong result, or out of memory
            failures.append(f"{problem}: {error}")
    torch.set_num_threads(all_threads)
    compare_layouts(rows)
    is_timed = "selective_scan" in options.operators and options.host_calls
    host = measure_host(options) if is_timed else []

    print(
        f"{environment['device']}, torch {environment['torch']}, selective_scan "
        f"{environment['selective_scan']} ({environment['revision']}), {environment['date']}\n"
        f"Ceilings: {ceilings}\n"
        "Results are checked against fp64 on sampled channels of the full problem over the whole "
        "sequence; error is the largest relative L2 error."
    )
    scans = [row for row in rows if row["operator"] == "selective_scan"]
    siblings = [row for row in rows if row["operator"] != "selective_scan"]
    l2 = f", {'cold' if options.cold_l2 else 'warm'} L2" if is_cuda else ""
    for part in filter(None, (scans, siblings)):
        title = f"Medians of {options.runs} runs (quartiles){l2}, ms"
        report.print_table(title, part, _COLUMNS)
    if memory:
        report.print_table("Memory beside inputs and dout", memory, " ".join(memory[0]))
    if host:
        title = "Public function, host's time per call, µs"
        report.print_table(title, host, "shape dtype what us_per_call")
    settings = {name: value for name, value in vars(options).items() if name != "anchors"}
    content = {
        "environment": environment,
        "ceilings": dataclasses.asdict(ceilings),
        "settings": settings,
        "rows": rows,
        "memory": memory,
        "host_overhead": host,
        "failures": failures,
    }
    records.write(options.json, content)
    if options.plot and scans:
        path = Path(f"{options.plot}_speedup.png")
        plots.plot_speedups(scans, environment["device"], path)
    if options.plot and siblings:
        path = Path(f"{options.plot}_siblings.png")
        plots.plot_siblings(siblings, environment["device"], path)
    return report_failures(failures)


if __name__ == "__main__":
    sys.exit(main())
