"""Calls with DTensors: every rank calls the op with its own rows of the batch, or its own channels.

The sharding of an operator's anchor tensor determines that of all others.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ._batching import by_batch
from ._module_arguments import refuse
from ._result import Result
from ._table import Table, TensorArgument

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def are_distributed(arguments: Sequence) -> bool:
    """Returns whether a DTensor is among the arguments, which requires that its module has been
    imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(it, module.DTensor) for it in arguments)


def call_sharded(
    operator: Callable, name: str, table: Table, declared: Sequence[Result], arguments: Sequence
) -> tuple | DTensor:
    """Returns the results of an operator of this name, table and results, sharded like its anchor.
    Saved states stay local to the rank. The operator, or the reference that is called in its place,
    may leave out the last results.

    A tensor without the sharded dimension is replicated, and its gradient is the sum over the
    ranks. Results need no communication, and neither do arguments that are already placed as
    required.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    call = table.check_values(arguments)
    anchor = call[table.anchor]
    for argument, tensor in call.tensors.items():
        if not isinstance(tensor, DTensor):
            refuse(argument, f"a DTensor as other arguments of {name} are", type(tensor))
    mesh = anchor.device_mesh
    kinds = {argument.name: argument for argument in table.tensors}
    anchor_dims = _dims(kinds[table.anchor], anchor)
    if not {"batch", "dim"} <= set(anchor_dims):
        raise NotImplementedError(f"selective_scan: {name} takes no DTensors")
    split = _split_dims(table.anchor, anchor_dims, anchor)
    groups = {f"groups of {name}": size for name, size in call.groups.items() if size > 1}
    for dim, others in (("batch", {}), ("dim", groups)):
        count = math.prod([mesh.size(i) for i, it in enumerate(split) if it == dim])
        for what, size in {dim: call.sizes[dim], **others}.items():
            if size % count != 0:
                refuse(
                    table.anchor, f"sharded over ranks whose number divides {what} = {size}", count
                )

    def placements(dims: Sequence[str], other: Placement) -> list[Placement]:
        return [
            Replicate() if it is None else Shard(dims.index(it)) if it in dims else other
            for it in split
        ]

    def local(name: str, tensor: DTensor) -> Tensor:
        dims = _dims(kinds[name], tensor)
        wanted = placements(dims, Replicate())
        if kinds[name].is_changed and [*tensor.placements] != wanted:
            # Otherwise the changes would be those of a copy.
            refuse(name, f"placed as {wanted}, since it is changed in place", tensor.placements)
        own = tensor.redistribute(mesh, wanted)
        return own.to_local(grad_placements=placements(dims, Partial()))

    given = dict(zip(table.names, arguments, strict=True))
    given |= {name: local(name, tensor) for name, tensor in call.tensors.items()}
    results = operator(*given.values())
    alone = isinstance(results, Tensor)
    whole = [
        DTensor.from_local(it, mesh, placements(by_batch(result.dims), Replicate()))
        if isinstance(it, Tensor) and result.is_differentiable
        else it
        for it, result in zip((results,) if alone else results, declared, strict=False)
    ]
    return whole[0] if alone else tuple(whole)


def _split_dims(name: str, dims: Sequence[str], anchor: DTensor) -> list[str | None]:
    """Returns the dimension that each mesh dimension shards, None if it replicates."""
    from torch.distributed.tensor import Replicate, Shard

    split = []
    for placement in anchor.placements:
        dim = dims[placement.dim] if isinstance(placement, Shard) else None
        if dim not in ("batch", "dim") and not isinstance(placement, Replicate):
            raise ValueError(
                f"selective_scan: {name} must be replicated, or sharded by batch or by channels, "
                f"got {placement!r}; selective_scan.distributed has functions for steps that lie "
                "on several ranks"
            )
        split.append(dim)
    return split


def _dims(argument: TensorArgument, tensor: Tensor) -> tuple[str, ...]:
    """Returns the names of a tensor's dimensions, where several groups of channels count as "dim",
    since they are sharded with the channels."""
    dims = by_batch(argument.dims_of(tensor))
    if "groups" in dims and tensor.shape[dims.index("groups")] > 1:
        return tuple("dim" if dim == "groups" else dim for dim in dims)
    return dims
