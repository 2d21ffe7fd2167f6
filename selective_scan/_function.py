"""Autograd functions of the ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from . import _pytorch


def make_function(
    name: str,
    op: Callable,
    setup_context: Callable[..., None],
    backward: Callable[..., object],
    *,
    jvp: Callable[..., NoReturn],
    map_over: Callable[..., tuple] | None = None,
) -> type[torch.autograd.Function]:
    """Returns an autograd function of an op, as torch.library.register_autograd would make it.

    The function of register_autograd is slower and does not support the transforms of torch.func.
    """

    call = _pytorch.shortest_call(op)

    def forward(*arguments):
        with _pytorch.below_autograd():
            return call(*arguments)

    def vmap(info, in_dims: tuple, *arguments):
        return map_over(function.apply, info, in_dims, *arguments)

    members = {"forward": forward, "setup_context": setup_context, "backward": backward, "jvp": jvp}
    if map_over is not None:
        members["vmap"] = vmap
    members = {key: staticmethod(value) for key, value in members.items()}
    members |= {"op": op, "generate_vmap_rule": map_over is None}
    function = type(name, (torch.autograd.Function,), members)
    return function


def differentiate(
    compose: Callable[..., Tensor | tuple[Tensor, ...]],
    tensors: Sequence[Tensor | None],
    *cotangents: Tensor,
) -> tuple[Tensor | None, ...]:
    """Returns the gradient for each of these arguments of a composition of other operations."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views keep the gradients apart for tensors that are given twice or computed from each
        # other.
        own = [None if it is None else it.view_as(it) for it in tensors]
        needed = [it for it in own if it is not None and it.requires_grad]
        out = compose(*own)
        gradients = iter(torch.autograd.grad(out, needed, cotangents, create_graph=create_graph))
    return tuple(next(gradients) if it is not None and it.requires_grad else None for it in own)


def save_nothing(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    pass
