"""The selective scan of a sequence whose steps lie on several ranks."""

from __future__ import annotations

from collections import namedtuple
from typing import Literal, overload

import torch
from torch import Tensor

from .._discretization import METHODS, Method
from .._result import Kept, Result
from .._selective_scan import INPUT_DELTA, POLE_DTYPES, POLES, scan_arguments
from .._table import RETURN_LAST_STATE, Option, TensorArgument
from ._between import scan_backward, scan_forward
from ._edges import exchange_maps, exchange_state_gradients
from ._groups import Group, GroupName, Ranks, name_of
from ._operator import DistributedOperator

_ARGUMENTS = scan_arguments(
    TensorArgument("A", POLE_DTYPES, POLES),
    METHODS,
    RETURN_LAST_STATE,
    Option("reduce_gradients"),
    GroupName(),
    INPUT_DELTA,
)


class _Arguments(namedtuple("_Arguments", _ARGUMENTS.names)):
    """The arguments of the forward op."""

    __slots__ = ()

    @property
    def ranks(self) -> Ranks:
        return Ranks.of(self.group, self.u.device, self.reverse)

    def local(self, entering: Tensor | None) -> tuple:
        """Returns the single-device ops' arguments for this rank's steps, without cu_seqlens."""
        tensors = (self.u, self.delta, self.A, self.B, self.C, self.D, self.z, self.delta_bias)
        options = self.delta_softplus, self.discretization_method, entering, self.reverse
        return *tensors, *options, self.input_delta


def _forward(*arguments) -> tuple[Tensor | None, ...]:
    """Returns out and last_state, then the tensors saved for backward if asked for."""
    *arguments, is_saved = arguments
    scan = _Arguments(*arguments)
    ranks, exchanged = scan.ranks, ()

    def enter(own: Tensor) -> Tensor:
        nonlocal exchanged
        exchanged = exchange_maps(
            own, scan.initial_state, ranks, is_last_wanted=scan.return_last_state
        )
        return exchanged[0]

    # The last rank's map affects only the last state. Without finding it, though, that rank would
    # wait for the maps that the others find in the midst of a pass before it begins its own pass.
    is_told = ranks.count > 1 or scan.return_last_state
    # The entering state replaces these zeros, which tell the op that arithmetic is double.
    zeros = None
    if scan.initial_state is not None and scan.initial_state.dtype.to_real() == torch.float64:
        zeros = torch.zeros_like(scan.initial_state)
    out, _, states = scan_forward(scan.local(zeros), enter, is_told=is_told, is_saved=is_saved)
    entering, last_state, factors = exchanged
    if not is_saved:
        return out, last_state, None, None, None
    return out, last_state, entering, factors, states


def _backward(
    dout: Tensor | None, dlast_state: Tensor | None, *arguments
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the forward op's tensors."""
    *arguments, entering, factors, states = arguments
    scan = _Arguments(*arguments)
    if entering is None:  # the forward op saved nothing
        _, _, entering, factors, states = _forward(*arguments, True)
    ranks = scan.ranks

    def enter(own: Tensor) -> Tensor:
        of_last = None
        if scan.return_last_state:
            of_last = torch.zeros_like(own) if dlast_state is None else dlast_state
        leaving = exchange_state_gradients(own, of_last, factors, ranks)
        return torch.zeros_like(own) if leaving is None else leaving

    # The gradient of the initial state comes from the first rank's own backward pass, so a single
    # rank has nothing to exchange; see _forward() for the others.
    is_told = ranks.count > 1
    du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dentering, dinput_delta = scan_backward(
        dout, scan.local(entering), states, enter, is_told=is_told
    )
    if scan.reduce_gradients:
        # Constant B and C are parameters.
        dB_sum, dC_sum = (None if p.dim() > 2 else g for p, g in ((scan.B, dB), (scan.C, dC)))
        dtype = entering.dtype.to_real()
        dA, dB_sum, dC_sum, dD, ddelta_bias = ranks.sum(
            [dA, dB_sum, dC_sum, dD, ddelta_bias], dtype
        )
        dB = dB if dB_sum is None else dB_sum
        dC = dC if dC_sum is None else dC_sum
    dinitial_state = None
    if scan.initial_state is not None:
        dinitial_state = dentering if ranks.is_first else torch.zeros_like(dentering)
        dinitial_state = dinitial_state.to(scan.initial_state.dtype)
    return du, ddelta, dA, dB, dC, dD, dz, ddelta_bias, dinitial_state, dinput_delta


_A, _INITIAL_STATE = map(_ARGUMENTS.names.index, ("A", "initial_state"))
_SCAN = DistributedOperator(
    "distributed_selective_scan",
    _ARGUMENTS,
    results=[
        Result("out", ("batch", "dim", "seqlen"), lambda call: call["u"].dtype),
        Result(
            "last_state",
            ("batch", "dim", "dstate"),
            lambda call: call.state_dtype,
            is_asked=lambda call: call.options["return_last_state"],
        ),
        *map(Kept, ("entering", "factors", "states")),
    ],
    backward=f"dout dlast_state {' '.join(_ARGUMENTS.names)} entering factors states",
    forward_kernel=_forward,
    backward_kernel=_backward,
    # The op of a rank's steps is not given initial_state, and its message for a matrix A describes
    # the calls that a single device supports.
    is_checked_by_kernel=lambda arguments: (
        arguments[_INITIAL_STATE] is None and arguments[_A].dim() == 2
    ),
)


@overload
def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: Literal[False] | None = False,
    *,
    group: Group,
    discretization_method: Method = "zoh",
    initial_state: Tensor | None = None,
    reverse: bool = False,
    reduce_gradients: bool = False,
    input_delta: Tensor | None = None,
) -> Tensor: ...


@overload
def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    return_last_state: Literal[True],
    group: Group,
    discretization_method: Method = "zoh",
    initial_state: Tensor | None = None,
    reverse: bool = False,
    reduce_gradients: bool = False,
    input_delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool | None = False,
    *,
    group: Group,
    discretization_method: Method = "zoh",
    initial_state: Tensor | None = None,
    reverse: bool = False,
    reduce_gradients: bool = False,
    input_delta: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool | None = False,
    *,
    group: Group,
    discretization_method: Method = "zoh",
    initial_state: Tensor | None = None,
    reverse: bool = False,
    reduce_gradients: bool = False,
    input_delta: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Scans a sequence whose steps are split over the ranks of a group.

    It computes what :func:`selective_scan.selective_scan_fn` computes for the whole sequence, which
    is the first rank's steps followed by the second's, and so on. Ranks may have different numbers
    of steps, including none. A and all other arguments without steps must be the same on every
    rank.

    Each rank first finds the map that its steps apply to an entering state, h → factor·h + offset.
    One all-gather of these maps, 2·batch·dim·dstate numbers per rank, gives every rank the state
    that enters its own steps, from which the ordinary scan runs. The backward pass does the same
    with the states' gradients, from the last rank to the first, with half as many numbers, or as
    many if there is a last state. See :doc:`/distributed` for the costs.

    All ranks must make the same calls, and all or none must run the backward pass. A rank that does
    not take part keeps the others waiting until the group's timeout.

    Args:
        u, delta, z, input_delta: this rank's steps, (batch, dim, seqlen); likewise variable B and
            C. All arguments are those of :func:`selective_scan.selective_scan_fn`, without matrices
            A.
        A, B, C, D, delta_bias, delta_softplus, return_last_state: see
            :func:`selective_scan.selective_scan_fn`.
        group: a ProcessGroup or a DeviceMesh of one dimension; None is the default group. Its
            backend must support the tensors' device: NCCL on GPUs, gloo on CPUs.
        discretization_method: see :func:`selective_scan.selective_scan_fn`.
        initial_state: the state before the first step of all, the same on every rank.
        reverse: scan from the last rank's last step to the first rank's first one.
        reduce_gradients: whether the gradients of A, D, delta_bias and of constant B and C are
            summed over the ranks. By default each rank has the part of its own steps, which
            data-parallel training expects. In either case, the gradient of initial_state is whole
            on the rank with the first step and 0 on all others.

    Returns:
        This rank's steps of out, (batch, dim, seqlen) in u's dtype. With return_last_state also the
        state after the last step of all, with the same bits on every rank; its gradient is the sum
        of the ranks' gradients.

    Raises:
        TypeError: an argument is not of the type above.
        ValueError: the group does not contain this rank, or is a mesh of several dimensions; its
            backend is gloo and the tensors are on a GPU; or there is no default group.
        RuntimeError: see :func:`selective_scan.selective_scan_fn`; also if a collective fails or
            the group's timeout expires.
        ImportError: the library for the tensors' device is missing.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from selective_scan.distributed import selective_scan_fn
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> u, delta = torch.randn(2, 8, 100), torch.rand(2, 8, 100)
        >>> A, B, C = -torch.rand(8, 4), torch.randn(2, 4, 100), torch.randn(2, 4, 100)
        >>> selective_scan_fn(u, delta, A, B, C, group=dist.group.WORLD).shape
        torch.Size([2, 8, 100])
        >>> dist.destroy_process_group()
    """
    arguments = (
        *(u, delta, A, B, C, D, z, delta_bias, delta_softplus, discretization_method),
        *(initial_state, reverse, bool(return_last_state), reduce_gradients, name_of(group)),
        input_delta,
    )
    _SCAN.require_kernels((*arguments, return_last_state))
    out, last_state, *_ = _SCAN(*arguments)
    return (out, last_state) if return_last_state else out
