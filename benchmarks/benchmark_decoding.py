#!/usr/bin/env python3
"""Times the two waits of a language model's user: for a prompt, and for each token.

The model has an embedding, S6 layers and a head, by default of mamba-130m's sizes, with random
weights; --vocabulary 0 leaves only the layers. A token runs through the layers and the head as one
operator. Its time is compared with the time of the same layers with each part called as a module,
of the linear layers alone, and of reading every weight once, the lower bound for batch 1: on a GPU
at the speed of a large copy, on a CPU timed alternately with the rest. On a GPU each call is timed
eagerly and as a CUDA graph, along with compat's MambaLMHeadModel and, if mamba_ssm is importable,
its model. On a CPU each call is timed eagerly and, with --compile, compiled, along with llama.cpp
with the same weights if llama-cpp-python and gguf are importable.

Example:
    python benchmarks/benchmark_decoding.py --device cpu --threads 2
    python benchmarks/benchmark_decoding.py --device cpu --threads 1 --vocabulary 0 --d-model 128 \
        --depth 3
    python benchmarks/benchmark_decoding.py --device cuda --dtype bfloat16 --json decoding.json
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn

from harness import arguments, ceilings, records, report, timing
from harness.llama_cpp import llama_cpp_calls
from harness.models import LanguageModel
from harness.peers import compat_token, mamba_ssm_token

# The number of consecutive eager tokens on a GPU. As in text generation, either the host is ahead
# of the GPU, or the GPU waits for the host.
_IN_A_ROW = 16


def linear_layers(model: LanguageModel, batch: int) -> Callable[[], object]:
    """Returns a call of a token's matrix products only, with operands prepared in advance."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weight = model.layers.norm_f.weight
    rows = {
        layer.in_features: torch.randn(
            batch, layer.in_features, device=weight.device, dtype=weight.dtype
        )
        for layer in linear
    }
    return lambda: [layer(rows[layer.in_features]) for layer in linear]


def called_by_parts(model: LanguageModel) -> LanguageModel:
    """Returns a model with the same weights that calls each part of a layer as a module."""
    shared = {id(weight): weight for weight in model.parameters()}
    twin = copy.deepcopy(model, shared)
    for layer in twin.layers.layers:
        for part in (layer.in_proj, layer.x_proj, layer.out_proj):
            part.register_forward_hook(lambda *_: None)
    return twin


def reading(weights: Sequence[torch.Tensor]) -> Callable[[], object]:
    """Returns a call that reads every weight once and does almost nothing with it."""
    integers = {2: torch.int16, 4: torch.int32}
    views = [weight.detach().flatten().view(integers[weight.element_size()]) for weight in weights]
    return lambda: [view.amax() for view in views]


def _repeated(call: Callable[[], object]) -> Callable[[], object]:
    def repeat() -> None:
        for _ in range(_IN_A_ROW):
            call()

    return repeat


def measure(options: argparse.Namespace) -> list[records.Row]:
    device = options.device
    is_cuda = device.type == "cuda"
    dtype = getattr(torch, options.dtype)
    model = LanguageModel(options.vocabulary, options.d_model, options.depth, device, dtype).eval()
    by_parts = called_by_parts(model)
    sizes = (options.batch, options.prompt)
    if options.vocabulary:
        prompt = torch.randint(options.vocabulary, sizes, device=device)
    else:
        prompt = torch.randn(*sizes, options.d_model, device=device, dtype=dtype)
    token = prompt[:, -1:].clone()
    cache = model.layers.allocate_cache(options.batch)
    products = linear_layers(model, options.batch)

    def read_prompt() -> None:
        cache.reset()
        model(prompt, cache)

    read_prompt()
    # A token reads one row of the embedding.
    weights = list(model.layers.parameters()) + ([model.head.weight] if model.head else [])
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    calls = {
        "prompt": read_prompt,
        "token": lambda: model(token, cache),
        "token, by parts": lambda: by_parts(token, cache),
        "its products": products,
    }
    if is_cuda and options.vocabulary:
        sizes = (options.vocabulary, options.d_model, options.depth, dtype)
        others = {
            "compat": compat_token(token, *sizes),
            "mamba_ssm": mamba_ssm_token(token, *sizes),
        }
        calls |= {f"token, {name}": call for name, call in others.items() if call is not None}
    if not is_cuda and options.vocabulary:
        calls |= llama_cpp_calls(model, prompt, options.threads)
    if options.compile:
        compiled = torch.compile(model, fullgraph=True)
        calls["token, compiled"] = lambda: compiled(token, cache)
    in_a_row = set()
    if is_cuda:
        for name in [name for name in calls if name not in ("prompt", "token, compiled")]:
            calls[f"{name}, CUDA graph"] = timing.in_graph(calls[name])
            calls[name] = _repeated(calls[name])
            in_a_row.add(name)
    else:
        calls["its weights, read"] = reading(weights)
    samples = timing.sample(
        calls, device, warmup=2, runs=options.runs, budget=options.budget, queue_ahead=False
    )
    times = {
        name: timing.Timing.of([ms / (_IN_A_ROW if name in in_a_row else 1) for ms in values])
        for name, values in samples.items()
    }
    if is_cuda:
        floor_ms = weight_bytes / ceilings.copy_bandwidth(device) * 1e3
    else:
        floor_ms = times["its weights, read"].median
    rows = []
    for name, time in times.items():
        beside = "its products" + (", CUDA graph" if name.endswith("CUDA graph") else "")
        is_token, is_prompt = name.startswith("token"), name.startswith("prompt")
        count = options.batch * (options.prompt if is_prompt else 1)
        rows.append(
            {
                "what": name,
                "time": dataclasses.asdict(time),
                "tokens_per_s": None if name.startswith("its") else count / time.median * 1e3,
                "over_products": time.median / times[beside].median if is_token else None,
                "over_reading_weights": None if is_prompt else time.median / floor_ms,
            }
        )
    speed = weight_bytes / floor_ms / 1e6
    print(
        f"weights: {weight_bytes / 2**20:.1f} MiB, read once in {floor_ms:.3g} ms: {speed:.0f} GB/s"
    )
    return rows


def parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = arguments.measuring_parser(__doc__)
    add, positive = parser.add_argument, arguments.positive
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--batch", type=positive, default=1)
    add("--prompt", type=positive, default=512, help="prompt length in tokens")
    add("--d-model", type=positive, default=768)
    add("--depth", type=positive, default=24)
    add("--vocabulary", type=int, default=50280, help="0: neither embedding nor head")
    add("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads")
    add("--compile", action="store_true", help="also time a token under torch.compile")
    add("--runs", type=positive, default=30)
    add("--budget", type=float, default=60.0, help="seconds for each measurement")
    return arguments.parse(parser, command_line)


@torch.inference_mode()
def main(command_line: list[str] | None = None) -> None:
    options = parse(command_line)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    if options.device.type == "cpu":
        timing.keep_freed_memory()
    rows = measure(options)
    environment = records.environment(options.device)
    report.print_table(
        f"{options.depth} layers of {options.d_model}, {options.dtype}, batch {options.batch}, "
        f"prompt of {options.prompt}, {environment['device']}, {options.threads} threads, ms",
        rows,
        "what time tokens_per_s over_products over_reading_weights",
    )
    given = {name: str(value) for name, value in vars(options).items()}
    records.write(options.json, {"environment": environment, "options": given, "rows": rows})


if __name__ == "__main__":
    main()
