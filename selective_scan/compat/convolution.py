"""The convolution by the signatures of causal_conv1d's modules cpp_functions, which mamba_ssm calls
below autograd, and causal_conv1d_varlen, and of its reference. Tensors may be on a CPU, too, and of
any strides."""

from __future__ import annotations

import torch
from torch import Tensor

from .._module_arguments import refuse
from .._ops import ops
from ..causal_conv1d import CAUSAL_CONV1D, Activation, causal_conv1d_fn
from ..causal_conv1d import causal_conv1d_ref as _reference
from ..causal_conv1d_update import causal_conv1d_update

Optional = Tensor | None


def _activation(silu_activation: bool) -> Activation | None:
    return "silu" if silu_activation else None


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Optional = None,
    initial_states: Optional = None,
    return_final_states: bool = False,
    final_states_out: Optional = None,
    activation: Activation | None = None,
    seq_idx: Optional = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`selective_scan.causal_conv1d_ref`, with seq_idx as the last argument, where upstream's
    reference has it."""
    before = (x, weight, bias, seq_idx, initial_states, return_final_states)
    return _reference(*before, final_states_out, activation)


@torch.no_grad()
def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Optional,
    seq_idx: Optional,
    initial_states: Optional,
    final_states_out: Optional,
    silu_activation: bool,
) -> Tensor:
    """out; the final states are written to final_states_out."""
    inputs = (x, weight, bias, seq_idx, initial_states)
    activation = _activation(silu_activation)
    if final_states_out is None:
        return causal_conv1d_fn(*inputs, activation=activation)
    return causal_conv1d_fn(*inputs, True, final_states_out, activation)[0]


@torch.no_grad()
def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Optional,
    dout: Tensor,
    seq_idx: Optional,
    initial_states: Optional,
    dfinal_states: Optional,
    dx: Optional,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Tensor, Tensor, Optional, Optional]:
    """dx, which is written to the dx that is given if one is, dweight, dbias, dinitial_states."""
    if return_dinitial_states and initial_states is None:
        initial_states = x.new_zeros(*x.shape[:2], weight.shape[1] - 1)
    if dx is None:
        dx = torch.empty_like(x)
    activation = _activation(silu_activation)
    inputs = (x, weight, bias, seq_idx, None, initial_states)
    differentiate = _by_reference
    if CAUSAL_CONV1D.has_kernels((*inputs, False, activation, None, "auto")):
        differentiate = ops.causal_conv1d_bwd_out
    dweight, dbias, dinitial_states = differentiate(dout, dfinal_states, *inputs, activation, dx=dx)
    if not return_dinitial_states:
        dinitial_states = None
    return dx, dweight, None if bias is None else dbias, dinitial_states


def _by_reference(
    dout: Tensor,
    dfinal_states: Optional,
    x: Tensor,
    weight: Tensor,
    bias: Optional,
    seq_idx: Optional,
    cu_seqlens: None,
    initial_states: Optional,
    activation: Activation | None,
    *,
    dx: Tensor,
) -> tuple[Tensor, Optional, Optional]:
    """What the op ``causal_conv1d_bwd_out`` does, where there are no kernels."""
    leaves = [
        None if t is None else t.detach().requires_grad_()
        for t in (x, weight, bias, initial_states)
    ]
    has_states = dfinal_states is not None
    with torch.enable_grad():
        results = _reference(*(*leaves[:3], seq_idx, leaves[3], has_states), activation=activation)
    results, cotangents = (results, (dout, dfinal_states)) if has_states else ([results], [dout])
    there = [leaf for leaf in leaves if leaf is not None]
    gradients = iter(torch.autograd.grad(results, there, cotangents))
    dx.copy_(next(gradients))
    dweight, dbias, dinitial_states = (
        None if leaf is None else next(gradients) for leaf in leaves[1:]
    )
    return dweight, dbias, dinitial_states


@torch.no_grad()
def causal_conv1d_update_function(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional,
    silu_activation: bool,
    cache_seqlens: Optional,
    conv_state_indices: Optional,
) -> Tensor:
    """out; conv_state is changed in place."""
    indices = (cache_seqlens, conv_state_indices)
    return causal_conv1d_update(x, conv_state, weight, bias, _activation(silu_activation), *indices)


@torch.no_grad()
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last steps of packed sequences: a convolution's states, from which decoding goes on.

    Args:
        x: (total, dim).
        cu_seqlens: (sequences + 1,), int32 or int64: sequence i has the rows from cu_seqlens[i] to
            before cu_seqlens[i + 1]. The values are not read back to the host.
        state_len: the number of steps.

    Returns:
        (sequences, dim, state_len), 0 in front of a sequence that is shorter, channels adjacent.

    Raises:
        ValueError: x has another number of dimensions.
    """
    if x.dim() != 2:
        refuse("x", "(total, dim)", tuple(x.shape))
    steps = torch.arange(-state_len, 0, device=x.device) + cu_seqlens[1:, None]
    is_there = (steps >= cu_seqlens[:-1, None])[..., None]
    # A row of zeros in front gives what is not there a place, also where x has no rows.
    rows = torch.nn.functional.pad(x, (0, 0, 1, 0))[steps.clamp(min=-1) + 1]
    return torch.where(is_there, rows, 0).transpose(1, 2)
