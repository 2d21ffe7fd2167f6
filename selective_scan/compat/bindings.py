"""Forward and backward passes by the signatures of the binding modules that forks call below
autograd: mamba_ssm's ``selective_scan_cuda``, VMamba's ``selective_scan_cuda_core`` and ``_oflex``.

Of the saved states x they promise what callers read, that x[:, :, -1, 1::2] is the last state.
There is one chunk; x[:, :, 0, 0::2] is the product of abar over all steps. The backward passes
take x, and out, for the signature's sake: they scan again, since the kernels save other states.

Tensors may be on a CPU, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import selective_scan_fn
from ..mamba_mixer import at_least_single, refuse

Optional = Tensor | None


@torch.no_grad()
def _forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional,
    delta_bias: Optional,
    delta_softplus: bool,
) -> list[Tensor]:
    """out in u's dtype, and x, (batch, dim, 1, 2·dstate)."""
    scanned = (u, delta, A, B, C, D, None, delta_bias, delta_softplus)
    out, last_state = selective_scan_fn(*scanned, return_last_state=True)
    steps = delta.to(last_state.real.dtype)
    if delta_bias is not None:
        steps = steps + delta_bias[:, None]
    if delta_softplus:
        steps = F.softplus(steps)
    decay = torch.exp(steps.sum(-1, keepdim=True) * A)
    return [out, torch.stack([decay, last_state], -1).flatten(2)[:, :, None].to(A.dtype)]


def _backward(
    tensors: Sequence[Optional], delta_softplus: bool, dout: Tensor
) -> tuple[Tensor, list[Optional]]:
    """out in float32, and the gradients of u, delta, A, B, C, D, z and delta_bias; dout may have a
    wider dtype than u."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    with torch.enable_grad():
        u = leaves[0].to(at_least_single(dout.dtype))
        out = selective_scan_fn(u, *leaves[1:], delta_softplus)
    there = [leaf for leaf in leaves if leaf is not None]
    gradients = iter(torch.autograd.grad(out, there, dout.to(out.dtype)))
    return out.detach(), [None if leaf is None else next(gradients) for leaf in leaves]


# --- mamba_ssm ------------------------------------------------------------------------------------


@torch.no_grad()
def mamba_fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Optional,
    z_: Optional,
    delta_bias_: Optional,
    delta_softplus: bool,
) -> list[Tensor]:
    """[out, x], and with z also out·silu(z). out is what the scan gives before the gate."""
    if z_ is None:
        return _forward(u, delta, A, B, C, D_, delta_bias_, delta_softplus)
    # In float32, so that the gate does not see a rounded out.
    wide = u.to(at_least_single(u.dtype))
    out, x = _forward(wide, delta, A, B, C, D_, delta_bias_, delta_softplus)
    return [out.to(u.dtype), x, (out * F.silu(z_.to(out.dtype))).to(u.dtype)]


def mamba_bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Optional,
    z_: Optional,
    delta_bias_: Optional,
    dout: Tensor,
    x_: Optional,
    out_: Optional,
    dz_: Optional,
    delta_softplus: bool,
    recompute_out_z: bool,
) -> list[Optional]:
    """[du, ddelta, dA, dB, dC, dD, ddelta_bias], with z also dz, which is dz_ where that is given,
    and then with recompute_out_z the gated out."""
    tensors = (u, delta, A, B, C, D_, z_, delta_bias_)
    out, (*before, dz, ddelta_bias) = _backward(tensors, delta_softplus, dout)
    result = [*before, ddelta_bias]
    if z_ is None:
        return result
    result.append(dz if dz_ is None else dz_.copy_(dz))
    return [*result, out.to(u.dtype)] if recompute_out_z else result


# --- VMamba ---------------------------------------------------------------------------------------


def _check_nrows(nrows: int) -> None:
    if nrows != 1:
        refuse("nrows", "1", nrows)


def core_fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Optional,
    delta_bias_: Optional,
    delta_softplus: bool,
    nrows: int,
) -> list[Tensor]:
    """[out, x]."""
    return oflex_fwd(u, delta, A, B, C, D_, delta_bias_, delta_softplus, nrows, False)


def core_bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Optional,
    delta_bias_: Optional,
    dout: Tensor,
    x_: Optional,
    delta_softplus: bool,
    nrows: int,
) -> list[Optional]:
    """[du, ddelta, dA, dB, dC, dD, ddelta_bias]; dout has u's dtype or float32."""
    _check_nrows(nrows)
    tensors = (u, delta, A, B, C, D_, None, delta_bias_)
    _, (*before, _, ddelta_bias) = _backward(tensors, delta_softplus, dout)
    return [*before, ddelta_bias]


def oflex_fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Optional,
    delta_bias_: Optional,
    delta_softplus: bool,
    nrows: int,
    out_float: bool,
) -> list[Tensor]:
    """[out, x], out in float32 if `out_float`."""
    _check_nrows(nrows)
    if out_float:
        u = u.float()
    return _forward(u, delta, A, B, C, D_, delta_bias_, delta_softplus)


oflex_bwd = core_bwd
