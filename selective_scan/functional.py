"""The selective scan: the function and its reference."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import Call
from ._discretization import DISCRETIZATIONS, Method, steps_of_sequences
from ._matrix_scan import operator_for
from ._packed import outside, scan_steps, zeroed
from ._pytorch import are_transforms_active
from ._sharding import are_distributed
from ._table import BackendName
from ._typing import typed_as


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
    input_delta: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Runs the selective scan step by step in plain PyTorch: slow, but differentiable and readable.

    This reference defines what every kernel must compute, and it is the oracle of the tests. It has
    the arguments, results and errors of :func:`selective_scan_fn`, so either function can replace
    the other in any call; `backend` is checked but has no other effect. The reference runs on any
    device and can be differentiated any number of times. Its time and, with gradients, its memory
    grow as batch·dim·dstate·seqlen; with a matrix A, memory grows by a further factor of dstate and
    time by dstate². Out-of-range boundaries in cu_seqlens are clamped to 0 and seqlen.

    Example:
        >>> import torch
        >>> from selective_scan import selective_scan_ref
        >>> u, delta = torch.randn(2, 8, 100), torch.rand(2, 8, 100)
        >>> A, B, C = -torch.rand(8, 4), torch.randn(2, 4, 100), torch.randn(2, 4, 100)
        >>> selective_scan_ref(u, delta, A, B, C).shape
        torch.Size([2, 8, 100])
    """
    options = (delta_softplus, discretization_method, initial_state, reverse)
    values = (u, delta, A, B, C, D, z, delta_bias, *options, cu_seqlens, input_delta)
    values = (*values, return_last_state, backend)
    scan = operator_for(A, discretization_method)
    if are_distributed(values):
        return scan.run_reference(selective_scan_ref, values)
    call = scan.check(values)

    _, dim, seqlen = u.shape
    dtype, h_dtype = call.compute_dtype, call.state_dtype
    discretize = DISCRETIZATIONS[discretization_method]

    are_none = outside(cu_seqlens, seqlen)
    delta = steps_of_sequences(zeroed(are_none, delta), delta_bias, delta_softplus, dtype)
    input_steps = delta if input_delta is None else zeroed(are_none, input_delta.to(dtype))
    input_steps = input_steps.unbind(-1)
    A = A.to(h_dtype)
    x = zeroed(are_none, u.to(dtype))
    B_steps = projection_steps(B, dim, seqlen, h_dtype, are_none)
    C_steps = projection_steps(C, dim, seqlen, h_dtype, are_none)

    if initial_state is None:
        h = torch.zeros(call.sizes["sequences"], dim, A.shape[1], dtype=h_dtype, device=u.device)
    else:
        h = initial_state.to(h_dtype, copy=True)
    delta_steps, u_steps = delta.unbind(-1), x.unbind(-1)
    y_steps = []

    def take_step(t: int, h: Tensor) -> Tensor:
        delta_t, u_t = delta_steps[t][..., None], u_steps[t][..., None]  # (batch, dim, 1)
        input_step = input_steps[t][..., None]
        if A.dim() == 3:
            h = _solve_step(h, delta_t, A, input_step * B_steps[t] * u_t)
        else:
            abar, bbar = discretize(input_step, delta_t * A)
            h = abar * h + bbar * B_steps[t] * u_t
        y_steps.append(observed(C_steps[t], h))
        return h

    h = scan_steps(take_step, h, seqlen, reverse, cu_seqlens)
    out = output_of(y_steps, call, x, reverse, are_none)
    return (out, h) if return_last_state else out


def observed(C: Tensor, h: Tensor) -> Tensor:
    """Computes y from a state; a complex pole also represents its conjugate."""
    y = (C * h).sum(-1)
    return 2 * y.real if y.is_complex() else y


def output_of(
    y_steps: list[Tensor], call: Call, x: Tensor, reverse: bool, are_none: Tensor | None
) -> Tensor:
    """Computes out from y, given per step in the order of the scan; x is u in the compute dtype."""
    u, D, z = call["u"], call.tensors.get("D"), call.tensors.get("z")
    if reverse:
        y_steps.reverse()
    y = torch.stack(y_steps, -1) if y_steps else _without_steps(x, call)
    y = finished(y, x, D, z, are_none)
    # out has u's dtype and layout. Transforms do not allow a mapped tensor to be copied into
    # another tensor, so there only the dtype is converted.
    return y.to(u.dtype) if are_transforms_active() else torch.empty_like(u).copy_(y)


def _without_steps(x: Tensor, call: Call) -> Tensor:
    """Returns y for seqlen 0, made to depend on every tensor so that all gradients are zeros."""
    y = torch.empty_like(x)
    for tensor in call.tensors.values():
        if tensor.is_complex() or tensor.is_floating_point():
            y = y + tensor.sum().real.to(y.dtype)
    return y


def finished(
    y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None, are_none: Tensor | None
) -> Tensor:
    """Applies the skip connection and the gate to y; steps that belong to no sequence become 0."""
    if D is not None:
        y = y + D.to(x.dtype)[:, None] * x
    if z is not None:
        y = y * F.silu(zeroed(are_none, z.to(x.dtype)))
    return zeroed(are_none, y)


def _solve_step(h: Tensor, delta: Tensor, A: Tensor, input: Tensor) -> Tensor:
    """Returns the state after a step with a matrix A; not finite if I − Δ/2·A is singular."""
    half = delta[..., None] / 2 * A  # (batch, dim, dstate, dstate)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    known = h + (half * h[..., None, :]).sum(-1) + input
    return torch.linalg.solve_ex(identity - half, known[..., None]).result[..., 0]


def projection_steps(
    projection: Tensor,
    dim: int,
    seqlen: int,
    dtype: torch.dtype,
    are_none: Tensor | None = None,
) -> list[Tensor]:
    """Returns B or C for each step, as (batch or 1, dim, dstate); 0 in the steps of no sequence."""
    projection = whole_projection(projection, seqlen, dtype, are_none)
    if projection.dim() == 2:
        return [projection[None]] * seqlen
    channels_per_group = dim // projection.shape[1]
    return [step.repeat_interleave(channels_per_group, dim=1) for step in projection.unbind(-1)]


def whole_projection(
    projection: Tensor, seqlen: int, dtype: torch.dtype, are_none: Tensor | None
) -> Tensor:
    """Returns B or C as (dim, dstate) or (batch, groups, dstate, seqlen), in the states' dtype; it
    is 0 in the steps that belong to no sequence."""
    if projection.dim() == 2:
        return projection.to(dtype)
    if dtype.is_complex and not projection.is_complex():  # (re, im) interleaved along time
        # torch.compile cannot trace dtype.to_real().
        real = torch.float64 if dtype == torch.complex128 else torch.float32
        pairs = projection.to(real).unflatten(-1, (seqlen, 2))
        projection = torch.complex(pairs[..., 0], pairs[..., 1])
    projection = projection[:, None] if projection.dim() == 3 else projection
    return zeroed(are_none, projection.to(dtype))


@overload
def selective_scan_fn(
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
    discretization_method: Method = "zoh",
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    input_delta: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor: ...


@overload
def selective_scan_fn(
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
    discretization_method: Method = "zoh",
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    input_delta: Tensor | None = None,
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def selective_scan_fn(
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
    input_delta: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...


def selective_scan_fn(
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
    input_delta: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scans a sequence with an input-dependent diagonal state space model, as Mamba does.

    For every batch entry and channel d, with a state h of size N = dstate that starts from
    initial_state or 0::

        h[t] = abar ⊙ h[t-1] + bbar ⊙ B[t] · u[t]
        y[t] = Σ_n C[t,n] h[t,n]             for real A,  2·Re Σ_n C[t,n] h[t,n]  for complex A
        out  = (y + D·u) · silu(z)           without D and z where they are None

    where Δ = delta + delta_bias, passed through softplus if `delta_softplus` (which is the identity
    above 20). With x = Δ·A, `discretization_method` chooses:

    ==========  =====================  ===========================
    method      abar                   bbar
    ==========  =====================  ===========================
    zoh         exp(x)                 Δ
    foh         exp(x)                 Δ·(exp(x) − 1)/x
    bilinear    (1 + x/2)/(1 − x/2)    Δ/(1 − x/2)
    poly        exp(x)                 Δ·(1 + x/2 + x²/6)
    highorder   exp(x)                 Δ·(1 + x/2)
    rk4         exp(x)                 Δ·(1 + x/2 + x²/6 + x³/24)
    ==========  =====================  ===========================

    zoh is what Mamba computes: exact for A, a first-order step for B. foh is exact for an input
    that is constant over each step; poly, highorder and rk4 truncate its series. bilinear is
    Tustin's rule, stable whenever Re A < 0.

    bilinear also takes a full matrix A for each channel, (dim, dstate, dstate), real or complex::

        (I − Δ/2·A)·h[t] = (I + Δ/2·A)·h[t-1] + Δ·B[t]·u[t]

    This costs O(dstate²) per step instead of O(dstate), whatever the structure of A: each call
    reduces A to Hessenberg form by an orthogonal change of basis, and each step solves one system.

    With `input_delta`, the input has its own step sizes E, which replace the factor Δ of bbar::

        h[t] = abar(Δ·A)·h[t-1] + E·b(Δ·A)·B[t]·u[t]        with b as in bbar = Δ·b(Δ·A)

    The state then decays by Δ, and its input is scaled by E. This suits events at irregular times:
    E = 1 adds B·u to the state as an impulse, E = Δ·τ holds it for a part of the step.

    One published description prints bilinear as (1 − x/2)/(1 + x/2), Δ/(1 + x/2), which diverges
    for A < 0; it equals the form above evaluated at −A.

    Tensors may have any strides. If u is dense, out has u's layout. Floating dtypes may be mixed:
    arithmetic and states are float32, or float64 if any tensor is float64 or complex128, also under
    torch.autocast. The result can be differentiated once with respect to every tensor, through out
    and last_state; each gradient has its input's dtype, and the same bits on every run.

    Args:
        u: input, (batch, dim, seqlen), float32, float16, bfloat16 or float64.
        delta: step sizes, (batch, dim, seqlen), any of these dtypes, in any unit of time.
        A: poles, (dim, dstate), float32, float64, complex64 or complex128, per that unit of time;
            the imaginary part of a complex pole is an angle in radians. Stable if Re A < 0. On CUDA
            dstate is at most 256, and less for complex128 on GPUs with less shared memory than
            Hopper.
            With bilinear also (dim, dstate, dstate), stable if all eigenvalues have Re < 0; on CUDA
            dstate is then at most 64. A step at which I − Δ/2·A is singular makes its channel
            infinite or NaN.
        B: input projection: constant (dim, dstate); or variable, (batch, dstate, seqlen) or
            (batch, groups, dstate, seqlen), where channel d belongs to group d // (dim/groups). For
            complex A, a constant B is complex; a variable B is either complex or real with a last
            dimension of 2·seqlen, (re, im) interleaved.
        C: output projection, like B. One may be constant and the other variable; if both are
            variable, they have the same number of groups.
        D: skip connection, (dim,).
        z: gate, (batch, dim, seqlen).
        delta_bias: added to delta, (dim,).
        delta_softplus: whether Δ is softplus(delta + delta_bias).
        return_last_state: whether to return (out, last_state).
        discretization_method: see the table above.
        initial_state: (batch, dim, dstate), float32 or float64, complex64 or complex128 for complex
            A; with cu_seqlens (sequences, dim, dstate).
        reverse: whether to scan from the last step to the first; last_state is then the state after
            step 0.
        cu_seqlens: boundaries of packed sequences, (sequences + 1,), int32 or int64, on u's device,
            non-decreasing; batch is then 1. Sequence i has the steps from cu_seqlens[i] up to, but
            not including, cu_seqlens[i + 1]. Each sequence is scanned separately, from its own
            initial state, backwards if `reverse`. out is 0 at steps that belong to no sequence. A
            sequence without steps keeps its state. On CUDA the values are not read back to the
            host, and values out of order or range are clamped to valid ones. Not supported with a
            matrix A.
        input_delta: step sizes E of the input, (batch, dim, seqlen), any of u's dtypes, used
            without delta_bias and softplus. None means E = Δ.
        backend: "auto" selects the kernels for the tensors' device; "cpu" and "cuda" do the same
            and require that device; "reference" runs :func:`selective_scan_ref` on any device.

    Returns:
        out, (batch, dim, seqlen) in u's dtype. With return_last_state also last_state, of
        initial_state's shape, float32 or float64, complex if A is complex.

    Raises:
        TypeError: an argument is not of the type above.
        ValueError: the backend is unknown, or does not match the tensors' device.
        RuntimeError: the method is unknown, an argument has a wrong layout, device, dtype or shape,
            or, on a CPU, cu_seqlens is out of order or range; the message names the argument, the
            expected and the actual value. Also raised when the result is differentiated twice.
        torch.OutOfMemoryError: the GPU has no memory left; on a CPU, and in code compiled by
            torch.compile, a RuntimeError with the allocator's message is raised instead.
        ImportError: the library for the tensors' device is missing; the message says why, and what
            to do. See :func:`backends` and :func:`allow_fallback`.

    References:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
        arXiv:2312.00752: eq. (2a) and (2b) are the recurrence, Algorithm 2 lets Δ, B and C depend
        on the input. Its eq. (4) is foh here; its code computes zoh.

        Separate step sizes for the input: Schöne et al., "STREAM: A Universal State-Space Model for
        Sparse Geometric Data", 2024, arXiv:2411.12603, and "Scalable Event-by-event Processing of
        Neuromorphic Sensory Signals With Deep State-Space Models", 2024, arXiv:2404.18508.

    Example:
        >>> import torch
        >>> from selective_scan import selective_scan_fn
        >>> batch, dim, dstate, seqlen = 2, 64, 16, 100
        >>> u = torch.randn(batch, dim, seqlen, requires_grad=True)
        >>> delta = torch.randn(batch, dim, seqlen)
        >>> A = -torch.rand(dim, dstate)
        >>> B, C = torch.randn(2, batch, dstate, seqlen)
        >>> out, last_state = selective_scan_fn(
        ...     u, delta, A, B, C, delta_softplus=True, return_last_state=True
        ... )
        >>> out.shape, last_state.shape
        (torch.Size([2, 64, 100]), torch.Size([2, 64, 16]))
        >>> out.sum().backward()
        >>> u.grad.shape
        torch.Size([2, 64, 100])
    """
    options = (delta_softplus, discretization_method, initial_state, reverse)
    arguments = (u, delta, A, B, C, D, z, delta_bias, *options, cu_seqlens, input_delta)
    scan = operator_for(A, discretization_method)
    values = (*arguments, return_last_state, backend)
    if not scan.has_kernels(values):
        return scan.run_reference(selective_scan_ref, values)
    out, last_state, _ = scan(*arguments)
    return (out, last_state) if return_last_state else out
