"""The arguments of the scan over several ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

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
    input_delta: Tensor | None

    @property
    def ranks(self) -> Ranks:
        return Ranks.of(self.group, self.u.device, self.reverse)

    def local(self, entering: Tensor | None) -> tuple:
        """The arguments of the ops of one device, for this rank's steps, without cu_seqlens."""
        tensors = (self.u, self.delta, self.A, self.B, self.C, self.D, self.z, self.delta_bias)
        options = self.delta_softplus, self.discretization_method, entering, self.reverse
        return *tensors, *options, self.input_delta
