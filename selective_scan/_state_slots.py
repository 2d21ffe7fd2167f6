"""Pools of states of which a call's packed sequences have some slots."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ._checks import BOOL, INTEGER, Call, fail
from ._table import Number, Shape, TensorArgument

# How an operator's table names the slots of its sequences.
SLOTS = (
    TensorArgument("cache_indices", INTEGER, ("sequences",), optional=True),
    TensorArgument("has_initial_state", BOOL, ("sequences",), optional=True),
    Number("pad_slot_id", -1),
)


def pool_of(*dims: str) -> Shape:
    """`dims` are those of a slot. Without indices every sequence has the slot of its own number."""
    return Shape((("slots", *dims),), where="cache_indices", otherwise=(("sequences", *dims),))


def slot_of(name: str, index: int, slots: int, pad_slot_id: int) -> int | None:
    """The slot that an index names, None for padding; refuses one that there is not."""
    if index == pad_slot_id or index < 0:
        return None
    if index >= slots:
        fail(f"{name} must be less than slots = {slots}, got {index}")
    return index


def slots_of(call: Call, pool: Tensor) -> list[int | None]:
    """That of every sequence, for the references, which read them back to the host."""
    if "cache_indices" not in call.tensors:
        return list(range(call.sizes["sequences"]))
    indices, pad_slot_id = call["cache_indices"].tolist(), call.options["pad_slot_id"]
    return [slot_of("cache_indices", index, len(pool), pad_slot_id) for index in indices]


def first_states(call: Call, pool: Tensor, slots: list[int | None]) -> list[Tensor | None]:
    """What every sequence that has a slot begins with, in the dtype of arithmetic."""
    flags = call.tensors.get("has_initial_state")
    have_state = [False] * len(slots) if flags is None else flags.tolist()
    return [
        None
        if slot is None
        else (pool[slot] if has_state else torch.zeros_like(pool[slot])).to(
            call.state_dtype, copy=True
        )
        for slot, has_state in zip(slots, have_state, strict=True)
    ]


def boundaries_of(call: Call, total: int) -> list[tuple[int, int]]:
    """The begin and end of every sequence; those out of range are moved into it."""
    bounds = call["cu_seqlens"].clamp(0, total).tolist()
    return [(begin, max(begin, end)) for begin, end in itertools.pairwise(bounds)]
