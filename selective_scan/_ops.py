"""What PyTorch needs to know of the ops beside their kernels: outputs' shapes, and derivatives.

The schemas are in csrc/torch/ops_cpu.cpp.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._autograd import (
    are_transforms_active,
    call_backward,
    refuse_double_backward,
    transformable,
    transformable_gradient,
)
from ._dtypes import compute_dtype, num_saved_values, state_dtype
from ._validation import METHODS, are_plain_tensors, check_gradients, check_inputs

try:
    from torch._C import _any_requires_grad, _is_tracing, _len_torch_dispatch_stack
    from torch._C._functorch import unwrap_if_dead

    _has_short_way = True
except ImportError:  # names of PyTorch's own, which a later one may lack
    _has_short_way = False

_FORWARD = "selective_scan::selective_scan_fwd"
_BACKWARD = "selective_scan::selective_scan_bwd"
_registered: list[torch.library.Library] = []  # what they register lasts as long as they do
_eager: SimpleNamespace  # the ops of the short way, which take as long to look up as some checks


def register() -> None:
    """Registers fake kernels and derivatives; the CPU library must be loaded."""
    torch.library.register_fake(_FORWARD, _forward_fake)
    torch.library.register_fake(_BACKWARD, _backward_fake)
    torch.library.register_autograd(_FORWARD, _backward, setup_context=_save_for_backward)
    torch.library.register_autograd(_BACKWARD, refuse_double_backward)
    global _eager
    ops = torch.ops.selective_scan
    _eager = SimpleNamespace(
        forward=ops.selective_scan_fwd_eager.default, backward=ops.selective_scan_bwd_eager.default
    )
    library = torch.library.Library("selective_scan", "IMPL")
    for name in ("selective_scan_fwd_eager", "selective_scan_bwd_eager"):
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    _registered.append(library)


def scan(*arguments) -> tuple[Tensor, Tensor]:
    """out and the last state: the forward op, given all its arguments but the last, save_states,
    which is settled here."""
    save_states = torch.is_grad_enabled() and any(
        isinstance(argument, Tensor) and argument.requires_grad for argument in arguments
    )
    op = torch.ops.selective_scan.selective_scan_fwd.default
    if not torch.compiler.is_compiling() and are_transforms_active():
        op = _TransformableScan.apply
    return op(*arguments, save_states)[:2]


# --- the short way --------------------------------------------------------------------------------
#
# What torch.library puts between the dispatcher and a kernel with a derivative takes several times
# as long as all the rest of a small call. In plain eager mode calls go around it, to ops of their
# own, which leave out what nobody asked for.


def is_plain_eager() -> bool:
    """Whether nothing but autograd has to see the ops that are called."""
    return _has_short_way and not (
        torch.compiler.is_compiling()
        or _is_tracing()
        or _len_torch_dispatch_stack()
        or are_transforms_active()
        or forward_ad._current_level >= 0
    )


def eager_scan(*arguments) -> Tensor | tuple[Tensor, Tensor]:
    """As scan, but takes the method by its place in METHODS and returns out alone unless the last
    argument asks for the last state.

    Raises:
        NotImplementedError: there are no kernels for tensors of this device or layout.
    """
    if torch.is_grad_enabled() and _any_requires_grad(*arguments):
        # Tensors that outlive a transform of torch.func are wrapped still; autograd does not see
        # through that.
        return _apply_eager_scan(
            *[unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in arguments]
        )
    out, last_state, _ = _eager.forward(*arguments)
    return out if last_state is None else (out, last_state)


class _EagerScan(torch.autograd.Function):
    """The forward op with its derivative, as register_autograd would make it."""

    @staticmethod
    def forward(ctx, *arguments):
        out, last_state, states = _eager.forward(*arguments, True)
        _save_inputs(ctx, arguments, states)
        return out if last_state is None else (out, last_state)

    @staticmethod
    def backward(ctx, dout, dlast_state=None):
        delta_softplus, method, reverse = ctx.options
        cotangents = (dout, dlast_state)
        is_plain = is_plain_eager() and are_plain_tensors(cotangents)
        if torch.is_grad_enabled() or not is_plain or dout is dlast_state is None:
            return _gradients(ctx, METHODS[method], *cotangents)
        *inputs, initial_state, states = ctx.saved_tensors
        *gradients, dinitial_state = _eager.backward(
            *cotangents, *inputs, delta_softplus, method, initial_state, reverse, states
        )
        return (*gradients, None, None, dinitial_state, None, None)


# Function.apply without its preparations for transforms of torch.func, which cost more than the
# rest of it.
_apply_eager_scan = super(torch.autograd.Function, _EagerScan).apply


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
    return _gradients(ctx, ctx.options[1], dout, dlast_state)


def _gradients(ctx, method: str, dout: Tensor | None, dlast_state: Tensor | None):
    *inputs, initial_state, states = ctx.saved_tensors
    delta_softplus, _, reverse = ctx.options
    if dout is None and dlast_state is None:
        return (None,) * len(ctx.needs_input_grad)
    op = torch.ops.selective_scan.selective_scan_bwd.default
    arguments = (dout, dlast_state, *inputs, delta_softplus, method, initial_state, reverse, states)
    *gradients, dinitial_state = call_backward(op, _TransformableGradient, arguments)
    gradients += [None, None, dinitial_state, None, None]
    return tuple(
        gradient if needed else None
        for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False)
    )


_TransformableScan = transformable("selective_scan_fwd", _save_for_backward, _backward)
_TransformableGradient = transformable_gradient("selective_scan_bwd")
