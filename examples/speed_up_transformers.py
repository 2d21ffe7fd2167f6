"""Times a model of transformers on this machine, with its own functions and with selective_scan's.

The model has random weights and is built from a configuration, so that nothing is downloaded;
--config uses the configuration in a config.json. The time of transformers' own backward pass grows
with the square of the length: seconds for 128 tokens, minutes for 512.

    python examples/speed_up_transformers.py
    python examples/speed_up_transformers.py --device cuda --dtype bfloat16 --seqlen 512
    python examples/speed_up_transformers.py --config folder/with/config.json --passes generate
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer
from transformers import AutoConfig, AutoModelForCausalLM, logging

import selective_scan.integrations.transformers as integration

PASSES = ("forward", "train", "generate")


def make_model(options: argparse.Namespace) -> torch.nn.Module:
    if options.config is not None:
        config = AutoConfig.from_pretrained(options.config, local_files_only=True)
    else:
        config = AutoConfig.for_model(
            options.model, hidden_size=options.hidden, num_hidden_layers=options.layers
        )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    return model.to(options.device).eval()


def make_passes(
    model: torch.nn.Module, tokens: torch.Tensor, new_tokens: int
) -> dict[str, Callable[[], object]]:
    """Returns the calls to measure, by name; "train" is a forward and a backward pass."""

    @torch.no_grad()
    def forward() -> None:
        model(tokens, use_cache=False)

    def train() -> None:
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()

    def generate() -> None:
        length = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        mask = torch.ones_like(tokens)
        model.generate(tokens, attention_mask=mask, do_sample=False, **length)

    return dict(zip(PASSES, (forward, train, generate), strict=True))


def milliseconds(call: Callable[[], object], runs: int) -> float:
    """Returns the median time of some runs after a first one, or the time of the first run if that
    exceeds half a minute."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    first = timer.timeit(1).median
    if first > 30:
        return 1e3 * first
    return 1e3 * statistics.median(timer.timeit(1).median for _ in range(runs))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=("mamba", "falcon_mamba"), default="mamba")
    add("--config", help="a config.json, or its folder, instead of --model, --hidden, --layers")
    add("--hidden", type=int, default=768)
    add("--layers", type=int, default=4)
    add("--batch", type=int, default=2)
    add("--seqlen", type=int, default=128)
    add("--new-tokens", type=int, default=64)
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--device", default="cpu")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--passes", nargs="+", choices=PASSES, default=PASSES)
    add("--runs", type=int, default=5)
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees no CUDA device")
    for name in ("hidden", "layers", "batch", "seqlen", "new_tokens", "threads", "runs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def main() -> None:
    options = parse_arguments()
    logging.set_verbosity_error()  # hides warnings about slow functions, which are measured here
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    model = make_model(options)
    size = (options.batch, options.seqlen)
    tokens = torch.randint(model.config.vocab_size, size, device=options.device)
    calls = make_passes(model, tokens, options.new_tokens)

    print(
        f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million "
        f"parameters, {options.dtype}, {size} tokens, {options.device}, {options.threads} threads"
    )
    print(f"{'milliseconds':<14}{'transformers':>14}{'selective_scan':>16}{'times as fast':>15}")
    for name in options.passes:
        with integration.enable():
            ours = milliseconds(calls[name], options.runs)
        own = milliseconds(calls[name], options.runs)
        print(f"{name:<14}{own:>14.1f}{ours:>16.1f}{own / ours:>15.1f}", flush=True)


if __name__ == "__main__":
    main()
