"""The ranks that share a call, and their collectives.

Ops are given a group by its name, like PyTorch's functional collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _pytorch
from .._operator import type_of
from .._table import fail_on_type

Group = dist.ProcessGroup | dist.DeviceMesh | None
# The groups given so far, for a PyTorch that cannot find a group by its name.
_seen_groups: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()


@dataclass(frozen=True)
class GroupName:
    """An argument of an op: the name of a group."""

    name: str = "group"
    type = str
    default = None
    optional = False

    def check_type(self, value: object) -> None:
        if not isinstance(value, str):
            fail_on_type("group", "the name of a group", value)

    def check_value(self, value: str) -> None:
        """Does nothing, since PyTorch itself refuses an unknown name."""


def name_of(group: Group) -> str:
    """Returns the name of the group that a caller gave; None is the default group."""
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                "selective_scan: group must be a ProcessGroup or a DeviceMesh of one dimension, "
                f"got a mesh of {group.ndim}"
            )
        group = group.get_group()
    elif group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError(
                "selective_scan: group must be a ProcessGroup or a DeviceMesh, got None, and there "
                "is no default group: call torch.distributed.init_process_group first"
            )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("selective_scan: group must have this rank as a member")
    if not isinstance(group, dist.ProcessGroup):
        fail_on_type("group", "a ProcessGroup, a DeviceMesh or None", group)
    if _pytorch.resolve_process_group is None:
        _seen_groups[group.group_name] = group
    return group.group_name


def check_backend(name: str, group: dist.ProcessGroup, device: str) -> None:
    """Raises a ValueError if the group cannot exchange tensors on devices of type `device`; `name`
    is the name of the argument that holds the group."""
    pairs = dist.get_backend_config(group).split(",")
    # Gloo's all-gather into one tensor reads GPU memory as host memory, which ends the process.
    if device != "cpu" and f"{device}:gloo" in pairs:
        raise ValueError(
            f"selective_scan: {name} must have a backend for tensors on {device}, such as nccl, "
            "got gloo"
        )


@dataclass(slots=True)
class Ranks:
    """The ranks of a group in the order in which a sequence runs through them.

    Attributes:
        group: the process group.
        count: the number of ranks.
        place: the position of this rank in the order.
        backwards: whether the order is from the last rank to the first.
    """

    group: dist.ProcessGroup
    count: int
    place: int
    backwards: bool

    @staticmethod
    def of(name: str, device: torch.device, backwards: bool = False) -> Ranks:
        """Returns the ranks of the group of this name, to exchange tensors on `device`."""
        group = (_pytorch.resolve_process_group or _seen_groups.__getitem__)(name)
        check_backend("group", group, type_of(device))
        count, rank = group.size(), group.rank()
        return Ranks(group, count, count - 1 - rank if backwards else rank, backwards)

    @property
    def is_first(self) -> bool:
        return self.place == 0

    def gather(self, tensor: Tensor) -> Tensor:
        """Gathers every rank's `tensor`, in the order of the sequence, along a new first
        dimension."""
        if self.count == 1 or tensor.numel() == 0:
            return tensor.expand(self.count, *tensor.shape)
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        gathered = _all_gather(real.contiguous(), self.count, self.group)
        gathered = gathered.view(self.count, *real.shape)
        if self.backwards:
            gathered = gathered.flip(0)
        return torch.view_as_complex(gathered) if tensor.is_complex() else gathered

    def sum(self, tensors: list[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
        """Returns the sums over all ranks, accumulated in `dtype` by one collective."""
        if self.count == 1:
            return tensors
        present = [tensor for tensor in tensors if tensor is not None]
        real = [torch.view_as_real(it) if it.is_complex() else it for it in present]
        parts = [tensor.to(dtype).flatten() for tensor in real]
        total = _all_reduce(torch.cat(parts), self.group)
        rows = iter(total.split([part.numel() for part in parts]))
        return [None if tensor is None else _from_row(next(rows), tensor) for tensor in tensors]


def _from_row(row: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        row = torch.view_as_complex(row.view(*like.shape, 2))
    # Results of an op must not share memory.
    return row.view(like.shape).to(like.dtype, copy=True)


# Functional collectives have fake kernels, which torch.compile needs. The others take less host
# time and run in the current stream.


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not _pytorch.num_modes()


def _all_gather(tensor: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenates all ranks' tensors along the first dimension."""
    if _pytorch.functional_all_gather is None or _is_plain(tensor):
        gathered = tensor.new_empty(count * len(tensor), *tensor.shape[1:])
        _pytorch.all_gather(gathered, tensor, group)
        return gathered
    gathered = _pytorch.functional_all_gather(tensor, count, group.group_name)
    return _pytorch.functional_wait(gathered)


def _all_reduce(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum over the ranks; may overwrite `own`."""
    if _pytorch.functional_all_reduce is None or _is_plain(own):
        dist.all_reduce(own, group=group)
        return own
    total = _pytorch.functional_all_reduce(own, "sum", group.group_name)
    return _pytorch.functional_wait(total)
