"""The adaptive unitary scan, whose states rotate by input-dependent angles."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import COMPLEX, REAL, Call
from ._layer_input import without_autocast
from ._operator import Operator
from ._result import Kept, Result
from ._table import PROJECTIONS, STATE_DTYPES, BackendName, Shape, Table, TensorArgument
from ._typing import typed_as
from .functional import projection_steps

_SEQUENCE = ("batch", "dim", "seqlen")
_STATE = ("batch", "dim", "dstate")
_PROJECTION = Shape((("dstate",), *PROJECTIONS), divided=("dim",))


def _arguments(B: str, C: str) -> Table:
    """Returns the table with these names for B and C; the ops take their polar forms, b and c."""
    return Table(
        TensorArgument("u", REAL, _SEQUENCE),
        TensorArgument("dt", REAL, _SEQUENCE),
        TensorArgument("x", REAL, ("dim", "dstate", "dim")),
        TensorArgument("x_bias", REAL, ("dim", "dstate")),
        TensorArgument(B, COMPLEX, _PROJECTION),
        TensorArgument(C, COMPLEX, _PROJECTION),
        TensorArgument("D", REAL, ("dim",)),
        TensorArgument("z", REAL, _SEQUENCE, optional=True),
        TensorArgument("initial_state", STATE_DTYPES, _STATE, optional=True),
        anchor="u",
        complex_by=(B, C),
    )


def _flops(call: Call) -> tuple[int, int]:
    """Counts the matrix products, which dominate: θ; in the backward pass θ again, dx and du."""
    sizes = call.sizes
    product = 2 * sizes["batch"] * sizes["seqlen"] * call["x"].numel()
    return product, 3 * product


_FUNCTION_ARGUMENTS = _arguments("B", "C")
_ADAPTIVE_UNITARY_SCAN = Operator(
    "adaptive_unitary_scan",
    _arguments("b", "c"),
    results=[
        Result("out", _SEQUENCE, lambda call: call["u"].dtype, like="u"),
        Result("last_state", _STATE, lambda call: call.state_dtype),
        Kept(
            "states", ("saved values",), lambda call: call.state_dtype, chunk="unitary_state_chunk"
        ),
    ],
    backward="dout dlast_state u dt x x_bias b c D z initial_state states",
    function_arguments=_FUNCTION_ARGUMENTS,
    flops=_flops,
)


def polar_form(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns softplus(Re w)·exp(i·Im w) in the complex `dtype`."""
    weight = weight.to(dtype)
    return torch.polar(F.softplus(weight.real), weight.imag)


@typed_as(lambda: adaptive_unitary_scan_fn)
def adaptive_unitary_scan_ref(
    u: Tensor,
    dt: Tensor,
    x: Tensor,
    x_bias: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool | None = False,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Runs the adaptive unitary scan step by step in plain PyTorch.

    It has the arguments, results and errors of :func:`adaptive_unitary_scan_fn`; `backend` is
    checked but has no other effect. It runs on any device and can be differentiated any number of
    times. Its time and, with gradients, its memory grow as batch·dim·dstate·seqlen.

    Example:
        >>> import torch
        >>> from selective_scan import adaptive_unitary_scan_ref
        >>> u, dt = torch.randn(2, 4, 100), torch.rand(2, 4, 100)
        >>> x, x_bias, D = torch.randn(4, 8, 4), torch.randn(4, 8), torch.ones(4)
        >>> B, C = torch.randn(2, 8, dtype=torch.complex64)
        >>> adaptive_unitary_scan_ref(u, dt, x, x_bias, B, C, D).shape
        torch.Size([2, 4, 100])
    """
    inputs = (u, dt, x, x_bias, B, C, D, z, initial_state)
    call = _ADAPTIVE_UNITARY_SCAN.check((*inputs, return_last_state, backend))

    batch, dim, seqlen = u.shape
    dtype, h_dtype = call.compute_dtype, call.state_dtype
    b_steps = _steps(polar_form(B, h_dtype), dim, seqlen)
    c_steps = _steps(polar_form(C, h_dtype), dim, seqlen)
    x, x_bias = x.to(dtype), x_bias.to(dtype)
    u_steps = u.to(dtype).unbind(-1)
    silu_u = F.silu(u.to(dtype))
    v_steps = (dt.to(dtype) * silu_u).unbind(-1)

    if initial_state is None:
        h = torch.zeros(batch, dim, x.shape[1], dtype=h_dtype, device=u.device)
    else:
        h = initial_state.to(h_dtype, copy=True)
    y_steps = []
    for t in range(seqlen):
        with without_autocast(u.device):
            theta = torch.einsum("dnr,br->bdn", x, u_steps[t]) + x_bias
        rotation = torch.polar(torch.ones_like(theta), theta)
        h = rotation * h + b_steps[t] * v_steps[t][..., None]
        y_steps.append((c_steps[t] * h).real.sum(-1))
    y = torch.stack(y_steps, dim=-1) if y_steps else torch.zeros_like(silu_u)
    out = y + D.to(dtype)[:, None] * silu_u
    if z is not None:
        out = out * F.silu(z.to(dtype))
    out = out.to(u.dtype)
    return (out, h) if return_last_state else out


def _steps(weight: Tensor, dim: int, seqlen: int) -> list[Tensor]:
    """Returns the weight for each step, broadcastable to (batch, dim, dstate)."""
    if weight.dim() == 1:
        return [weight] * seqlen
    return projection_steps(weight, dim, seqlen, weight.dtype)


@overload
def adaptive_unitary_scan_fn(
    u: Tensor,
    dt: Tensor,
    x: Tensor,
    x_bias: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_last_state: Literal[False] | None = False,
    backend: BackendName = "auto",
) -> Tensor: ...


@overload
def adaptive_unitary_scan_fn(
    u: Tensor,
    dt: Tensor,
    x: Tensor,
    x_bias: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_last_state: Literal[True],
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def adaptive_unitary_scan_fn(
    u: Tensor,
    dt: Tensor,
    x: Tensor,
    x_bias: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool | None = False,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...


def adaptive_unitary_scan_fn(
    u: Tensor,
    dt: Tensor,
    x: Tensor,
    x_bias: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    return_last_state: bool | None = False,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scans a sequence with states that rotate by input-dependent angles, as AUSSM does.

    For every batch entry and channel d, with a complex state h of size N = dstate that starts from
    initial_state or 0::

        θ[t,d,n] = Σ_r x[d,n,r]·u[t,r] + x_bias[d,n]
        h[t] = exp(iθ[t]) ⊙ h[t-1] + b ⊙ dt[t]·silu(u[t])      b = softplus(Re B)·exp(i·Im B)
        y[t] = Re Σ_n c_n h[t,n]                                c = softplus(Re C)·exp(i·Im C)
        out  = (y + D·silu(u)) · silu(z)                        without z where it is None

    The transition is unitary: states neither decay nor grow, and each state rotates by an angle
    that depends on all channels of the input. The sequence may have any length.

    Each step rotates by its own θ, whose sine and cosine are computed after full argument
    reduction. No phase is accumulated along the sequence. The last step is therefore as accurate as
    the first, except for the rounding of θ, the rotation and the state at each step, which
    accumulates because nothing decays. θ is a matrix product in float32 (float64 if any tensor is
    float64 or complex128), whose rounding error grows with the square root of dim: after 65536
    steps in float32 the last state's relative error is 1.2e-5 for dim 8 and 4e-5 for dim 256, which
    is 2 and 5 (at times 8) times the error of rounding an exact θ and its rotation once per step.
    Leave TF32 off (``torch.backends.cuda.matmul.allow_tf32``): it would round θ to three digits.

    A large θ is never stored as a whole. It is computed for a slab of steps and batch entries at a
    time, of 16 MiB on CPU and 256 MiB on CUDA, or of 64 steps of one sequence if that is more. The
    backward pass, which recomputes θ, needs up to three times this memory (five times if B or C is
    variable). The states of every 64th step are kept for the backward pass.

    Floating dtypes may be mixed, and tensors may have any strides. If u is dense, out has u's
    layout. The result can be differentiated once with respect to every tensor, through out and
    last_state; each gradient has its input's dtype.

    Args:
        u: input, (batch, dim, seqlen), float32, float16, bfloat16 or float64.
        dt: step sizes, (batch, dim, seqlen), any of these dtypes; already positive, since no
            softplus is applied.
        x: weights from the input to the angles, (dim, dstate, dim); on CUDA dstate is at most 256.
        x_bias: angles without input, in radians per step, (dim, dstate).
        B: input weights, complex64 or complex128: constant (dstate,); or variable, (batch, dstate,
            seqlen) or (batch, groups, dstate, seqlen), where channel d belongs to group
            d // (dim/groups). The modulus is softplus of the real part, the phase is the imaginary
            part.
        C: output weights, like B. If both are variable, they have the same number of groups.
        D: skip connection, (dim,).
        z: gate, (batch, dim, seqlen).
        initial_state: (batch, dim, dstate), complex64 or complex128.
        return_last_state: whether to return (out, last_state).
        backend: as in :func:`selective_scan_fn`; "reference" runs
            :func:`adaptive_unitary_scan_ref`.

    Returns:
        out, (batch, dim, seqlen) in u's dtype. With return_last_state also last_state, (batch, dim,
        dstate), complex64 or complex128.

    Raises:
        TypeError, ValueError, torch.OutOfMemoryError, ImportError: see :func:`selective_scan_fn`.
        RuntimeError: an argument has a wrong layout, device, dtype or shape; the message names the
            argument, the expected and the actual value. Also raised when the result is
            differentiated twice.

    References:
        Karuvally et al., "Bridging Expressivity and Scalability with Adaptive Unitary SSMs", 2025,
        arXiv:2507.05238. Input-dependent B and C are an extension of it.

    Example:
        >>> import torch
        >>> from selective_scan import adaptive_unitary_scan_fn
        >>> batch, dim, dstate, seqlen = 2, 16, 8, 100
        >>> u = torch.randn(batch, dim, seqlen, requires_grad=True)
        >>> dt = 0.1 * torch.rand(batch, dim, seqlen)
        >>> x, x_bias = torch.randn(dim, dstate, dim) / dim, torch.randn(dim, dstate)
        >>> B, C = torch.randn(2, dstate, dtype=torch.complex64)
        >>> out, last_state = adaptive_unitary_scan_fn(
        ...     u, dt, x, x_bias, B, C, torch.ones(dim), return_last_state=True
        ... )
        >>> out.shape, last_state.dtype
        (torch.Size([2, 16, 100]), torch.complex64)
        >>> out.sum().backward()
        >>> u.grad.shape
        torch.Size([2, 16, 100])
    """
    inputs = (u, dt, x, x_bias, B, C, D, z, initial_state)
    values = (*inputs, return_last_state, backend)
    if not _ADAPTIVE_UNITARY_SCAN.has_kernels(values):
        return _ADAPTIVE_UNITARY_SCAN.run_reference(adaptive_unitary_scan_ref, values)
    dtype = _FUNCTION_ARGUMENTS.check_values(inputs).state_dtype
    weights = (polar_form(B, dtype), polar_form(C, dtype))
    out, last_state, _ = _ADAPTIVE_UNITARY_SCAN(*inputs[:4], *weights, D, z, initial_state)
    return (out, last_state) if return_last_state else out
