"""Forward and backward passes with the signatures of the binding modules that forks call below
autograd: mamba_ssm's ``selective_scan_cuda``, VMamba's ``selective_scan_cuda_core`` and ``_oflex``,
and ``causal_conv1d_cuda``.

Only the part of a scan's saved states x that callers read is guaranteed: x[:, :, -1, 1::2] is the
last state. x has one chunk, and x[:, :, 0, 0::2] is the product of abar over all steps. The
backward passes accept x and out only to match the signatures. They scan again, because our kernels
save other states.

Tensors may also be on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .._discretization import at_least_single
from ..functional import selective_scan_fn
from ._forms import by_position
from .convolution import (
    causal_conv1d_bwd_function,
    causal_conv1d_fwd_function,
    causal_conv1d_update_function,
    differentiate,
)

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
    """Returns out, in u's dtype, and x, (batch, dim, 1, 2·dstate)."""
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
    """Returns out, in float32 or wider, and the gradients of u, delta, A, B, C, D, z, delta_bias.

    dout may have a wider dtype than u.
    """
    wide = at_least_single(dout.dtype)

    def scan(u: Tensor, *others: Optional) -> Tensor:
        return selective_scan_fn(u.to(wide), *others, delta_softplus)

    out, gradients = differentiate(scan, tensors, dout.to(wide))
    return out.detach(), gradients


# --- mamba_ssm ------------------------------------------------------------------------------------


@by_position("selective_scan_cuda.fwd")
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
    """Returns [out, x], and with z also out·silu(z); out is the scan's output before the gate."""
    if z_ is None:
        return _forward(u, delta, A, B, C, D_, delta_bias_, delta_softplus)
    # out is computed in float32, so that the gate is not applied to a rounded out.
    wide = u.to(at_least_single(u.dtype))
    out, x = _forward(wide, delta, A, B, C, D_, delta_bias_, delta_softplus)
    return [out.to(u.dtype), x, (out * F.silu(z_.to(out.dtype))).to(u.dtype)]


@by_position("selective_scan_cuda.bwd")
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
    """Returns [du, ddelta, dA, dB, dC, dD, ddelta_bias], followed with z by dz, which is written to
    dz_ if that is given, and with recompute_out_z by the gated out."""
    tensors = (u, delta, A, B, C, D_, z_, delta_bias_)
    out, (*before, dz, ddelta_bias) = _backward(tensors, delta_softplus, dout)
    result = [*before, ddelta_bias]
    if z_ is None:
        return result
    result.append(dz if dz_ is None else dz_.copy_(dz))
    return [*result, out.to(u.dtype)] if recompute_out_z else result


# --- VMamba ---------------------------------------------------------------------------------------

# nrows, by which VMamba's first kernels divided the channels, affects no result and is ignored.


def _vmamba_fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Optional,
    delta_bias_: Optional,
    delta_softplus: bool,
    nrows: int,
    out_float: bool = False,
) -> list[Tensor]:
    """Returns [out, x], with out in float32 if `out_float`."""
    if out_float:
        u = u.float()
    return _forward(u, delta, A, B, C, D_, delta_bias_, delta_softplus)


_SCANNED = "u delta A B C D_ delta_bias_ delta_softplus nrows"
core_fwd = by_position("selective_scan_cuda_core.fwd", _SCANNED)(_vmamba_fwd)
oflex_fwd = by_position("selective_scan_cuda_oflex.fwd", f"{_SCANNED} out_float")(_vmamba_fwd)


def _vmamba_bwd(
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
    """Returns [du, ddelta, dA, dB, dC, dD, ddelta_bias]; dout has u's dtype or float32."""
    tensors = (u, delta, A, B, C, D_, None, delta_bias_)
    _, (*before, _, ddelta_bias) = _backward(tensors, delta_softplus, dout)
    return [*before, ddelta_bias]


core_bwd = by_position("selective_scan_cuda_core.bwd")(_vmamba_bwd)
oflex_bwd = by_position("selective_scan_cuda_oflex.bwd")(_vmamba_bwd)


# --- causal_conv1d --------------------------------------------------------------------------------


@by_position(
    "causal_conv1d_cuda.causal_conv1d_fwd",
    "x weight bias silu_activation",  # version 1.0
    "x weight bias seq_idx silu_activation",  # 1.1
    "x weight bias seq_idx initial_states final_states_out silu_activation",  # 1.2 to 1.5.0
    "x weight bias seq_idx initial_states out final_states_out silu_activation",  # from 1.5.1 on
)
def convolution_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Optional,
    silu_activation: bool,
    seq_idx: Optional = None,
    initial_states: Optional = None,
    final_states_out: Optional = None,
    out: Optional = None,
) -> Optional:
    """Returns out, or None if the signature passes `out`, which then receives the result."""
    inputs = (x, weight, bias, seq_idx, initial_states, final_states_out)
    return _give(causal_conv1d_fwd_function(*inputs, silu_activation), out)


@torch.no_grad()
def _give(made: Tensor, out: Optional) -> Optional:
    if out is None:
        return made
    out.copy_(made)
    return None


@by_position(
    "causal_conv1d_cuda.causal_conv1d_bwd",
    "x weight bias dout dx silu_activation",
    "x weight bias dout seq_idx dx silu_activation",
    "x weight bias dout seq_idx initial_states dfinal_states dx return_dinitial_states"
    " silu_activation",
    "x weight bias dout seq_idx initial_states dfinal_states dx dweight dbias dinitial_states"
    " silu_activation",
)
@torch.no_grad()
def convolution_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Optional,
    dout: Tensor,
    dx: Optional,
    silu_activation: bool,
    seq_idx: Optional = None,
    initial_states: Optional = None,
    dfinal_states: Optional = None,
    return_dinitial_states: bool | None = None,
    dweight: Optional = None,
    dbias: Optional = None,
    dinitial_states: Optional = None,
) -> list[Optional] | None:
    """Returns [dx, dweight, dbias], and dinitial_states in the third signature.

    A dx that is given receives the gradient of x, and is returned. The last signature passes all
    gradients: it adds to dweight and dbias, and returns None.
    """
    states = (seq_idx, initial_states, dfinal_states)
    if dweight is None:
        asked = bool(return_dinitial_states)
        gradients = causal_conv1d_bwd_function(
            *(x, weight, bias, dout, *states, dx, asked, silu_activation)
        )
        return [*gradients] if return_dinitial_states is not None else [*gradients[:3]]
    # Casting the weights to dweight's dtype, say float32, keeps their gradients from being rounded
    # before they are added.
    wide = [None if t is None else t.to(dweight.dtype) for t in (weight, bias)]
    asked = dinitial_states is not None
    gradients = causal_conv1d_bwd_function(x, *wide, dout, *states, dx, asked, silu_activation)
    dweight.add_(gradients[1])
    if dbias is not None:
        dbias.add_(gradients[2])
    if dinitial_states is not None:
        dinitial_states.copy_(gradients[3])
    return None


@by_position(
    "causal_conv1d_cuda.causal_conv1d_update",
    "x conv_state weight bias silu_activation",  # versions 1.0 to 1.3
    "x conv_state weight bias silu_activation cache_seqlens",  # 1.4
    "x conv_state weight bias silu_activation cache_seqlens conv_state_indices",  # 1.5.0
    "x conv_state weight bias out silu_activation cache_seqlens conv_state_indices",  # from 1.5.1
)
def convolution_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional,
    silu_activation: bool,
    cache_seqlens: Optional = None,
    conv_state_indices: Optional = None,
    out: Optional = None,
) -> Optional:
    """Returns out, or None if the signature passes `out`; changes conv_state in place."""
    states = (cache_seqlens, conv_state_indices)
    inputs = (x, conv_state, weight, bias, silu_activation, *states)
    return _give(causal_conv1d_update_function(*inputs), out)
