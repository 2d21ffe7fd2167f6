"""What the kernels are compared with: mamba_ssm's kernels where it is importable, or its times from
a file; and the scan as textbooks write it in PyTorch."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

from problems import Inputs, Problem

_DIRECTIONS = {"forward": "fwd", "training forward": "fwd", "backward": "bwd"}


@dataclass
class Anchors:
    """Times of mamba_ssm's kernels on some GPU, measured elsewhere.

    A row names batch B, dim D, seqlen L, dstate N, groups G, dtype and z; "A": "complex" and
    "B_C": "constant" mark what differs from real A and variable B, C.
    """

    device: str = ""
    ceilings: dict[str, float] = field(default_factory=dict)
    rows: dict[tuple, dict] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Anchors:
        content = json.loads(path.read_text())
        rows = {}
        for row in content["rows"]:
            sizes = tuple(row[name] for name in ("B", "D", "L", "N", "G"))
            complex_a = row.get("A") == "complex"
            constant = row.get("B_C") == "constant"
            rows[(sizes, row["dtype"], row["z"], complex_a, constant)] = row
        return cls(content["device"], content["ceilings"], rows)

    def find(self, problem: Problem) -> dict | None:
        """The row of a problem that mamba_ssm solves; float16 is as fast as bfloat16 there."""
        variant = problem.variant
        plain_layout = not (variant.channel_last or variant.reverse or variant.initial_state)
        if problem.method != "zoh" or not plain_layout:
            return None
        dtype = "bfloat16" if problem.dtype == "float16" else problem.dtype
        key = (problem.shape.sizes, dtype, variant.has_z, variant.is_complex, variant.is_constant)
        return self.rows.get(key)

    def milliseconds(self, problem: Problem, which: str) -> float | None:
        row = self.find(problem)
        direction = _DIRECTIONS.get(which)
        return row.get(f"mamba_ssm_{direction}_ms") if row and direction else None

    def backward_mib(self, problem: Problem) -> float | None:
        """Memory that the backward pass allocates."""
        row = self.find(problem)
        return row.get("mamba_ssm_bwd_extra_MiB") if row else None


class MambaSsm:
    """mamba_ssm's compiled kernels, called as its autograd function calls them."""

    name = "mamba_ssm"

    def __init__(self, module: ModuleType):
        self._module = module

    @classmethod
    def find(cls) -> MambaSsm | None:
        try:
            return cls(importlib.import_module("selective_scan_cuda"))
        except ImportError:
            return None

    def supports(self, problem: Problem) -> bool:
        variant = problem.variant
        return (
            problem.method == "zoh"
            and problem.dtype != "float64"
            and not (variant.channel_last or variant.reverse or variant.initial_state)
            and problem.shape.dstate <= 256
        )

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """(out, saved states, out after the gate where there is z)"""
        x = inputs
        return tuple(self._module.fwd(x.u, x.delta, x.A, x.B, x.C, x.D, x.z, x.delta_bias, True))

    def backward(self, inputs: Inputs, saved: tuple[torch.Tensor, ...]) -> object:
        x = inputs
        out = saved[0] if x.z is not None else None
        return self._module.bwd(
            x.u, x.delta, x.A, x.B, x.C, x.D, x.z, x.delta_bias, x.dout, saved[1], out, None,
            True, False,
        )  # fmt: skip


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
    """The zoh scan as one meets it in papers and tutorials, for real A and variable B and C.

    Everything of size (batch, dim, seqlen, dstate) is computed at once, then a loop goes over time
    (Gu and Dao, "Mamba", 2023, section 3.2). selective_scan_ref is faster: its tensors are those of
    one step, which stay in the cache.
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
    # unbind, since the gradient of deltaA[:, :, t] would be as large as deltaA, at every step.
    steps = zip(deltaA.unbind(2), deltaB_u.unbind(2), C.unbind(-1), strict=True)
    for deltaA_t, deltaB_u_t, C_t in steps:
        h = deltaA_t * h + deltaB_u_t
        ys.append(torch.einsum("bdn,bdn->bd", h, C_t))
    y = torch.stack(ys, dim=-1) + D[:, None] * u
    return (y * F.silu(z.to(A.dtype))).to(dtype)
