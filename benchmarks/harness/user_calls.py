"""Prepares users' calls on fresh inputs and times them, on a GPU several calls in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.checks import check
from harness.models import LanguageModel, check_layer, model_step
from harness.operators import make_scan
from harness.peers import mamba_ssm_layers, mamba_ssm_passes, mamba_ssm_token, reference_passes
from harness.problems import DTYPES
from harness.timing import in_graph, sample
from harness.users import Call, LayerCall, ScanCall, TokenCall
from selective_scan import S6

_GRAPH_CALLS = 4  # calls in one graph, so that the graph's launch is negligible

Passes = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Prepared:
    """A call on fresh inputs.

    Attributes:
        passes: the passes to time, by name.
        results: returns the results of the passes, by name.
        check: compares the results with the reference and returns the error; None if there is no
            such check.
        peer: returns mamba_ssm's passes, or for a scan on a CPU the reference's; none if there is
            no such call, or mamba_ssm is not importable.
    """

    passes: Passes
    results: Callable[[], dict[str, list[Tensor]]]
    check: Callable[[], float | None]
    peer: Callable[[], Passes]


def prepare(call: Call, device: torch.device, seed: int) -> Prepared:
    torch.manual_seed(seed)
    if isinstance(call, ScanCall):
        return _prepare_scan(call, device, seed)
    if isinstance(call, LayerCall):
        return _prepare_layers(call, device)
    return _prepare_token(call, device)


def _prepare_scan(call: ScanCall, device: torch.device, seed: int) -> Prepared:
    scan = make_scan(call.problem, device, seed)
    if device.type == "cuda":
        passes = _three_passes(
            lambda: scan.forward(False),
            lambda: scan.forward(True),
            lambda: scan.backward(scan.forward(True)[2]),
        )
    else:
        found = scan.passes(backward=True)
        passes = {which: found[which] for which in ("forward", "backward")}

    def peer() -> Passes:
        if device.type == "cpu":
            return reference_passes(scan)
        found = mamba_ssm_passes(scan, backward=True)
        if not found:
            return {}
        forward, backward = found["forward"], found["backward"]
        return _three_passes(forward, forward, lambda: (forward(), backward()))

    return Prepared(passes, scan.results, lambda: max(check(scan, backward=True).values()), peer)


def _three_passes(*passes: Callable[[], object]) -> Passes:
    return dict(zip(("forward", "training forward", "forward + backward"), passes, strict=True))


def _prepare_layers(call: LayerCall, device: torch.device) -> Prepared:
    dtype = DTYPES[call.dtype]
    model = S6(call.d_model, depth=call.layers, device=device)
    x = torch.randn(call.batch, call.seqlen, call.d_model, device=device).requires_grad_()
    passes = model_step(model, x, dtype).passes()

    def peer() -> Passes:
        other = mamba_ssm_layers(call.d_model, call.layers, device)
        return {} if other is None else model_step(other, x, dtype).passes()

    return Prepared(
        passes,
        lambda: {name: list(run()) for name, run in passes.items()},
        lambda: check_layer(model.layers[0], dtype),
        peer,
    )


def _prepare_token(call: TokenCall, device: torch.device) -> Prepared:
    sizes = (call.vocabulary, call.d_model, call.layers)
    dtype = DTYPES[call.dtype]
    model = LanguageModel(*sizes, device, dtype).eval()
    cache = model.layers.allocate_cache(call.batch)
    tokens = torch.randint(call.vocabulary, (call.batch, 1), device=device)

    @torch.inference_mode()
    def token() -> Tensor:
        return model(tokens, cache)

    def results() -> dict[str, list[Tensor]]:
        cache.reset()
        return {"token": [token()]}

    def peer() -> Passes:
        other = mamba_ssm_token(tokens, *sizes, dtype)
        return {} if other is None else {"token": other}

    return Prepared({"token": token}, results, lambda: None, peer)


# --- measurement ----------------------------------------------------------------------------------


class Timed:
    """Times the passes of several parties, which alternate."""

    def __init__(self, parties: Mapping[str, Passes], device: torch.device) -> None:
        self._device = device
        self._calls = _GRAPH_CALLS if device.type == "cuda" else 1
        passes = {(name, which): run for name, own in parties.items() for which, run in own.items()}
        if device.type == "cuda":
            passes = {key: in_graph(run, _GRAPH_CALLS) for key, run in passes.items()}
        self._passes = passes

    def sample(self, **limits: object) -> dict[str, dict[str, list[float]]]:
        """Returns the milliseconds per call, by party and pass. The time of a scan's backward pass
        in a graph is that of forward + backward minus that of the training forward, run by run.
        Other work on the GPU may make such a difference negative."""
        found: dict[str, dict[str, list[float]]] = {}
        for (name, which), values in sample(self._passes, self._device, **limits).items():
            found.setdefault(name, {})[which] = [value / self._calls for value in values]
        for own in found.values():
            forward = own.pop("training forward", None)
            if forward is not None:
                both = own.pop("forward + backward")
                own["backward"] = [b - a for a, b in zip(forward, both, strict=True)]
        return found
