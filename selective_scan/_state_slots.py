"""Pools of states, from which the rows or the packed sequences of a call use some slots."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ._checks import BOOL, INTEGER, Call, fail
from ._table import Number, Shape, TensorArgument

# The arguments by which an operator's table assigns slots to its sequences.
SLOTS = (
    TensorArgument("cache_indices", INTEGER, ("sequences",), optional=True),
    TensorArgument("has_initial_state", BOOL, ("sequences",), optional=True),
    Number("pad_slot_id", -1),
)


def pool_of(*dims: str, indices: str = "cache_indices", rows: str = "sequences") -> Shape:
    """Returns the shape of a pool whose slots have dimensions `dims`. Without the argument
    `indices`, every row uses the slot of its own number."""
    return Shape((("slots", *dims),), where=indices, otherwise=((rows, *dims),))


def are_slots(name: str, indices: Tensor, slots: int, pad_slot_id: int) -> Tensor:
    """Returns a mask of the indices that name a slot and are not padding, for the references.
    Refuses an index past the last slot."""
    are_named = (indices >= 0) & (indices != pad_slot_id)
    beyond = indices[are_named & (indices >= slots)]
    if beyond.numel() > 0:
        fail(f"{name} must be less than slots = {slots}, got {beyond[0].item()}")
    return are_named


def slots_of_rows(call: Call, name: str, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the slot of every row of the batch, and whether the row has one.

    The argument `name` holds the slots; without it, every row uses the slot of its own number.
    """
    if name not in call.tensors:
        rows = torch.arange(call.sizes["batch"], device=pool.device)
        return rows, torch.ones_like(rows, dtype=torch.bool)
    pad_slot_id = call.options.get("pad_slot_id", -1)
    return call[name].long(), are_slots(name, call[name], len(pool), pad_slot_id)


def slots_named(call: Call, name: str, indices: Tensor, pool: Tensor) -> list[int | None]:
    """Returns the slots that the indices name, None for padding, read back to the host."""
    are_named = are_slots(name, indices, len(pool), call.options["pad_slot_id"])
    pairs = zip(indices.tolist(), are_named.tolist(), strict=True)
    return [index if is_named else None for index, is_named in pairs]


def slots_of(call: Call, pool: Tensor) -> list[int | None]:
    """Returns the slot of every sequence, None for padding."""
    if "cache_indices" not in call.tensors:
        return list(range(call.sizes["sequences"]))
    return slots_named(call, "cache_indices", call["cache_indices"], pool)


def first_states(call: Call, pool: Tensor, slots: list[int | None]) -> list[Tensor | None]:
    """Returns the initial state of every sequence, None without a slot, in the dtype of the
    arithmetic."""
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
    """Returns the begin and end of every sequence, clamped to the range of steps."""
    bounds = call["cu_seqlens"].clamp(0, total).tolist()
    return [(begin, max(begin, end)) for begin, end in itertools.pairwise(bounds)]
