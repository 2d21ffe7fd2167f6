"""What PyTorch needs to know of the diagonal scan ops beside their kernels.

The schemas are in csrc/torch/diagonal_ops_cpu.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _autograd
from ._diagonal_validation import check_dh, check_diagonal_inputs, state_dtype
from ._forward_mode import refuse_tangents

_FORWARD = "selective_scan::diagonal_scan_fwd"
_BACKWARD = "selective_scan::diagonal_scan_bwd"


def register() -> None:
    """Registers fake kernels and derivatives; the CPU library must be loaded."""
    torch.library.register_fake(_FORWARD, _forward_fake)
    torch.library.register_fake(_BACKWARD, _backward_fake)
    torch.library.register_autograd(_FORWARD, _backward, setup_context=_save_for_backward)
    torch.library.register_autograd(_BACKWARD, _autograd.refuse_double_backward)


def scan(a: Tensor, b: Tensor, initial_state: Tensor | None, reverse: bool) -> Tensor:
    """The forward op; in plain eager mode without the detour of register_autograd."""
    refuse_tangents((a, b, initial_state), "diagonal_scan_ref")
    arguments = (a, b, initial_state, reverse)
    op = torch.ops.selective_scan.diagonal_scan_fwd.default
    if torch.compiler.is_compiling():
        return op(*arguments)
    if _autograd.are_transforms_active():
        return _TransformableScan.apply(*arguments)
    tensors = (a, b) if initial_state is None else (a, b, initial_state)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _EagerScan.apply(*arguments)
    return _autograd.below_autograd(op, arguments)


class _EagerScan(torch.autograd.Function):
    """The forward op with its derivative, as register_autograd would make it."""

    @staticmethod
    def forward(ctx, *arguments):
        h = _autograd.below_autograd(torch.ops.selective_scan.diagonal_scan_fwd.default, arguments)
        _save_for_backward(ctx, arguments, h)
        return h

    @staticmethod
    def backward(ctx, dh):
        return _backward(ctx, dh)


def _forward_fake(
    a: Tensor, b: Tensor, initial_state: Tensor | None = None, reverse: bool = False
) -> Tensor:
    check_diagonal_inputs(a, b, initial_state)
    is_complex = a.is_complex() or b.is_complex()
    return torch.empty_like(b, dtype=b.dtype.to_complex() if is_complex else b.dtype)


def _backward_fake(
    dh: Tensor,
    a: Tensor,
    h: Tensor,
    initial_state: Tensor | None,
    reverse: bool,
    complex_b: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    check_diagonal_inputs(a, h, initial_state, "h")
    check_dh(dh, h)
    db_dtype = h.dtype if complex_b else h.dtype.to_real()
    if initial_state is None:
        dinitial_state = h.new_empty((0,), dtype=state_dtype(a, h, None))
    else:
        dinitial_state = torch.empty_like(initial_state)
    return torch.empty_like(a), torch.empty_like(h, dtype=db_dtype), dinitial_state


def _save_for_backward(ctx, inputs: tuple, output: Tensor) -> None:
    a, b, initial_state, reverse = inputs
    ctx.save_for_backward(a, output, initial_state)
    ctx.options = reverse, b.is_complex()
    ctx.set_materialize_grads(False)


def _backward(ctx, dh: Tensor | None):
    if dh is None:
        return (None,) * 4
    arguments = (dh, *ctx.saved_tensors, *ctx.options)
    op = torch.ops.selective_scan.diagonal_scan_bwd.default
    results = _autograd.call_backward(op, _TransformableGradient, arguments)
    needed = ctx.needs_input_grad
    return (*(g if n else None for g, n in zip(results, needed, strict=False)), None)


_TransformableScan = _autograd.transformable("diagonal_scan_fwd", _save_for_backward, _backward)
_TransformableGradient = _autograd.transformable_gradient("diagonal_scan_bwd")
