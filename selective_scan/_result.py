"""Declarations of an op's results, and their allocation by the fake kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import Call, size_of
from ._ops import ops

_STATES_PADDING = 2  # as in csrc/torch/scan_ops.h, where it is explained


@dataclass(frozen=True)
class Result:
    """A tensor that an op returns.

    Attributes:
        name: as in the schema of the op.
        dims: the names of the dimensions.
        dtype: returns the result's dtype for a call.
        like: the argument whose memory layout the result has.
        is_asked: returns whether a call returns the result or None. By default it always does.
    """

    name: str
    dims: tuple[str, ...]
    dtype: Callable[[Call], torch.dtype]
    like: str | None = None
    is_asked: Callable[[Call], bool] | None = None

    is_differentiable = True

    @property
    def optional(self) -> bool:
        return not self.is_differentiable or self.is_asked is not None

    def sizes(self, call: Call) -> list[int | torch.SymInt]:
        return [size_of(dim, call.sizes) for dim in self.dims]

    def allocate(self, call: Call, is_saved: bool) -> Tensor | None:
        if not (self.is_differentiable or is_saved):
            return None
        if self.is_asked is not None and not self.is_asked(call):
            return None
        dtype = self.dtype(call)
        if self.like is not None:
            return torch.empty_like(call[self.like], dtype=dtype)
        return call[call.anchor].new_empty(self.sizes(call), dtype=dtype)


def out_unless_given(like: str, dims: tuple[str, ...]) -> Result:
    """Returns the result of an op that may be given a tensor, out, to write it to; the argument
    `like` determines its dtype and layout."""
    return Result(
        "out",
        dims,
        lambda call: call[like].dtype,
        like=like,
        is_asked=lambda call: "out" not in call.tensors,
    )


@dataclass(frozen=True)
class Kept(Result):
    """A tensor saved for the backward op, which recomputes it if it is not given.

    It is None if no gradient is needed. If the op is its own fake kernel, only the name matters.

    Attributes:
        chunk: for the states of a scan, the op that returns the number of steps between two of
            them.
    """

    dims: tuple[str, ...] = ()
    dtype: Callable[[Call], torch.dtype] = lambda call: call.compute_dtype
    chunk: str | None = None

    is_differentiable = False

    def sizes(self, call: Call) -> list[int | torch.SymInt]:
        if self.chunk is None:
            return super().sizes(call)
        batch, dim, dstate, seqlen = (call.sizes[d] for d in ("batch", "dim", "dstate", "seqlen"))
        steps = getattr(ops, self.chunk)()
        num_states = (torch.sym_max(seqlen, 1) - 1) // steps
        return [num_states * batch * dim * dstate + _STATES_PADDING]
