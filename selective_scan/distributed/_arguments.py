"""The arguments of the scan over several ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._ops import ops
from ._groups import Ranks


@dataclass(slots=True)
class ScanArguments:
    """Those of the forward op."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None
    delta_softplus: bool
    discretization_method: str
    initial_state: Tensor | None
    reverse: bool
    return_last_state: bool
    reduce_gradients: bool
    group: str

    @property
    def ranks(self) -> Ranks:
        return Ranks.of(self.group, self.u.device, self.reverse)

    @property
    def state_dtype(self) -> torch.dtype:
        tensors = (getattr(self, name) for name in self.__slots__)
        dtypes = [tensor.dtype for tensor in tensors if isinstance(tensor, Tensor)]
        is_double = torch.float64 in dtypes or torch.complex128 in dtypes
        real = torch.float64 if is_double else torch.float32
        return real.to_complex() if self.A.is_complex() else real

    def zeros(self, *maps: int) -> Tensor:
        """A state, or as many as a map has."""
        shape = (self.u.shape[0], *maps, *self.A.shape)
        return self.u.new_zeros(shape, dtype=self.state_dtype)

    def options(self, initial_state: Tensor | None) -> tuple:
        """The last arguments of the ops of one device."""
        return self.delta_softplus, self.discretization_method, initial_state, self.reverse

    def local(self, entering: Tensor) -> tuple:
        """The arguments of the ops of one device, for this rank's steps, up to cu_seqlens."""
        tensors = (self.u, self.delta, self.A, self.B, self.C, self.D, self.z, self.delta_bias)
        return *tensors, *self.options(entering)

    def segment_map(self) -> Tensor:
        """What this rank's steps do to the state that enters them, h → factor·h + offset:
        (batch, 2, dim, dstate)."""
        tensors = (self.u, self.delta, self.A, self.B, self.C, None, None, self.delta_bias)
        return ops.selective_scan_segment_map(*tensors, *self.options(None))

    def state_gradient(self, dout: Tensor, entering: Tensor) -> Tensor:
        """The gradient of the state that enters, of this rank's outputs alone."""
        return ops.selective_scan_state_gradient(*self.local(entering), dout)

    def differentiate(
        self, dout: Tensor | None, leaving: Tensor | None, entering: Tensor, states: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of this rank's steps; `leaving` is that of the state behind them."""
        return ops.selective_scan_bwd(dout, leaving, *self.local(entering), None, None, states)
