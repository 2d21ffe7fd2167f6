#!/usr/bin/env python3
"""Times what a user of a language model waits for: a prompt, and then each token.

The model has an embedding, S6 layers and a head, by default of mamba-130m's sizes, with random
weights. A token's time is set beside that of its linear layers alone, and beside that of reading
every weight once at the speed of a large copy, which no decoder of batch 1 beats. On a GPU the
token is a CUDA graph, on a CPU eager and, with --compile, compiled.

Example:
    python benchmarks/benchmark_decoding.py --device cpu --threads 2
    python benchmarks/benchmark_decoding.py --device cuda --dtype bfloat16 --json decoding.json
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from harness import arguments, ceilings, records, report, timing
from harness.models import LanguageModel


def linear_layers(model: LanguageModel, batch: int) -> Callable[[], object]:
    """A token's matrix products alone, of operands that lie ready."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weight = model.head.weight
    rows = {
        layer.in_features: torch.randn(
            batch, layer.in_features, device=weight.device, dtype=weight.dtype
        )
        for layer in linear
    }
    return lambda: [layer(rows[layer.in_features]) for layer in linear]


def measure(options: argparse.Namespace) -> list[records.Row]:
    device = options.device
    is_cuda = device.type == "cuda"
    dtype = getattr(torch, options.dtype)
    model = LanguageModel(options.vocabulary, options.d_model, options.depth, device, dtype).eval()
    sizes = (options.batch, options.prompt)
    prompt = torch.randint(options.vocabulary, sizes, device=device)
    token = prompt[:, -1:].clone()
    cache = model.layers.allocate_cache(options.batch)
    products = linear_layers(model, options.batch)

    def read_prompt() -> None:
        cache.reset()
        model(prompt, cache)

    read_prompt()
    calls = {"prompt": read_prompt, "token": lambda: model(token, cache), "its products": products}
    if options.compile:
        compiled = torch.compile(model, fullgraph=True)
        calls["token, compiled"] = lambda: compiled(token, cache)
    if is_cuda:
        calls["token, CUDA graph"] = timing.in_graph(calls["token"])
        calls["its products, CUDA graph"] = timing.in_graph(products)
    times = timing.measure(
        calls, device, warmup=2, runs=options.runs, budget=options.budget, queue_ahead=False
    )
    copy = ceilings.copy_bandwidth(device)
    read_once = [*model.layers.parameters(), model.head.weight]  # and one row of the embedding
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in read_once)
    floor_ms = weight_bytes / copy * 1e3
    rows = []
    for name, time in times.items():
        beside = "its products" + (", CUDA graph" if name.endswith("CUDA graph") else "")
        is_token = name.startswith("token")
        count = options.batch * (options.prompt if name == "prompt" else 1)
        rows.append(
            {
                "what": name,
                "time": dataclasses.asdict(time),
                "tokens_per_s": None if name.startswith("its") else count / time.median * 1e3,
                "over_products": time.median / times[beside].median if is_token else None,
                "over_reading_weights": None if name == "prompt" else time.median / floor_ms,
            }
        )
    print(f"weights: {weight_bytes / 2**20:.0f} MiB; copy bandwidth: {copy / 1e9:.0f} GB/s")
    return rows


def parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = arguments.make_parser(__doc__)
    arguments.add_device(parser)
    add, positive = parser.add_argument, arguments.positive
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--batch", type=positive, default=1)
    add("--prompt", type=positive, default=512, help="tokens of the prompt")
    add("--d-model", type=positive, default=768)
    add("--depth", type=positive, default=24)
    add("--vocabulary", type=positive, default=50280)
    add("--threads", type=positive, default=torch.get_num_threads(), help="on a CPU")
    add("--compile", action="store_true", help="also time a token under torch.compile")
    add("--runs", type=positive, default=30)
    add("--budget", type=float, default=60.0, help="seconds")
    add("--json", type=Path, help="where to write the record")
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
    if options.json:
        given = {name: str(value) for name, value in vars(options).items()}
        records.write(options.json, {"environment": environment, "options": given, "rows": rows})


if __name__ == "__main__":
    main()
