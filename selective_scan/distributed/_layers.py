"""Layers in which each rank computes its own steps, its own channels, or both."""

from __future__ import annotations

import copy
import re

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.func import functional_call

from .._layer_input import checked_sequence
from .._mamba_weights import LAYER_NAMES
from .._module_arguments import refuse
from .._plain_mixer import has_plain_weights, weights_of
from .._plain_stack import LAYER_OPTIONS
from ..cache import MixerCache
from ..mamba_inner import layer_in_one
from ..s6 import S6Layer
from ._groups import name_of
from ._mamba_inner import MAMBA_INNER_OF_RANKS
from .causal_conv1d import causal_conv1d_fn
from .selective_scan import selective_scan_fn

# How a layer's parameters are sharded by channels; all others are replicated.
_CHANNELS = {
    "in_proj.weight": Shard(0),
    "in_proj.bias": Shard(0),
    "conv1d.weight": Shard(0),
    "conv1d.bias": Shard(0),
    "x_proj.weight": Shard(1),
    "dt_proj.weight": Shard(0),
    "dt_proj.bias": Shard(0),
    "out_proj.weight": Shard(1),
    "A_log": Shard(0),
    "D": Shard(0),
}
# The attributes in which nn.Module keeps the hooks of its calls.
_HOOKS = [name for name in vars(nn.Module()) if re.match("_(forward|backward)_|_is_full_", name)]


def replaced_part(layer: S6Layer) -> str | None:
    """Returns the name of a projection that is not an nn.Linear, or of a parameter that Mamba does
    not have, if there is one."""
    names = [name for name in _PROJECTIONS if type(layer.get_submodule(name)) is not nn.Linear]
    names += [name for name, _ in layer.named_parameters() if name not in LAYER_NAMES]
    return names[0] if names else None


def split_steps(layer: S6Layer, mesh: DeviceMesh) -> None:
    """Makes a layer compute its steps as part of a sequence split over a mesh of one dimension.

    The layer keeps the mesh, since with a process group it could not be copied or pickled.
    """
    layer.__class__ = _OwnSteps
    layer.mesh = mesh


def split_channels(layer: S6Layer, mesh: DeviceMesh) -> S6Layer:
    """Makes the parameters DTensors over the mesh, which has one dimension. Returns the layer that
    computes with this rank's shards of them."""
    own = copy.deepcopy(layer).to("meta")
    own.d_inner //= mesh.size()
    own.conv1d.in_channels = own.conv1d.out_channels = own.conv1d.groups = own.d_inner
    own.__class__ = _OwnPart
    for name, kind in _PROJECTIONS.items():
        projection = own.get_submodule(name)
        projection.__class__ = kind
        projection.mesh = mesh
    _share_hooks(layer, own)
    layer.__class__ = _OwnChannels
    layer.own = [own]  # in a list, so that its parameters are not registered with the layer
    _distribute_parameters(layer, mesh, _CHANNELS)
    return own


def _share_hooks(layer: S6Layer, own: S6Layer) -> None:
    """Makes the hooks of a layer's submodules, including later ones, run when `own` calls its
    submodules. The hooks of the layer run only in the call of the layer itself."""
    none = vars(nn.Module())
    vars(own).update({name: none[name] for name in _HOOKS})
    for part, twin in zip(layer.children(), own.children(), strict=True):
        vars(twin).update({name: vars(part)[name] for name in _HOOKS})
        if twin._is_full_backward_hook is None:  # backward hooks registered later are full ones
            twin._is_full_backward_hook = True


def replicate_norm(norm: nn.RMSNorm, mesh: DeviceMesh) -> None:
    norm.__class__ = _ReplicatedNorm
    _distribute_parameters(norm, mesh, {})


def _distribute_parameters(
    module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]
) -> None:
    """Makes a module's parameters DTensors with the values of the mesh's first rank."""
    for name, parameter in list(module.named_parameters()):
        placement = placements.get(name, Replicate())
        tensor = distribute_tensor(parameter.detach(), mesh, [placement])
        distributed = nn.Parameter(tensor, parameter.requires_grad)
        distributed.__dict__.update(parameter.__dict__)  # marks for optimizers
        *path, last = name.split(".")
        setattr(module.get_submodule(".".join(path)), last, distributed)


class _OwnPart(S6Layer):
    """A layer that computes a part of the steps or of the channels."""

    def _run(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cache: MixerCache | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        for name, value in (("cache", cache), ("cu_seqlens", cu_seqlens)):
            if value is not None:
                refuse(name, "None where a model is split over ranks", type(value).__name__)
        out = self._run_in_one(hidden, residual)
        return super()._run(hidden, residual, None, None) if out is None else out

    def _run_in_one(self, hidden: Tensor, residual: Tensor | None) -> Tensor | None:
        """Returns the layer's output by one operator, None if no operator serves it."""

    def _is_plain(self) -> bool:
        return False


class _OwnSteps(_OwnPart):
    """A layer that computes its rank's steps, and gets data of other ranks' through collectives."""

    mesh: DeviceMesh

    def _run_in_one(self, hidden: Tensor, residual: Tensor | None) -> Tensor | None:
        in_proj = self.in_proj
        if not (S6Layer._is_plain(self) and has_plain_weights(in_proj, nn.Linear)):
            return None
        return layer_in_one(
            MAMBA_INNER_OF_RANKS,
            (name_of(self.mesh),),
            checked_sequence(self._input_name, hidden, self.d_model),
            weights_of(self, in_proj),
            self._layer_options(None),
            residual,
        )

    def _convolve(self, x: Tensor, _cu_seqlens: None) -> Tensor:
        if not self._has_plain_convolution(can_be_called=False):
            kind = type(self.conv1d).__name__
            refuse("conv1d", "a plain layer without hooks where sequences are split", kind)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        return causal_conv1d_fn(x, weight, bias, activation="silu", group=self.mesh)

    def _scan_steps(self, *arguments: Tensor, cu_seqlens: None = None, **options: object) -> Tensor:
        return selective_scan_fn(*arguments, **options, group=self.mesh)


class _OwnChannels(S6Layer):
    """A layer that holds the parameters as DTensors. `own` computes with this rank's shards."""

    own: list[S6Layer]

    def __setattr__(self, name: str, value: object) -> None:
        """Does what the layer does. Options also reach `own`, which computes with its own ones."""
        super().__setattr__(name, value)
        if name in LAYER_OPTIONS:
            setattr(self.own[0], name, value)

    def forward(self, hidden: Tensor, **options: object) -> Tensor:
        parts = {
            name: _own_rows(parameter) if name.startswith("in_proj.") else parameter.to_local()
            for name, parameter in self.named_parameters()
        }
        return functional_call(self.own[0], parts, (hidden,), options)


def _own_rows(parameter: DTensor) -> Tensor:
    """Returns this rank's rows for x and for z. The parameter itself is sharded without regard to
    the two, so that a checkpoint has the layout of an unsplit layer."""
    mesh = parameter.device_mesh
    whole = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    rows = whole.unflatten(0, (2, mesh.size(), -1))[:, mesh.get_local_rank()]
    return rows.flatten(0, 1)


def _sum(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the sum over the ranks. Its gradient is the gradient of each part."""
    partial = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    return partial.redistribute(placements=[Replicate()]).to_local()


def _sum_gradients(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns the tensor, which is the same on all ranks; its gradient is summed over the ranks."""
    replicated = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])


class _InProjection(nn.Linear):
    mesh: DeviceMesh

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(_sum_gradients(hidden, self.mesh))


class _SummedProjection(nn.Linear):
    mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        out = _sum(F.linear(x, self.weight), self.mesh)
        return out if self.bias is None else out + self.bias


class _SharedProjection(_SummedProjection):
    def forward(self, x: Tensor) -> Tensor:
        return _sum_gradients(super().forward(x), self.mesh)


class _ReplicatedNorm(nn.RMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.normalized_shape, self.weight.to_local(), self.eps)


_PROJECTIONS = {
    "in_proj": _InProjection,
    "x_proj": _SharedProjection,
    "out_proj": _SummedProjection,
}
