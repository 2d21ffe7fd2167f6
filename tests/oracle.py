"""The selective scan for float64 oracles: computes selective_scan_ref ten times as fast.

All steps are discretized at once. The recurrence, the only loop over time, is differentiated by its
adjoint instead of operation by operation. Nothing is shared with the kernels; test_oracle.py
compares this module with selective_scan_ref.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from selective_scan._discretization import DISCRETIZATIONS


class Recurrence(torch.autograd.Function):
    """h[t] = a[t]·h[t-1] + b[t] along dimension 0. Returns h from h[-1] on, one step longer than
    b."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, initial: Tensor) -> Tensor:
        h = torch.cat([initial[None], b])
        steps = h.unbind()
        for before, a_t, h_t in zip(steps, a.unbind(), steps[1:], strict=False):
            h_t.addcmul_(a_t, before)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx, dh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, h = ctx.saved_tensors
        a = a.conj().resolve_conj()
        g = dh.clone()
        steps = g.unbind()
        for t in range(len(a), 0, -1):
            steps[t - 1].addcmul_(a[t - 1], steps[t])
        return g[1:] * h[:-1].conj(), g[1:], g[0]


def scan(
    u,
    delta,
    A,
    B,
    C,
    D,
    z,
    delta_bias,
    initial_state,
    input_delta=None,
    *,
    delta_softplus: bool,
    discretization_method: str,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Returns out and last_state in the precision that all inputs share."""
    _, dim, seqlen = u.shape
    if delta_bias is not None:
        delta = delta + delta_bias[:, None]
    if delta_softplus:
        delta = F.softplus(delta, threshold=20)
    B, C = (_complete(projection, A, dim, seqlen) for projection in (B, C))
    input_delta = delta if input_delta is None else input_delta
    # Each has the shape (seqlen or 1, ...).
    steps = [tensor.movedim(-1, 0) for tensor in (u, delta, input_delta, B, C)]
    if reverse:
        steps = [tensor.flip(0) for tensor in steps]
    u_steps, delta_steps, input_steps, B_steps, C_steps = steps

    delta_steps = delta_steps[..., None]
    discretize = DISCRETIZATIONS[discretization_method]
    abar, bbar = discretize(input_steps[..., None], delta_steps * A)
    b = bbar * B_steps * u_steps[..., None]
    if initial_state is None:
        initial_state = A.new_zeros(b.shape[1:])
    h = Recurrence.apply(abar, b, initial_state)

    y = (C_steps * h[1:]).sum(-1)
    y = (2 * y.real if y.is_complex() else y).movedim(0, -1)
    y = y.flip(-1) if reverse else y
    if D is not None:
        y = y + D[:, None] * u
    return (y if z is None else y * F.silu(z)), h[-1]


def _complete(projection: Tensor, A: Tensor, dim: int, seqlen: int) -> Tensor:
    """Returns B or C of any kind as (batch or 1, dim, dstate, seqlen or 1)."""
    if projection.dim() == 2:
        return projection[None, ..., None]
    if A.is_complex() and not projection.is_complex():  # (re, im) interleaved along time
        projection = torch.view_as_complex(projection.unflatten(-1, (seqlen, 2)))
    if projection.dim() == 3:
        projection = projection[:, None]
    return projection.repeat_interleave(dim // projection.shape[1], dim=1)
