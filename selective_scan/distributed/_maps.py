"""What a rank's steps do to the states that enter them, h → factor·h + offset, and to the gradients
of the states that leave them, which come back multiplied by the factors' conjugates.

They are found by ops of one device: an end state is a scan's from 0, and the gradient of the state
that enters is found as in a backward pass, without the other gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._arguments import ScanArguments


def forward_map(scan: ScanArguments) -> tuple[Tensor, Tensor]:
    """The product of abar, and the end state from 0, both (batch, dim, dstate)."""
    offset = _end_state(scan, scan.u, scan.B, scan.new_state(0))
    if scan.discretization_method == "bilinear":
        # What is left of ones where no input comes.
        return _end_state(scan, torch.zeros_like(scan.u), scan.B, scan.new_state(1)), offset
    return _exponential(scan), offset


def _end_state(scan: ScanArguments, u: Tensor, B: Tensor, initial_state: Tensor) -> Tensor:
    _, last_state, _ = torch.ops.selective_scan.selective_scan_fwd(
        *(u, scan.delta, scan.A, B, scan.C, None, None, scan.delta_bias),
        *scan.options(initial_state),
        None,
        False,
    )
    return last_state


def _exponential(scan: ScanArguments) -> Tensor:
    """exp(A·ΣΔ), in float64 for the digits that a large angle takes."""
    dtype = scan.state_dtype
    delta = scan.delta.to(dtype.to_real())
    if scan.delta_bias is not None:
        delta = delta + scan.delta_bias.to(delta.dtype)[:, None]
    if scan.delta_softplus:
        delta = F.softplus(delta, threshold=20)
    span = delta.sum(-1, dtype=torch.float64)[..., None]
    return torch.exp(span * scan.A.to(torch.promote_types(torch.float64, scan.A.dtype))).to(dtype)


def backward_offset(scan: ScanArguments, dout: Tensor | None, entering: Tensor) -> Tensor:
    """The gradient of the state that enters, of this rank's outputs alone."""
    if dout is None:
        return torch.zeros_like(entering)
    return torch.ops.selective_scan.selective_scan_state_gradient(*scan.local(entering), dout)
