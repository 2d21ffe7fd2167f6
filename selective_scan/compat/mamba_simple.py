"""Mamba's layer with the signature of mamba_ssm's mamba_simple module, and its decoding step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._discretization import at_least_single, poles
from .._layer_convolution import refuse_boundaries
from .._layer_input import checked_sequence
from .._layer_stack import StackStates, run_mixer
from .._module_arguments import check_count, check_flag, check_positive, refuse
from .._plain_mixer import project
from .._wider_states import steps_in_one
from ..cache import MixerCache, needs_gradient
from ..functional import selective_scan_fn
from ..step_projection import DT_INIT_FLOOR, DT_MAX, DT_MIN
from . import block
from .directions import DirectedMixer
from .steps import warn_without_graph


class InferenceParams(Protocol):
    """The object that generation passes to the layers: states by layer_idx, and steps so far."""

    key_value_memory_dict: dict[int, tuple[Tensor, Tensor]]
    seqlen_offset: int


class Mamba(DirectedMixer):
    """:class:`MambaMixer` with the arguments and methods of mamba_ssm's ``Mamba``, and with the
    arguments for several directions of the forks of Vim, VideoMamba and SegMamba.

    It differs from a mixer in two ways: A_log and D are at least float32, whatever `dtype` is; and
    it has states for decoding, from which `step` and forward calls with `inference_params`
    continue.

    Args:
        expand: d_inner is the integer part of expand·d_model.
        use_fast_path: whether a forward call is one autograd node; otherwise the layer's parts are
            called one after another, with the same result.
        layer_idx: the layer's key in the states of `inference_params`.
        bimamba_type: "v1" adds a second scan from the last step to the first, with its own poles
            A_b_log. "v2" adds a second set of all parameters between in_proj and out_proj, with
            names that end in _b, for the sequence from its last step to its first. "v3" also adds a
            third set, _s, for the sequence across slices: the first steps of all slices, then the
            second ones, and so on. The results are added before out_proj. States and `step` are
            then not supported, because the output depends on later steps. None is "none".
        if_divide_out: whether the sum of "v2" or "v3" is divided by the number of directions, as
            Vim's fork does for "v2" and Vivim's always does for "v3"; has no effect on other types.
        init_layer_scale: the initial value of a parameter gamma, (d_model,), by which the result
            is multiplied; None for no such parameter.
        nslices: number of slices of "v3", which must divide seqlen; 5 if None.
        bimamba: VideoMamba's name for "v2".
        if_devide_out: `if_divide_out` in the spelling of Vim's first release.

    As in the forks, dt_proj_b and dt_proj_s are initialized like any linear layer, without Mamba's
    range of steps.

    All other arguments are those of :class:`MambaMixer`.

    Attributes:
        activation, act: the activation by name and as a module, for subclasses with their own
            forward method; this class does not use them.

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
        dt_min: float = DT_MIN,
        dt_max: float = DT_MAX,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = DT_INIT_FLOOR,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bimamba_type: str | None = "none",
        if_divide_out: bool = False,
        init_layer_scale: float | None = None,
        nslices: int | None = None,
        bimamba: bool = False,
        if_devide_out: bool = False,
    ) -> None:
        check_count("d_model", d_model)
        check_positive("expand", expand)
        check_positive("expand·d_model", expand * d_model)
        steps = (dt_rank, dt_min, dt_max, dt_init, dt_scale, dt_init_floor)
        sizes = (d_model, d_state, d_conv, int(expand * d_model) / d_model)
        # Configurations contain 0 and 1 for these two, which upstream passes on to PyTorch.
        conv_bias, bias = (bool(it) if isinstance(it, int) else it for it in (conv_bias, bias))
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
            inference_params: None, or an object with the attributes `key_value_memory_dict`, which
                contains the layer's states or receives new ones, and `seqlen_offset`. If
                seqlen_offset is 0, the states become those after the last step. Otherwise seqlen
                must be 1, and the layer takes one step from its states.
            cu_seqlens: the boundaries of packed sequences, see :class:`MambaMixer`; only without
                inference_params.

        Returns:
            (batch, seqlen, d_model).

        Raises:
            ValueError: seqlen is not 1 although seqlen_offset is not 0; the states are for another
                batch; layer_idx is None; two of cu_seqlens, inference_params and several directions
                are combined; or nslices does not divide seqlen.
        """
        if inference_params is None:
            return super().forward(hidden_states, cu_seqlens=cu_seqlens)
        refuse_boundaries(cu_seqlens, "inference_params is given")
        self._refuse_states()
        conv_state, ssm_state = self._get_states_from_cache(
            inference_params, hidden_states.shape[0]
        )
        if inference_params.seqlen_offset > 0:
            return self.step(hidden_states, conv_state, ssm_state)[0]
        return self._prefill(hidden_states, conv_state, ssm_state)

    def _is_plain(self) -> bool:
        return self.use_fast_path and super()._is_plain()

    def _prefill(self, hidden: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:
        """Runs a forward call and stores the states after its last step."""
        hidden = checked_sequence("hidden_states", hidden, self.d_model)
        if hidden.shape[0] not in (1, ssm_state.shape[0]):
            wanted = f"of batch {ssm_state.shape[0]}, as the states in inference_params are"
            refuse("hidden_states", wanted, tuple(hidden.shape))
        if self.use_fast_path:
            states = StackStates([conv_state], [ssm_state], begins=True)
            if (out := run_mixer(self, hidden, None, states)) is not None:
                return self._scale(out)
        x, z = self._project_input(hidden).transpose(1, 2).chunk(2, dim=1)
        # F.pad keeps the last steps of a longer sequence, and prepends zeros to a shorter one.
        conv_state.copy_(F.pad(x.detach(), (self.d_conv - x.shape[-1], 0)))
        x = self._convolve(x, None)
        delta, B, C, delta_bias = self._project(x)
        scanned = (x, delta, poles(self.A_log), B, C, self.D, z, delta_bias)
        y, last_state = selective_scan_fn(*scanned, return_last_state=True, **self._scan_options())
        ssm_state.copy_(last_state.detach())
        return self._scale(project(self.out_proj, y.transpose(1, 2)))

    def step(
        self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Takes one step, without gradients, and changes the states in place.

        Like mamba_ssm's, it does so also in grad mode. The first such call logs a warning to the
        logger ``"selective_scan"``, unless torch.compile traces it.

        Args:
            hidden_states: (batch, 1, d_model).
            conv_state: the convolution's last inputs, (batch, d_inner, d_conv).
            ssm_state: the scan's state, (batch, d_inner, d_state).

        Returns:
            (out, conv_state, ssm_state), with out (batch, 1, d_model).

        Raises:
            ValueError: hidden_states does not have exactly one step, ssm_state is for another batch
                or layer, or the layer has several directions.
        """
        self._refuse_states()
        hidden = checked_sequence("hidden_states", hidden_states, self.d_model)
        if hidden.shape[1] != 1:
            refuse("hidden_states", "one step, (batch, 1, d_model)", tuple(hidden.shape))
        wanted = (hidden.shape[0], self.d_inner, self.d_state)
        # Checked first, since the convolution's state has changed when the scan would refuse this.
        if ssm_state.shape != wanted:
            sizes = f"(batch, d_inner, d_state) = {wanted}"
            refuse("ssm_state", sizes, tuple(ssm_state.shape))
        warn_without_graph(
            "Mamba.step, by which a call with states goes on,",
            lambda: needs_gradient(self, hidden),
        )
        with torch.no_grad():
            out = None
            if self.takes_steps_in_one():
                out = steps_in_one((self,), hidden, ((conv_state, ssm_state),))
                if out is None:
                    out = run_mixer(self, hidden, None, StackStates([conv_state], [ssm_state]))
            if out is None:
                out = self._run_by_parts(hidden, MixerCache(conv_state, ssm_state))
            out = self._scale(out)
        return out, conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Returns the states before the first step: zeros, in `dtype` or the weights' dtype.

        Returns:
            conv_state, (batch_size, d_inner, d_conv), and ssm_state, (batch_size, d_inner,
            d_state). Their sizes do not depend on max_seqlen.

        Raises:
            ValueError: the layer has several directions.
        """
        self._refuse_states()
        weight = self._weight_like_states()
        where = {"dtype": dtype or weight.dtype, "device": weight.device}
        sizes = (self.d_conv, self.d_state)
        conv_state, ssm_state = (
            torch.zeros(batch_size, self.d_inner, size, **where) for size in sizes
        )
        return conv_state, ssm_state

    def takes_steps_in_one(self) -> bool:
        """Returns whether the layer's options allow a step to run as a single operator."""
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
    """:class:`selective_scan.compat.block.Block` without an MLP, as in mamba_ssm 1's module."""

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__(dim, mixer_cls, nn.Identity, norm_cls, fused_add_norm, residual_in_fp32)
