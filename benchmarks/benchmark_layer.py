"""Times a Mamba layer: whole models of it, their matrix products alone, and the parts of a layer.

A model is S6: some layers of norm, mixer and residual, and a last norm. It is compared with its
matrix products alone, with mamba_ssm's layer if that is importable, and with --transformers with
transformers' layers under the integration. bfloat16 means torch.autocast over float32 parameters.
On CUDA a model is also timed as one CUDA graph, and with its two passes as graphs, which
torch.cuda.make_graphed_callables captures and autograd calls; and the memory that a step needs
beyond parameters and input is measured. A model's times include the GPU's waits for the host; those
of parts are the GPU's alone.

Example:
    python benchmarks/benchmark_layer.py --device cpu --threads 2 --json layer.json --plot layer.png
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import plots, records, report
from harness.arguments import measuring_parser, parse, positive
from harness.models import PASSES, Step, check_layer, graphed_step, model_step
from harness.peers import imported_versions, mamba_ssm_layers
from harness.timing import Timing, in_graph, keep_freed_memory, measure, peak_mebibytes
from harness.users import LAYERS, LayerCall
from selective_scan import S6, MambaMixer
from selective_scan._add_norm import add_rms_norm
from selective_scan.integrations.transformers import enable

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = {call.name: call for call in LAYERS}


def parse_shape(text: str) -> LayerCall:
    if text in SHAPES:
        return SHAPES[text]
    sizes = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(sizes) != 4 or 0 in sizes:
        names = ", ".join(SHAPES)
        raise argparse.ArgumentTypeError(
            f"expected {names} or batch,seqlen,d_model,layers, got {text!r}"
        )
    return LayerCall("x".join(map(str, sizes)), "given", *sizes)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    # fmt: off
    add("--shapes", nargs="+", type=parse_shape, metavar="SHAPE",
        help=f"names among {', '.join(SHAPES)}, or batch,seqlen,d_model,layers "
             "(default: all on CUDA, 2,512,768,2 on a CPU)")
    add("--dtypes", nargs="+", choices=_DTYPES, help="default: bfloat16 on CUDA, both on a CPU")
    add("--compile", action="store_true", help="also time the model under torch.compile")
    add("--transformers", action="store_true", help="also time transformers' layers")
    add("--threads", type=positive, default=torch.get_num_threads())
    add("--runs", type=positive, default=20)
    add("--budget", type=float, default=60, metavar="SECONDS",
        help="for each shape and dtype; no run starts after that time (default: 60)")
    add("--plot", type=Path, metavar="FILE", help="draw where a layer's time goes")
    # fmt: on
    return parse(parser, arguments)


# --- the timed calls ------------------------------------------------------------------------------


def transformers_layers(shape: LayerCall) -> nn.Module:
    from transformers import MambaConfig, MambaModel

    class Layers(MambaModel):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(inputs_embeds=x, use_cache=False).last_hidden_state

    enable(["mamba"])
    config = MambaConfig(hidden_size=shape.d_model, num_hidden_layers=shape.layers)
    model = Layers(config)
    del model.embeddings
    return model


def make_models(shape: LayerCall, device: torch.device) -> dict[str, nn.Module]:
    models = {
        "S6": S6(shape.d_model, depth=shape.layers),
        "S6 bidirectional": S6(shape.d_model, depth=shape.layers, bidirectional=True),
    }
    peer = mamba_ssm_layers(shape.d_model, shape.layers, device)
    if peer is not None:
        models["mamba_ssm"] = peer
    return {name: model.to(device) for name, model in models.items()}


def products_step(layer: MambaMixer, x: Tensor, layers: int, dtype: torch.dtype) -> Step:
    """Returns the matrix products of all layers, with operands prepared in advance."""
    batch, seqlen, _ = x.shape

    def operand(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=x.device, dtype=dtype).requires_grad_()

    operands = []
    for name in ("in_proj", "x_proj", "dt_proj", "out_proj"):
        rows, columns = getattr(layer, name).weight.shape
        operands.append((operand(batch, seqlen, columns), operand(rows, columns)))
    leaves = [tensor for pair in operands for tensor in pair]
    return Step(lambda: [F.linear(*pair) for _ in range(layers) for pair in operands], leaves)


def part_steps(layer: MambaMixer, x: Tensor, dtype: torch.dtype) -> dict[str, dict[str, Callable]]:
    """Returns the parts of one layer as it calls them, by name: forward, and backward alone."""
    ops = torch.ops.selective_scan
    dim, rank, dstate = layer.d_inner, layer.dt_rank, layer.d_state
    norm = nn.RMSNorm(x.shape[-1], eps=1e-5, device=x.device)
    weights = {
        name: getattr(layer, name).weight.detach().to(dtype)
        for name in ("in_proj", "x_proj", "dt_proj", "out_proj")
    }
    hidden = torch.randn_like(x, dtype=dtype)
    product_out = torch.randn_like(x, dtype=dtype).requires_grad_()
    xz = F.linear(hidden, weights["in_proj"])
    taps = (layer.conv1d.weight.detach().squeeze(1), layer.conv1d.bias.detach(), None, None, None)
    convolved = (xz[..., :dim].transpose(1, 2), *taps)
    u = ops.causal_conv1d_fwd(*convolved, False, "silu")[0].transpose(1, 2)
    x_dbl = F.linear(u, weights["x_proj"])
    dt, B, C = x_dbl.split([rank, dstate, dstate], dim=-1)
    delta = F.linear(dt.contiguous(), weights["dt_proj"])
    scanned = (
        *(tensor.transpose(1, 2) for tensor in (u, delta)),
        -torch.exp(layer.A_log.detach()),
        *(tensor.transpose(1, 2) for tensor in (B, C)),
        layer.D.detach(),
        xz[..., dim:].transpose(1, 2),
        layer.dt_proj.bias.detach(),
        *(True, "zoh", None, False, None, None),
    )
    y, _, states = ops.selective_scan_fwd(*scanned, True)
    dxz, dx_dbl, ddelta, du = map(torch.empty_like, (xz, x_dbl, delta, u))
    _, dB, dC = (part.transpose(1, 2) for part in dx_dbl.split([rank, dstate, dstate], dim=-1))
    dx, dz = (half.transpose(1, 2) for half in dxz.chunk(2, dim=-1))
    given = {"du": du.transpose(1, 2), "ddelta": ddelta.transpose(1, 2), "dB": dB, "dC": dC}

    def product(name: str, rows: Tensor) -> dict[str, Callable]:
        weight, rows = weights[name], rows.reshape(-1, rows.shape[-1])
        gradient = rows @ weight.t()
        return {
            "forward": lambda: rows @ weight.t(),
            "backward": lambda: (gradient.t() @ rows, gradient @ weight),
        }

    return {
        "in_proj": product("in_proj", hidden),
        "convolution": {
            "forward": lambda: ops.causal_conv1d_fwd(*convolved, False, "silu"),
            "backward": lambda: ops.causal_conv1d_bwd_out(
                given["du"], None, *convolved, "silu", dx=dx
            ),
        },
        "x_proj": product("x_proj", u),
        "dt_proj": product("dt_proj", dt),
        "scan": {
            "forward": lambda: ops.selective_scan_fwd(*scanned, False),
            "backward": lambda: ops.selective_scan_bwd_out(
                y, None, *scanned, states, **given, dz=dz
            ),
        },
        "out_proj": product("out_proj", y.transpose(1, 2)),
        "norm and residual": Step(
            lambda: add_rms_norm(product_out, x, norm.weight, norm.eps, dtype, x.dtype),
            [product_out, x, norm.weight],
        ).passes(),
    }


# --- measuring ------------------------------------------------------------------------------------


def measure_models(
    options: argparse.Namespace,
    shape: LayerCall,
    dtype: str,
    models: dict[str, nn.Module],
    x: Tensor,
) -> list[records.Row]:
    device = options.device
    half = _DTYPES[dtype]
    steps = {name: model_step(model, x, half) for name, model in models.items()}
    if options.compile:
        steps["S6 compiled"] = model_step(torch.compile(models["S6"], fullgraph=True), x, half)
    layer = models["S6"].layers[0]
    steps["matrix products"] = products_step(layer, x, shape.layers, half)
    calls = {
        (name, which): call for name, step in steps.items() for which, call in step.passes().items()
    }
    memory = {key: peak_mebibytes(call, device) for key, call in calls.items()}
    if device.type == "cuda":
        calls |= {("S6 as a CUDA graph", which): in_graph(calls["S6", which]) for which in PASSES}
        graphed = graphed_step(models["S6"], x, half)
        calls |= {("S6 with graphed passes", which): it for which, it in graphed.passes().items()}
    times = measure(
        calls, device, warmup=2, runs=options.runs, budget=options.budget, queue_ahead=False
    )
    error = check_layer(layer, half)

    def ratio(time: Timing, other: tuple[str, str]) -> float | None:
        return time.median / times[other].median if other in times else None

    return [
        {
            "shape": shape.name,
            "sizes": list(shape.sizes),
            "dtype": dtype,
            "what": name,
            "which": which,
            "time": dataclasses.asdict(time),
            "over_products": ratio(time, ("matrix products", which)),
            "over_mamba_ssm": ratio(time, ("mamba_ssm", which)),
            "peak_MiB": memory.get((name, which)),
            "error": error if name == "S6" else None,
        }
        for (name, which), time in times.items()
    ]


def measure_parts(
    options: argparse.Namespace, shape: LayerCall, dtype: str, models: list[records.Row],
    layer: MambaMixer, x: Tensor,
) -> list[records.Row]:  # fmt: skip
    """Returns the times of one layer: of its parts in both passes, and of the rest."""
    half = _DTYPES[dtype]
    parts = part_steps(layer, x, half)
    calls = {(name, which): call for name, part in parts.items() for which, call in part.items()}
    times = measure(calls, options.device, warmup=2, runs=options.runs, budget=options.budget)
    found = {key: time.median for key, time in times.items()}
    rows = []
    for which in PASSES:
        (whole,) = (r for r in models if (r["what"], r["which"]) == ("S6", which))
        left = whole["time"]["median"] / shape.layers
        costs = {}
        for name in parts:
            costs[name] = found.get((name, which)) or sum(
                found[name, each] for each in which.split(" + ")
            )
        if which != "forward":  # the backward pass recomputes these
            costs["convolution"] += found["convolution", "forward"]
            costs["dt_proj"] += found["dt_proj", "forward"]
        costs["else"] = max(0.0, left - sum(costs.values()))
        rows += [
            {"shape": shape.name, "dtype": dtype, "which": which, "part": part, "ms": cost,
             "of_layer": cost / left}
            for part, cost in costs.items()
        ]  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    is_cuda = options.device.type == "cuda"
    if not is_cuda:
        keep_freed_memory()
    shapes = options.shapes or (list(SHAPES.values()) if is_cuda else [parse_shape("2,512,768,2")])
    dtypes = options.dtypes or (["bfloat16"] if is_cuda else list(_DTYPES))
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows, parts = [], []
    for shape in shapes:
        for dtype in dtypes:
            models = make_models(shape, options.device)
            if options.transformers:
                models["transformers"] = transformers_layers(shape).to(options.device)
            sizes = (shape.batch, shape.seqlen, shape.d_model)
            x = torch.randn(sizes, device=options.device).requires_grad_()
            own = measure_models(options, shape, dtype, models, x)
            parts += measure_parts(options, shape, dtype, own, models["S6"].layers[0], x)
            rows += own
    environment = {**records.environment(options.device), "peers": imported_versions()}
    title = f"{environment['device']}, torch {torch.__version__}, {options.threads} threads"
    report.print_table(
        f"Models of Mamba layers, {title}, ms: median (quartiles)", rows,
        "sizes dtype what which time over_products over_mamba_ssm peak_MiB error",
    )  # fmt: skip
    report.print_table(f"Parts of one layer, {title}", parts, "shape dtype which part ms of_layer")
    records.write(options.json, {"environment": environment, "rows": rows, "parts": parts})
    if options.plot:
        bars = {
            f"{dtype}, {which}": [r for r in parts if (r["dtype"], r["which"]) == (dtype, which)]
            for dtype in dtypes
            for which in PASSES
        }
        plots.plot_stacks(
            options.plot, f"Where a Mamba layer's time goes, {environment['device']}", bars,
            "ms, medians", label=lambda row: row["shape"], group=lambda row: row["part"],
            length=lambda row: row["ms"],
        )  # fmt: skip


if __name__ == "__main__":
    main()
