"""Models whose sequences are split over a mesh of devices."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from .._checks import MAX_WIDTH
from .._module_arguments import refuse
from ..cache import MixerCache
from ..s6 import S6, S6Layer
from .causal_conv1d import causal_conv1d_fn
from .selective_scan import selective_scan_fn


class _SequenceParallelLayer(S6Layer):
    """A layer that sees a rank's own steps, and what it needs of others' through collectives."""

    group: dist.ProcessGroup

    def forward(
        self, hidden: Tensor, *, cache: MixerCache | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        for name, value in (("cache", cache), ("cu_seqlens", cu_seqlens)):
            if value is not None:
                refuse(name, "None where a sequence is split over ranks", type(value).__name__)
        return super().forward(hidden)

    def _is_plain(self) -> bool:
        return False

    def _convolve(self, x: Tensor, _cu_seqlens: None) -> Tensor:
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        return causal_conv1d_fn(x, weight, bias, activation="silu", group=self.group)

    def _scan_steps(self, *arguments: Tensor, cu_seqlens: None = None, **options: object) -> Tensor:
        return selective_scan_fn(*arguments, **options, group=self.group)


def parallelize(model: S6, mesh: dist.DeviceMesh, *, sequence_dim: str | int) -> S6:
    """Has a model take sequences whose steps lie on the ranks of a mesh.

    Each rank passes its own steps, (batch, seqlen, d_model), in the order of the ranks, and gets
    the model's output for these. Ranks may have different numbers of steps. The parameters stay
    the same on every rank, and each rank's gradients are those of its own steps: put
    DistributedDataParallel or ``fully_shard`` around the model afterwards, over a group that has
    these ranks, to reduce them. A bidirectional model's second scan runs the ranks the other way.

    Args:
        model: is changed in place.
        mesh: of the ranks.
        sequence_dim: the dimension of the mesh over which sequences are split, by its name or its
            number.

    Returns:
        The model.

    Raises:
        TypeError: an argument is not of the type above.
        ValueError: the mesh has no such dimension, the model is parallel already, or its
            convolution is wider than 8.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from selective_scan import S6
        >>> from selective_scan.distributed import parallelize
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("sequence",))
        >>> model = parallelize(S6(d_model=32), mesh, sequence_dim="sequence")
        >>> model(torch.randn(2, 100, 32)).shape
        torch.Size([2, 100, 32])
        >>> dist.destroy_process_group()
    """
    for name, value, wanted in (("model", model, S6), ("mesh", mesh, dist.DeviceMesh)):
        if not isinstance(value, wanted):
            raise TypeError(
                f"selective_scan: {name} must be of type {wanted.__name__}, "
                f"got {type(value).__name__}"
            )
    names = mesh.mesh_dim_names or ()
    if sequence_dim not in (*names, *range(mesh.ndim)) or isinstance(sequence_dim, bool):
        numbers = ", ".join(map(str, (*names, *range(mesh.ndim))))
        refuse("sequence_dim", f"a dimension of the mesh, one of {numbers}", sequence_dim)
    for layer in model.layers:
        if type(layer) is not S6Layer:
            refuse("model", "of layers that are not parallel yet", type(layer).__name__)
        width = layer.conv1d.kernel_size[0]
        if width > MAX_WIDTH:
            refuse("model", f"one with d_conv of at most {MAX_WIDTH}", width)
    group = mesh.get_group(sequence_dim)
    for layer in model.layers:
        layer.__class__ = _SequenceParallelLayer
        layer.group = group
    return model
