"""The four scans of a map as one autograd node.

On small maps the GPU waits for the host. One node takes two op calls, forward and backward, in
place of eight with their views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from . import _memory, _pytorch
from ._function import differentiate
from ._ops import ops
from ._selective_scan import SELECTIVE_SCAN
from .mamba_inner import OPAQUE_TYPES

# The number of arguments before the tensors in _CrossScan.forward.
_OPTIONS = 3


def is_one_node(x: Tensor, *others: Tensor | None) -> bool:
    """Returns whether the two ops serve a call of these tensors: a plain eager call on tensors of
    PyTorch's own types, for which kernels exist."""
    return (
        _pytorch.is_plain_call()
        and SELECTIVE_SCAN.has_kernels_for(x.device.type)
        and {type(x), *map(type, others)} <= OPAQUE_TYPES
    )


def cross_scan(
    compose: Callable[..., Tensor],
    x: Tensor,
    maps: Sequence[Sequence[Tensor]],
    parameters: tuple[Tensor, Tensor | None, Tensor | None],
    options: tuple[bool, str],
) -> Tensor:
    """Scans a map in four directions and adds the results. The arguments must have been checked.

    Args:
        compose: computes the same from x, maps, parameters and options by parts that can be
            differentiated any number of times.
        x: as in :func:`cross_scan_fn`, like all arguments below.
        maps: delta, B and C.
        parameters: A, D and delta_bias.
        options: delta_softplus and discretization_method.
    """
    tensors = (x, *parameters, *(it for of_directions in maps for it in of_directions))
    if torch.is_grad_enabled() and any(it is not None and it.requires_grad for it in tensors):
        return _apply(compose, *options, *tensors)
    return _scan(tensors, options, save_states=False)[0]


def _scan(
    tensors: tuple[Tensor | None, ...], options: tuple[bool, str], save_states: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Returns the sum of the scans, the sequences of all directions, and the saved states."""
    x, A, D, delta_bias, *maps = tensors
    delta, B, C = _by_kinds(maps)
    given = (x, delta, A, B, C, D, delta_bias, *options, save_states)
    outs, sequences, states = _memory.call(
        _pytorch.shortest_call(ops.cross_scan_fwd.default), given
    )
    return _sum_of_directions(outs), sequences, states


def _by_kinds(maps: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    count = len(maps) // 3
    return [maps[i : i + count] for i in range(0, len(maps), count)]


def _sum_of_directions(maps: Sequence[Tensor]) -> Tensor:
    """Sums the directions pairwise first, since the two scans along rows share one memory layout
    and the two along columns another."""
    rows, columns, rows_from_end, columns_from_end = maps
    return (rows + rows_from_end) + (columns + columns_from_end)


class _CrossScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, compose, delta_softplus, discretization_method, *tensors):
        options = (delta_softplus, discretization_method)
        out, sequences, states = _scan(tensors, options, save_states=True)
        ctx.save_for_backward(*tensors, *sequences, *states)
        ctx.compose, ctx.options = compose, options
        ctx.counts = len(tensors), len(sequences)
        return out

    @staticmethod
    def backward(ctx, dout):
        num_tensors, num_sequences = ctx.counts
        saved = ctx.saved_tensors
        tensors, kept = saved[:num_tensors], saved[num_tensors:]
        if _pytorch.needs_composition(dout):
            compose = partial(_composed, ctx.compose, ctx.options)
            return (None,) * _OPTIONS + differentiate(compose, tensors, dout)
        _, A, D, delta_bias, *_ = tensors
        sequences, states = list(kept[:num_sequences]), list(kept[num_sequences:])
        given = (dout, sequences, A, D, delta_bias, *ctx.options, states)
        op = _pytorch.shortest_call(ops.cross_scan_bwd.default)
        dx, ddelta, dB, dC, *of_parameters = _memory.call(op, given)
        dparameters = (torch.stack(entries) if entries else None for entries in of_parameters)
        return (*(None,) * _OPTIONS, _sum_of_directions(dx), *dparameters, *ddelta, *dB, *dC)


_apply = _pytorch.apply_outside_transforms(_CrossScan)


def _composed(
    compose: Callable[..., Tensor], options: tuple[bool, str], *tensors: Tensor | None
) -> Tensor:
    x, A, D, delta_bias, *maps = tensors
    return compose(x, _by_kinds(maps), (A, D, delta_bias), options)
