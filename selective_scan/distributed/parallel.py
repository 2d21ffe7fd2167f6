"""Models whose sequences or channels are split over a mesh of devices."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from .._checks import MAX_WIDTH
from .._module_arguments import refuse
from .._table import fail_on_type
from ..s6 import S6, S6Layer
from . import _layers
from ._groups import check_backend


def parallelize(
    model: S6,
    mesh: dist.DeviceMesh,
    *,
    sequence_dim: str | int | None = None,
    tensor_dim: str | int | None = None,
) -> S6:
    """Splits the sequences that a model takes, its channels, or both over the ranks of a mesh.

    With `sequence_dim`, each rank passes its own steps, (batch, seqlen, d_model), in the order of
    the ranks, and gets the model's output for them. Ranks may have different numbers of steps. A
    bidirectional model's second scan runs through the ranks in reverse. The parameters are the same
    on every rank, and each rank's gradients are those of its own steps. To reduce them, wrap the
    model afterwards in ``fully_shard`` or DistributedDataParallel over a group with these ranks.

    With `tensor_dim`, each rank computes with d_inner / ranks of the inner channels. All ranks take
    the same input, (batch, seqlen, d_model), and return the same output. All parameters become
    DTensors over this dimension of the mesh. They keep their names and shapes, and have the values
    of the first rank. Create the optimizer afterwards, and apply ``fully_shard`` to the model over
    other dimensions of the mesh. x_proj and out_proj take one all-reduce each, of (batch, seqlen,
    dt_rank + 2·d_state) and (batch, seqlen, d_model), and as many in the backward pass.

    Args:
        model: changed in place.
        mesh: the mesh of the ranks.
        sequence_dim: the dimension of the mesh over which sequences are split, by its name or its
            number; None splits none.
        tensor_dim: the dimension over which channels are split, likewise.

    Returns:
        The model.

    Raises:
        TypeError: an argument is not of the type above.
        ValueError: the mesh has no such dimension, both are the same one, or neither is given; the
            mesh is of GPUs and its groups use gloo; the model is already parallel, or has rotating
            states or the trapezoid; d_inner is not a multiple of the ranks of `tensor_dim`;
            channels are split and an adapter replaces a part, another norm with weights replaces
            norm_f, or the convolution sums over channels; or sequences are split and the
            convolution is wider than 8. If sequences are split and the convolution has a hook or is
            not a plain layer, calls of the model raise the error; hooks registered for all modules
            do not see the convolution then.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from selective_scan import S6
        >>> from selective_scan.distributed import parallelize
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("sequence", "tensor"))
        >>> model = parallelize(S6(d_model=32), mesh, sequence_dim="sequence", tensor_dim="tensor")
        >>> model(torch.randn(2, 100, 32)).shape
        torch.Size([2, 100, 32])
        >>> dist.destroy_process_group()
    """
    for name, value, wanted in (("model", model, S6), ("mesh", mesh, dist.DeviceMesh)):
        if not isinstance(value, wanted):
            fail_on_type(name, f"of type {wanted.__name__}", value)
    sequences = _one_dimension("sequence_dim", sequence_dim, mesh)
    channels = _one_dimension("tensor_dim", tensor_dim, mesh)
    if sequences is None and channels is None:
        raise ValueError("selective_scan: sequence_dim or tensor_dim must be given, got neither")
    if sequences == channels:
        refuse("tensor_dim", "another dimension of the mesh than sequence_dim", tensor_dim)
    for dimension in (sequences, channels):
        if dimension is not None:
            check_backend("mesh", dimension.get_group(), mesh.device_type)
    for layer in model.layers:
        if type(layer) is not S6Layer:
            refuse("model", "of layers that are not parallel yet", type(layer).__name__)
        if layer.sizes.are_mamba3s:
            refuse("model", "one without rotary=True and the trapezoid", layer.extra_repr())
        width = layer.d_conv
        if sequences is not None and width > MAX_WIDTH:
            refuse("model", f"one with d_conv of at most {MAX_WIDTH}", width)
        if channels is not None and layer.d_inner % channels.size() != 0:
            refuse("model", f"one with d_inner a multiple of {channels.size()}", layer.d_inner)
        if channels is not None and (part := _layers.replaced_part(layer)) is not None:
            refuse("model", "one without adapters where channels are split", part)
        # A module of another kind that replaces the convolution may have no groups.
        groups = getattr(layer.conv1d, "groups", layer.d_inner)
        if channels is not None and groups != layer.d_inner:
            refuse("model", "one whose conv1d is depthwise where channels are split", f"{groups=}")
    kind, has_weights = type(model.norm_f), len([*model.norm_f.parameters()]) > 0
    if channels is not None and has_weights and kind is not nn.RMSNorm:
        wanted = "one whose norm_f is an nn.RMSNorm where channels are split"
        refuse("model", wanted, kind.__name__)
    for layer in model.layers:
        own = layer if channels is None else _layers.split_channels(layer, channels)
        if sequences is not None:
            _layers.split_steps(own, sequences)
    if channels is not None and has_weights:
        _layers.replicate_norm(model.norm_f, channels)
    return model


def _one_dimension(
    name: str, dim: str | int | None, mesh: dist.DeviceMesh
) -> dist.DeviceMesh | None:
    """Returns the submesh of this dimension, None if `dim` is None."""
    if dim is None:
        return None
    names = mesh.mesh_dim_names or ()
    if dim not in (*names, *range(mesh.ndim)) or isinstance(dim, bool):
        numbers = ", ".join(map(str, (*names, *range(mesh.ndim))))
        refuse(name, f"a dimension of the mesh, one of {numbers}", dim)
    if mesh.ndim == 1:
        return mesh
    if not names:
        refuse("mesh", "one with mesh_dim_names where it has several dimensions", mesh.ndim)
    return mesh[names[dim] if isinstance(dim, int) else dim]
