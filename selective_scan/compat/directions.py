"""Mamba layers with several scan directions, as in the forks of Vim, VideoMamba and SegMamba."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .._discretization import poles
from .._layer_convolution import refuse_boundaries
from .._layer_input import checked_sequence
from .._library import warn_once
from .._mamba_operators import Layer
from .._module_arguments import check_choice, check_count, check_finite, check_flag, refuse
from .._plain_mixer import parameter, project
from ..cache import MixerCache
from ..mamba_inner import add, run_layer
from ..mamba_mixer import MambaMixer

# Functions that inspect their arguments must stay one node each in a torch.fx graph.
fx.wrap("checked_sequence")
fx.wrap("poles")
fx.wrap("refuse_boundaries")
fx.wrap("run_layer")


def mamba_inner_fn_no_out_proj(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
) -> Tensor:
    """Runs :func:`selective_scan.mamba_inner_fn` without the output projection, as in Vim's fork.

    Args:
        xz: the result of the layer's input projection, (batch, 2·dim, seqlen).
        conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight: see
            :func:`selective_scan.mamba_inner_fn`; likewise all following arguments.

    Returns:
        (batch, dim, seqlen), the transpose of an output projection's input.

    Raises:
        TypeError, RuntimeError, torch.OutOfMemoryError, ImportError: see
            :func:`selective_scan.mamba_inner_fn`.

    Example:
        >>> import torch
        >>> from selective_scan.compat.directions import mamba_inner_fn_no_out_proj
        >>> dim, dstate, rank = 8, 4, 2
        >>> weights = [(dim, 1, 4), (dim,), (rank + 2 * dstate, dim), (dim, rank)]
        >>> weights = [torch.randn(shape) for shape in weights]
        >>> A = -torch.rand(dim, dstate)
        >>> mamba_inner_fn_no_out_proj(torch.randn(2, 2 * dim, 20), *weights, A).shape
        torch.Size([2, 8, 20])
    """
    layer = Layer(
        *(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, None, None, A, None),
        *(B, C, D, delta_bias, B_proj_bias, C_proj_bias, delta_softplus),
    )
    return run_layer(layer).transpose(1, 2)


def bimamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    A_b: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
) -> Tensor:
    """Runs :func:`selective_scan.mamba_inner_fn` with a second, reverse scan, as in Vim's fork.

    The second scan has the same inputs and the poles A_b, and runs from the last step to the first.
    Each scan applies D and the gate, and both are added before the output projection. In contrast,
    the scans of ``mamba_inner_fn(…, bidirectional=True)`` share poles, and D·x is added once.

    Args:
        xz: the result of the layer's input projection, (batch, 2·dim, seqlen).
        conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight: see
            :func:`selective_scan.mamba_inner_fn`; likewise all following arguments but A_b.
        A_b: poles of the second scan, like A, (dim, dstate); complex if A is complex.

    Returns:
        (batch, seqlen, d_model).

    Raises:
        TypeError, RuntimeError, torch.OutOfMemoryError, ImportError: see
            :func:`selective_scan.mamba_inner_fn`.

    Example:
        >>> import torch
        >>> from selective_scan.compat.directions import bimamba_inner_fn
        >>> dim, dstate, rank = 8, 4, 2
        >>> weights = [(dim, 1, 4), (dim,), (rank + 2 * dstate, dim), (dim, rank), (6, dim)]
        >>> weights = [torch.randn(shape) for shape in weights]
        >>> A, A_b = -torch.rand(2, dim, dstate)
        >>> bimamba_inner_fn(torch.randn(2, 2 * dim, 20), *weights, None, A, A_b).shape
        torch.Size([2, 20, 6])
    """
    if not isinstance(A_b, Tensor):
        raise TypeError(f"selective_scan: A_b must be a Tensor, got {type(A_b).__name__}")
    layer = Layer(
        *(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, None, None, A, A_b),
        *(B, C, D, delta_bias, B_proj_bias, C_proj_bias, delta_softplus),
    )
    rows = run_layer(layer)
    bias = None if out_proj_bias is None else out_proj_bias.to(rows.dtype)
    return F.linear(rows, out_proj_weight.to(rows.dtype), bias)


# --- layers ---------------------------------------------------------------------------------------


def _as_it_is(rows: Tensor, _nslices: int) -> Tensor:
    return rows


def _turned(rows: Tensor, _nslices: int) -> Tensor:
    return rows.flip(1)


def _across_slices(rows: Tensor, nslices: int) -> Tensor:
    """Orders the steps such that the first steps of all slices come first, then the second ones."""
    return _exchange(rows, nslices, is_back=False)


def _along_slices(rows: Tensor, nslices: int) -> Tensor:
    return _exchange(rows, nslices, is_back=True)


@fx.wrap
def _exchange(rows: Tensor, nslices: int, is_back: bool) -> Tensor:
    seqlen = rows.shape[1]
    if seqlen % nslices != 0:
        refuse("seqlen", f"a multiple of nslices = {nslices}", seqlen)
    sizes = nslices, seqlen // nslices
    return rows.unflatten(1, sizes[::-1] if is_back else sizes).transpose(1, 2).flatten(1, 2)


class _Direction(NamedTuple):
    """A scan direction: the suffix in the names of its parts, and `there`, which brings the steps
    of rows, (batch, seqlen, channels), into its order; `back` undoes `there`."""

    suffix: str = ""
    there: Callable[[Tensor, int], Tensor] = _as_it_is
    back: Callable[[Tensor, int], Tensor] = _as_it_is
    has_second_poles: bool = False


_THERE, _BACK = _Direction(), _Direction("_b", _turned, _turned)
_DIRECTIONS = {
    "none": (_THERE,),
    "v1": (_Direction(has_second_poles=True),),
    "v2": (_THERE, _BACK),
    "v3": (_THERE, _BACK, _Direction("_s", _across_slices, _along_slices)),
}


class DirectedMixer(MambaMixer):
    """:class:`MambaMixer` with several directions, each of which has its own parts between in_proj
    and out_proj, and with a scaled result. See :class:`.mamba_simple.Mamba`."""

    _marked = ("A_log", "D", "A_b_log", "D_b", "A_s_log", "D_s")
    _input_name = "hidden_states"
    use_fast_path = True
    # Values for use while the constructor of MambaMixer runs.
    bimamba_type = "none"
    init_layer_scale: float | None = None

    def _add_directions(
        self,
        bimamba_type: str | None,
        if_divide_out: bool,
        init_layer_scale: float | None,
        nslices: int | None,
        bimamba: bool,
    ) -> None:
        if bimamba_type is None:
            bimamba_type = "none"
        check_choice("bimamba_type", bimamba_type, tuple(_DIRECTIONS))
        check_flag("if_divide_out", if_divide_out)
        if nslices is None:
            nslices = 5
            if bimamba_type == "v3":
                warn_once(
                    "bimamba_type='v3' without nslices adds its three directions, as in SegMamba; "
                    "Vivim's own Mamba divides this sum by 3, for which if_divide_out must be True"
                )
        check_count("nslices", nslices)
        check_flag("bimamba", bimamba)
        if bimamba:
            if bimamba_type not in ("none", "v2"):
                refuse("bimamba_type", "'none' or 'v2' where bimamba=True", bimamba_type)
            bimamba_type = "v2"
        self.bimamba_type = bimamba_type
        self.bidirectional = bimamba_type != "none"
        self.if_divide_out = if_divide_out
        self.nslices = nslices
        # An optimizer's state identifies parameters by order, so the order is that of the forks.
        out_proj, poles_and_skip = self.out_proj, (self.A_log, self.D)
        del self.out_proj, self.A_log, self.D
        if init_layer_scale is not None:
            check_finite("init_layer_scale", init_layer_scale)
            self.init_layer_scale = init_layer_scale
            self.gamma = nn.Parameter(torch.empty(self.d_model, **_like(poles_and_skip[0])))
        self.A_log, self.D = poles_and_skip
        for direction in _DIRECTIONS[bimamba_type]:
            if direction.has_second_poles:
                self.A_b_log = nn.Parameter(torch.empty_like(self.A_log))
            if direction.suffix:
                self._add_parts(direction.suffix)
        self.out_proj = out_proj

    def _add_parts(self, suffix: str) -> None:
        for name in ("conv1d", "x_proj"):
            part = copy.deepcopy(self.get_submodule(name))
            part.reset_parameters()
            self.add_module(f"{name}{suffix}", part)
        dt_proj = nn.Linear(self.dt_rank, self.d_inner, **_like(self.conv1d.weight))
        self.add_module(f"dt_proj{suffix}", dt_proj)
        setattr(self, f"A{suffix}_log", nn.Parameter(torch.empty_like(self.A_log)))
        setattr(self, f"D{suffix}", nn.Parameter(torch.empty_like(self.D)))

    @torch.no_grad()
    def _reset_poles(self) -> None:
        super()._reset_poles()
        for name in self._marked[2:]:
            if name in self._parameters:
                self._parameters[name].copy_(self.D if name.startswith("D") else self.A_log)
        if self.init_layer_scale is not None:
            self.gamma.fill_(self.init_layer_scale)

    def _run(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cache: MixerCache | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        if self.bimamba_type == "none":
            if self.init_layer_scale is None or cache is not None:
                return super()._run(hidden, residual, cache, cu_seqlens)
            return add(residual, self._scale(super()._run(hidden, None, None, cu_seqlens)))
        hidden = checked_sequence(self._input_name, hidden, self.d_model)
        if cache is not None:
            self._refuse_states()
        refuse_boundaries(cu_seqlens, "bimamba_type is not 'none'")
        xz = self._project_input(hidden)
        first, *others = (
            self._run_direction(xz, direction) for direction in _DIRECTIONS[self.bimamba_type]
        )
        y = sum(others, start=first)
        if self.if_divide_out and self.bimamba_type != "v1":
            y = y / (1 + len(others))
        return add(residual, self._scale(project(self.out_proj, y)))

    def _run_direction(self, xz: Tensor, direction: _Direction) -> Tensor:
        """Computes one direction's input of out_proj, in the order of xz."""
        suffix = direction.suffix
        A_log, D = getattr(self, f"A{suffix}_log"), getattr(self, f"D{suffix}")
        A, A_b = poles(A_log), poles(self.A_b_log) if direction.has_second_poles else None
        if self.use_fast_path and self._has_plain_parts(suffix):
            is_turned = direction.there is _turned
            rows = xz if is_turned else direction.there(xz, self.nslices)
            conv1d, x_proj, dt_proj = (
                self._modules[f"{name}{suffix}"] for name in ("conv1d", "x_proj", "dt_proj")
            )
            layer = Layer(
                xz=rows.transpose(1, 2),
                conv1d_weight=parameter(conv1d, "weight"),
                conv1d_bias=parameter(conv1d, "bias"),
                x_proj_weight=parameter(x_proj, "weight"),
                delta_proj_weight=parameter(dt_proj, "weight"),
                A=A,
                A_b=A_b,
                D=D,
                delta_bias=parameter(dt_proj, "bias"),
                reverse=is_turned,
                **self._scan_options(),
            )
            y = run_layer(layer)
            return y if is_turned else direction.back(y, self.nslices)
        x, z = direction.there(xz, self.nslices).transpose(1, 2).chunk(2, dim=1)
        x = self._convolve(x, None, suffix)
        delta, B, C, delta_bias = self._project(x, suffix)
        options = {"delta_bias": delta_bias, **self._scan_options()}
        y = self._scan_steps(x, delta, A, B, C, D, z, **options)
        if A_b is not None:
            y = y + self._scan_steps(x, delta, A_b, B, C, D, z, **options, reverse=True)
        return direction.back(y.transpose(1, 2), self.nslices)

    def _go_on(self, hidden: Tensor, cache: MixerCache) -> Tensor:
        return self._scale(super()._go_on(hidden, cache))

    def _scale(self, out: Tensor) -> Tensor:
        """Scales out by gamma, and keeps its dtype, although gamma's may be wider, like A_log's."""
        return out if self.init_layer_scale is None else (out * self.gamma).to(out.dtype)

    def _refuse_states(self) -> None:
        if self.bimamba_type != "none":
            reason = "for lack of the steps to come"
            wanted = f"'none' where a call goes on from states or leaves some, {reason}"
            refuse("bimamba_type", wanted, self.bimamba_type)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bimamba_type='{self.bimamba_type}'"


def _like(tensor: Tensor) -> dict[str, object]:
    return {"device": tensor.device, "dtype": tensor.dtype}
