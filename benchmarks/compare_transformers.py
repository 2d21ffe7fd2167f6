"""Times transformers' Mamba or FalconMamba with its own functions and with selective_scan's
integration.

The model keeps its projections, norms and head. The head takes more time than the layers if these
are few, so the backbone is also timed without it. A third path replaces scan and convolution by
almost nothing; its time bounds the possible gain. The paths alternate in one process. In fp32 the
logits, the first layer's gradient and the generated tokens of the first runs must agree. In bf16
the integration's results must be about as close to those of the same model in fp32 as transformers'
own, and tokens, which depend on ties, may differ. The number of runs is small, since a backward
pass of transformers' own path takes minutes.

Example:
    pip install transformers
    python benchmarks/compare_transformers.py --layers 4 --hidden 768 --batch 2 --seqlen 512
    python benchmarks/compare_transformers.py --model falcon_mamba --layers 64 --hidden 4096 \
        --batch 1 --seqlen 64 --dtype bfloat16 --passes forward "64 new tokens"
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib
import os
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator

import torch

from harness import records, report
from harness.arguments import measuring_parser, parse, positive
from harness.checks import relative_l2
from harness.problems import DTYPES
from harness.timing import Timing
from selective_scan.integrations.transformers import enable

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
try:
    import transformers
except ImportError:
    sys.exit("compare_transformers.py needs transformers: pip install 'transformers>=5'")

_MODELS = ("mamba", "falcon_mamba")
_PASSES = ("forward", "backbone forward", "forward + backward", "64 new tokens")
_DTYPES = ("float32", "bfloat16")
_LARGEST_DIFFERENCE = 1e-4  # between the paths in fp32
_LARGEST_RATIO = 1.5  # between the paths' errors in bf16 against fp32


def parse_arguments() -> argparse.Namespace:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    # fmt: off
    add("--model", choices=_MODELS, default="mamba")
    add("--layers", type=positive, default=4)
    add("--hidden", type=positive, default=768)
    add("--batch", type=positive, default=2)
    add("--seqlen", type=positive, default=512)
    add("--dtype", choices=_DTYPES, default="float32")
    add("--threads", type=positive, default=torch.get_num_threads())
    add("--passes", nargs="+", choices=_PASSES, default=_PASSES, metavar="PASS",
        help=f"passes among {', '.join(_PASSES)} (default: all)")
    add("--runs", type=positive, default=3, help="timed runs of each pass (default: 3)")
    add("--budget", type=float, default=120, metavar="SECONDS",
        help="for each pass; no run starts after that time (default: 120)")
    # fmt: on
    return parse(parser, None)


def no_scan(u, delta, A, B, C, D=None, z=None, return_last_state=False, **_: object) -> object:
    """Returns a result that depends on all inputs, so that the rest of a layer still runs."""
    out = u + delta + (B + C).sum(1, keepdim=True) + z
    return (out, u.new_zeros(*u.shape[:2], A.shape[-1])) if return_last_state else out


def no_update(state, u, delta, A, B, C, D=None, z=None, **_: object) -> torch.Tensor:
    return u + delta + (B + C).sum(1, keepdim=True) + z


def no_convolution(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return x


@contextlib.contextmanager
def next_to_nothing(model: str) -> Iterator[None]:
    nothing = {
        "mamba_selective_scan": no_scan,
        "mamba_selective_state_update": no_update,
        "causal_conv1d_fn": no_convolution,
        "causal_conv1d_update": no_convolution,
    }
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    with unittest.mock.patch.multiple(module, **nothing):
        yield


def time_in_turn(
    model: str, call: Callable[[], torch.Tensor], runs: int, budget: float
) -> tuple[dict[str, torch.Tensor], dict[str, Timing]]:
    """Returns the results of each path's first run, and the times of all runs."""
    paths = {
        "transformers": contextlib.nullcontext,
        "selective_scan": lambda: enable([model]),
        "no_scan": lambda: next_to_nothing(model),
    }
    samples: dict[str, list[float]] = {name: [] for name in paths}
    first: dict[str, torch.Tensor] = {}
    end = time.perf_counter() + budget

    def timed() -> tuple[torch.Tensor, float]:
        begin = time.perf_counter()
        result = call()
        if result.is_cuda:
            torch.cuda.synchronize(result.device)
        return result, (time.perf_counter() - begin) * 1e3

    for _ in range(runs):
        if first and time.perf_counter() > end:
            break
        for name, path in paths.items():
            with path():
                if name != "transformers":
                    timed()  # the first call after transformers' own path takes milliseconds longer
                result, milliseconds = timed()
                samples[name].append(milliseconds)
            first.setdefault(name, result.double())
    return first, {name: Timing.of(values) for name, values in samples.items()}


def complaint(results: dict[str, torch.Tensor], exact: torch.Tensor | None) -> str | None:
    """Returns why the integration's result is worse than transformers' own, None if it is not.
    `exact` is the result in fp32 for half types, else None."""
    ours, theirs = results["selective_scan"], results["transformers"]
    if exact is None:
        if (difference := relative_l2(ours, theirs)) <= _LARGEST_DIFFERENCE:
            return None
        return f"the paths differ by {difference:.1e}"
    errors = relative_l2(ours, exact), relative_l2(theirs, exact)
    if errors[0] <= _LARGEST_RATIO * errors[1]:
        return None
    return f"{errors[0]:.1e} off the result in fp32, transformers' own path {errors[1]:.1e}"


def main() -> int:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        options.model,
        num_hidden_layers=options.layers,
        hidden_size=options.hidden,
        use_cache=False,
    )
    dtype = DTYPES[options.dtype]
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    size = (options.batch, options.seqlen)
    tokens = torch.randint(config.vocab_size, size, device=options.device)

    def forward(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model(tokens).logits

    def backbone_forward(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model.backbone(tokens).last_hidden_state

    def forward_backward(model: torch.nn.Module) -> torch.Tensor:
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        # All gradients of the first layer flow into this one.
        return model.backbone.layers[0].mixer.in_proj.weight.grad

    def generate(model: torch.nn.Module) -> torch.Tensor:
        length = {"min_new_tokens": 64, "max_new_tokens": 64}
        return model.generate(tokens, do_sample=False, use_cache=True, **length)

    functions = (forward, backbone_forward, forward_backward, generate)
    calls = dict(zip(_PASSES, functions, strict=True))
    rows = []
    for which in options.passes:
        call = functools.partial(calls[which], model)
        model.train(which == "forward + backward")
        with enable([options.model]):
            call()  # starts threads, allocates memory, fills caches
        results, times = time_in_turn(options.model, call, options.runs, options.budget)
        may_differ = dtype != torch.float32 and calls[which] is generate
        exact = None
        if dtype != torch.float32 and not may_differ:
            with enable([options.model]):
                exact = calls[which](copy.deepcopy(model).float()).double()
        if not may_differ and (reason := complaint(results, exact)):
            sys.exit(f"{which}: {reason}")
        rows.append(
            {
                "pass": which,
                "difference": relative_l2(results["selective_scan"], results["transformers"]),
                "speedup": times["transformers"].median / times["selective_scan"].median,
                "largest_speedup": times["transformers"].median / times["no_scan"].median,
                **{name: dataclasses.asdict(timing) for name, timing in times.items()},
            }
        )

    environment = {
        **records.environment(options.device),
        "transformers": transformers.__version__,
        "model": f"{type(model).__name__}, {options.layers} layers, hidden {options.hidden}, "
        f"{size} tokens, {options.dtype}",
    }
    print(
        f"{environment['device']}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {options.threads} threads"
    )

    names = "pass transformers selective_scan no_scan speedup largest_speedup difference"
    report.print_table(f"{environment['model']}, ms: median (quartiles)", rows, names)
    records.write(options.json, {"environment": environment, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
