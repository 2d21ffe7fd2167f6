"""The exponential trapezoid, Mamba-3's recurrence: by a selective scan, and its reference."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import REAL, Call
from ._discretization import steps_of_sequences
from ._layer_input import without_autocast
from ._packed import PackedSequences, outside, scan_steps, zeroed
from ._selective_scan import POLE_DTYPES, POLES, scanned
from ._table import (
    BACKEND,
    CU_SEQLENS,
    RETURN_LAST_STATE,
    STATE_DTYPES,
    BackendName,
    Option,
    Table,
    TensorArgument,
    check_backend,
)
from ._typing import typed_as
from .functional import (
    finished,
    observed,
    output_of,
    projection_steps,
    selective_scan_fn,
    whole_projection,
)

_ARGUMENTS = Table(
    *scanned(TensorArgument("A", POLE_DTYPES, POLES)),
    TensorArgument("mix", REAL, ("batch", "dim", "seqlen")),
    TensorArgument(
        "initial_state", STATE_DTYPES, ("sequences", "2", "dim", "dstate"), optional=True
    ),
    Option("reverse"),
    CU_SEQLENS,
    anchor="u",
    complex_by=("A",),
)


def _check(values: tuple, return_last_state: object, backend: str) -> Call:
    _ARGUMENTS.check_types(values)
    RETURN_LAST_STATE.check_type(return_last_state)
    BACKEND.check_type(backend)
    check_backend(backend, values[0].device)
    return _ARGUMENTS.check_values(values)


@typed_as(lambda: exponential_trapezoid_fn)
def exponential_trapezoid_ref(
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
    mix: Tensor,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Runs the exponential trapezoid step by step in plain PyTorch: slow, but readable.

    It has the arguments, results and errors of :func:`exponential_trapezoid_fn`; `backend` is
    checked but has no other effect. It runs on any device and can be differentiated any number of
    times.

    Example:
        >>> import torch
        >>> from selective_scan import exponential_trapezoid_ref
        >>> u, A, B = torch.ones(1, 1, 3), torch.zeros(1, 1), torch.ones(1, 1)
        >>> exponential_trapezoid_ref(u, u, A, B, B, mix=torch.full_like(u, 0.5)).flatten().tolist()
        [0.5, 1.5, 2.5]
    """
    values = (u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    values = (*values, mix, initial_state, reverse, cu_seqlens)
    call = _check(values, return_last_state, backend)
    _, dim, seqlen = u.shape
    dtype, h_dtype = call.compute_dtype, call.state_dtype
    are_none = outside(cu_seqlens, seqlen)
    steps = steps_of_sequences(zeroed(are_none, delta), delta_bias, delta_softplus, dtype)
    A, x, mix = A.to(h_dtype), zeroed(are_none, u.to(dtype)), zeroed(are_none, mix.to(dtype))
    B_steps = projection_steps(B, dim, seqlen, h_dtype, are_none)
    C_steps = projection_steps(C, dim, seqlen, h_dtype, are_none)
    if initial_state is None:
        state = A.new_zeros(call.sizes["sequences"], 2, *A.shape)
    else:
        state = initial_state.to(h_dtype, copy=True)
    y_steps = []

    def take_step(t: int, state: Tensor) -> Tensor:
        h, before = state.unbind(1)
        step, share = steps[..., t, None], mix[..., t, None]  # (batch, dim, 1)
        now = B_steps[t] * x[..., t, None]
        h = (step * A).exp() * (h + (1 - share) * step * before) + share * step * now
        y_steps.append(observed(C_steps[t], h))
        return torch.stack([h, now], 1)

    state = scan_steps(take_step, state, seqlen, reverse, cu_seqlens)
    out = output_of(y_steps, call, x, reverse, are_none)
    return (out, state) if return_last_state else out


class _Edges(NamedTuple):
    """The first and last steps of sequences in the order of the scan.

    Attributes:
        first, last: the indices of each sequence's first and last step, (sequences,); without
            packed sequences, one index for all batch entries.
        are_none: mask of the steps that belong to no sequence, (seqlen,); None without packed
            sequences.
        are_last: mask of those steps and the last step of each sequence, (seqlen,), or None.
        are_empty: mask of the sequences without steps, (sequences,), or None.
    """

    first: Tensor | int
    last: Tensor | int
    are_none: Tensor | None = None
    are_last: Tensor | None = None
    are_empty: Tensor | None = None

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, seqlen: int, reverse: bool) -> _Edges:
        if cu_seqlens is None:
            return cls(*((seqlen - 1, 0) if reverse else (0, seqlen - 1)))
        sequences = PackedSequences.of(cu_seqlens, seqlen, reverse)
        are_none = sequences.are_none
        are_last = are_none | _of_next_step(sequences.are_first | are_none, reverse)
        edges = (sequences.first, sequences.last)
        places = (place.clamp(0, max(seqlen - 1, 0)) for place in edges)
        return cls(*places, are_none, are_last, sequences.are_empty)

    def at(self, place: Tensor | int, steps: Tensor) -> Tensor:
        """Selects the steps at `place`: (batch, ..., seqlen) becomes (sequences, ...)."""
        if not isinstance(place, Tensor):
            return steps.select(-1, place)
        return steps[0].index_select(-1, place).movedim(-1, 0)

    def with_empty(self, of_empty: Tensor | int, values: Tensor) -> Tensor:
        """Replaces the values of sequences without steps by `of_empty`; (sequences, ...)."""
        if self.are_empty is None:
            return values
        are_empty = self.are_empty.view(-1, *[1] * (values.dim() - 1))
        return torch.where(are_empty, of_empty, values)


def _of_next_step(steps: Tensor, reverse: bool) -> Tensor:
    """Returns for each step the value of the next one in the order of the scan; 0 for the last."""
    return F.pad(steps, (1, 0))[..., :-1] if reverse else F.pad(steps, (0, 1))[..., 1:]


def _spread(of_groups: Tensor, dim: int) -> Tensor:
    """Expands dimension 1 from groups to channels."""
    batch, groups, *others = of_groups.shape
    channels = of_groups.unsqueeze(2).expand(batch, groups, dim // groups, *others)
    return channels.flatten(1, 2)


def _products(B: Tensor, C: Tensor, dim: int) -> Tensor:
    """Computes Σ B·C over the states, broadcastable to (batch, dim, seqlen)."""
    if B.dim() == C.dim() == 2:
        return observed(C, B)[:, None]
    if B.dim() == C.dim():
        products = observed(C.movedim(-2, -1), B.movedim(-2, -1))  # (batch, groups, seqlen)
        return products if B.shape[1] == 1 else _spread(products, dim)
    constant, variable = (B, C) if B.dim() == 2 else (C, B)
    grouped = constant.unflatten(0, (variable.shape[1], -1))  # (groups, channels, dstate)
    with without_autocast(B.device):
        products = (grouped @ variable).flatten(1, 2)
    return 2 * products.real if products.is_complex() else products


@overload
def exponential_trapezoid_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: Literal[False] | None = False,
    *,
    mix: Tensor,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor: ...


@overload
def exponential_trapezoid_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    return_last_state: Literal[True],
    mix: Tensor,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def exponential_trapezoid_fn(
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
    mix: Tensor,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...


def exponential_trapezoid_fn(
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
    mix: Tensor,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scans a sequence, taking the input at both ends of each step, as Mamba-3 does.

    With Δ as in :func:`selective_scan_fn`, α = exp(Δ·A) and λ = mix::

        h[t] = α·(h[t-1] + (1 − λ)·Δ·B[t-1]·u[t-1]) + λ·Δ·B[t]·u[t]
        y[t] = Σ_n C[t,n] h[t,n]             for real A,  2·Re Σ_n C[t,n] h[t,n]  for complex A
        out  = (y + D·u) · silu(z)           without D and z where they are None

    λ = 1 is the selective scan's zoh, of order 1; λ = 1/2 is the trapezoid rule for the integral of
    the input, of order 2 for an input that is smooth rather than held. The input before the first
    step is 0, unless initial_state contains its B·u.

    The function runs one selective scan, of s[t] = h[t] + (1 − λ[t+1])·Δ[t+1]·B[t]·u[t]. There each
    input enters once, weighted by the sum of its shares in its own step and in the next one; this
    sum is the `input_delta` of :func:`selective_scan_fn`. The contribution of the next step's share
    to y is then subtracted, so y loses digits if it is small compared to that share.

    Args:
        u, delta, A, B, C, D, z, delta_bias, delta_softplus: as in :func:`selective_scan_fn`, with
            poles A, (dim, dstate).
        return_last_state: whether to return (out, last_state).
        mix: λ, (batch, dim, seqlen), any of u's dtypes; from 0 to 1, which is not checked.
        initial_state: (batch, 2, dim, dstate), float32 or float64, complex if A is complex: the
            state before the first step, and B·u of the step before it. With cu_seqlens the first
            dimension is sequences.
        reverse: whether to scan from the last step to the first; step t then also takes the input
            of step t + 1.
        cu_seqlens: boundaries of packed sequences, as in :func:`selective_scan_fn`. No input passes
            from one sequence to the next.
        backend: as in :func:`selective_scan_fn`; "reference" runs
            :func:`exponential_trapezoid_ref`.

    Returns:
        out, (batch, dim, seqlen) in u's dtype, rounded to it once. With return_last_state also
        last_state, the initial_state of a call that continues from here, for example a call of a
        single step for decoding. Both can be differentiated once, with respect to every tensor.

    Raises:
        TypeError, ValueError, torch.OutOfMemoryError, ImportError: see :func:`selective_scan_fn`.
        RuntimeError: an argument has a wrong layout, device, dtype or shape, or, on a CPU,
            cu_seqlens is out of order or range; the message names the argument, the expected and
            the actual value. Also raised when the result is differentiated twice.

    References:
        Mamba-3, 2026, arXiv:2603.15569: the exponential-trapezoidal discretization, in the form for
        a single input and output.

    Example:
        >>> import torch
        >>> from selective_scan import exponential_trapezoid_fn
        >>> u, delta, mix = torch.randn(3, 2, 8, 100).sigmoid()
        >>> A, B, C = -torch.rand(8, 4), torch.randn(2, 4, 100), torch.randn(2, 4, 100)
        >>> out = exponential_trapezoid_fn(u, delta, A, B, C, mix=mix)
        >>> first, state = exponential_trapezoid_fn(
        ...     *(u[..., :60], delta[..., :60], A, B[..., :60], C[..., :60]),
        ...     mix=mix[..., :60],
        ...     return_last_state=True,
        ... )
        >>> rest = exponential_trapezoid_fn(
        ...     *(u[..., 60:], delta[..., 60:], A, B[..., 60:], C[..., 60:]),
        ...     mix=mix[..., 60:],
        ...     initial_state=state,
        ... )
        >>> torch.allclose(torch.cat([first, rest], -1), out, atol=1e-5)
        True
    """
    values = (u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    values = (*values, mix, initial_state, reverse, cu_seqlens)
    call = _check(values, return_last_state, backend)
    if backend == "reference":
        options = dict(zip(("initial_state", "reverse", "cu_seqlens"), values[10:], strict=True))
        return exponential_trapezoid_ref(*values[:9], return_last_state, mix=mix, **options)
    _, dim, seqlen = u.shape
    dtype, h_dtype = call.compute_dtype, call.state_dtype
    edges = _Edges.of(cu_seqlens, seqlen, reverse)
    are_none = edges.are_none
    steps = steps_of_sequences(zeroed(are_none, delta), delta_bias, delta_softplus, dtype)
    x = zeroed(are_none, u.to(dtype))
    B, C = (whole_projection(projection, seqlen, h_dtype, are_none) for projection in (B, C))
    own = zeroed(are_none, mix.to(dtype)) * steps
    before = steps - own
    ahead = _of_next_step(before, reverse)
    if edges.are_last is not None:
        ahead = torch.where(edges.are_last, 0, ahead)

    h = driven = None
    if initial_state is not None:
        h, driven = initial_state.to(h_dtype).unbind(1)
        if seqlen != 0:
            share = edges.with_empty(0, edges.at(edges.first, before))
            h = h + share[..., None] * driven
    y, h = selective_scan_fn(
        *(x, steps, A, B, C),
        input_delta=own + ahead,
        initial_state=h,
        return_last_state=True,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        backend=backend,
    )
    y = y - ahead * _products(B, C, dim) * x
    out = finished(y, x, D, z, are_none).to(u.dtype)
    if not return_last_state:
        return out

    now = torch.zeros_like(h) if driven is None else driven
    if seqlen != 0:
        last_B = B if B.dim() == 2 else _spread(edges.at(edges.last, B), dim)
        now = edges.with_empty(now, last_B * edges.at(edges.last, x)[..., None])
    return out, torch.stack([h, now], 1)
