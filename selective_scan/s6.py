"""S6: layers of the selective state space model of Mamba."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._checks import HALF
from ._discretization import METHODS, Method
from .functional import selective_scan_fn

try:
    from causal_conv1d import causal_conv1d_fn
except ModuleNotFoundError:
    causal_conv1d_fn = None
except ImportError as error:
    logging.getLogger("selective_scan").warning(
        "causal_conv1d is installed but does not load, torch's convolution serves instead: %s",
        error,
    )
    causal_conv1d_fn = None

# What an argument must keep where it could have no effect.
_DT_MIN, _DT_MAX, _DT_INIT_FLOOR = 1e-3, 0.1, 1e-4


class S6(nn.Module):
    """A stack of selective state space layers, from (batch, seqlen, d_model) to the same shape.

    Each layer computes, with d_inner = expand·d_model::

        x, z     = in_proj(RMSNorm(input))                     (batch, seqlen, d_inner) each
        x        = silu(causal depthwise convolution of x)
        dt, B, C = x_proj(x)                                   dt_rank, d_state, d_state channels
        y        = selective_scan_fn(x, dt_proj(dt), A, B, C, D, z)       A = −exp(A_log)
        output   = input + out_proj(y)

    and a final RMSNorm follows the last layer. Output t depends on inputs 0 to t only, unless
    `bidirectional`: then a second scan of the same inputs runs from the last step to the first,
    with the same weights, and both are added before the gate: (forward + backward + D·x)·silu(z).

    On CUDA the convolution is that of the package causal_conv1d where it is installed.

    Args:
        d_model: number of channels of input and output.
        d_state: number of states per inner channel.
        d_conv: width of the causal convolution, at least 1.
        expand: d_inner is expand·d_model, which must be a whole number.
        dt_rank: rank of the step size's projection; "auto" is ceil(d_model/16).
        dt_min: the initial step sizes are log-uniform from dt_min
        dt_max: to dt_max,
        dt_init_floor: and at least this.
        dt_init: "random" draws dt_proj.weight uniformly from ±dt_rank^-0.5·dt_scale, "constant"
            sets all of it to dt_rank^-0.5·dt_scale.
        dt_scale: see dt_init.
        dt_proj_bias: whether dt_proj has a bias. The bias holds the initial step sizes, so without
            it dt_min, dt_max and dt_init_floor must keep their defaults.
        dt_soft_plus: whether the step is softplus(dt_proj(dt)). Else the projection is the step
            itself; it may become negative, and states then grow.
        conv_bias: whether the convolution has a bias.
        bias: whether in_proj and out_proj have one.
        depth: number of layers.
        bidirectional: see above.
        discretization_method: see :func:`selective_scan_fn`.
        device: of the parameters.
        dtype: of the parameters, float32, float16, bfloat16 or float64. Where it is a half type,
            A_log, D and dt_proj.bias are float32 nevertheless, and they stay so under .half() and
            .to(torch.bfloat16): rounding them changes the dynamics and swallows small updates.

    Raises:
        ValueError: an argument is of the wrong type, out of range, or would have no effect.

    References:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
        arXiv:2312.00752: section 3.4 and figure 3; the initialisation is that of its code.

    Example:
        >>> import torch
        >>> from selective_scan import S6
        >>> model = S6(d_model=32, depth=2)
        >>> x = torch.randn(4, 100, 32)
        >>> model(x).shape
        torch.Size([4, 100, 32])
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | str = "auto",
        dt_min: float = _DT_MIN,
        dt_max: float = _DT_MAX,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = _DT_INIT_FLOOR,
        dt_proj_bias: bool = True,
        dt_soft_plus: bool = True,
        conv_bias: bool = True,
        bias: bool = False,
        depth: int = 1,
        bidirectional: bool = False,
        *,
        discretization_method: Method = "zoh",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_count("d_model", d_model)
        _check_count("d_state", d_state)
        _check_count("d_conv", d_conv)
        _check_positive("expand", expand)
        if not float(expand * d_model).is_integer():
            _refuse("expand", f"such that expand·d_model is a whole number ({d_model=})", expand)
        if dt_rank == "auto":
            dt_rank = math.ceil(d_model / 16)
        _check_count("dt_rank", dt_rank, " or 'auto'")
        _check_positive("dt_min", dt_min)
        _check_positive("dt_max", dt_max)
        if dt_min > dt_max:
            _refuse("dt_min", f"at most dt_max = {dt_max}", dt_min)
        _check_choice("dt_init", dt_init, ("random", "constant"))
        _check_positive("dt_scale", dt_scale)
        _check_positive("dt_init_floor", dt_init_floor)
        _check_flag("dt_proj_bias", dt_proj_bias)
        if not dt_proj_bias:
            _check_default("dt_min", dt_min, _DT_MIN)
            _check_default("dt_max", dt_max, _DT_MAX)
            _check_default("dt_init_floor", dt_init_floor, _DT_INIT_FLOOR)
        _check_flag("dt_soft_plus", dt_soft_plus)
        _check_flag("conv_bias", conv_bias)
        _check_flag("bias", bias)
        _check_count("depth", depth)
        _check_flag("bidirectional", bidirectional)
        _check_choice("discretization_method", discretization_method, METHODS)
        if dtype not in (None, torch.float32, torch.float64, *HALF):
            _refuse("dtype", "float32, float16, bfloat16, float64 or None", dtype)

        self.d_model = d_model
        self.depth = depth

        def make_layer() -> S6Layer:
            step_projection = StepProjection(
                dt_rank,
                round(expand * d_model),
                constant_weight=dt_init == "constant",
                scale=dt_scale,
                step_range=(dt_min, dt_max) if dt_proj_bias else None,
                floor=dt_init_floor,
                softplus=dt_soft_plus,
                device=device,
                dtype=dtype,
            )
            return S6Layer(
                d_model,
                d_state,
                d_conv,
                step_projection,
                conv_bias=conv_bias,
                bias=bias,
                bidirectional=bidirectional,
                discretization_method=discretization_method,
                device=device,
                dtype=dtype,
            )

        self.layers = nn.ModuleList(make_layer() for _ in range(depth))
        self.norm_f = nn.RMSNorm(d_model, eps=1e-5, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Runs all layers and the final norm.

        Args:
            x: (batch, seqlen, d_model), of the parameters' dtype, or of any floating dtype under
                torch.autocast.

        Returns:
            (batch, seqlen, d_model). Empty where seqlen is 0.

        Raises:
            TypeError: x is not a tensor.
            ValueError: x has another shape.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"selective_scan: x must be a Tensor, got {type(x).__name__}")
        if x.dim() != 3 or x.shape[2] != self.d_model:
            raise ValueError(
                f"selective_scan: x must be (batch, seqlen, d_model) = (*, *, {self.d_model}), "
                f"got {tuple(x.shape)}"
            )
        if x.shape[1] > 0:  # convolutions refuse an empty sequence
            for layer in self.layers:
                x = layer(x)
        return self.norm_f(x)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, depth={self.depth}"


class _FloatParameters(nn.Module):
    """A module of which some parameters stay float32 when it is cast to a half type."""

    _float_parameters: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        """Module.to(), .half(), .cuda() and the like all come here; `fn` casts, moves, or both."""
        parameters = [getattr(self, name) for name in self._float_parameters]
        parameters = [parameter for parameter in parameters if parameter is not None]
        kept = [*parameters, *(parameter.grad for parameter in parameters)]

        def cast(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if result.dtype in HALF and any(tensor is other for other in kept):
                return tensor.to(result.device, torch.float32)
            return result

        return super()._apply(cast, recurse)


def _float_dtype(dtype: torch.dtype | None) -> torch.dtype:
    dtype = dtype or torch.get_default_dtype()
    return torch.float32 if dtype in HALF else dtype


class StepProjection(_FloatParameters):
    """The linear map to the step sizes, whose bias the scan adds, in full precision.

    Args:
        rank: number of input channels.
        dim: number of output channels.
        constant_weight: whether all weights start as rank^-0.5·scale, else uniform in ± that.
        scale: see constant_weight.
        step_range: the initial steps' range, log-uniform; None for no bias.
        floor: the initial steps' minimum.
        softplus: whether the step is the softplus of this projection.
    """

    _float_parameters = ("bias",)

    def __init__(
        self,
        rank: int,
        dim: int,
        *,
        constant_weight: bool,
        scale: float,
        step_range: tuple[float, float] | None,
        floor: float,
        softplus: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.dim = dim
        self.constant_weight = constant_weight
        self.scale = scale
        self.step_range = step_range
        self.floor = floor
        self.softplus = softplus
        self.weight = nn.Parameter(torch.empty(dim, rank, device=device, dtype=dtype))
        if step_range is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=_float_dtype(dtype)))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        bound = self.rank**-0.5 * self.scale
        if self.constant_weight:
            self.weight.fill_(bound)
        else:
            self.weight.uniform_(-bound, bound)
        if self.bias is not None:
            low, high = map(math.log, self.step_range)
            step = torch.empty_like(self.bias).uniform_(low, high).exp().clamp(min=self.floor)
            # The inverse of softplus, log(exp(step) - 1), for any size of step.
            self.bias.copy_(step + torch.log(-torch.expm1(-step)) if self.softplus else step)

    def forward(self, dt: Tensor) -> Tensor:
        """(..., rank) to (..., dim), without the bias."""
        return F.linear(dt, self.weight)

    def extra_repr(self) -> str:
        return f"{self.rank}, {self.dim}, bias={self.bias is not None}, softplus={self.softplus}"


class S6Layer(_FloatParameters):
    """One residual layer of S6, which documents the arguments."""

    _float_parameters = ("A_log", "D")

    def __init__(
        self,
        d_model: int,
        d_state: int,
        d_conv: int,
        step_projection: StepProjection,
        *,
        conv_bias: bool,
        bias: bool,
        bidirectional: bool,
        discretization_method: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_state = d_state
        self.d_inner = d_inner = step_projection.dim
        self.bidirectional = bidirectional
        self.discretization_method = discretization_method
        where = {"device": device, "dtype": dtype}
        self.norm = nn.RMSNorm(d_model, eps=1e-5, **where)
        self.in_proj = nn.Linear(d_model, 2 * d_inner, bias=bias, **where)
        self.conv1d = nn.Conv1d(
            d_inner, d_inner, d_conv, groups=d_inner, padding=d_conv - 1, bias=conv_bias, **where
        )
        self.x_proj = nn.Linear(d_inner, step_projection.rank + 2 * d_state, bias=False, **where)
        self.dt_proj = step_projection
        self.out_proj = nn.Linear(d_inner, d_model, bias=bias, **where)
        where["dtype"] = _float_dtype(dtype)
        self.A_log = nn.Parameter(torch.empty(d_inner, d_state, **where))
        self.D = nn.Parameter(torch.empty(d_inner, **where))
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_ignore_legacy_buffer)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets A to -1, -2, ... -d_state in every channel, and D to 1."""
        states = torch.arange(1, self.d_state + 1, device=self.A_log.device)
        self.A_log.copy_(states.to(self.A_log.dtype).log().expand_as(self.A_log))
        self.D.fill_(1)

    def forward(self, hidden: Tensor) -> Tensor:
        x, z = self.in_proj(self.norm(hidden)).transpose(1, 2).chunk(2, dim=1)
        x = self._convolve(x)
        rank, dstate = self.dt_proj.rank, self.d_state
        dt, B, C = self.x_proj(x.transpose(1, 2)).split([rank, dstate, dstate], dim=-1)
        delta = self.dt_proj(dt).transpose(1, 2)
        y = self._scan(x, delta, B.transpose(1, 2), C.transpose(1, 2), z)
        return hidden + self.out_proj(y.transpose(1, 2))

    def _convolve(self, x: Tensor) -> Tensor:
        """silu of the causal depthwise convolution of x, (batch, d_inner, seqlen)."""
        width = self.conv1d.kernel_size[0]
        if (
            causal_conv1d_fn is not None
            and x.is_cuda
            and not torch.compiler.is_compiling()
            and not torch.are_deterministic_algorithms_enabled()  # it adds gradients atomically
            and x.dtype != torch.float64
            and 2 <= width <= 4
            and self.d_inner % 4 == 0  # strides of a channel-last x are multiples of 8
        ):
            weight = self.conv1d.weight.squeeze(1)
            return causal_conv1d_fn(x, weight, self.conv1d.bias, activation="silu")
        return F.silu(self.conv1d(x)[..., : x.shape[-1]])

    def _scan(self, x: Tensor, delta: Tensor, B: Tensor, C: Tensor, z: Tensor) -> Tensor:
        A_log = self.A_log.float() if self.A_log.dtype in HALF else self.A_log
        A = -torch.exp(A_log)
        options = {
            "delta_bias": self.dt_proj.bias,
            "delta_softplus": self.dt_proj.softplus,
            "discretization_method": self.discretization_method,
        }
        if not self.bidirectional:
            return selective_scan_fn(x, delta, A, B, C, self.D, z, **options)
        forward = selective_scan_fn(x, delta, A, B, C, self.D, **options)
        backward = selective_scan_fn(x, delta, A, B, C, **options, reverse=True)
        return (forward + backward) * F.silu(z)

    def extra_repr(self) -> str:
        return (
            f"d_state={self.d_state}, bidirectional={self.bidirectional}, "
            f"discretization_method='{self.discretization_method}'"
        )


def _ignore_legacy_buffer(module: nn.Module, state_dict: dict, prefix: str, *_: object) -> None:
    """State dicts of older implementations hold A = -exp(A_log) beside A_log."""
    state_dict.pop(f"{prefix}A_negexp", None)


# --- constructor arguments ------------------------------------------------------------------------


def _refuse(name: str, wanted: str, value: object) -> NoReturn:
    raise ValueError(f"selective_scan: {name} must be {wanted}, got {value!r}")


def _check_count(name: str, value: object, alternative: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        _refuse(name, f"an integer of at least 1{alternative}", value)


def _check_positive(name: str, value: object) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        _refuse(name, "a positive finite number", value)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(name, "a bool", value)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        _refuse(name, f"one of {', '.join(choices)}", value)


def _check_default(name: str, value: float, default: float) -> None:
    if value != default:
        _refuse(name, f"{default} where dt_proj_bias=False, since it has no effect then", value)
