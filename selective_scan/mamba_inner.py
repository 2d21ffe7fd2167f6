"""Everything between a Mamba layer's input and output projections, as one operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _library, _pytorch
from ._discretization import Method, at_least_single, poles
from ._layer_input import autocast_dtype_of, checked_factor
from ._mamba_operators import ABSENT_FROM_OP, LAYER_ARGUMENTS, MAMBA_INNER, Layer, residual_dtypes
from ._table import BackendName
from .causal_conv1d import causal_conv1d_fn
from .functional import selective_scan_fn

# An argument of any other type is a subclass of Tensor, which may have to see the parts of a layer.
OPAQUE_TYPES = {Tensor, nn.Parameter, type(None)}


def compose(scan: Callable[..., Tensor], convolve: Callable[..., Tensor], layer: Layer) -> Tensor:
    """Computes a layer from a selective scan, a causal convolution and PyTorch's operations.

    Autograd decides what is saved for the backward pass; checkpoint_lvl has no effect here.
    """
    dtype = layer.xz.dtype
    if dtype != torch.float64:
        dtype = autocast_dtype_of(layer.xz.device) or dtype
    # x and z are halves of the same rows, so that one tensor receives both gradients.
    rows = layer.xz.transpose(1, 2).to(dtype)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    x, z = (half.transpose(1, 2) for half in rows.chunk(2, dim=-1))
    u = convolve(
        x.flip(2) if layer.reverse else x,
        layer.conv1d_weight.squeeze(1),
        layer.conv1d_bias,
        activation="silu",
        cu_seqlens=layer.cu_seqlens,
    )
    u = u.flip(2) if layer.reverse else u
    delta, B, C = _project(u, layer)
    options = {
        "delta_bias": layer.delta_bias,
        "delta_softplus": layer.delta_softplus,
        "discretization_method": layer.discretization_method,
        "cu_seqlens": layer.cu_seqlens,
    }
    A, D = layer.A, layer.D
    if layer.bidirectional:
        y = scan(u, delta, A, B, C, D, **options)
        y = (y + scan(u, delta, A, B, C, **options, reverse=True)) * F.silu(z)
    else:
        y = scan(u, delta, A, B, C, D, z, **options, reverse=layer.reverse)
    if layer.A_b is not None:
        y = y + scan(u, delta, layer.A_b, B, C, D, z, **options, reverse=True)
    rows = y.transpose(1, 2)
    if layer.out_proj_weight is None:
        return rows
    bias = layer.out_proj_bias
    return F.linear(rows, layer.out_proj_weight.to(dtype), None if bias is None else bias.to(dtype))


def _project(u: Tensor, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Projects u to delta, B and C as the scan takes them; a B or C that is given is returned."""
    dtype, dstate = u.dtype, layer.A.shape[1]
    x_dbl = F.linear(u.transpose(1, 2), layer.x_proj_weight.to(dtype))
    rank, states = layer.delta_proj_weight.shape[1], dstate * (2 if layer.A.is_complex() else 1)
    dt, B_rows, C_rows = x_dbl.split(
        [rank, *(0 if given is not None else states for given in (layer.B, layer.C))], dim=-1
    )
    delta = F.linear(dt, layer.delta_proj_weight.to(dtype))
    if layer.dt_rms_weight is not None:
        delta = rms_norm(delta, layer.dt_rms_weight, layer.b_c_dt_rms_eps)

    def projection(
        given: Tensor | None, rows: Tensor, bias: Tensor | None, rms_weight: Tensor | None
    ) -> Tensor:
        if given is not None:
            return given
        if bias is not None:
            rows = rows + bias.to(dtype)
        if rms_weight is not None:
            rows = rms_norm(rows, rms_weight, layer.b_c_dt_rms_eps)
        # A complex projection becomes (re, im) interleaved along time.
        return rows.unflatten(-1, (dstate, -1)).transpose(1, 2).flatten(2)

    B = projection(layer.B, B_rows, layer.B_proj_bias, layer.b_rms_weight)
    C = projection(layer.C, C_rows, layer.C_proj_bias, layer.c_rms_weight)
    return delta.transpose(1, 2), B, C


def rms_norm(rows: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Returns rows / rms(rows)·weight in the dtype of rows, computed in float32 or wider."""
    x = rows.to(at_least_single(rows.dtype))
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed = x * scale
    return (normed if weight is None else normed * weight.to(x.dtype)).to(rows.dtype)


def run_layer(layer: Layer, backend: BackendName = "auto") -> Tensor:
    """Computes mamba_inner_fn with the arguments that LAYER_ARGUMENTS describes. Without an output
    projection it returns the rows that would enter it, (batch, seqlen, dim)."""
    if not MAMBA_INNER.has_kernels((*layer, backend)):
        return _run_reference(layer, backend)
    tensors = (
        *(layer.xz, None, None, layer.conv1d_weight, layer.conv1d_bias, layer.x_proj_weight),
        *(layer.delta_proj_weight, layer.out_proj_weight, layer.out_proj_bias),
        *(layer.A, layer.A_b, layer.D, layer.delta_bias),
    )
    if (
        all(getattr(layer, name) is None for name in ABSENT_FROM_OP)
        and not layer.A.is_complex()
        and layer.b_c_dt_rms_eps >= 0
        and (torch.compiler.is_compiling() or not _are_parts_wanted(tensors))
    ):
        options = (layer.delta_softplus, layer.checkpoint_lvl, layer.discretization_method,
                   layer.bidirectional, layer.reverse, layer.cu_seqlens)  # fmt: skip
        return MAMBA_INNER(*tensors, *options, autocast_dtype_of(layer.xz.device), None)[0]
    LAYER_ARGUMENTS.check_values(layer)
    MAMBA_INNER.refuse_tangents(layer)
    return compose(selective_scan_fn, causal_conv1d_fn, layer)


def _run_reference(layer: Layer, backend: BackendName) -> Tensor:
    MAMBA_INNER.check((*layer, backend))
    # The functions call their references, and also do so for DTensors.
    parts = (partial(part, backend="reference") for part in (selective_scan_fn, causal_conv1d_fn))
    return compose(*parts, layer)


def mamba_inner_ref(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    *,
    discretization_method: Method = "zoh",
    bidirectional: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Computes :func:`mamba_inner_fn` from PyTorch's operations and the other references.

    It has the arguments, result and errors of :func:`mamba_inner_fn`; `checkpoint_lvl` and
    `backend` are checked but have no other effect. It runs on any device and can be differentiated
    any number of times.

    Example:
        >>> import torch
        >>> from selective_scan import mamba_inner_ref
        >>> dim, dstate, rank, d_model = 8, 4, 2, 6
        >>> weights = [(dim, 1, 4), (dim,), (rank + 2 * dstate, dim), (dim, rank), (d_model, dim)]
        >>> weights = [torch.randn(shape) for shape in weights]
        >>> A = -torch.rand(dim, dstate)
        >>> mamba_inner_ref(torch.randn(2, 2 * dim, 20), *weights, None, A).shape
        torch.Size([2, 20, 6])
    """
    layer = Layer(
        *(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight),
        *(_given(out_proj_weight), out_proj_bias, A, None, B, C, D, delta_bias),
        *(B_proj_bias, C_proj_bias, delta_softplus, checkpoint_lvl),
        *(b_rms_weight, c_rms_weight, dt_rms_weight, b_c_dt_rms_eps),
        *(discretization_method, bidirectional, False, cu_seqlens),
    )
    return _run_reference(layer, backend)


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    *,
    discretization_method: Method = "zoh",
    bidirectional: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    r"""Computes a Mamba layer from the result of its input projection to its output projection.

    With x and z being the halves of xz::

        x        = silu(causal depthwise convolution of x)
        dt, B, C = x_proj_weight · x
        delta    = delta_proj_weight · dt
        y        = selective_scan_fn(x, delta, A, B, C, D, z, delta_bias, delta_softplus)
        out      = out_proj_weight · y + out_proj_bias

    where B and C are taken from the projection only if they are not given. B_proj_bias and
    C_proj_bias are added to the projected B and C; b_rms_weight, c_rms_weight and dt_rms_weight
    normalize B, C and delta over their channels: v / sqrt(mean(v²) + b_c_dt_rms_eps)·weight.

    The call is one autograd node. If xz is the transpose of a (batch, seqlen, 2·dim) tensor, as a
    matrix product returns it, nothing is transposed, concatenated or copied. Other strides are
    supported, but xz is copied unless its channels are adjacent in memory. The inputs, the
    projection dt|B|C, the scan's output and its saved states are kept for the backward pass, which
    recomputes the convolution and delta. With complex A, with B or C given, or with biases or norms
    of B, C and delta, the call consists of several nodes, each of which keeps what it needs.

    The matrix products and their results have the dtype of xz, or torch.autocast's dtype if
    autocast is enabled and xz is not float64; weights are cast to it. The rest is as in
    :func:`causal_conv1d_fn` and :func:`selective_scan_fn`: arithmetic is float32 or float64, and A,
    D and the biases are not cast. The result can be differentiated once with respect to every
    tensor; each gradient has its input's dtype, and the same bits on every run.

    Args:
        xz: the result of the layer's input projection, x and z, (batch, 2·dim, seqlen), float32,
            float16, bfloat16 or float64, as are all tensors except A, B and C.
        conv1d_weight: (dim, 1, width), width 1 to 8.
        conv1d_bias: (dim,) or None.
        x_proj_weight: (dt_rank + 2·dstate, dim), without the dstate rows of B or C if that tensor
            is given. For complex A, twice as many rows of states, with re and im of each state
            adjacent.
        delta_proj_weight: (dim, dt_rank).
        out_proj_weight: (d_model, dim).
        out_proj_bias: (d_model,) or None.
        A: poles, (dim, dstate), float32, float64, complex64 or complex128.
        B: None to project it from x, or a tensor as in :func:`selective_scan_fn`, for example
            (dim, dstate).
        C: like B.
        D: skip connection, (dim,).
        delta_bias: added to delta, (dim,).
        B_proj_bias: added to B, (dstate,); (2·dstate,) for complex A.
        C_proj_bias: added to C, like B_proj_bias.
        delta_softplus: whether the step is softplus(delta + delta_bias).
        checkpoint_lvl: 1 to recompute the convolution's output and delta in the backward pass; 0 to
            keep them, if the layer is one node.
        b_rms_weight: weight of B's norm, (dstate,); (2·dstate,) for complex A, whose real and
            imaginary parts are normalized together.
        c_rms_weight: weight of C's norm, like b_rms_weight.
        dt_rms_weight: weight of delta's norm, (dim,).
        b_c_dt_rms_eps: added to the mean square in these norms.
        discretization_method: see :func:`selective_scan_fn`.
        bidirectional: whether to add a second scan of the same inputs, which runs from the last
            step to the first, before the gate; D·x is added once.
        cu_seqlens: the boundaries of packed sequences, as in :func:`selective_scan_fn`; batch is
            then 1.
        backend: as in :func:`selective_scan_fn`; "reference" runs :func:`mamba_inner_ref`.

    Returns:
        out, (batch, seqlen, d_model).

    Raises:
        TypeError, ValueError, torch.OutOfMemoryError, ImportError: see :func:`selective_scan_fn`.
        RuntimeError: the method is unknown, an argument has a wrong layout, device, dtype or shape,
            or, on a CPU, cu_seqlens is out of order or range; the message names the argument, the
            expected and the actual value. Also raised when the result is differentiated twice.

    References:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
        arXiv:2312.00752, section 3.4. The positional arguments are those of mamba_ssm's function
        of this name. The norms are those of Zuo et al., "Falcon Mamba", 2024, arXiv:2410.05355.

    Example:
        >>> import torch
        >>> from selective_scan import mamba_inner_fn
        >>> batch, seqlen, d_model, dim, dstate, rank = 2, 100, 32, 64, 16, 2
        >>> xz = torch.randn(batch, seqlen, 2 * dim).transpose(1, 2).requires_grad_()
        >>> conv1d_weight, conv1d_bias = torch.randn(dim, 1, 4), torch.randn(dim)
        >>> x_proj_weight = torch.randn(rank + 2 * dstate, dim)
        >>> delta_proj_weight, out_proj_weight = torch.randn(dim, rank), torch.randn(d_model, dim)
        >>> A = -torch.rand(dim, dstate)
        >>> out = mamba_inner_fn(
        ...     xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight,
        ...     None, A, D=torch.ones(dim),
        ... )
        >>> out.shape
        torch.Size([2, 100, 32])
        >>> out.sum().backward()
        >>> xz.grad.shape
        torch.Size([2, 128, 100])
    """
    layer = Layer(
        *(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight),
        *(_given(out_proj_weight), out_proj_bias, A, None, B, C, D, delta_bias),
        *(B_proj_bias, C_proj_bias, delta_softplus, checkpoint_lvl),
        *(b_rms_weight, c_rms_weight, dt_rms_weight, b_c_dt_rms_eps),
        *(discretization_method, bidirectional, False, cu_seqlens),
    )
    return run_layer(layer, backend)


def _given(out_proj_weight: Tensor) -> Tensor:
    if out_proj_weight is None:
        raise TypeError("selective_scan: out_proj_weight must be a Tensor, got NoneType")
    return out_proj_weight


class LayerOptions(NamedTuple):
    """The options of a layer; each field is the argument of mamba_inner_fn with its name."""

    delta_softplus: bool = True
    discretization_method: Method = "zoh"
    bidirectional: bool = False
    cu_seqlens: Tensor | None = None


def mamba_layer(
    hidden: Tensor,
    weights: tuple[Tensor | None, ...],
    options: LayerOptions,
    residual: Tensor | None,
    name: str = "hidden",
) -> Tensor:
    """Runs a layer: in_proj, mamba_inner_fn with A = −exp(A_log), and the addition of the residual.

    Args:
        hidden: the layer's input, (batch, seqlen, d_model); the result of in_proj if `weights` has
            None for in_proj's weight.
        weights: weight and bias of in_proj and of conv1d; weights of x_proj and dt_proj; weight and
            bias of out_proj; A_log, D, and the bias of dt_proj.
        name: the name of `hidden` in error messages.
    """
    out = layer_in_one(MAMBA_INNER, (), hidden, weights, options, residual)
    if out is not None:
        return out
    in_proj_weight, in_proj_bias, *parts, A_log, D, delta_bias = weights
    xz = hidden
    if in_proj_weight is not None:
        hidden = checked_factor(name, hidden, in_proj_weight)
        xz = F.linear(hidden, in_proj_weight, in_proj_bias)
    out = mamba_inner_fn(
        *(xz.transpose(1, 2), *parts, poles(A_log)),
        D=D,
        delta_bias=delta_bias,
        **options._asdict(),
    )
    return add(residual, out)


def layer_in_one(
    operator: Callable[..., tuple[Tensor | None, ...]],
    own: tuple[object, ...],
    hidden: Tensor,
    weights: tuple[Tensor | None, ...],
    options: LayerOptions,
    residual: Tensor | None,
) -> Tensor | None:
    """Runs mamba_layer as a single call of `operator`; None if its parts must be called instead.

    Args:
        operator: MAMBA_INNER, or an operator of a layer that has further arguments.
        own: the values of those further arguments.
    """
    in_proj_weight = weights[0]
    # Compilers fuse the parts of a layer with the operations around them, which is faster.
    if (
        in_proj_weight is None
        or torch.compiler.is_compiling()
        or _are_parts_wanted((hidden, *weights, residual))
        or hidden.device.type not in _library.devices
        or hidden.is_meta  # the operator has no fake kernel for A_log in half precision
    ):
        return None
    autocast_dtype = autocast_dtype_of(hidden.device)
    dtypes = hidden.dtype, in_proj_weight.dtype
    is_cast = autocast_dtype is not None and torch.float64 not in dtypes
    delta_softplus, method, bidirectional, cu_seqlens = options
    is_right = cu_seqlens is None or isinstance(cu_seqlens, Tensor)
    if not (is_right and (is_cast or dtypes[0] == dtypes[1])):
        return None
    *parts, D, delta_bias = weights
    of_op = (delta_softplus, 1, method, bidirectional, False, cu_seqlens, autocast_dtype)
    given = (hidden, *parts, None, D, delta_bias, *of_op)
    product_dtype = autocast_dtype if is_cast else dtypes[0]
    if residual is None or residual.dtype in residual_dtypes(product_dtype):
        return operator(*given, residual, *own)[0]
    return residual + operator(*given, None, *own)[0]


def _are_parts_wanted(tensors: tuple[Tensor | None, ...]) -> bool:
    """Returns whether a mode, a subclass of Tensor or a transform must see the parts of a layer,
    since it has rules for the parts only."""
    return (
        bool(_pytorch.num_modes())
        or _pytorch.are_transforms_active()
        or not OPAQUE_TYPES.issuperset(map(type, tensors))
    )


def add(residual: Tensor | None, out: Tensor) -> Tensor:
    return out if residual is None else residual + out
