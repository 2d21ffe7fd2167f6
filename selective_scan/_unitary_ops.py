"""What PyTorch needs to know of the adaptive unitary scan ops beside their kernels.

The schemas are in csrc/torch/unitary_ops_cpu.cpp. The ops take b and c, the polar forms of B and C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _autograd
from ._dtypes import compute_dtype
from ._forward_mode import refuse_tangents
from ._unitary_validation import (
    Inputs,
    check_unitary_gradients,
    check_unitary_inputs,
    state_dtype,
)

_FORWARD = "selective_scan::adaptive_unitary_scan_fwd"
_BACKWARD = "selective_scan::adaptive_unitary_scan_bwd"
_WEIGHTS = ("b", "c")
_STATES_PADDING = 2  # as in csrc/torch/unitary_ops.h, where it is explained


def register() -> None:
    """Registers fake kernels and derivatives; the CPU library must be loaded."""
    torch.library.register_fake(_FORWARD, _forward_fake)
    torch.library.register_fake(_BACKWARD, _backward_fake)
    torch.library.register_autograd(_FORWARD, _backward, setup_context=_save_for_backward)
    torch.library.register_autograd(_BACKWARD, _autograd.refuse_double_backward)


def scan(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The forward op; in plain eager mode without the detour of register_autograd."""
    refuse_tangents(inputs, "adaptive_unitary_scan_ref")
    needs_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in inputs
    )
    arguments = (*inputs, needs_gradient)
    op = torch.ops.selective_scan.adaptive_unitary_scan_fwd.default
    if torch.compiler.is_compiling():
        return op(*arguments)
    if _autograd.are_transforms_active():
        return _TransformableScan.apply(*arguments)
    if needs_gradient:
        return _EagerScan.apply(*arguments)
    return _autograd.below_autograd(op, arguments)


class _EagerScan(torch.autograd.Function):
    """The forward op with its derivative, as register_autograd would make it."""

    @staticmethod
    def forward(ctx, *arguments):
        op = torch.ops.selective_scan.adaptive_unitary_scan_fwd.default
        output = _autograd.below_autograd(op, arguments)
        _save_for_backward(ctx, arguments, output)
        return output

    @staticmethod
    def backward(ctx, *gradients):
        return _backward(ctx, *gradients)


def _num_saved_values(inputs: Inputs) -> int | torch.SymInt:
    batch, dim, seqlen = inputs[0].shape
    chunk = torch.ops.selective_scan.unitary_state_chunk()
    chunks = (torch.sym_max(seqlen, 1) - 1) // chunk
    return chunks * batch * dim * inputs[2].shape[1] + _STATES_PADDING


def _forward_fake(
    u: Tensor,
    dt: Tensor,
    x: Tensor,
    x_bias: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,
    z: Tensor | None = None,
    initial_state: Tensor | None = None,
    save_states: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (u, dt, x, x_bias, b, c, D, z, initial_state)
    check_unitary_inputs(inputs, _WEIGHTS)
    dtype = state_dtype(inputs)
    last_state = u.new_empty((*u.shape[:2], x.shape[1]), dtype=dtype)
    states = u.new_empty((_num_saved_values(inputs) if save_states else 0,), dtype=dtype)
    return torch.empty_like(u), last_state, states


def _backward_fake(
    dout: Tensor | None,
    dlast_state: Tensor | None,
    u: Tensor,
    dt: Tensor,
    x: Tensor,
    x_bias: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,
    z: Tensor | None,
    initial_state: Tensor | None,
    states: Tensor,
) -> tuple[Tensor, ...]:
    inputs = (u, dt, x, x_bias, b, c, D, z, initial_state)
    check_unitary_inputs(inputs, _WEIGHTS)
    check_unitary_gradients(inputs, dout, dlast_state, states, _num_saved_values(inputs))
    absent = (compute_dtype(inputs), state_dtype(inputs))
    return (
        *(torch.empty_like(tensor) for tensor in inputs[:7]),
        *(
            u.new_empty((0,), dtype=dtype) if tensor is None else torch.empty_like(tensor)
            for tensor, dtype in zip(inputs[7:], absent, strict=True)
        ),
    )


def _save_for_backward(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Keeps the inputs and the states at chunk boundaries; angles and output are recomputed."""
    ctx.save_for_backward(*inputs[:9], output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, dout: Tensor | None, dlast_state: Tensor | None, _dstates: None):
    if dout is None and dlast_state is None:
        return (None,) * 10
    op = torch.ops.selective_scan.adaptive_unitary_scan_bwd.default
    arguments = (dout, dlast_state, *ctx.saved_tensors)
    results = _autograd.call_backward(op, _TransformableGradient, arguments)
    needed = ctx.needs_input_grad
    return (*(g if n else None for g, n in zip(results, needed, strict=False)), None)


_TransformableScan = _autograd.transformable(
    "adaptive_unitary_scan_fwd", _save_for_backward, _backward
)
_TransformableGradient = _autograd.transformable_gradient("adaptive_unitary_scan_bwd")
