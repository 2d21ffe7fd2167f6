"""The causal convolution of a sequence whose steps lie on several ranks."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Literal, overload

import torch
from torch import Tensor

from .._checks import REAL
from .._discretization import at_least_single
from .._ops import ops
from .._result import Kept, Result
from .._table import Option, Table, TensorArgument
from ..causal_conv1d import ACTIVATION, BIAS, WEIGHT, Activation
from ._edges import (
    add_tail_gradient,
    exchange_tails,
    exchange_window_gradients,
    tail_gradient,
    window_of,
)
from ._groups import Group, GroupName, Ranks, name_of
from ._operator import DistributedOperator

_STATES = ("batch", "dim", "width-1")
_ARGUMENTS = Table(
    TensorArgument("x", REAL, ("batch", "dim", "seqlen")),
    WEIGHT,
    BIAS,
    TensorArgument("initial_states", REAL, _STATES, optional=True),
    Option("return_final_states"),
    ACTIVATION,
    Option("reduce_gradients"),
    GroupName(),
    anchor="x",
)


class _Arguments(namedtuple("_Arguments", _ARGUMENTS.names)):
    """The arguments of the forward op."""

    __slots__ = ()

    @property
    def history(self) -> int:
        """The number of earlier steps that the convolution looks back at."""
        return self.weight.shape[1] - 1

    def local(self, before: Tensor) -> tuple:
        """Returns the arguments of the single-device ops for this rank's steps."""
        return self.x, self.weight, self.bias, None, None, before


def _forward(*arguments) -> tuple[Tensor | None, ...]:
    """Returns out and final_states, then the tensors saved for backward if asked for."""
    *arguments, is_saved = arguments
    call = _Arguments(*arguments)
    ranks = Ranks.of(call.group, call.x.device)
    tails, counts = exchange_tails(call.x, call.history, ranks)
    before = window_of(tails, call.initial_states, counts, ranks.place)
    out, _ = ops.causal_conv1d_fwd(*call.local(before), False, call.activation)
    final_states = None
    if call.return_final_states:
        final_states = window_of(tails, call.initial_states, counts, ranks.count)
        final_states = final_states.to(call.x.dtype, copy=True)
    return out, final_states, *((before, counts) if is_saved else (None, None))


def _backward(dout: Tensor | None, dfinal_states: Tensor | None, *arguments):
    """Returns the gradients of the forward op's tensors."""
    *arguments, before, counts = arguments
    call = _Arguments(*arguments)
    if before is None:  # the forward op saved nothing
        *_, before, counts = _forward(*arguments, True)
    ranks = Ranks.of(call.group, call.x.device)
    if dout is None:
        dout = torch.zeros_like(call.x)
    dx, dweight, dbias, dbefore = ops.causal_conv1d_bwd(
        dout, None, *call.local(before), call.activation
    )
    of_last = None
    if call.return_final_states:
        none = dfinal_states is None
        of_last = torch.zeros_like(dbefore) if none else dfinal_states.to(dbefore.dtype)
    windows = exchange_window_gradients(dbefore, of_last, ranks)
    add_tail_gradient(dx, windows, counts, ranks)
    if call.reduce_gradients:
        dtypes = [tensor.dtype for tensor in (call.x, dweight, dbias) if tensor is not None]
        dtype = at_least_single(functools.reduce(torch.promote_types, dtypes))
        dweight, dbias = ranks.sum([dweight, dbias], dtype)
    dinitial_states = None
    if call.initial_states is not None:
        dinitial_states = torch.zeros_like(call.initial_states)
        if ranks.is_first:
            dinitial_states.copy_(tail_gradient(0, windows, counts))
    return dx, dweight, dbias, dinitial_states


_CONVOLUTION = DistributedOperator(
    "distributed_causal_conv1d",
    _ARGUMENTS,
    results=[
        Result("out", ("batch", "dim", "seqlen"), lambda call: call["x"].dtype),
        Result("final_states", _STATES, lambda call: call["x"].dtype),
        *map(Kept, ("before", "counts")),
    ],
    backward=f"dout dfinal_states {' '.join(_ARGUMENTS.names)} before counts",
    forward_kernel=_forward,
    backward_kernel=_backward,
)


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_states: Tensor | None = None,
    return_final_states: Literal[False] = False,
    activation: Activation | None = None,
    group: Group,
    reduce_gradients: bool = False,
) -> Tensor: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_states: Tensor | None = None,
    return_final_states: Literal[True],
    activation: Activation | None = None,
    group: Group,
    reduce_gradients: bool = False,
) -> tuple[Tensor, Tensor]: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: Activation | None = None,
    group: Group,
    reduce_gradients: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: Activation | None = None,
    group: Group,
    reduce_gradients: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolves a sequence whose steps are split over the ranks of a group.

    It computes what :func:`selective_scan.causal_conv1d_fn` computes for the whole sequence, which
    is the first rank's steps followed by the second's, and so on; a rank may have any number of
    steps, including none. One all-gather gives every rank the width - 1 steps before its own, which
    may come from several ranks with few steps, and another one returns their gradients. The
    requirements of :func:`selective_scan_fn` on calls and on the group apply here, too.

    Args:
        x: this rank's steps, (batch, dim, seqlen).
        weight: (dim, width), the same on every rank.
        bias: (dim,), the same on every rank.
        initial_states: x at the width - 1 steps before the first of all, (batch, dim, width - 1),
            the same on every rank.
        return_final_states: whether to return (out, final_states).
        activation: None, "silu" or "swish".
        group: see :func:`selective_scan_fn`.
        reduce_gradients: whether the gradients of weight and bias are summed over the ranks. The
            gradient of initial_states is whole on the first rank and 0 on all others.

    Returns:
        This rank's steps of out, (batch, dim, seqlen) in x's dtype. With return_final_states also
        the last width - 1 steps of all, on every rank; their gradient is the sum of the ranks'
        gradients.

    Raises:
        TypeError, ValueError, ImportError: see :func:`selective_scan_fn`.
        RuntimeError: see :func:`selective_scan.causal_conv1d_fn`; also if a collective fails or the
            group's timeout expires.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from selective_scan.distributed import causal_conv1d_fn
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x, weight = torch.randn(2, 8, 100), torch.randn(8, 4)
        >>> causal_conv1d_fn(x, weight, activation="silu", group=dist.group.WORLD).shape
        torch.Size([2, 8, 100])
        >>> dist.destroy_process_group()
    """
    arguments = (
        *(x, weight, bias, initial_states, return_final_states, activation, reduce_gradients),
        name_of(group),
    )
    _CONVOLUTION.require_kernels(arguments)
    out, final_states, *_ = _CONVOLUTION(*arguments)
    return (out, final_states) if return_final_states else out
