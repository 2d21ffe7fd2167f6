"""Times the scan of one sequence over the ranks of torchrun against a single rank.

Every rank has its own GPU with NCCL, or a CPU thread with gloo. The whole sequence on the first
rank, while the others wait, and its parts on all ranks are timed alternately, each run from a
barrier to the end of the last rank. The table then lists the parts of a run: a rank's ordinary
passes, its passes with an exchange of states, a collective, and the composition of the maps of more
ranks. The results of both ways are compared first.

An S6 layer with the same number of inner channels is timed likewise, and also with one rank's steps
on the first rank: that time divided by the time of all ranks is the efficiency of weak scaling.
bfloat16 means torch.autocast.

With --graphs each forward and backward pass, of one rank and of all, is also timed as the replay of
a CUDA graph, which eliminates the host's time. The layer split by channels is left out.

Example:
    torchrun --nproc-per-node 2 benchmarks/benchmark_distributed.py --shape 1,512,8192,16
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from harness import records, report
from harness.arguments import make_parser, positive
from harness.checks import relative_l2
from harness.problems import METHODS
from harness.timing import Timing, in_graph
from selective_scan import S6, diagonal_scan_fn, distributed, selective_scan_fn
from selective_scan.distributed import _between

_RANKS = (8, 64, 512)  # the hypothetical numbers of ranks whose maps are composed
_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def parse_shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(",") if part.isdecimal())
    if len(sizes) != 4 or 0 in sizes:
        raise argparse.ArgumentTypeError(f"expected batch,dim,seqlen,dstate, got {text!r}")
    return sizes


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    # fmt: off
    add("--shape", type=parse_shape, metavar="BATCH,DIM,SEQLEN,DSTATE",
        help="whole sequence (default: 1,2048,131072,16 on GPUs, 1,512,8192,16 on a CPU)")
    add("--device", choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=tuple(_TOLERANCE), help="default: bfloat16 on GPUs, float32 on a CPU")
    add("--method", choices=METHODS, default="zoh")
    add("--runs", type=positive, default=20)
    add("--graphs", action="store_true", help="also time passes as CUDA graphs")
    add("--json", type=Path, metavar="FILE", help="where to write the record")
    # fmt: on
    options = parser.parse_args()
    is_cuda = options.device == "cuda"
    if options.graphs and not is_cuda:
        parser.error("--graphs needs --device cuda")
    options.shape = options.shape or ((1, 2048, 131072, 16) if is_cuda else (1, 512, 8192, 16))
    options.dtype = options.dtype or ("bfloat16" if is_cuda else "float32")
    return options


class Rank:
    """This process as one of the ranks."""

    def __init__(self, device: str) -> None:
        index = int(os.environ["LOCAL_RANK"])
        self.device = torch.device(device, index) if device == "cuda" else torch.device("cpu")
        if device == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        self.index, self.count = dist.get_rank(), dist.get_world_size()

    def time(self, calls: dict[str, Callable[[], object] | None], runs: int) -> dict[str, Timing]:
        """Returns the milliseconds of alternating calls until the last rank is done. With None this
        rank only waits for the others."""
        samples = {name: [] for name in calls}
        for run in range(runs + 2):
            for name, call in calls.items():
                self.wait()
                dist.barrier()
                start = time.perf_counter()
                if call is not None:
                    call()
                self.wait()
                elapsed = torch.tensor(1e3 * (time.perf_counter() - start), device=self.device)
                dist.all_reduce(elapsed, dist.ReduceOp.MAX)
                if run >= 2:  # the first ones warm up
                    samples[name].append(elapsed.item())
        return {name: Timing.of(values) for name, values in samples.items()}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict:
    """Returns inputs that are the same on every rank; states decay over some hundred steps."""
    batch, dim, seqlen, dstate = shape
    random = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=random, device=device).to(dtype)

    sequence = (batch, seqlen, dim)
    poles = torch.arange(1, dstate + 1, device=device, dtype=torch.float32)
    return {
        "u": normal(*sequence).transpose(1, 2),
        "delta": (normal(*sequence) - 4).transpose(1, 2),
        "A": -poles.expand(dim, dstate).contiguous(),
        "B": normal(batch, seqlen, dstate).transpose(1, 2),
        "C": normal(batch, seqlen, dstate).transpose(1, 2),
        "D": torch.ones(dim, device=device),
        "z": normal(*sequence).transpose(1, 2),
    }


def own_part(rank: Rank, tensor: Tensor, seqlen: int) -> Tensor:
    if tensor.shape[-1] != seqlen or tensor.dim() < 3:
        return tensor
    part = tensor.tensor_split(rank.count, dim=-1)[rank.index]
    return part.transpose(1, 2).contiguous().transpose(1, 2)


def passes(scan: Callable[..., Tensor], inputs: dict, dout: Tensor) -> dict[str, Callable]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}

    @torch.no_grad()
    def forward() -> Tensor:
        return scan(**inputs, delta_softplus=True)

    def both() -> tuple[Tensor, ...]:
        out = scan(**leaves, delta_softplus=True)
        return out.detach(), *torch.autograd.grad(out, list(leaves.values()), dout)

    return {"forward": forward, "forward + backward": both}


def parts_of(inputs: dict, dout: Tensor, rank: Rank, method: str) -> dict[str, Callable]:
    """Returns the individual parts of a rank's run."""
    ops = torch.ops.selective_scan
    tensors = tuple(inputs[name] for name in ("u", "delta", "A", "B", "C", "D", "z"))
    arguments = (*tensors, None, True, method, None, False)
    _, last_state, states = ops.selective_scan_fwd(*arguments, None, None, True)
    gathered = last_state.new_empty(rank.count * 2, *last_state.shape)
    both = torch.stack([last_state, last_state])
    all_maps = torch.rand(2, max(_RANKS), *last_state.shape, device=rank.device)

    def enter(_own: Tensor) -> Tensor:
        return last_state

    def compose(count: int) -> None:
        factors, offsets = all_maps[:, :count]
        diagonal_scan_fn(factors.movedim(0, -1), offsets.movedim(0, -1))

    return {
        "its forward pass": lambda: ops.selective_scan_fwd(*arguments, None, None, True),
        "its forward pass, asking": lambda: _between.scan_forward(
            (*arguments, None), enter, is_told=True, is_saved=True
        ),
        "its backward pass": lambda: ops.selective_scan_bwd(
            dout, last_state, *arguments, None, None, states
        ),
        "its backward pass, asking": lambda: _between.scan_backward(
            dout, (*arguments, None), states, enter, is_told=True
        ),
        "an all-gather": lambda: dist.all_gather_into_tensor(gathered, both),
        **{f"composing {count} maps": functools.partial(compose, count) for count in _RANKS},
    }


def layer_passes(options: argparse.Namespace, rank: Rank) -> dict[str, Callable | None]:
    """Returns calls of forward and backward of a layer: all steps on one rank and split over all
    ranks, one rank's steps on one rank, and a part of the channels on each rank."""
    batch, dim, seqlen, dstate = options.shape
    torch.manual_seed(0)
    model = S6(dim // 2, dstate, discretization_method=options.method, device=rank.device)
    mesh = dist.init_device_mesh(options.device, (rank.count,))
    split = distributed.parallelize(copy.deepcopy(model), mesh, sequence_dim=0)
    is_divided = dim % rank.count == 0
    if is_divided:
        of_channels = distributed.parallelize(copy.deepcopy(model), mesh, tensor_dim=0)
    x = torch.randn(batch, seqlen, dim // 2, device=rank.device)
    own = x.tensor_split(rank.count, dim=1)[rank.index]
    context = torch.autocast(options.device, torch.bfloat16, options.dtype == "bfloat16")

    def run(model: S6, x: Tensor) -> None:
        with context:
            out = model(x)
        torch.autograd.grad(out, list(model.parameters()), torch.ones_like(out))

    def on_first(x: Tensor) -> Callable | None:
        return functools.partial(run, model, x) if rank.index == 0 else None

    calls = {
        "one rank, layer": on_first(x),
        "all ranks, layer": functools.partial(run, split, own),
        "one rank, layer, own steps": on_first(own),
    }
    if is_divided:
        calls["all ranks, layer by channels"] = functools.partial(run, of_channels, x)
    return calls


def graphs_of(calls: dict[str, Callable | None]) -> dict[str, Callable | None]:
    """Returns the calls of forward and backward passes as CUDA graphs, which all ranks capture in
    the same order."""

    def graph_of(call: Callable) -> Callable:
        # NCCL's own thread may query earlier work during the capture.
        return in_graph(call, capture_error_mode="thread_local")

    return {
        f"{name}, graph": None if call is None else graph_of(call)
        for name, call in calls.items()
        if name.endswith(("layer", "forward + backward"))
    }


def check(rank: Rank, whole: dict, parts: dict, seqlen: int, tolerance: float) -> float:
    """Returns the largest relative difference between the results of one rank and of all ranks;
    fails if it is too large."""
    worst = 0.0
    for name in ("forward", "forward + backward"):
        ours = parts[name]()
        theirs = whole[name]()
        pairs = [(ours, theirs)] if name == "forward" else list(zip(ours, theirs, strict=True))
        for mine, exact in pairs:
            if mine.shape == exact.shape:  # parameters' gradients, which add up over the ranks
                dist.all_reduce(mine)
            else:
                exact = own_part(rank, exact, seqlen)
            worst = max(worst, relative_l2(mine, exact))
    error = torch.tensor(worst, device=rank.device)
    dist.all_reduce(error, dist.ReduceOp.MAX)
    if error.item() > tolerance:
        raise SystemExit(f"results differ by {error.item():.3g}, more than {tolerance}")
    return error.item()


def work(options: argparse.Namespace, rank: Rank) -> None:
    seqlen = options.shape[2]
    inputs = make_inputs(options.shape, getattr(torch, options.dtype), rank.device)
    dout = torch.ones_like(inputs["u"])
    own = {name: own_part(rank, tensor, seqlen) for name, tensor in inputs.items()}
    own_dout = own_part(rank, dout, seqlen)

    def on_one(**arguments) -> Tensor:
        return selective_scan_fn(**arguments, discretization_method=options.method)

    def on_all(**arguments) -> Tensor:
        return distributed.selective_scan_fn(
            **arguments, discretization_method=options.method, group=None
        )

    whole, parts = passes(on_one, inputs, dout), passes(on_all, own, own_dout)
    error = check(rank, whole, parts, seqlen, _TOLERANCE[options.dtype])
    calls = {}
    for name in whole:
        calls[f"one rank, {name}"] = whole[name] if rank.index == 0 else None
        calls[f"all ranks, {name}"] = parts[name]
    calls |= layer_passes(options, rank)
    if options.graphs:
        calls |= graphs_of(calls)
    calls |= parts_of(own, own_dout, rank, options.method)
    times = rank.time(calls, options.runs)
    if rank.index == 0:
        rows = []
        for name, timing in times.items():
            alone = times.get(name.removesuffix(" by channels").replace("all ranks", "one rank"))
            row = {"what": name, "time": dataclasses.asdict(timing)}
            if name.startswith("all"):
                row["ratio"] = timing.median / alone.median
                row["error"] = error if name.removeprefix("all ranks, ") in whole else None
            rows.append(row)
        title = f"{rank.count} ranks, {options.shape}, {options.dtype}, {options.method}"
        report.print_table(title, rows, "what time=ms ratio=of_one_rank's error")
        records.write(options.json, records.environment(rank.device) | {"rows": rows})


def main() -> None:
    options = parse_arguments()
    work(options, Rank(options.device))
    # Nothing references the group any more, so its threads end before the process does.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
