"""A step through a stack of layers as a function with a reference, for the tests of its operator.

The package itself calls the operator from its layers and has no such function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selective_scan import causal_conv1d_update_ref, selective_state_update_ref
from selective_scan._discretization import Method
from selective_scan._s6_step import S6_STEP, StackTensors, compose_step
from selective_scan._state_slots import slots_of_rows
from selective_scan._table import BackendName


def s6_step_ref(
    hidden: Tensor,
    stack: StackTensors,
    norm_f: Tensor | None = None,
    head: Tensor | None = None,
    state_batch_indices: Tensor | None = None,
    workspace: Tensor | None = None,
    *,
    eps: float = 1e-5,
    delta_softplus: bool = True,
    discretization_method: Method = "zoh",
    inner_eps: float = -1.0,
    backend: BackendName = "auto",
) -> Tensor:
    """Computes the step through the stack layer by layer in plain PyTorch.

    Arguments, result and errors are those of :func:`s6_step`. `backend` is checked as there but
    chooses nothing here, and the workspace is not used. The function runs on any device, and
    refuses indices of slots that do not exist on all of them.
    """
    tensors = (norm_f, head, state_batch_indices, workspace)
    options = (eps, delta_softplus, discretization_method, inner_eps)
    call = S6_STEP.check((hidden, *stack, *tensors, *options, backend))
    dtype = call.compute_dtype
    out_dtype = hidden.dtype if head is None else head.dtype
    _, is_live = slots_of_rows(call, "state_batch_indices", stack.state[0])
    residual = compose_step(
        *(causal_conv1d_update_ref, selective_state_update_ref, hidden.to(dtype), stack),
        *(norm_f, head, state_batch_indices, *options),
    )
    return torch.where(is_live[:, None, None], residual, 0).to(out_dtype)


def s6_step(
    hidden: Tensor,
    stack: StackTensors,
    norm_f: Tensor | None = None,
    head: Tensor | None = None,
    state_batch_indices: Tensor | None = None,
    workspace: Tensor | None = None,
    *,
    eps: float = 1e-5,
    delta_softplus: bool = True,
    discretization_method: Method = "zoh",
    inner_eps: float = -1.0,
    backend: BackendName = "auto",
) -> Tensor:
    """Calls the operator described in docs/kernels/step.md, which changes `stack` in place.

    Returns:
        (batch, steps, d_model) of hidden's dtype, or with a head (batch, steps, vocabulary) of its
        dtype.
    """
    tensors = (norm_f, head, state_batch_indices, workspace)
    options = (eps, delta_softplus, discretization_method, inner_eps)
    arguments = (hidden, *stack, *tensors, *options)
    if not S6_STEP.has_kernels((*arguments, backend)):
        names = ("eps", "delta_softplus", "discretization_method", "inner_eps")
        return s6_step_ref(hidden, stack, *tensors, **dict(zip(names, options, strict=True)))
    return S6_STEP(*arguments)
