"""The convolution with the signatures of causal_conv1d's versions, of its reference, and of its
modules causal_conv1d_varlen and cpp_functions, the latter of which mamba_ssm calls below autograd.

Tensors may also be on a CPU, and may have any strides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._module_arguments import refuse
from .._ops import ops
from ..causal_conv1d import CAUSAL_CONV1D, Activation
from ..causal_conv1d import causal_conv1d_fn as _convolve
from ..causal_conv1d import causal_conv1d_ref as _reference
from ..causal_conv1d_update import causal_conv1d_update

Optional = Tensor | None


def _activation(silu_activation: bool) -> Activation | None:
    return "silu" if silu_activation else None


@functools.wraps(_convolve)
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Optional = None,
    seq_idx: Tensor | Activation | None = None,
    *arguments: object,
    **options: object,
) -> Tensor | tuple[Tensor, Tensor]:
    # In version 1.0 the fourth argument, and the last one, was the activation.
    if isinstance(seq_idx, str) and not arguments:
        return _convolve(x, weight, bias, activation=seq_idx, **options)
    return _convolve(x, weight, bias, seq_idx, *arguments, **options)


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
    """Calls :func:`selective_scan.causal_conv1d_ref`; seq_idx comes last, as upstream has it."""
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
    """Returns out, and writes the final states to final_states_out if it is given."""
    inputs = (x, weight, bias, seq_idx, initial_states)
    activation = _activation(silu_activation)
    if final_states_out is None:
        return _convolve(*inputs, activation=activation)
    return _convolve(*inputs, True, final_states_out, activation)[0]


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
    """Returns dx, dweight, dbias and dinitial_states; a dx that is given receives the result."""
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
    """Computes the op ``causal_conv1d_bwd_out`` if there are no kernels."""
    options = {"activation": activation, "seq_idx": seq_idx}
    cotangents = dout
    if dfinal_states is not None:
        options["return_final_states"], cotangents = True, (dout, dfinal_states)
    convolve = functools.partial(causal_conv1d_ref, **options)
    _, gradients = differentiate(convolve, (x, weight, bias, initial_states), cotangents)
    dx.copy_(gradients[0])
    return tuple(gradients[1:])


def differentiate(
    function: Callable[..., Any], tensors: Sequence[Optional], cotangents: Any
) -> tuple[Any, list[Optional]]:
    """Returns the function's results for some tensors, and the gradients of these tensors."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    with torch.enable_grad():
        results = function(*leaves)
    there = [leaf for leaf in leaves if leaf is not None]
    gradients = iter(torch.autograd.grad(results, there, cotangents))
    return results, [None if leaf is None else next(gradients) for leaf in leaves]


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
    """Returns out; changes conv_state in place."""
    indices = (cache_seqlens, conv_state_indices)
    return causal_conv1d_update(x, conv_state, weight, bias, _activation(silu_activation), *indices)


@torch.no_grad()
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """Returns the last steps of packed sequences, the convolution states that decoding starts from.

    Args:
        x: (total, dim).
        cu_seqlens: boundaries of the sequences, (sequences + 1,), int32 or int64. Sequence i has
            the rows from cu_seqlens[i] up to, but not including, cu_seqlens[i + 1]. The values are
            not read back to the host.
        state_len: the number of steps.

    Returns:
        (sequences, dim, state_len), with adjacent channels, and with 0 before the first step of a
        sequence that is shorter.

    Raises:
        ValueError: x has a wrong number of dimensions.
    """
    if x.dim() != 2:
        refuse("x", "(total, dim)", tuple(x.shape))
    steps = torch.arange(-state_len, 0, device=x.device) + cu_seqlens[1:, None]
    is_there = (steps >= cu_seqlens[:-1, None])[..., None]
    # A leading row of zeros serves the steps that do not exist, even if x has no rows.
    rows = torch.nn.functional.pad(x, (0, 0, 1, 0))[steps.clamp(min=-1) + 1]
    return torch.where(is_there, rows, 0).transpose(1, 2)
