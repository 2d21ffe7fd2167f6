"""MambaMixer: a Mamba layer without its norm and residual."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from . import _mamba_weights
from ._checks import MAX_WIDTH, REAL
from ._discretization import LAYER_METHODS, LayerMethod, at_least_single, poles
from ._layer_convolution import causal_convolution, convolve_by, refuse_boundaries
from ._layer_input import checked_factor, checked_sequence
from ._layer_stack import StackStates, run_mixer
from ._mamba3 import Sizes, add_parts, scan_as_mamba3
from ._marks import MarkedModule
from ._module_arguments import (
    check_choice,
    check_count,
    check_dtype,
    check_flag,
    check_positive,
    refuse,
)
from ._plain_mixer import (
    has_plain_weights,
    is_plain_convolution,
    is_plain_product,
    parameter,
    project,
    run_in_one,
)
from ._plain_stack import is_of_mamba, step_in_one
from .cache import (
    MixerCache,
    allocate_cache,
    check_cache,
    refuse_gradient,
    refuse_other_cache,
)
from .functional import selective_scan_fn
from .mamba_inner import LayerOptions, add
from .step_projection import (
    DT_INIT_FLOOR,
    DT_MAX,
    DT_MIN,
    InitialSteps,
    StepProjection,
    is_plain_projection,
    project_steps,
)

# Functions that inspect their arguments must stay one node each in a torch.fx graph.
fx.wrap("causal_convolution")
fx.wrap("checked_factor")
fx.wrap("checked_sequence")
fx.wrap("poles")
fx.wrap("refuse_other_cache")
fx.wrap("selective_scan_fn")


class MambaMixer(MarkedModule):
    """The selective state space layer of Mamba, from (batch, seqlen, d_model) to the same shape.

    With d_inner = expand·d_model it computes::

        x, z     = in_proj(hidden)                             (batch, seqlen, d_inner) each
        x        = silu(causal depthwise convolution of x)
        dt, B, C = x_proj(x)                                   dt_rank, d_state, d_state channels
        y        = selective_scan_fn(x, dt_proj(dt), A, B, C, D, z)       A = −exp(A_log)
        output   = out_proj(y)

    Output t depends on inputs 0 to t only, unless `bidirectional`: then a second scan of the same
    inputs runs from the last step to the first, with the same weights, and both are added before
    the gate: (forward + backward + D·x)·silu(z). :class:`S6` is a stack of such layers with norms
    and residuals.

    Two options, `rotary` and the method "trapezoid", add features of Mamba-3. With either of them,
    x_proj has more channels, and B and C are normalized and have biases::

        B, C = B_norm(B) + B_bias, C_norm(C) + C_bias
        λ    = sigmoid(mix_proj(mix))                 dt_rank channels; for the trapezoid
        θ[t] = θ[t-1] + π·tanh(turns[t])·Δ[t]         d_state/2 channels; if states rotate

    The method "trapezoid" scans by :func:`exponential_trapezoid_fn` with mix = λ. `rotary` rotates
    pairs of states by θ with :func:`rotate_states`, with any method; both states of a pair have the
    same pole, and A_log is (d_inner, d_state/2). Since all channels have the same B and C, θ uses
    the mean of the channels' Δ. Such a layer runs part by part, also for a step with a cache.
    docs/methods.md describes the differences from Mamba-3.

    The parameters have the names and shapes of mamba_ssm's ``Mamba``, so ``load_state_dict``
    accepts its weights: in_proj, conv1d, x_proj, dt_proj and out_proj, which are ``nn.Linear`` and
    ``nn.Conv1d``, and A_log and D. A_log and D have the attribute ``_no_weight_decay = True`` for
    optimizers' parameter groups, and dt_proj.bias, from which the step sizes start, has
    ``_no_reinit = True``. An initialization of whole models that sets the biases of all linear
    layers to 0 must leave it out, as Mamba's own does; else all steps start at softplus(0) = 0.69.

    :func:`mamba_inner_fn` computes everything after in_proj, unless parts of the layer have to be
    called as modules. x_proj, dt_proj or out_proj is called, and so are the parts around it, if it
    is replaced by an adapter, has a hook, or has a weight of another tensor type, such as a
    quantized one. The same holds for conv1d if it has a hook, such as ``torch.nn.utils.prune``
    adds. With global module hooks, all five modules are called, except conv1d for packed sequences.
    A dt_proj that is called adds its bias itself, rounded to its dtype, as ``nn.Linear`` does.
    Otherwise the scan adds the bias, in full precision.

    Every parameter follows .half(), .to(torch.bfloat16) and `dtype`. A_log, D and dt_proj.bias are
    used in float32 nevertheless (float64 if any tensor is float64), but a half-precision parameter
    is already rounded and loses small updates: train with float32 parameters under torch.autocast
    or FSDP's ``MixedPrecisionPolicy``, and use half-precision parameters for inference only.

    Args:
        d_model: number of channels of input and output.
        d_state: number of states per inner channel.
        d_conv: width of the causal convolution, at least 1.
        expand: d_inner is expand·d_model, which must be a whole number.
        dt_rank: rank of the step size's projection; "auto" is ceil(d_model/16).
        dt_min: lower end of the initial step sizes, which are log-uniform.
        dt_max: upper end of the initial step sizes.
        dt_init: "random" draws dt_proj.weight uniformly from ±dt_rank^-0.5·dt_scale, "constant"
            sets all of it to dt_rank^-0.5·dt_scale.
        dt_scale: see dt_init.
        dt_init_floor: minimum of the initial step sizes; 0 for none.
        conv_bias: whether the convolution has a bias.
        bias: whether in_proj and out_proj have biases.
        dt_proj_bias: whether dt_proj has a bias. The bias sets the initial step sizes, so without
            it dt_min, dt_max and dt_init_floor must keep their defaults.
        dt_soft_plus: whether the step is softplus(dt_proj(dt)). Otherwise the projection is the
            step itself; it may become negative, and states then grow.
        bidirectional: see above.
        discretization_method: see :func:`selective_scan_fn`; or "trapezoid", see above.
        rotary: whether states rotate by input-dependent angles; d_state must then be even.
        device: the parameters' device.
        dtype: the parameters' dtype, float32, float16, bfloat16 or float64.

    Raises:
        ValueError: an argument is of the wrong type, out of range, or would have no effect.

    References:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
        arXiv:2312.00752, section 3.4 and figure 3; the initialization is that of its code.
        "Mamba-3", 2026, arXiv:2603.15569: the trapezoid, the rotations, norms and biases.

    Example:
        >>> import torch
        >>> from selective_scan import MambaMixer
        >>> mixer = MambaMixer(d_model=32)
        >>> mixer(torch.randn(4, 100, 32)).shape
        torch.Size([4, 100, 32])
    """

    _marked = ("A_log", "D")
    _input_name = "hidden"  # the name of forward's argument in error messages

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
        *,
        dt_proj_bias: bool = True,
        dt_soft_plus: bool = True,
        bidirectional: bool = False,
        discretization_method: LayerMethod = "zoh",
        rotary: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("d_model", d_model)
        check_count("d_state", d_state)
        check_count("d_conv", d_conv)
        check_positive("expand", expand)
        # A decimal fraction such as 0.29 is no binary one: 0.29·100 is not quite 29.
        channels = expand * d_model
        if channels == math.inf or not math.isclose(channels, round(channels)):
            refuse("expand", f"such that expand·d_model is a whole number ({d_model=})", expand)
        if dt_rank == "auto":
            dt_rank = math.ceil(d_model / 16)
        check_count("dt_rank", dt_rank, " or 'auto'")
        initial = InitialSteps(dt_min, dt_max, dt_init, dt_scale, dt_init_floor)
        initial.check(dt_proj_bias)
        check_flag("dt_soft_plus", dt_soft_plus)
        check_flag("conv_bias", conv_bias)
        check_flag("bias", bias)
        check_flag("bidirectional", bidirectional)
        check_choice("discretization_method", discretization_method, LAYER_METHODS)
        sizes = Sizes.of(dt_rank, d_state, discretization_method, rotary)
        check_dtype(dtype)

        self.d_model = d_model
        self.d_state = d_state
        self.d_inner = d_inner = round(channels)
        self.d_conv = d_conv
        self.dt_rank = dt_rank
        self.dt_soft_plus = dt_soft_plus
        self.bidirectional = bidirectional
        self.discretization_method = discretization_method
        self.rotary = rotary
        self.sizes = sizes
        where = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(d_model, 2 * d_inner, bias=bias, **where)
        self.conv1d = nn.Conv1d(
            d_inner, d_inner, d_conv, groups=d_inner, padding=d_conv - 1, bias=conv_bias, **where
        )
        self.x_proj = nn.Linear(d_inner, sum(sizes), bias=False, **where)
        self.dt_proj = StepProjection(
            dt_rank, d_inner, initial, bias=dt_proj_bias, softplus=dt_soft_plus, **where
        )
        self.out_proj = nn.Linear(d_inner, d_model, bias=bias, **where)
        # Both states of a rotating pair have the same pole.
        num_poles = sizes.turns or d_state
        self.A_log = nn.Parameter(torch.empty(d_inner, num_poles, **where))
        self.D = nn.Parameter(torch.empty(d_inner, **where))
        if sizes.are_mamba3s:
            add_parts(self, where)
        self._reset_poles()

    def __setattr__(self, name: str, value: object) -> None:
        """Does what nn.Module does, but refuses options that need other parameters than the layer
        was constructed with, since they would have no effect."""
        if name in ("discretization_method", "rotary") and "sizes" in vars(self):
            self.sizes.check_option(name, value)
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Initializes all parameters again, including those of the submodules."""
        for module in self.children():
            if hasattr(module, "reset_parameters"):  # modules without parameters lack it
                module.reset_parameters()
        self._reset_poles()

    @torch.no_grad()
    def _reset_poles(self) -> None:
        """Sets A to -1, -2, ... -d_state in every channel, and D and the biases of B and C to 1."""
        ones = torch.ones_like(self.A_log, dtype=at_least_single(self.A_log.dtype))
        self.A_log.copy_(ones.cumsum(1).log())
        self.D.fill_(1)
        if self.sizes.are_mamba3s:
            self.B_bias.fill_(1)
            self.C_bias.fill_(1)

    def allocate_cache(
        self,
        batch_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> MixerCache:
        """Allocates a cache, with which each call continues where the previous one ended.

        Args:
            batch_size: number of sequences, all of which are at their start.
            dtype: the cache's dtype, float32, float16, bfloat16 or float64. None means float32 for
                the scan's states (float64 for float64 parameters), and the parameters' dtype for
                the convolution's states.
            device: the cache's device; by default that of the parameters.

        Raises:
            ValueError: an argument is of the wrong type or out of range, or the layer is
                bidirectional.

        Example:
            >>> from selective_scan import MambaMixer
            >>> MambaMixer(d_model=32).allocate_cache(2).state.shape
            torch.Size([2, 64, 16])
        """
        return allocate_cache(self, batch_size, dtype, device)

    def _weight_like_states(self) -> Tensor:
        """Returns a weight with the dtype and device of new states: that of conv1d, unless a module
        that replaces it has none, or an integer one."""
        weight = getattr(self.conv1d, "weight", None)
        return weight if isinstance(weight, Tensor) and weight.dtype in REAL else self.A_log

    def forward(
        self, hidden: Tensor, *, cache: MixerCache | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Runs the layer.

        Args:
            hidden: (batch, seqlen, d_model), in the parameters' dtype. Under torch.autocast, hidden
                and the parameters may each be float32, float16 or bfloat16; float64 needs float64
                in both.
            cache: a cache from :meth:`allocate_cache`, for hidden's batch: the call continues from
                its states, with any number of steps, and changes it in place.
            cu_seqlens: the boundaries of packed sequences, see :func:`selective_scan_fn`; batch is
                then 1, and a cache is not supported.

        Returns:
            (batch, seqlen, d_model), empty if seqlen is 0.

        Raises:
            TypeError: hidden or cu_seqlens is not a tensor, or cache is not a cache.
            ValueError: hidden has a wrong shape; the cache is for another batch, device or layer; a
                cache is given together with cu_seqlens, or to a bidirectional layer; or cu_seqlens
                is given and the convolution is wider than 8, has a hook or is not a plain layer.
            RuntimeError: hidden or the cache has a wrong dtype, a call with a cache needs a
                gradient, or :func:`selective_scan_fn` refuses cu_seqlens.
        """
        return self._run(hidden, None, cache, cu_seqlens)

    def _run(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        cache: MixerCache | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        """Returns the layer's output plus the residual."""
        name = self._input_name
        hidden = checked_sequence(name, hidden, self.d_model, cu_seqlens)
        if isinstance(cache, MixerCache):
            refuse_gradient(self, hidden)
            refuse_boundaries(cu_seqlens, "there is a cache")
            check_cache(self, cache, hidden.shape[0], hidden.device)
            return add(residual, self._go_on(hidden, cache))
        refuse_other_cache(cache, "MixerCache")
        if self._is_plain():
            return run_in_one(self, name, hidden, self._layer_options(cu_seqlens), residual)
        return add(residual, self._run_by_parts(hidden, None, cu_seqlens))

    def _go_on(self, hidden: Tensor, cache: MixerCache) -> Tensor:
        """Runs the layer from the cache's states."""
        out = step_in_one((self,), hidden, (cache,))
        if out is None and is_of_mamba(cache):
            out = run_mixer(self, hidden, None, StackStates.of((cache,)))
        return self._run_by_parts(hidden, cache) if out is None else out

    def _run_by_parts(
        self, hidden: Tensor, cache: MixerCache | None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Calls the parts of the layer one after another, from the cache's states if there is one;
        one step with a cache runs on tensors without a time dimension."""
        are_mamba3s = self.sizes.are_mamba3s
        is_one_step = cache is not None and hidden.shape[1] == 1 and not are_mamba3s
        xz = self._project_input(hidden.squeeze(1) if is_one_step else hidden)
        x, z = _across(xz).chunk(2, dim=1)
        if cache is None:
            x = self._convolve(x, cu_seqlens)
        else:
            conv1d, width = self.conv1d, self.d_conv
            is_plain = self._has_plain_convolution() and conv1d.kernel_size == (width,)
            x = cache.convolve(x, conv1d, width, is_called=not is_plain)
        if are_mamba3s:
            y = scan_as_mamba3(self, x, z, cu_seqlens, cache)
        elif cache is None:
            y = self._scan(x, *self._project(x), z, cu_seqlens)
        else:
            delta, B, C, delta_bias = self._project(x)
            scanned = (x, delta, self.A_log, B, C, self.D, z, delta_bias)
            y = cache.scan(*scanned, **self._scan_options())
        out = project(self.out_proj, _across(y))
        return out.unsqueeze(1) if is_one_step else out

    def _project_input(self, hidden: Tensor) -> Tensor:
        in_proj = self.in_proj
        if has_plain_weights(in_proj, nn.Linear):
            hidden = checked_factor(self._input_name, hidden, parameter(in_proj, "weight"))
        return in_proj(hidden)

    def _project(self, x: Tensor, suffix: str = "") -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Projects x to delta, B and C, all (batch, channels, seqlen) or all (batch, channels), and
        the bias that the scan is to add. A suffix selects another set of parts, here and below."""
        sizes = [self.dt_rank, self.d_state, self.d_state]
        x_proj, dt_proj = getattr(self, f"x_proj{suffix}"), getattr(self, f"dt_proj{suffix}")
        dt, B, C = project(x_proj, _across(x)).split_with_sizes(sizes, -1)
        delta, delta_bias = project_steps(dt_proj, dt)
        return _across(delta), _across(B), _across(C), delta_bias

    def _is_plain(self) -> bool:
        if self.sizes.are_mamba3s:
            return False
        return self._has_plain_parts() and has_plain_weights(self._modules["out_proj"], nn.Linear)

    def _has_plain_parts(self, suffix: str = "") -> bool:
        parts = self._modules
        return (
            self._has_plain_convolution(suffix=suffix)
            and parts[f"conv1d{suffix}"].kernel_size[0] <= MAX_WIDTH
            and is_plain_product(parts[f"x_proj{suffix}"])
            and is_plain_projection(parts[f"dt_proj{suffix}"])
        )

    def _has_plain_convolution(self, can_be_called: bool = True, suffix: str = "") -> bool:
        conv1d = self._modules[f"conv1d{suffix}"]
        return is_plain_convolution(conv1d, can_be_called=can_be_called)

    def _scan(
        self,
        x: Tensor,
        delta: Tensor,
        B: Tensor,
        C: Tensor,
        delta_bias: Tensor | None,
        z: Tensor,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        A, options = poles(self.A_log), self._scan_options()
        options |= {"delta_bias": delta_bias, "cu_seqlens": cu_seqlens}
        if not self.bidirectional:
            return self._scan_steps(x, delta, A, B, C, self.D, z, **options)
        forward = self._scan_steps(x, delta, A, B, C, self.D, **options)
        backward = self._scan_steps(x, delta, A, B, C, **options, reverse=True)
        return (forward + backward) * F.silu(z)

    # These two see other steps; layers whose steps are distributed over ranks override them.

    def _convolve(self, x: Tensor, cu_seqlens: Tensor | None, suffix: str = "") -> Tensor:
        conv1d = getattr(self, f"conv1d{suffix}")
        if self._has_plain_convolution(can_be_called=cu_seqlens is None, suffix=suffix):
            return causal_convolution(x, conv1d.weight, conv1d.bias, cu_seqlens)
        refuse_boundaries(cu_seqlens, "conv1d has a hook or is no plain layer")
        return convolve_by(conv1d, x)

    def _scan_steps(self, *arguments: Tensor, **options: object) -> Tensor:
        return selective_scan_fn(*arguments, **options)

    def _scan_options(self) -> dict[str, object]:
        return {
            "delta_softplus": self.dt_soft_plus,
            "discretization_method": self.discretization_method,
        }

    def _layer_options(self, cu_seqlens: Tensor | None) -> LayerOptions:
        flags = (self.dt_soft_plus, self.discretization_method, self.bidirectional)
        return LayerOptions(*flags, cu_seqlens)

    @classmethod
    def from_mamba(
        cls,
        source: Mapping[str, Tensor] | nn.Module,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> MambaMixer:
        """Creates a mixer with the sizes and with copies of the weights of a Mamba layer.

        Args:
            source: mamba_ssm's ``Mamba`` or transformers' ``MambaMixer``, or its state dict.
            device: the parameters' device; by default that of the weights.
            dtype: the parameters' dtype; by default that of the weights.

        Raises:
            TypeError: source is neither a module nor a mapping.
            ValueError: source is another module, lacks a weight, or contains one with a wrong shape
                or dtype, or one that a mixer does not have; the message names it.

        Example:
            >>> from selective_scan import MambaMixer
            >>> from selective_scan.compat.mamba_simple import Mamba
            >>> MambaMixer.from_mamba(Mamba(d_model=32, d_state=8)).d_state
            8
        """
        weights = _mamba_weights.read_weights(source)
        mixer = cls(**_mamba_weights.mixer_options(weights))
        _mamba_weights.assign_weights(mixer, weights, device, dtype)
        return mixer

    def to_mamba(self) -> dict[str, Tensor]:
        """Returns the state dict, which mamba_ssm's ``Mamba`` and transformers' mixer can load.

        Raises:
            ValueError: the mixer computes something that Mamba does not.

        Example:
            >>> from selective_scan import MambaMixer
            >>> from selective_scan.compat.mamba_simple import Mamba
            >>> Mamba(d_model=32).load_state_dict(MambaMixer(d_model=32).to_mamba())
            <All keys matched successfully>
        """
        _mamba_weights.check_is_mamba(self)
        return self.state_dict()

    def extra_repr(self) -> str:
        return (
            f"d_state={self.d_state}, bidirectional={self.bidirectional}, "
            f"discretization_method='{self.discretization_method}'" + ", rotary=True" * self.rotary
        )


@fx.wrap
def _across(tensor: Tensor) -> Tensor:
    """Exchanges channels and time; a single step has no time dimension."""
    return tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
