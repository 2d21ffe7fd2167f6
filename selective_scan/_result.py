"""What an op returns: a declaration, and the fake kernels' allocation of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import Call, Dtypes
from ._ops import ops

_STATES_PADDING = 2  # as in csrc/torch/scan_ops.h, where it is explained


@dataclass(frozen=True)
class Result:
    """A tensor that an op returns.

    Attributes:
        name: as in the schema of the op.
        dims: the names of its dimensions, or a size that is always the same.
        dtype: what finds its dtype.
        like: the argument as which it is laid out.
        chunk: for states that the backward op wants, the op that gives the number of steps from one
            to the next. They are not differentiable; None, where none are to be saved.
        is_kept: whether it is for the backward op alone, as such states are.
        recomputed: whether the backward op computes what is kept if it is not given it.
        stands_for: the argument in place of which the backward op is given it, unless it is None.
        gradient_dtypes: those that its gradient may have, where the backward op is not given what
            decides the result's own.
        is_asked: whether it is returned; if not, it is None. Left out, it always is.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: Callable[[Call], torch.dtype]
    like: str | None = None
    chunk: str | None = None
    is_kept: bool = False
    recomputed: bool = False
    stands_for: str | None = None
    gradient_dtypes: Dtypes = ()
    is_asked: Callable[[Call], bool] | None = None

    @property
    def is_optional(self) -> bool:
        return not self.is_differentiable or self.is_asked is not None

    @property
    def is_differentiable(self) -> bool:
        return self.chunk is None and not self.is_kept

    def sizes(self, call: Call) -> list[int | torch.SymInt]:
        if self.chunk is None:
            return [dim if isinstance(dim, int) else call.sizes[dim] for dim in self.dims]
        batch, dim, dstate, seqlen = (call.sizes[d] for d in ("batch", "dim", "dstate", "seqlen"))
        steps = getattr(ops, self.chunk)()
        num_states = (torch.sym_max(seqlen, 1) - 1) // steps
        return [num_states * batch * dim * dstate + _STATES_PADDING]

    def allocate(self, call: Call, is_saved: bool) -> Tensor | None:
        if not (self.is_differentiable or is_saved):
            return None
        if self.is_asked is not None and not self.is_asked(call):
            return None
        dtype = self.dtype(call)
        if self.like is not None:
            return torch.empty_like(call[self.like], dtype=dtype)
        return call[call.anchor].new_empty(self.sizes(call), dtype=dtype)
