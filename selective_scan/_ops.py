"""What PyTorch needs to know of the ops beside their kernels: outputs' shapes, and derivatives.

The schemas are in csrc/torch/ops_cpu.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._dtypes import compute_dtype, num_saved_values, state_dtype
from ._validation import check_gradients, check_inputs

_FORWARD = "selective_scan::selective_scan_fwd"
_BACKWARD = "selective_scan::selective_scan_bwd"


def register() -> None:
    """Registers fake kernels and derivatives; the CPU library must be loaded."""
    torch.library.register_fake(_FORWARD, _forward_fake)
    torch.library.register_fake(_BACKWARD, _backward_fake)
    torch.library.register_autograd(_FORWARD, _backward, setup_context=_save_for_backward)
    torch.library.register_autograd(_BACKWARD, _refuse_double_backward)


def scan(*inputs_and_options, with_last_state: bool) -> tuple[Tensor, Tensor | None]:
    """The forward op, given all its arguments but the last, save_states, which is settled here.

    Returns out and the last state, which may be None unless it is asked for. In plain eager mode it
    goes the short way: what register_autograd puts between the dispatcher and the kernel takes
    several times as long as all the rest of a small call.
    """
    needs_gradient = torch.is_grad_enabled() and any(
        isinstance(argument, Tensor) and argument.requires_grad for argument in inputs_and_options
    )
    if torch.compiler.is_compiling():
        op = torch.ops.selective_scan.selective_scan_fwd.default
        return op(*inputs_and_options, needs_gradient)[:2]
    if torch._C._are_functorch_transforms_active():
        return _TransformableScan.apply(*inputs_and_options, needs_gradient)[:2]
    if not needs_gradient:
        op = torch.ops.selective_scan.selective_scan_fwd.default
        return _below_autograd(op, (*inputs_and_options, False))[:2]
    if with_last_state:
        return _EagerScan.apply(*inputs_and_options, True)
    return _EagerScan.apply(*inputs_and_options, False), None


def _below_autograd(op: torch._ops.OpOverload, arguments: tuple) -> tuple[Tensor, ...]:
    """Calls an op whose results need no gradient; torch.library does the same."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


class _EagerScan(torch.autograd.Function):
    """The forward op with its derivative, as register_autograd would make it, but without outputs
    that nobody asked for: each costs time here and in the backward pass."""

    @staticmethod
    def forward(ctx, *arguments):
        *inputs_and_options, with_last_state = arguments
        op = torch.ops.selective_scan.selective_scan_fwd.default
        out, last_state, states = _below_autograd(op, (*inputs_and_options, True))
        _save_inputs(ctx, arguments, states)
        return (out, last_state) if with_last_state else out

    @staticmethod
    def backward(ctx, dout, dlast_state=None):
        return _backward(ctx, dout, dlast_state)


class _TransformableScan(torch.autograd.Function):
    """The same for the transforms of torch.func, which register_autograd does not support."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return torch.ops.selective_scan.selective_scan_fwd.default(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save_for_backward(ctx, inputs, output)

    @staticmethod
    def backward(ctx, *gradients):
        return _backward(ctx, *gradients)


class _TransformableGradient(torch.autograd.Function):
    """The backward op for torch.func, which always wants to differentiate once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return torch.ops.selective_scan.selective_scan_bwd.default(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        return _refuse_double_backward(ctx, *gradients)


# --- fake kernels: the outputs' shapes, dtypes and strides ----------------------------------------


def _forward_fake(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    discretization_method: str = "zoh",
    initial_state: Tensor | None = None,
    reverse: bool = False,
    save_states: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    check_inputs(inputs, discretization_method)
    batch, dim, _ = u.shape
    dtype = state_dtype(inputs, A)
    return (
        torch.empty_like(u),
        u.new_empty((batch, dim, A.shape[1]), dtype=dtype),
        u.new_empty((num_saved_values(u, A) if save_states else 0,), dtype=dtype),
    )


def _backward_fake(
    dout: Tensor | None,
    dlast_state: Tensor | None,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    discretization_method: str,
    initial_state: Tensor | None,
    reverse: bool,
    states: Tensor | None,
) -> tuple[Tensor, ...]:
    inputs = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    check_inputs(inputs, discretization_method)
    check_gradients(inputs, dout, dlast_state, states)
    dtype = compute_dtype(inputs)
    return tuple(
        u.new_empty((0,), dtype=dtype) if tensor is None else torch.empty_like(tensor)
        for tensor in inputs
    )


# --- derivatives ----------------------------------------------------------------------------------


def _save_for_backward(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[2])
    _save_inputs(ctx, inputs, output[2])


def _save_inputs(ctx, inputs: tuple, states: Tensor) -> None:
    """Keeps the inputs and the states at chunk boundaries; the output is recomputed in backward."""
    *tensors, delta_softplus, method, initial_state, reverse, _ = inputs
    ctx.save_for_backward(*tensors, initial_state, states)
    ctx.options = delta_softplus, method, reverse
    ctx.set_materialize_grads(False)


def _backward(ctx, dout: Tensor | None, dlast_state: Tensor | None, _dstates: None = None):
    *inputs, initial_state, states = ctx.saved_tensors
    delta_softplus, method, reverse = ctx.options
    if dout is None and dlast_state is None:
        return (None,) * len(ctx.needs_input_grad)
    op = torch.ops.selective_scan.selective_scan_bwd.default
    arguments = (dout, dlast_state, *inputs, delta_softplus, method, initial_state, reverse, states)
    # With create_graph=True the op must stay visible to autograd, so that it can refuse.
    if not torch.is_grad_enabled():
        results = _below_autograd(op, arguments)
    elif torch._C._are_functorch_transforms_active():
        results = _TransformableGradient.apply(*arguments)
    else:
        results = op(*arguments)
    *gradients, dinitial_state = results
    gradients += [None, None, dinitial_state, None, None]
    return tuple(
        gradient if needed else None
        for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False)
    )


def _refuse_double_backward(ctx, *gradients: Tensor | None):
    raise RuntimeError(
        "selective_scan: the gradient is once differentiable; double backward is not supported"
    )
