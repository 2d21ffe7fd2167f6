"""The parts of Mamba-3 that a layer supports: steps that take their input from both ends (the
exponential trapezoid), rotating states, and norms and biases of B and C."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ._discretization import METHODS, LayerMethod, at_least_single, poles, steps_of_sequences
from ._mamba_weights import NORM_EPS
from ._module_arguments import check_flag, refuse
from .cache import MixerCache
from .diagonal_scan import diagonal_scan_fn
from .exponential_trapezoid import exponential_trapezoid_fn
from .functional import selective_scan_fn
from .rotation import rotate_states
from .step_projection import project_steps

if TYPE_CHECKING:
    from .mamba_mixer import MambaMixer


class Sizes(NamedTuple):
    """The split of x_proj's output channels. Every layer has the first three parts.

    Attributes:
        dt, B, C: dt_rank, d_state, d_state.
        mix: the input of mix_proj, dt_rank channels if the method is the trapezoid, else 0.
        turns: the angle of every pair of states, d_state/2 channels if states rotate, else 0.
    """

    dt: int
    B: int
    C: int
    mix: int = 0
    turns: int = 0

    @classmethod
    def of(cls, dt_rank: int, d_state: int, method: LayerMethod, rotary: bool) -> Sizes:
        check_flag("rotary", rotary)
        if rotary and d_state % 2:
            refuse("d_state", "even where rotary=True, since pairs of states rotate", d_state)
        mix = dt_rank if method == "trapezoid" else 0
        return cls(dt_rank, d_state, d_state, mix, d_state // 2 if rotary else 0)

    def check_option(self, name: str, value: object) -> None:
        """Raises a ValueError if the option, of this name, needs parameters of other sizes."""
        if name == "rotary":
            kept, is_kept = repr(self.turns > 0), value is (self.turns > 0)
        else:
            choices = ("trapezoid",) if self.mix else METHODS
            kept, is_kept = f"one of {', '.join(choices)}", value in choices
        if not is_kept:
            refuse(name, f"{kept} in this layer, because others need other parameters", value)

    @property
    def are_mamba3s(self) -> bool:
        return self.mix + self.turns > 0


def add_parts(mixer: MambaMixer, where: dict[str, object]) -> None:
    """Adds the modules and parameters that this file needs to a layer, under Mamba-3's names."""
    sizes = mixer.sizes
    if sizes.mix:
        mixer.mix_proj = nn.Linear(sizes.mix, mixer.d_inner, **where)
    for name, size in (("B", sizes.B), ("C", sizes.C)):
        setattr(mixer, f"{name}_norm", nn.RMSNorm(size, eps=NORM_EPS, **where))
        setattr(mixer, f"{name}_bias", nn.Parameter(torch.empty(size, **where)))


def scan_as_mamba3(
    mixer: MambaMixer,
    x: Tensor,
    z: Tensor,
    cu_seqlens: Tensor | None,
    cache: MixerCache | None,
) -> Tensor:
    """Computes the part of such a layer between its convolution and out_proj.

    x is (batch, d_inner, seqlen). If there is a cache, the scan continues from its states.
    """
    dt, B, C, mix, turns = mixer.x_proj(x.transpose(1, 2)).split_with_sizes(mixer.sizes, -1)
    delta, delta_bias = project_steps(mixer.dt_proj, dt)
    return _scan(
        *(x, delta.transpose(1, 2), mixer.A_log),
        *(_normed(mixer.B_norm, B, mixer.B_bias), _normed(mixer.C_norm, C, mixer.C_bias)),
        *(mixer.D, z, delta_bias, mixer.dt_soft_plus),
        mix=mixer.mix_proj(mix).transpose(1, 2) if mixer.sizes.mix else None,
        turns=turns.transpose(1, 2) if mixer.sizes.turns else None,
        discretization_method=mixer.discretization_method,
        bidirectional=mixer.bidirectional,
        cu_seqlens=cu_seqlens,
        cache=cache,
    )


def _normed(norm: nn.Module, rows: Tensor, bias: Tensor) -> Tensor:
    """Returns the normalized B or C, (batch, d_state, seqlen), in at least float32."""
    return (_widened(norm(rows.to(bias.dtype))) + bias).transpose(1, 2)


# Functions that inspect their arguments stay one node in a torch.fx graph.


@fx.wrap
def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(at_least_single(tensor.dtype))


@fx.wrap
def _scan(
    x: Tensor,
    delta: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    *,
    mix: Tensor | None,
    turns: Tensor | None,
    discretization_method: LayerMethod,
    bidirectional: bool,
    cu_seqlens: Tensor | None,
    cache: MixerCache | None,
) -> Tensor:
    A = poles(A_log)
    if turns is not None:
        A = A.repeat_interleave(2, dim=1)  # both states of a pair have one pole
        turns = _angles_of_steps(turns, delta, delta_bias, delta_softplus)
    mix = None if mix is None else _widened(mix).sigmoid()

    def scan(*more: Tensor | None, reverse: bool = False) -> Tensor:
        projections = B, C
        if turns is not None:
            angles = _sums(turns, reverse, cu_seqlens, cache)
            projections = rotate_states(B, C, angles)
        projections = (projection.to(x.dtype) for projection in projections)
        arguments = (x, delta, A, *projections, *more, delta_bias, delta_softplus)
        options = {"reverse": reverse, "cu_seqlens": cu_seqlens}
        if mix is not None:
            options["mix"] = mix
        else:
            options["discretization_method"] = discretization_method
        function = selective_scan_fn if mix is None else exponential_trapezoid_fn
        if cache is None:
            return function(*arguments, **options)
        out, last = function(*arguments, True, initial_state=_states_of(cache), **options)
        _keep(cache, last)
        return out

    if not bidirectional:
        return scan(D, z)
    return (scan(D, None) + scan(None, None, reverse=True)) * F.silu(z)


def _angles_of_steps(
    turns: Tensor, delta: Tensor, delta_bias: Tensor | None, delta_softplus: bool
) -> Tensor:
    """Returns the angle of each pair of states at each step, (batch, d_state/2, seqlen).

    An angle is within ±π times the mean of the channels' step sizes: one mean, since all channels
    share B and C.
    """
    dtype = torch.promote_types(at_least_single(turns.dtype), delta.dtype)
    steps = steps_of_sequences(delta, delta_bias, delta_softplus, dtype)
    return math.pi * turns.to(dtype).tanh() * steps.mean(1, keepdim=True)


def _sums(
    turns: Tensor, reverse: bool, cu_seqlens: Tensor | None, cache: MixerCache | None
) -> Tensor:
    """Returns the sum of the angles up to each step, reduced to ±2π.

    float64 keeps the sum accurate enough for sequences of any length.
    """
    sums = diagonal_scan_fn(
        turns.new_ones(1, dtype=torch.float64),
        turns.double(),
        initial_state=None if cache is None else cache.angles[..., 0],
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )
    sums = sums.fmod(2 * math.pi)
    if cache is not None and sums.shape[-1] > 0:
        cache.angles.copy_(sums[..., -1:])
    return sums.to(turns.dtype)


def _states_of(cache: MixerCache) -> Tensor:
    states = [cache.state] if cache.last_input is None else [cache.state, cache.last_input]
    states = [_widened(state) for state in states]
    return states[0] if len(states) == 1 else torch.stack(states, 1)


def _keep(cache: MixerCache, last: Tensor) -> None:
    if cache.last_input is None:
        cache.state.copy_(last)
        return
    state, last_input = last.unbind(1)
    cache.state.copy_(state)
    cache.last_input.copy_(last_input)
