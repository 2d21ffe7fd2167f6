"""Mamba's layer by the signature of mamba_ssm's mamba_simple module, with its decoding step."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import mamba_mixer
from .._discretization import at_least_single, poles
from .._layer_input import checked_sequence
from .._module_arguments import check_count, check_flag, check_positive, refuse
from .._wider_states import steps_in_one
from ..cache import MixerCache, needs_gradient
from ..functional import selective_scan_fn
from . import block
from .directions import DirectedMixer
from .steps import warn_without_graph


class InferenceParams(Protocol):
    """What generation hands to the layers: their states, by layer_idx, and the steps behind it."""

    key_value_memory_dict: dict[int, tuple[Tensor, Tensor]]
    seqlen_offset: int


class Mamba(DirectedMixer):
    """:class:`MambaMixer` with the arguments and methods of mamba_ssm's ``Mamba``, and with the
    arguments by which Vim's, VideoMamba's and SegMamba's forks have several directions.

    Two things differ from a mixer: A_log and D are float32 at least, whatever `dtype`; and there
    are states for decoding, in which `step` and a forward call with `inference_params` go on.

    Args:
        expand: d_inner is the whole part of expand·d_model.
        use_fast_path: whether a forward call is one node of autograd; else the layer's parts are
            called one after the other, which gives the same.
        layer_idx: the layer's key in the states of `inference_params`.
        bimamba_type: "v1" adds a second scan from the last step to the first, by poles A_b_log of
            its own. "v2" adds a second set of all parameters between in_proj and out_proj, with
            names that end in _b, for the sequence from its last step to its first. "v3" adds to
            that a third set, _s, for the sequence as it lies across slices: the first steps of all
            of them, then the second ones. The results are added in front of out_proj. As there are
            steps to come, there are no states then, and no `step`.
        if_divide_out: whether the sum of "v2" is halved; it is for "v2" alone.
        init_layer_scale: the initial value of a parameter gamma, (d_model,), by which the result
            is multiplied; None for no such parameter.
        nslices: number of slices of "v3", which must divide seqlen.
        bimamba: "v2" by another name, VideoMamba's.
        if_devide_out: `if_divide_out` as Vim's first release spelled it.

    dt_proj_b and dt_proj_s start as any linear layer does, as in the forks: without Mamba's range
    of steps.

    All others are those of :class:`MambaMixer`.

    Attributes:
        activation, act: the activation by name and as a module, for subclasses that have a forward
            method of their own; this class does not look at them.

    Example:
        >>> import torch
        >>> from selective_scan.compat.mamba_simple import Mamba
        >>> Mamba(d_model=32, d_state=8)(torch.randn(2, 10, 32)).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | str = "auto",
        dt_min: float = mamba_mixer.DT_MIN,
        dt_max: float = mamba_mixer.DT_MAX,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = mamba_mixer.DT_INIT_FLOOR,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bimamba_type: str = "none",
        if_divide_out: bool = False,
        init_layer_scale: float | None = None,
        nslices: int = 5,
        bimamba: bool = False,
        if_devide_out: bool = False,
    ) -> None:
        check_count("d_model", d_model)
        check_positive("expand", expand)
        check_positive("expand·d_model", expand * d_model)
        steps = (dt_rank, dt_min, dt_max, dt_init, dt_scale, dt_init_floor)
        sizes = (d_model, d_state, d_conv, Fraction(int(expand * d_model), d_model))
        super().__init__(*sizes, *steps, conv_bias, bias, device=device, dtype=dtype)
        self.expand = expand
        self.activation = "silu"
        self.act = nn.SiLU()
        self.use_fast_path = use_fast_path
        self.layer_idx = layer_idx
        wide = at_least_single(self.A_log.dtype)
        self.A_log = nn.Parameter(self.A_log.to(wide))
        self.D = nn.Parameter(self.D.to(wide))
        check_flag("if_devide_out", if_devide_out)
        is_halved = if_divide_out or if_devide_out
        self._add_directions(bimamba_type, is_halved, init_layer_scale, nslices, bimamba)
        self._reset_poles()

    def forward(
        self,
        hidden_states: Tensor,
        inference_params: InferenceParams | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Runs the layer.

        Args:
            hidden_states: (batch, seqlen, d_model).
            inference_params: None; or an object with the attributes `key_value_memory_dict`, where
                the layer's states are and are put if they are not there, and `seqlen_offset`. If
                that is 0, the states become those after the last step. Else seqlen must be 1, and
                the layer takes one step from its states.
            cu_seqlens: the boundaries of packed sequences, see :class:`MambaMixer`, where there are
                no inference_params.

        Returns:
            (batch, seqlen, d_model).

        Raises:
            ValueError: seqlen is not 1 where seqlen_offset is not 0, or the states are of another
                batch, or layer_idx is None, or cu_seqlens is given where there are inference_params
                or several directions, or the layer has several directions and there are
                inference_params, or nslices does not divide seqlen.
        """
        if inference_params is None:
            return super().forward(hidden_states, cu_seqlens=cu_seqlens)
        mamba_mixer.refuse_boundaries(cu_seqlens, "inference_params is given")
        self._refuse_states()
        conv_state, ssm_state = self._get_states_from_cache(
            inference_params, hidden_states.shape[0]
        )
        if inference_params.seqlen_offset > 0:
            return self.step(hidden_states, conv_state, ssm_state)[0]
        return self._prefill(hidden_states, conv_state, ssm_state)

    def _is_plain(self) -> bool:
        return self.use_fast_path and super()._is_plain()

    def _mark(self) -> None:
        super()._mark()
        # The models' initialisations, which zero the biases of Linear modules, look for this mark.
        bias = getattr(self._modules.get("dt_proj"), "bias", None)
        if isinstance(bias, Tensor):
            bias._no_reinit = True

    def _prefill(self, hidden: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:
        """A forward call that leaves the states after its last step."""
        hidden = checked_sequence("hidden_states", hidden, self.d_model)
        if hidden.shape[0] not in (1, ssm_state.shape[0]):
            wanted = f"of batch {ssm_state.shape[0]}, as the states in inference_params are"
            refuse("hidden_states", wanted, tuple(hidden.shape))
        x, z = self._project_input(hidden).transpose(1, 2).chunk(2, dim=1)
        # These are the last steps of a longer sequence; in front of a shorter one there are zeros.
        conv_state.copy_(F.pad(x.detach(), (self.d_conv - x.shape[-1], 0)))
        x = self._convolve(x, None)
        delta, B, C, delta_bias = self._project(x)
        scanned = (x, delta, poles(self.A_log), B, C, self.D, z, delta_bias)
        y, last_state = selective_scan_fn(*scanned, return_last_state=True, **self._scan_options())
        ssm_state.copy_(last_state.detach())
        return self._scale(self.out_proj(y.transpose(1, 2)))

    def step(
        self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Takes one step, without gradients, and changes the states in place.

        As mamba_ssm's, it does so in grad mode too. The first such call logs a warning to the
        logger ``"selective_scan"``, unless torch.compile traces it.

        Args:
            hidden_states: (batch, 1, d_model).
            conv_state: (batch, d_inner, d_conv), the convolution's last inputs.
            ssm_state: (batch, d_inner, d_state).

        Returns:
            (out, conv_state, ssm_state), out (batch, 1, d_model).

        Raises:
            ValueError: hidden_states has another number of steps, or the layer has several
                directions.
        """
        self._refuse_states()
        hidden = checked_sequence("hidden_states", hidden_states, self.d_model)
        if hidden.shape[1] != 1:
            refuse("hidden_states", "one step, (batch, 1, d_model)", hidden.shape)
        warn_without_graph(
            "Mamba.step, by which a call with states goes on,",
            lambda: needs_gradient(self, hidden),
        )
        with torch.no_grad():
            out = None
            if self.takes_steps_in_one():
                out = steps_in_one((self,), hidden, ((conv_state, ssm_state),))
            if out is None:
                out = self._run_by_parts(hidden, MixerCache(conv_state, ssm_state))
            out = self._scale(out)
        return out, conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """States before the first step: zeros, of `dtype` or of the weights'.

        Returns:
            conv_state, (batch_size, d_inner, d_conv), and ssm_state, (batch_size, d_inner,
            d_state). They do not grow with max_seqlen.

        Raises:
            ValueError: the layer has several directions.
        """
        self._refuse_states()
        # What stands in a part's place may have no weight, or one of integers.
        weight = getattr(self.conv1d, "weight", self.A_log)
        where = {"dtype": dtype or weight.dtype, "device": weight.device}
        sizes = (self.d_conv, self.d_state)
        conv_state, ssm_state = (
            torch.zeros(batch_size, self.d_inner, size, **where) for size in sizes
        )
        return conv_state, ssm_state

    def takes_steps_in_one(self) -> bool:
        """Whether nothing is asked for that the one operator does not do."""
        return self.use_fast_path and self.d_conv > 1

    def _get_states_from_cache(
        self, inference_params: InferenceParams, batch_size: int, initialize_states: bool = False
    ) -> tuple[Tensor, Tensor]:
        if self.layer_idx is None:
            refuse("layer_idx", "given where inference_params is", None)
        states = inference_params.key_value_memory_dict
        if self.layer_idx not in states:
            states[self.layer_idx] = self.allocate_inference_cache(batch_size, 0)
        elif initialize_states:
            for state in states[self.layer_idx]:
                state.zero_()
        return states[self.layer_idx]


class Block(block.Block):
    """:class:`selective_scan.compat.block.Block` without MLP, as mamba_ssm 1 had it here."""

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__(dim, mixer_cls, nn.Identity, norm_cls, fused_add_norm, residual_in_fp32)
