"""The peers of the kernels: mamba_ssm's kernels and models if it is importable, or times from a
file; the reference; and the scan as textbooks write it in PyTorch."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from harness.operators import Scan
from harness.problems import Problem

_FOLDER = Path(__file__).resolve().parents[1] / "anchors"
# Above these sizes a run of the reference takes too long.
_MOST_REFERENCE_UPDATES = 1 << 27
_MOST_REFERENCE_STEPS = 1 << 12
_DIRECTIONS = {"forward": "fwd", "training forward": "fwd", "backward": "bwd"}


def _is_mambas(problem: Problem) -> bool:
    """Returns whether mamba_ssm's kernels support the problem; channel-last inputs are copied."""
    variant = problem.variant
    is_plain = not (
        variant.reverse
        or variant.initial_state
        or variant.has_input_delta
        or variant.projection_dtype
    )
    return problem.operator == "selective_scan" and problem.method == "zoh" and is_plain


@dataclass
class Anchors:
    """Times of other kernels on some GPU, measured elsewhere.

    A row of mamba_ssm's times names batch B, dim D, seqlen L, dstate N, groups G, dtype and z; "A":
    "complex" and "B_C": "constant" mark deviations from real A and variable B, C. The operators
    other than the selective scan have a separate file, for the GPU that it names.
    """

    device: str = ""
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: dict[tuple, dict] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None, device_name: str) -> Anchors:
        content = json.loads(path.read_text()) if path else {}
        rows = {}
        for row in content.get("rows", ()):
            sizes = tuple(row[name] for name in ("B", "D", "L", "N", "G"))
            kind = (row["z"], row.get("A") == "complex", row.get("B_C") == "constant")
            rows[(sizes, row["dtype"], *kind)] = row
        siblings = json.loads((_FOLDER / "h200_siblings.json").read_text())
        for row in siblings["rows"] if siblings["device"] == device_name else ():
            variant = "plain" if row["layout"] == "contiguous" else row["layout"]
            rows[(row["operator"], row["shape"], row["dtype"], variant, row["which"])] = row
        return cls(content.get("device", device_name), content.get("ceilings", {}), rows)

    def find(self, problem: Problem) -> dict:
        """Returns mamba_ssm's row; float16 takes bfloat16's, which is as fast there."""
        variant = problem.variant
        dtype = "bfloat16" if problem.dtype == "float16" else problem.dtype
        key = (problem.sizes, dtype, variant.has_z, variant.is_complex, variant.is_constant)
        is_found = _is_mambas(problem) and not variant.channel_last
        return self.rows.get(key, {}) if is_found else {}

    def milliseconds(self, problem: Problem, which: str) -> tuple[str | None, float | None]:
        """Returns the name of the other kernel, and its time."""
        if problem.operator == "selective_scan":
            name, ms = "mamba_ssm", self.find(problem).get(f"mamba_ssm_{_DIRECTIONS.get(which)}_ms")
        else:
            key = (problem.operator, problem.shape.name, problem.dtype, problem.variant.name, which)
            name, ms = "the fastest public kernel", self.rows.get(key, {}).get("ms")
        return (f"{name} ({self.device})" if ms else None), ms


def _along_time(x: torch.Tensor | None) -> torch.Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def mamba_ssm_passes(scan: Scan, backward: bool) -> dict[str, Callable[[], object]]:
    """Returns mamba_ssm's compiled kernels by pass, called as its autograd function calls them;
    none if they are not importable or do not support the problem."""
    problem = scan.problem
    if not _is_mambas(problem) or problem.dtype == "float64" or problem.shape.dstate > 256:
        return {}
    try:
        module = importlib.import_module("selective_scan_cuda")
    except ImportError:
        return {}
    given = scan.arguments()[:8]
    kept = list(map(_along_time, given))

    def forward() -> tuple[torch.Tensor, ...]:
        return tuple(module.fwd(*map(_along_time, given), True))

    out, states = forward()[:2]
    saved_out = out if "z" in scan.tensors else None

    def run_backward() -> object:
        dout = _along_time(scan.dout)
        return module.bwd(*kept, dout, states, saved_out, None, True, False)

    return {"forward": forward, **({"backward": run_backward} if backward else {})}


def imported_versions() -> dict[str, str]:
    """Returns the versions of the other packages that this process has imported."""
    found = {name: sys.modules.get(name) for name in ("mamba_ssm", "causal_conv1d")}
    return {name: module.__version__ for name, module in found.items() if module is not None}


class Residual(nn.Module):
    """Another package's layer with S6's norm and residual."""

    def __init__(self, layer: nn.Module, d_model: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.norm(x))


def mamba_ssm_layers(d_model: int, depth: int, device: torch.device) -> nn.Module | None:
    """Returns a model of mamba_ssm's layers that corresponds to S6; None if mamba_ssm is not
    available or the device is no GPU."""
    if device.type != "cuda":
        return None
    try:
        from mamba_ssm import Mamba
    except ImportError:
        return None
    layers = [Residual(Mamba(d_model), d_model) for _ in range(depth)]
    return nn.Sequential(*layers, nn.RMSNorm(d_model, eps=1e-5)).to(device)


def mamba_ssm_token(
    tokens: torch.Tensor, vocabulary: int, d_model: int, depth: int, dtype: torch.dtype
) -> Callable[[], torch.Tensor] | None:
    """Returns a call that runs a token of each sequence through mamba_ssm's language model, as its
    `generate` does; None if mamba_ssm is not available or the device is no GPU."""
    if not tokens.is_cuda:
        return None
    try:
        from mamba_ssm.models.config_mamba import MambaConfig
        from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
        from mamba_ssm.utils.generation import InferenceParams
    except ImportError:
        return None
    config = MambaConfig(d_model=d_model, n_layer=depth, vocab_size=vocabulary)
    model = MambaLMHeadModel(config, device=tokens.device, dtype=dtype)
    return _token_of(model, InferenceParams, tokens, dtype)


def compat_token(
    tokens: torch.Tensor, vocabulary: int, d_model: int, depth: int, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    """Returns a call that does the same with this package's language model of that interface."""
    from selective_scan.compat.config_mamba import MambaConfig
    from selective_scan.compat.generation import InferenceParams
    from selective_scan.compat.mixer_seq_simple import MambaLMHeadModel

    config = MambaConfig(d_model=d_model, n_layer=depth, vocab_size=vocabulary)
    model = MambaLMHeadModel(config, device=tokens.device, dtype=dtype)
    return _token_of(model, InferenceParams, tokens, dtype)


def _token_of(
    model: nn.Module, make_params: type, tokens: torch.Tensor, dtype: torch.dtype
) -> Callable[[], torch.Tensor]:
    batch = tokens.shape[0]
    states = model.eval().allocate_inference_cache(batch, 2, dtype)
    past = make_params(2, batch, seqlen_offset=1, key_value_memory_dict=states)

    @torch.inference_mode()
    def token() -> torch.Tensor:
        return model(tokens, inference_params=past, num_last_tokens=1).logits

    return token


def is_for_the_reference(problem: Problem) -> bool:
    """Returns whether the reference solves the problem in acceptable time."""
    is_short = problem.shape.seqlen <= _MOST_REFERENCE_STEPS
    return is_short and problem.updates <= _MOST_REFERENCE_UPDATES


def reference_passes(scan: Scan) -> dict[str, Callable[[], object]]:
    """Returns the passes of the reference, the only alternative on a CPU without kernels; none if
    they take too long."""
    if not is_for_the_reference(scan.problem):
        return {}
    leaves = {name: x.detach().requires_grad_() for name, x in scan.tensors.items()}
    inputs, out = list(leaves.values()), scan.reference(leaves)

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return scan.reference(scan.tensors)

    def backward() -> object:
        return torch.autograd.grad(out, inputs, scan.dout, retain_graph=True)

    return {"forward": forward, "backward": backward}


def textbook_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    delta_bias: torch.Tensor,
    *,
    delta_softplus: bool,
    discretization_method: str,
    reverse: bool,
) -> torch.Tensor:
    """Runs the zoh scan as papers and tutorials write it, for real A and variable B and C.

    Everything of size (batch, dim, seqlen, dstate) is computed at once, then a loop goes over time
    (Gu and Dao, "Mamba", 2023, section 3.2). selective_scan_ref is faster, since its tensors have
    the size of one step and stay in the cache.
    """
    if discretization_method != "zoh" or reverse:
        raise ValueError(
            "the textbook's scan knows zoh from the first step on, "
            f"got {discretization_method}, reverse={reverse}"
        )
    dtype = u.dtype
    u, delta, B, C = (x.to(A.dtype) for x in (u, delta, B, C))
    delta = delta + delta_bias[:, None]
    if delta_softplus:
        delta = F.softplus(delta)
    B, C = (x.repeat_interleave(u.shape[1] // x.shape[1], dim=1) for x in (B, C))
    deltaA = torch.exp(torch.einsum("bdl,dn->bdln", delta, A))
    deltaB_u = torch.einsum("bdl,bdnl,bdl->bdln", delta, B, u)
    h = torch.zeros_like(deltaA[:, :, 0])
    ys = []
    # unbind, since at every step the gradient of deltaA[:, :, t] would be as large as deltaA.
    steps = zip(deltaA.unbind(2), deltaB_u.unbind(2), C.unbind(-1), strict=True)
    for deltaA_t, deltaB_u_t, C_t in steps:
        h = deltaA_t * h + deltaB_u_t
        ys.append(torch.einsum("bdn,bdn->bd", h, C_t))
    y = torch.stack(ys, dim=-1) + D[:, None] * u
    return (y * F.silu(z.to(A.dtype))).to(dtype)
