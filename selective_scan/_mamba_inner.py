"""What mamba_inner_fn computes, forward and backward, by other ops and by matrix products; and what
of it does not need out_proj, in either direction.

Everything lies channel-last. Rows are (batch, seqlen, channels), which matrix products take and
give, and the scan and the convolution read as (batch, channels, seqlen). What is a part of a row,
x and z of xz, dt, B and C of x_dbl, is read where it lies, and its gradient written where it
belongs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _pytorch
from ._anti_causal import anti_causal_conv1d, anti_causal_conv1d_backward
from ._checks import HALF
from ._ops import ops


@dataclass(slots=True)
class Layer:
    """The arguments of the forward op; the last ones are those of an op without out_proj.

    With A_b there is a second scan, by these poles, from the last step to the first. With reverse
    there is this one alone, and the convolution, too, looks at the steps to come.
    """

    xz: Tensor
    conv1d_weight: Tensor
    conv1d_bias: Tensor | None
    x_proj_weight: Tensor
    delta_proj_weight: Tensor
    out_proj_weight: Tensor | None
    out_proj_bias: Tensor | None
    A: Tensor
    B: Tensor | None
    C: Tensor | None
    D: Tensor | None
    delta_bias: Tensor | None
    B_proj_bias: Tensor | None
    C_proj_bias: Tensor | None
    delta_softplus: bool
    checkpoint_lvl: int
    b_rms_weight: Tensor | None
    c_rms_weight: Tensor | None
    dt_rms_weight: Tensor | None
    b_c_dt_rms_eps: float
    discretization_method: str
    bidirectional: bool
    cu_seqlens: Tensor | None
    autocast_dtype: torch.dtype | None
    A_b: Tensor | None = None
    reverse: bool = False

    @property
    def dim(self) -> int:
        return self.A.shape[0]

    @property
    def rank(self) -> int:
        return self.delta_proj_weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix products, and of all that they take and give."""
        is_double = self.xz.dtype == torch.float64
        return self.xz.dtype if self.autocast_dtype is None or is_double else self.autocast_dtype

    def halves(self) -> tuple[Tensor, Tensor]:
        """x and z, whose channels are neighbours in memory."""
        xz = self.xz.to(self.dtype)
        if xz.stride(1) != 1:
            xz = xz.transpose(1, 2).contiguous().transpose(1, 2)
        return xz.chunk(2, dim=1)

    def _convolution_arguments(self, x: Tensor) -> tuple:
        return x, self.conv1d_weight.squeeze(1), self.conv1d_bias, None, self.cu_seqlens, None

    def convolve(self, x: Tensor) -> Tensor:
        """As rows."""
        if self.reverse:
            return anti_causal_conv1d(x, self.conv1d_weight.squeeze(1), self.conv1d_bias)
        arguments = self._convolution_arguments(x)
        u, _ = ops.causal_conv1d_fwd(*arguments, False, "silu")
        return u.transpose(1, 2).contiguous()

    def convolution_backward(
        self, du: Tensor, x: Tensor, dx: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of weight and bias; fills dx."""
        if self.reverse:
            weight, bias = self.conv1d_weight.squeeze(1), self.conv1d_bias
            dweight, dbias = anti_causal_conv1d_backward(du, x, weight, bias, dx)
        else:
            arguments = self._convolution_arguments(x)
            dweight, dbias, _ = ops.causal_conv1d_bwd_out(du, None, *arguments, "silu", dx=dx)
        return dweight.unsqueeze(1), dbias

    def parts(self, x_dbl: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt, B and C as they lie in x_dbl, or in its gradient; of no channels where given."""
        states = self.A.shape[1] * (2 if self.A.is_complex() else 1)
        in_B, in_C = (0 if given is not None else states for given in (self.B, self.C))
        return x_dbl.split_with_sizes([self.rank, in_B, in_C], -1)

    def projections(self, B: Tensor, C: Tensor) -> list[Projection]:
        """Those of which these are the parts of x_dbl."""
        is_complex, eps = self.A.is_complex(), self.b_c_dt_rms_eps
        return [
            Projection(self.B, B, self.B_proj_bias, self.b_rms_weight, eps, is_complex),
            Projection(self.C, C, self.C_proj_bias, self.c_rms_weight, eps, is_complex),
        ]

    def steps(self, dt: Tensor) -> Tensor:
        """delta before its norm."""
        # Of a matrix, or PyTorch makes a product of each batch entry.
        steps = F.linear(_matrix(dt), self.delta_proj_weight.to(self.dtype))
        return steps.view(*dt.shape[:2], self.dim)

    def normed_steps(self, steps: Tensor) -> Tensor:
        if self.dt_rms_weight is None:
            return steps
        return rms_norm(steps, self.dt_rms_weight, self.b_c_dt_rms_eps)

    def scan_arguments(
        self, u: Tensor, delta: Tensor, B: Tensor, C: Tensor, z: Tensor
    ) -> list[tuple]:
        """Those of the scan's ops, for each scan, whose results are added. Of two that share A both
        are gated, and one has D; of two with poles of their own each has all."""
        scans = [(self.A, self.D, self.reverse)]
        if self.bidirectional:
            scans.append((self.A, None, True))
        if self.A_b is not None:
            scans.append((self.A_b, self.D, True))
        options = (self.delta_softplus, self.discretization_method, None)
        return [
            (u, delta, A, B, C, D, z, self.delta_bias, *options, reverse, self.cu_seqlens)
            for A, D, reverse in scans
        ]


@dataclass(slots=True)
class Projection:
    """B or C: given, or a part of x_dbl, to which a bias is added, and which is normed, if so."""

    given: Tensor | None
    part: Tensor
    bias: Tensor | None
    rms_weight: Tensor | None
    eps: float
    is_complex: bool

    def biased(self) -> Tensor:
        return self.part if self.bias is None else self.part + self.bias.to(self.part.dtype)

    def value(self) -> Tensor:
        """As the scan takes it."""
        if self.given is not None:
            return self.given
        rows = self.biased()
        if self.rms_weight is not None:
            rows = rms_norm(rows, self.rms_weight, self.eps)
        if self.is_complex:
            rows = rows.to(_at_least_single(rows.dtype)).unflatten(-1, (-1, 2))
            rows = torch.view_as_complex(rows.contiguous())
        return rows.transpose(1, 2)

    def gradient(self, value: Tensor, part: Tensor) -> Tensor:
        """What the scan is to write the gradient into: if that can be, `part` of x_dbl's."""
        if self.given is None and self.rms_weight is None and not self.is_complex:
            return part.transpose(1, 2)
        return torch.empty_like(value)

    def backward(
        self, gradient: Tensor, part: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of what is given, bias and rms_weight; fills `part` of the gradient of x_dbl."""
        if self.given is not None:
            return gradient, None, None
        dbias = drms_weight = None
        if self.is_complex or self.rms_weight is not None:
            rows = gradient.transpose(1, 2)
            if self.is_complex:
                rows = torch.view_as_real(rows).flatten(-2)
            if self.rms_weight is not None:
                rows, drms_weight = rms_norm_backward(
                    rows, self.biased(), self.rms_weight, self.eps
                )
            part.copy_(rows)
        if self.bias is not None:
            dbias = part.sum((0, 1), dtype=_at_least_single(part.dtype)).to(self.bias.dtype)
        return None, dbias, drms_weight


# Those of the tensors among the forward op's arguments, in their order.
_GRADIENTS = (
    *("xz", "conv1d_weight", "conv1d_bias", "x_proj_weight", "delta_proj_weight"),
    *("out_proj_weight", "out_proj_bias", "A", "B", "C", "D", "delta_bias"),
    *("B_proj_bias", "C_proj_bias", "b_rms_weight", "c_rms_weight", "dt_rms_weight"),
)
_NUM_KEPT = 6

# --- both passes ----------------------------------------------------------------------------------


def forward(*arguments) -> tuple[Tensor | None, ...]:
    """out, and for the backward pass x_dbl, y, u, delta, states and those of the second scan."""
    *arguments, saves = arguments
    layer = Layer(*arguments)
    dtype = layer.dtype
    y, x_dbl, rows, steps, *states = forward_rows(layer, saves)
    bias = layer.out_proj_bias
    out = F.linear(y, layer.out_proj_weight.to(dtype), None if bias is None else bias.to(dtype))
    if not saves:
        return out, None, None, None, None, None, None
    if layer.checkpoint_lvl == 1:
        rows = steps = None
    return out, x_dbl, y, rows, steps, *states


def forward_rows(layer: Layer, saves: bool) -> tuple[Tensor | None, ...]:
    """y, the rows that out_proj takes; x_dbl, u and delta as rows; and the states of two scans."""
    x, z = layer.halves()
    rows = layer.convolve(x)
    u = rows.transpose(1, 2)
    x_dbl = F.linear(rows, layer.x_proj_weight.to(layer.dtype))
    dt, *parts = layer.parts(x_dbl)
    steps = layer.steps(dt)
    delta = layer.normed_steps(steps).transpose(1, 2)
    B, C = (projection.value() for projection in layer.projections(*parts))

    def scan(scan_arguments: tuple) -> tuple[Tensor, Tensor | None]:
        y, _, states = ops.selective_scan_fwd(*scan_arguments, saves)
        return y.transpose(1, 2), states

    first, *second = layer.scan_arguments(u, delta, B, C, z)
    y, states = scan(first)
    second_states = None
    if second:
        second_y, second_states = scan(*second)
        # A mode may keep what ops return, as selective checkpointing does.
        y = y + second_y if _pytorch.num_modes() else y.add_(second_y)
    return y, x_dbl, rows, steps, states, second_states


def backward(dout: Tensor, *arguments) -> tuple[Tensor | None, ...]:
    """The gradients of the tensors among the forward op's arguments, in their order."""
    arguments, kept = arguments[:-_NUM_KEPT], arguments[-_NUM_KEPT:]
    if kept[0] is None:  # the forward op was not asked to keep anything
        _, *kept = forward(*arguments, True)
    x_dbl, y, rows, steps, *states = kept
    layer = Layer(*arguments)
    dout = _matrix(dout)
    dout_proj_weight = _product(dout.t(), _matrix(y), layer.out_proj_weight.dtype)
    dout_proj_bias = None
    if layer.out_proj_bias is not None:
        dout_proj_bias = dout.sum(0, dtype=_at_least_single(dout.dtype))
        dout_proj_bias = dout_proj_bias.to(layer.out_proj_bias.dtype)
    dy = torch.mm(dout, layer.out_proj_weight.to(layer.dtype)).view(y.shape)
    gradients = backward_rows(layer, dy, x_dbl, rows, steps, *states)
    gradients |= {"out_proj_weight": dout_proj_weight, "out_proj_bias": dout_proj_bias}
    return tuple(gradients[name] for name in _GRADIENTS)


def backward_rows(
    layer: Layer,
    dy: Tensor,
    x_dbl: Tensor,
    rows: Tensor | None,
    steps: Tensor | None,
    states: Tensor,
    second_states: Tensor | None,
) -> dict[str, Tensor | None]:
    """The gradients of all that forward_rows takes, by name; u and delta may be None."""
    dtype = layer.dtype
    x, z = layer.halves()
    dt, *parts = layer.parts(x_dbl)
    if rows is None:
        rows, steps = layer.convolve(x), layer.steps(dt)
    u, delta = rows.transpose(1, 2), layer.normed_steps(steps).transpose(1, 2)

    dxz = x.new_empty(*rows.shape[:2], 2 * layer.dim).transpose(1, 2)
    dx, dz = dxz.chunk(2, dim=1)
    dx_dbl, drows, dsteps = torch.empty_like(x_dbl), torch.empty_like(rows), torch.empty_like(rows)
    du, ddelta = drows.transpose(1, 2), dsteps.transpose(1, 2)
    ddt, *dparts = layer.parts(dx_dbl)
    projections = layer.projections(*parts)
    B, C = (projection.value() for projection in projections)
    dB, dC = (
        projection.gradient(value, part)
        for projection, value, part in zip(projections, (B, C), dparts, strict=True)
    )
    to_scan = {"du": du, "ddelta": ddelta, "dB": dB, "dC": dC, "dz": dz}

    def scan_backward(scan_arguments: tuple, states: Tensor, given: dict[str, Tensor]) -> tuple:
        return ops.selective_scan_bwd_out(
            dy.transpose(1, 2), None, *scan_arguments, states, **given
        )

    first, *second = layer.scan_arguments(u, delta, B, C, z)
    dA, dD, ddelta_bias, _ = scan_backward(first, states, to_scan)
    dA_b = None
    if second:
        to_second = {name: torch.empty_like(total) for name, total in to_scan.items()}
        second_dA, second_dD, *others, _ = scan_backward(*second, second_states, to_second)
        sums, terms = [*to_scan.values(), ddelta_bias], [*to_second.values(), *others]
        if layer.A_b is None:
            sums.append(dA)
            terms.append(second_dA)
        else:
            dA_b = second_dA
            sums.append(dD)
            terms.append(second_dD)
        for total, term in zip(sums, terms, strict=True):
            if total is not None:
                total.add_(term)
    (dB, dB_proj_bias, db_rms_weight), (dC, dC_proj_bias, dc_rms_weight) = (
        projection.backward(gradient, part)
        for projection, gradient, part in zip(projections, (dB, dC), dparts, strict=True)
    )
    ddt_rms_weight = None
    if layer.dt_rms_weight is not None:
        dsteps, ddt_rms_weight = rms_norm_backward(
            dsteps, steps, layer.dt_rms_weight, layer.b_c_dt_rms_eps
        )

    dsteps, dx_dbl, total = _matrix(dsteps), _matrix(dx_dbl), _matrix(drows)
    torch.mm(dsteps, layer.delta_proj_weight.to(dtype), out=_matrix(ddt))
    ddelta_proj_weight = _product(dsteps.t(), _matrix(dt), layer.delta_proj_weight.dtype)
    total.addmm_(dx_dbl, layer.x_proj_weight.to(dtype))
    dx_proj_weight = _product(dx_dbl.t(), _matrix(rows), layer.x_proj_weight.dtype)
    dconv1d_weight, dconv1d_bias = layer.convolution_backward(du, x, dx)
    return {
        "xz": dxz.to(layer.xz.dtype),
        "conv1d_weight": dconv1d_weight,
        "conv1d_bias": dconv1d_bias,
        "x_proj_weight": dx_proj_weight,
        "delta_proj_weight": ddelta_proj_weight,
        "A": dA,
        "A_b": dA_b,
        "B": dB,
        "C": dC,
        "D": dD,
        "delta_bias": ddelta_bias,
        "B_proj_bias": dB_proj_bias,
        "C_proj_bias": dC_proj_bias,
        "b_rms_weight": db_rms_weight,
        "c_rms_weight": dc_rms_weight,
        "dt_rms_weight": ddt_rms_weight,
    }


def _matrix(rows: Tensor) -> Tensor:
    """Batch and time in one dimension."""
    return rows.reshape(-1, rows.shape[-1])


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left·right in `dtype`. CUDA's need no rounding to half precision on the way to float32."""
    if left.is_cuda and left.dtype in HALF and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left, right).to(dtype)


def _at_least_single(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# --- the norm of a row ----------------------------------------------------------------------------


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rows / rms(rows)·weight, at least in float32, in the dtype of rows."""
    x = rows.to(_at_least_single(rows.dtype))
    return (x * _reciprocal_rms(x, eps) * weight.to(x.dtype)).to(rows.dtype)


def rms_norm_backward(
    gradient: Tensor, rows: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Of rows and weight."""
    x = rows.to(_at_least_single(rows.dtype))
    gradient = gradient.to(x.dtype)
    scale = _reciprocal_rms(x, eps)
    normed = x * scale
    dweight = (gradient * normed).sum((0, 1)).to(weight.dtype)
    gradient = gradient * weight.to(x.dtype)
    drows = scale * (gradient - normed * (gradient * normed).mean(-1, keepdim=True))
    return drows.to(rows.dtype), dweight


def _reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
