"""Stacks whose states have the layout of mamba_ssm and transformers: the convolution's last d_conv
inputs, one more than a step reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from . import _pytorch
from ._inspected import are_the_same
from ._plain_stack import Stack, serves, step_in_one
from .cache import MixerCache

if TYPE_CHECKING:
    from .mamba_mixer import MambaMixer

# For each layer (batch, d_inner, d_conv) and (batch, d_inner, d_state).
States = Sequence[tuple[Tensor, Tensor]]
_NAME = "_selective_scan_states"


class NotCopied:
    """An object that is not copied or pickled with its owner: the copy gets None in its place."""

    def __reduce__(self) -> tuple[type[None], tuple]:
        return type(None), ()


class _WiderStates(NotCopied):
    """Views of a stack's states in the layout that a step takes."""

    def __init__(self, states: States) -> None:
        self._tensors = [*chain(*states)]
        self.caches = [MixerCache(conv_state[..., 1:], state) for conv_state, state in states]
        self.oldest = [conv_state[..., 0] for conv_state, _ in states]
        self.next_oldest = [conv_state[..., 1] for conv_state, _ in states]
        self.are_of_one_size = len({oldest.shape for oldest in self.oldest}) == 1

    @classmethod
    def of(cls, states: States, owner: object | None) -> _WiderStates:
        """Returns the views kept by the owner if they are of these states, otherwise new views."""
        own = getattr(owner, "__dict__", None)
        if own is None or torch.compiler.is_compiling():
            return cls(states)
        kept = own.get(_NAME)
        if kept is None or not are_the_same([*chain(*states)], kept._tensors):
            # Views made in inference mode could not be changed outside of it.
            with torch.inference_mode(False), torch.no_grad():
                kept = own[_NAME] = cls(states)
        return kept


def steps_in_one(
    mixers: Collection[MambaMixer],
    hidden: Tensor,
    states: States,
    stack: Stack | None = None,
    head: nn.Module | None = None,
    owner: object | None = None,
) -> Tensor | None:
    """Takes one step through one or several layers by one operator, see step_in_one.

    Args:
        mixers, hidden, stack, head: as in step_in_one.
        states: the layers' states, each with more than one input of the convolution.
        owner: the object that holds the states, on which the views are kept from step to step.
    """
    if not serves(hidden):  # checked first, so that unsupported calls make no views
        return None
    views = _WiderStates.of(states, owner)
    if not views.are_of_one_size:  # the operator does not support layers of different sizes
        return None
    next_oldest = torch.stack(views.next_oldest)
    out = step_in_one(mixers, hidden, views.caches, stack, head)
    if out is not None:
        _pytorch.copy_each(views.oldest, next_oldest.unbind())
    return out
