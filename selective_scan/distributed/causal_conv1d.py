"""The causal convolution of a sequence whose steps lie on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import REAL
from .._ops import ops
from .._result import Kept, Result
from .._table import Option, Table, TensorArgument
from ..causal_conv1d import ACTIVATION, BIAS, WEIGHT, Activation
from ._groups import Group, GroupName, Ranks, name_of
from ._operator import DistributedOperator

_STATES = ("batch", "dim", "width-1")


@dataclass(slots=True)
class _Arguments:
    """Those of the forward op."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    initial_states: Tensor | None
    return_final_states: bool
    activation: str | None
    reduce_gradients: bool
    group: str

    @property
    def history(self) -> int:
        """How many steps back the convolution looks."""
        return self.weight.shape[1] - 1

    def local(self, before: Tensor) -> tuple:
        """The arguments of the ops of one device, for this rank's steps."""
        return self.x, self.weight, self.bias, None, None, before

    def states_before_all(self) -> Tensor:
        if self.initial_states is not None:
            return self.initial_states
        return self.x.new_zeros(*self.x.shape[:2], self.history)


class _Tails:
    """Which steps of others a rank needs.

    A tail is the last width - 1 steps that a rank has, behind something else where it has fewer.
    The initial states are the first tail, and rank r's is tail r + 1. A window is the last
    width - 1 steps before a rank; the last window is behind all.

    Only the tails' steps count here, in one row: no window reaches beyond a tail that is full.

    Args:
        counts: how many steps each rank's tail has, (rank,).
        history: width - 1.
    """

    def __init__(self, counts: Tensor, history: int) -> None:
        in_tail = torch.arange(history, device=counts.device)
        counts = F.pad(counts, (1, 0), value=history)
        ends = counts.cumsum(0)[:, None]
        self.windows = ends - history + in_tail  # (window, step): places in the row
        self.steps = torch.where(in_tail >= history - counts[:, None], self.windows, -1)

    def window(self, values: Tensor) -> Tensor:
        """The last of the tails `values`, (tail, batch, dim, step)."""
        tails = len(values)
        row = self.steps[:tails].flatten()
        is_wanted = row == self.windows[tails - 1][:, None]  # one of each line
        place = torch.where(is_wanted, torch.arange(len(row), device=row.device), 0).sum(1)
        return values.movedim(0, 2).flatten(2).index_select(2, place)

    def gradient(self, tail: int, windows: Tensor) -> Tensor:
        """That of a tail, from those of all windows, (window, batch, dim, step)."""
        windows = windows[tail:]
        history = windows.shape[-1]
        place = self.steps[tail] - self.windows[tail:, :1]  # in each window
        is_there = (place >= 0) & (self.steps[tail] >= 0)
        place = place.clamp(0, history - 1)[:, None, None].expand_as(windows)
        return torch.where(is_there[:, None, None], windows.gather(3, place), 0).sum(0)


def _exchange(call: _Arguments, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """The tails of all ranks, (rank, batch, dim, step), and how many steps each has."""
    x, history = call.x, call.history
    count = min(x.shape[2], history)
    tail = F.pad(x[:, :, x.shape[2] - count :], (history - count, 0))
    row = torch.cat([tail.flatten(), tail.new_full((1,), count)])  # a dtype holds such a number
    rows = ranks.gather(row)
    return rows[:, :-1].view(ranks.count, *tail.shape), rows[:, -1].long()


def _forward(*arguments) -> tuple[Tensor | None, ...]:
    """out and final_states; then, if asked for, what the backward pass wants."""
    *arguments, is_saved = arguments
    call = _Arguments(*arguments)
    ranks = Ranks.of(call.group, call.x.device)
    values, counts = _exchange(call, ranks)
    tails = _Tails(counts, call.history)
    values = torch.cat([call.states_before_all()[None], values])
    before = tails.window(values[: ranks.place + 1])
    out, _ = ops.causal_conv1d_fwd(*call.local(before), False, call.activation)
    final_states = tails.window(values).to(call.x.dtype) if call.return_final_states else None
    return out, final_states, *((before, counts) if is_saved else (None, None))


def _backward(dout: Tensor | None, dfinal_states: Tensor | None, *arguments):
    """The gradients of the forward op's tensors."""
    *arguments, before, counts = arguments
    call = _Arguments(*arguments)
    if before is None:  # the forward op was not asked to keep anything
        *_, before, counts = _forward(*arguments, True)
    ranks = Ranks.of(call.group, call.x.device)
    if dout is None:
        dout = torch.zeros_like(call.x)
    dx, dweight, dbias, dbefore = ops.causal_conv1d_bwd(
        dout, None, *call.local(before), call.activation
    )
    windows = [dbefore]
    if call.return_final_states:
        none = dfinal_states is None
        windows.append(torch.zeros_like(dbefore) if none else dfinal_states.to(dbefore.dtype))
    gathered = ranks.gather(torch.stack(windows))
    at_end = gathered[:, 1].sum(0) if call.return_final_states else torch.zeros_like(dbefore)
    windows = torch.cat([gathered[:, 0], at_end[None]])
    tails = _Tails(counts, call.history)
    count = min(call.x.shape[2], call.history)
    dtail = tails.gradient(ranks.place + 1, windows)
    dx[:, :, dx.shape[2] - count :] += dtail[:, :, call.history - count :]
    if call.reduce_gradients:
        dtype = torch.promote_types(torch.float32, call.x.dtype)
        dweight, dbias = ranks.sum([dweight, dbias], dtype)
    dinitial_states = None
    if call.initial_states is not None:
        dinitial_states = torch.zeros_like(call.initial_states)
        if ranks.is_first:
            dinitial_states.copy_(tails.gradient(0, windows))
    return dx, dweight, dbias, dinitial_states


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
    initial_states: Tensor | None = None,
    return_final_states: Literal[False] = False,
    activation: Activation | None = None,
    *,
    group: Group,
    reduce_gradients: bool = False,
) -> Tensor: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    *,
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
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: Activation | None = None,
    *,
    group: Group,
    reduce_gradients: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: Activation | None = None,
    *,
    group: Group,
    reduce_gradients: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolves a sequence whose steps lie on the ranks of a group, each with some of its own.

    It computes what :func:`selective_scan.causal_conv1d_fn` computes of the whole sequence, which
    is that of the first rank's steps, then the second's, and so on; a rank may have any number of
    steps, and none. One all-gather tells every rank the width - 1 steps before its own, which lie
    on several ranks where these have few, and one brings their gradients back. What is said of
    calls and of the group at :func:`selective_scan_fn` holds here.

    Args:
        x: this rank's steps, (batch, dim, seqlen).
        weight: (dim, width), the same on every rank.
        bias: (dim,), the same on every rank.
        initial_states: x at the width - 1 steps before the first of all, (batch, dim, width - 1),
            given alike on every rank.
        return_final_states: whether to return (out, final_states).
        activation: None, "silu" or "swish".
        group: see :func:`selective_scan_fn`.
        reduce_gradients: whether the gradients of weight and bias are summed over the ranks. That
            of initial_states is the first rank's and 0 on all others, whose sum is the whole.

    Returns:
        This rank's steps of out, (batch, dim, seqlen) in x's dtype. With return_final_states also
        the last width - 1 steps of all, on every rank; their gradient is the sum of what the ranks
        send back.

    Raises:
        TypeError, ValueError, ImportError: see :func:`selective_scan_fn`.
        RuntimeError: see :func:`selective_scan.causal_conv1d_fn`; also where a collective fails or
            the group's timeout is over.

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
