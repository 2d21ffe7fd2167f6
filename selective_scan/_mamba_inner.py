"""What mamba_inner_fn computes, forward and backward, by other ops and by matrix products.

Everything lies channel-last. Rows are (batch, seqlen, channels), which matrix products take and
give, and the scan and the convolution read as (batch, channels, seqlen). What is a part of a row,
x and z of xz, dt, B and C of x_dbl, is read where it lies, and its gradient written where it
belongs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True)
class Layer:
    """The arguments of the forward op."""

    xz: Tensor
    conv1d_weight: Tensor
    conv1d_bias: Tensor | None
    x_proj_weight: Tensor
    delta_proj_weight: Tensor
    out_proj_weight: Tensor
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

    def rows(self) -> Tensor:
        """xz, whose channels are neighbours in memory."""
        rows = self.xz.to(self.dtype).transpose(1, 2)
        return rows if rows.stride(2) == 1 else rows.contiguous()

    def convolution_arguments(self, rows: Tensor) -> tuple:
        x = rows[..., : self.dim].transpose(1, 2)
        return x, self.conv1d_weight.squeeze(1), self.conv1d_bias, None, self.cu_seqlens, None

    def convolve(self, rows: Tensor) -> Tensor:
        arguments = self.convolution_arguments(rows)
        u, _ = torch.ops.selective_scan.causal_conv1d_fwd(*arguments, False, "silu")
        return u.transpose(1, 2).contiguous()

    def parts(self, x_dbl: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt, B and C as they lie in x_dbl, or in its gradient; of no channels where given."""
        states = self.A.shape[1] * (2 if self.A.is_complex() else 1)
        channels = [self.rank, *(0 if given is not None else states for given in (self.B, self.C))]
        return x_dbl.split(channels, dim=-1)

    def projections(self, x_dbl: Tensor) -> list[Projection]:
        _, B, C = self.parts(x_dbl)
        is_complex, eps = self.A.is_complex(), self.b_c_dt_rms_eps
        return [
            Projection(self.B, B, self.B_proj_bias, self.b_rms_weight, eps, is_complex),
            Projection(self.C, C, self.C_proj_bias, self.c_rms_weight, eps, is_complex),
        ]

    def steps(self, x_dbl: Tensor) -> Tensor:
        """delta before its norm."""
        dt = self.parts(x_dbl)[0]  # as a matrix, or PyTorch makes a product of each batch entry
        steps = _matrix(dt) @ self.delta_proj_weight.to(self.dtype).t()
        return steps.view(*dt.shape[:2], self.dim)

    def normed_steps(self, steps: Tensor) -> Tensor:
        if self.dt_rms_weight is None:
            return steps
        return rms_norm(steps, self.dt_rms_weight, self.b_c_dt_rms_eps)

    def scan_arguments(
        self, u: Tensor, delta: Tensor, B: Tensor, C: Tensor, rows: Tensor, reverse: bool
    ) -> tuple:
        """Those of the scan's ops. Of two directions both are gated, and one has D."""
        u, delta, z = (x.transpose(1, 2) for x in (u, delta, rows[..., self.dim :]))
        D = None if reverse else self.D
        options = (self.delta_softplus, self.discretization_method, None, reverse, self.cu_seqlens)
        return u, delta, self.A, B, C, D, z, self.delta_bias, *options


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
        return rows.transpose(1, 2).unsqueeze(1)

    def gradient(self, value: Tensor, part: Tensor) -> Tensor:
        """What the scan is to write the gradient into: if that can be, `part` of x_dbl's."""
        if self.given is None and self.rms_weight is None and not self.is_complex:
            return part.transpose(1, 2).unsqueeze(1)
        return torch.empty_like(value)

    def backward(
        self, gradient: Tensor, part: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of what is given, bias and rms_weight; fills `part` of the gradient of x_dbl."""
        if self.given is not None:
            return gradient, None, None
        dbias = drms_weight = None
        if self.is_complex or self.rms_weight is not None:
            rows = gradient.squeeze(1).transpose(1, 2)
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


_NUM_ARGUMENTS = len(fields(Layer))

# --- both passes ----------------------------------------------------------------------------------


def forward(*arguments) -> tuple[Tensor | None, ...]:
    """out, and for the backward pass x_dbl, y, u, delta, states and those of the reverse scan."""
    *arguments, saves = arguments
    layer = Layer(*arguments)
    rows = layer.rows()
    u = layer.convolve(rows)
    x_dbl = F.linear(u, layer.x_proj_weight.to(layer.dtype))
    steps = layer.steps(x_dbl)
    delta = layer.normed_steps(steps)
    B, C = (projection.value() for projection in layer.projections(x_dbl))

    def scan(reverse: bool) -> tuple[Tensor, Tensor | None]:
        scan_arguments = layer.scan_arguments(u, delta, B, C, rows, reverse)
        y, _, states = torch.ops.selective_scan.selective_scan_fwd(*scan_arguments, saves)
        return y.transpose(1, 2), states

    y, states = scan(reverse=False)
    reverse_states = None
    if layer.bidirectional:
        reverse_y, reverse_states = scan(reverse=True)
        y.add_(reverse_y)
    bias = layer.out_proj_bias
    out = F.linear(
        y, layer.out_proj_weight.to(layer.dtype), None if bias is None else bias.to(layer.dtype)
    )
    if not saves:
        return out, None, None, None, None, None, None
    if layer.checkpoint_lvl == 1:
        u = steps = None
    return out, x_dbl, y, u, steps, states, reverse_states


def backward(dout: Tensor, *arguments) -> tuple[Tensor | None, ...]:
    """The gradients of the tensors among the forward op's arguments, in their order."""
    arguments, kept = arguments[:_NUM_ARGUMENTS], arguments[_NUM_ARGUMENTS:]
    if kept[0] is None:  # the forward op was not asked to keep anything
        _, *kept = forward(*arguments, True)
    x_dbl, y, u, steps, states, reverse_states = kept
    layer = Layer(*arguments)
    rows = layer.rows()
    dout_rows = _matrix(dout)
    dout_proj_weight = dout_rows.t() @ _matrix(y)
    dout_proj_bias = None
    if layer.out_proj_bias is not None:
        dout_proj_bias = dout_rows.sum(0, dtype=_at_least_single(dout.dtype))
    dy = (dout_rows @ layer.out_proj_weight.to(layer.dtype)).view(y.shape)
    if u is None:
        u, steps = layer.convolve(rows), layer.steps(x_dbl)
    delta = layer.normed_steps(steps)

    dxz = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dx, dz = (part.transpose(1, 2) for part in dxz.chunk(2, dim=-1))
    dx_dbl = torch.empty_like(x_dbl)
    ddt, *parts = layer.parts(dx_dbl)
    projections = layer.projections(x_dbl)
    B, C = (projection.value() for projection in projections)
    du, ddelta = torch.empty_like(u), torch.empty_like(delta)
    dB, dC = (
        projection.gradient(value, part)
        for projection, value, part in zip(projections, (B, C), parts, strict=True)
    )
    to_scan = {
        "du": du.transpose(1, 2),
        "ddelta": ddelta.transpose(1, 2),
        "dB": dB,
        "dC": dC,
        "dz": dz,
    }
    dA, dD, ddelta_bias = _scan_backward(
        layer.scan_arguments(u, delta, B, C, rows, False), dy, states, to_scan
    )
    if layer.bidirectional:
        to_reverse = {name: torch.empty_like(total) for name, total in to_scan.items()}
        reverse_dA, _, reverse_ddelta_bias = _scan_backward(
            layer.scan_arguments(u, delta, B, C, rows, True), dy, reverse_states, to_reverse
        )
        sums, terms = [*to_scan.values(), dA], [*to_reverse.values(), reverse_dA]
        if ddelta_bias is not None:
            sums.append(ddelta_bias)
            terms.append(reverse_ddelta_bias)
        for total, term in zip(sums, terms, strict=True):
            total.add_(term)
    (dB, dB_proj_bias, db_rms_weight), (dC, dC_proj_bias, dc_rms_weight) = (
        projection.backward(gradient, part)
        for projection, gradient, part in zip(projections, (dB, dC), parts, strict=True)
    )
    ddt_rms_weight = None
    if layer.dt_rms_weight is not None:
        ddelta, ddt_rms_weight = rms_norm_backward(
            ddelta, steps, layer.dt_rms_weight, layer.b_c_dt_rms_eps
        )

    torch.mm(_matrix(ddelta), layer.delta_proj_weight.to(layer.dtype), out=_matrix(ddt))
    ddelta_proj_weight = _matrix(ddelta).t() @ _matrix(layer.parts(x_dbl)[0])
    total = _matrix(du)
    torch.addmm(total, _matrix(dx_dbl), layer.x_proj_weight.to(layer.dtype), out=total)
    dx_proj_weight = _matrix(dx_dbl).t() @ _matrix(u)
    dconv1d_weight, dconv1d_bias, _ = torch.ops.selective_scan.causal_conv1d_bwd_out(
        du.transpose(1, 2), None, *layer.convolution_arguments(rows), "silu", dx=dx
    )
    return (
        dxz.transpose(1, 2).to(layer.xz.dtype),
        dconv1d_weight.unsqueeze(1),
        dconv1d_bias,
        dx_proj_weight.to(layer.x_proj_weight.dtype),
        ddelta_proj_weight.to(layer.delta_proj_weight.dtype),
        dout_proj_weight.to(layer.out_proj_weight.dtype),
        None if dout_proj_bias is None else dout_proj_bias.to(layer.out_proj_bias.dtype),
        dA,
        dB,
        dC,
        dD,
        ddelta_bias,
        dB_proj_bias,
        dC_proj_bias,
        db_rms_weight,
        dc_rms_weight,
        ddt_rms_weight,
    )


def _scan_backward(
    arguments: tuple, dy: Tensor, states: Tensor, gradients: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dA, dD and ddelta_bias; fills the gradients of u, delta, B, C and z."""
    dA, dD, ddelta_bias, _ = torch.ops.selective_scan.selective_scan_bwd_out(
        dy.transpose(1, 2), None, *arguments, states, **gradients
    )
    return dA, dD, ddelta_bias


def _matrix(rows: Tensor) -> Tensor:
    """Batch and time in one dimension."""
    return rows.reshape(-1, rows.shape[-1])


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
