"""The selective scan in plain PyTorch: slow, differentiable, written to be read.

It defines what every kernel must compute, and is the oracle of the tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import BackendName
from ._discretization import DISCRETIZATIONS, Method, step_size
from ._matrix_scan import operator_for
from ._packed import PackedSequences
from ._pytorch import are_transforms_active
from ._typing import typed_as

if TYPE_CHECKING:
    from .functional import selective_scan_fn


@typed_as(lambda: selective_scan_fn)
def selective_scan_ref(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool | None = False,
    *,
    discretization_method: Method = "zoh",
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The selective scan, step by step in plain PyTorch.

    Arguments, results and errors are those of :func:`selective_scan_fn`, so that one name may take
    the other's place in any call; `backend` is checked as there, but chooses nothing here. It runs
    on any device and can be differentiated any number of times. Time and, with gradients, memory
    grow as batch·dim·dstate·seqlen; with a matrix A memory as that times dstate, and time as that
    times dstate². Boundaries in cu_seqlens that are out of range are moved into it.

    Example:
        >>> import torch
        >>> from selective_scan import selective_scan_ref
        >>> u, delta = torch.randn(2, 8, 100), torch.rand(2, 8, 100)
        >>> A, B, C = -torch.rand(8, 4), torch.randn(2, 4, 100), torch.randn(2, 4, 100)
        >>> selective_scan_ref(u, delta, A, B, C).shape
        torch.Size([2, 8, 100])
    """
    options = (delta_softplus, discretization_method, initial_state, reverse, cu_seqlens)
    values = (u, delta, A, B, C, D, z, delta_bias, *options, return_last_state, backend)
    call = operator_for(A, discretization_method).check(values)

    _, dim, seqlen = u.shape
    dtype, h_dtype = call.compute_dtype, call.state_dtype
    discretize = DISCRETIZATIONS[discretization_method]

    bias = None if delta_bias is None else delta_bias.to(dtype)[:, None]
    delta = step_size(delta.to(dtype), bias, delta_softplus)
    A = A.to(h_dtype)
    x = u.to(dtype)
    B_steps = _steps(B, dim, seqlen, h_dtype)
    C_steps = _steps(C, dim, seqlen, h_dtype)

    if initial_state is None:
        h = torch.zeros(call.sizes["sequences"], dim, A.shape[1], dtype=h_dtype, device=u.device)
    else:
        h = initial_state.to(h_dtype, copy=True)
    sequences = None if cu_seqlens is None else PackedSequences.of(cu_seqlens, seqlen, reverse)
    if sequences is not None:
        first_states, h, h_steps = h, h.new_zeros(1, dim, A.shape[1]), []
    delta_steps, u_steps = delta.unbind(-1), x.unbind(-1)
    y_steps = []
    for t in reversed(range(seqlen)) if reverse else range(seqlen):
        if sequences is not None:
            h = sequences.enter(t, first_states, h)
        delta_t = delta_steps[t][..., None]  # (batch, dim, 1)
        if A.dim() == 3:
            h = _solve_step(h, delta_t, A, B_steps[t] * u_steps[t][..., None])
        else:
            abar, bbar = discretize(delta_t, delta_t * A)
            h = abar * h + bbar * B_steps[t] * u_steps[t][..., None]
        y = (C_steps[t] * h).sum(-1)
        y_steps.append(2 * y.real if y.is_complex() else y)
        if sequences is not None:
            h_steps.append(h)

    if reverse:
        y_steps.reverse()
    if sequences is not None:
        h = sequences.last_states(first_states, h_steps)
    y = torch.stack(y_steps, -1) if y_steps else torch.empty_like(x)
    if D is not None:
        y = y + D.to(dtype)[:, None] * x
    if z is not None:
        y = y * F.silu(z.to(dtype))
    if sequences is not None:
        y = torch.where(sequences.are_none, 0, y)
    # In u's dtype, and laid out as u is but under transforms, which allow no copy of a mapped
    # tensor into another.
    out = y.to(u.dtype) if are_transforms_active() else torch.empty_like(u).copy_(y)
    return (out, h) if return_last_state else out


def _solve_step(h: Tensor, delta: Tensor, A: Tensor, input: Tensor) -> Tensor:
    """The state after a step with a matrix A; not finite where I − Δ/2·A is singular."""
    half = delta[..., None] / 2 * A  # (batch, dim, dstate, dstate)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    known = h + (half * h[..., None, :]).sum(-1) + delta * input
    return torch.linalg.solve_ex(identity - half, known[..., None]).result[..., 0]


def _steps(projection: Tensor, dim: int, seqlen: int, dtype: torch.dtype) -> list[Tensor]:
    """B or C at every step, each (batch or 1, dim, dstate)."""
    if projection.dim() == 2:
        return [projection.to(dtype)[None]] * seqlen
    if dtype.is_complex and not projection.is_complex():  # (re, im) interleaved along time
        pairs = projection.to(dtype.to_real()).unflatten(-1, (seqlen, 2))
        projection = torch.complex(pairs[..., 0], pairs[..., 1])
    if projection.dim() == 3:
        projection = projection[:, None]
    channels_per_group = dim // projection.shape[1]
    return [
        step.to(dtype).repeat_interleave(channels_per_group, dim=1)
        for step in projection.unbind(-1)
    ]
