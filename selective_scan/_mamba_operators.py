"""What lies between a Mamba layer's projections as Operators: what their ops take and return."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import _mamba_inner
from ._checks import (
    COMPLEX,
    CU_SEQLENS,
    REAL,
    SINGLE_OR_DOUBLE,
    Call,
    Dtypes,
    Number,
    Option,
    Projection,
    Table,
    TensorArgument,
    check_dims,
    fail,
)
from ._composed import ComposedOperator, Kept
from ._discretization import METHODS
from ._operator import Operator
from ._result import Result
from ._selective_scan import projection_dtypes


def _check_xz(name: str, tensor: Tensor, call: Call) -> None:
    check_dims(name, tensor, ("batch", "2*dim", "seqlen"), call.sizes)
    if tensor.shape[1] % 2 != 0:
        fail(f"{name} must have an even number of channels, got {tuple(tensor.shape)}")
    call.sizes["dim"] = tensor.shape[1] // 2


def check_x_proj_weight(call: Call) -> None:
    """It has rows for dt, and for the states of those of B and C that are not given."""
    sizes = dict(call.sizes)
    parts = ["dt_rank", *[_states(call)] * sum(name not in call.tensors for name in "BC")]
    sizes["+".join(parts)] = sum(_size(part, sizes) for part in parts)
    check_dims("x_proj_weight", call["x_proj_weight"], ("+".join(parts), "dim"), sizes)


class _ProjectedStates:
    """What belongs to B or C, (dstate,), or, with both components of complex ones, (2*dstate,)."""

    def __init__(self, projection: str) -> None:
        self._projection = projection

    def __call__(self, name: str, tensor: Tensor, call: Call) -> None:
        if self._projection in call.tensors:
            fail(f"{name} must be None where {self._projection} is given")
        dim = _states(call)
        check_dims(name, tensor, (dim,), call.sizes | {dim: _size(dim, call.sizes)})


def _states(call: Call) -> str:
    return "2*dstate" if call.is_complex else "dstate"


def _size(dim: str, sizes: dict) -> int | torch.SymInt:
    return 2 * sizes["dstate"] if dim == "2*dstate" else sizes[dim]


_CHANNELS = ("dim",)
_POLES = ("dim", "dstate")
_ROWS = ("batch", "seqlen", "dim")
_ROWS_OUT = ("batch", "seqlen", "d_model")


def _arguments(*own: Option) -> Table:
    return Table(
        TensorArgument("xz", REAL, _check_xz),
        TensorArgument("conv1d_weight", REAL, ("dim", "1", "width")),
        TensorArgument("conv1d_bias", REAL, _CHANNELS, optional=True),
        TensorArgument("x_proj_weight", REAL, ("projected", "dim")),
        TensorArgument("delta_proj_weight", REAL, ("dim", "dt_rank")),
        TensorArgument("out_proj_weight", REAL, ("d_model", "dim")),
        TensorArgument("out_proj_bias", REAL, ("d_model",), optional=True),
        TensorArgument("A", (*SINGLE_OR_DOUBLE, *COMPLEX), _POLES),
        TensorArgument("B", projection_dtypes, Projection(_POLES), optional=True),
        TensorArgument("C", projection_dtypes, Projection(_POLES), optional=True),
        TensorArgument("D", REAL, _CHANNELS, optional=True),
        TensorArgument("delta_bias", REAL, _CHANNELS, optional=True),
        TensorArgument("B_proj_bias", REAL, _ProjectedStates("B"), optional=True),
        TensorArgument("C_proj_bias", REAL, _ProjectedStates("C"), optional=True),
        Option("delta_softplus"),
        Option("checkpoint_lvl", (1, 0)),
        TensorArgument("b_rms_weight", REAL, _ProjectedStates("B"), optional=True),
        TensorArgument("c_rms_weight", REAL, _ProjectedStates("C"), optional=True),
        TensorArgument("dt_rms_weight", REAL, _CHANNELS, optional=True),
        Number("b_c_dt_rms_eps", 1e-6, low=0),
        Option("discretization_method", METHODS),
        Option("bidirectional"),
        CU_SEQLENS,
        *own,
        anchor="xz",
        complex_by=("A",),
        relations=check_x_proj_weight,
    )


_FUNCTION_ARGUMENTS = _arguments()
AUTOCAST_DTYPE = Option("autocast_dtype", (torch.float16, torch.bfloat16), optional=True)
MAMBA_INNER = ComposedOperator(
    "mamba_inner",
    _arguments(AUTOCAST_DTYPE),
    results=[
        Result("out", _ROWS_OUT, lambda call: call["xz"].dtype),
        *map(Kept, ("x_dbl", "y", "u", "steps", "states", "reverse_states")),
    ],
    backward=(
        f"dout {' '.join(_FUNCTION_ARGUMENTS.names)} autocast_dtype "
        "x_dbl y u steps states reverse_states"
    ),
    forward_kernel=_mamba_inner.forward,
    backward_kernel=_mamba_inner.backward,
    function_arguments=_FUNCTION_ARGUMENTS,
)


# --- a plain layer --------------------------------------------------------------------------------

# What a layer lacks that goes one way, is real and takes B and C from x as they are.
ABSENT_FROM_PLAIN = {
    **dict.fromkeys(("B", "C", "B_proj_bias", "C_proj_bias")),
    **dict.fromkeys(("b_rms_weight", "c_rms_weight", "dt_rms_weight")),
    "b_c_dt_rms_eps": 0.0,
    "bidirectional": False,
}


def _check_plain_xz(name: str, tensor: Tensor, call: Call) -> None:
    if "in_proj_weight" not in call.tensors:
        return _check_xz(name, tensor, call)
    check_dims(name, tensor, ("batch", "seqlen", "d_input"), call.sizes)


def _check_in_proj_weight(name: str, tensor: Tensor, call: Call) -> None:
    check_dims(name, tensor, ("2*dim", "d_input"), call.sizes)
    if tensor.shape[0] % 2 != 0:
        fail(f"{name} must have an even number of channels, got {tuple(tensor.shape)}")
    call.sizes["dim"] = tensor.shape[0] // 2


def _plain_arguments(*own: TensorArgument) -> Table:
    _, *others = (
        a for a in _arguments(AUTOCAST_DTYPE).arguments if a.name not in ABSENT_FROM_PLAIN
    )
    return Table(
        TensorArgument("xz", REAL, _check_plain_xz),
        TensorArgument("in_proj_weight", REAL, _check_in_proj_weight, optional=True),
        TensorArgument("in_proj_bias", REAL, ("2*dim",), optional=True),
        *others,
        *own,
        anchor="xz",
        relations=check_x_proj_weight,
    )


def _products_dtype(call: Call) -> torch.dtype:
    dtype = call["xz"].dtype
    return dtype if dtype == torch.float64 else call.options["autocast_dtype"] or dtype


def _residual_dtypes(_tensor: Tensor, call: Call) -> tuple[Dtypes, str]:
    """What is added to out must not make it less precise."""
    dtype = _products_dtype(call)
    return tuple(dict.fromkeys((dtype, torch.promote_types(dtype, torch.float32)))), ""


def _out_dtype(call: Call) -> torch.dtype:
    residual = call.tensors.get("residual")
    return _products_dtype(call) if residual is None else residual.dtype


def _states_dtype(call: Call) -> torch.dtype:
    """Of the scan's states, which the convolution's and the products' weights do not decide."""
    given = [call.tensors[name].dtype for name in ("A", "D", "delta_bias") if name in call.tensors]
    is_double = torch.float64 in (_products_dtype(call), *given)
    return torch.float64 if is_double else torch.float32


def _is_projected(call: Call) -> bool:
    return "in_proj_weight" in call.tensors


def _kept(
    name: str,
    dims: tuple[str, ...],
    dtype: Callable[[Call], torch.dtype] = _products_dtype,
    **options: object,
) -> Result:
    return Result(name, dims, dtype, is_kept=True, recomputed=True, **options)


def _allocate_dxz(given: dict) -> Tensor:
    xz, dtype = given["xz"], given["xz_dtype"]
    if given["in_proj_weight"] is not None:
        return torch.empty_like(xz, dtype=dtype, memory_format=torch.contiguous_format)
    batch, channels, seqlen = xz.shape
    return xz.new_empty(batch, seqlen, channels, dtype=dtype).transpose(1, 2)


_RESIDUAL = TensorArgument("residual", _residual_dtypes, _ROWS_OUT, optional=True)
# The same as MAMBA_INNER in C++, since a small layer waits for the host. With in_proj_weight, xz
# is the layer's input, (batch, seqlen, d_input), and A is A_log. The residual is added to out.
PLAIN_MAMBA_INNER = Operator(
    "plain_mamba_inner",
    _plain_arguments(_RESIDUAL),
    results=[
        Result("out", _ROWS_OUT, _out_dtype, gradient_dtypes=REAL),
        _kept(
            "input",
            ("batch", "seqlen", "d_input"),
            stands_for="xz",
            is_asked=lambda call: _is_projected(call) and call["xz"].dtype != _products_dtype(call),
        ),
        _kept("xz_rows", ("batch", "seqlen", "2*dim"), is_asked=_is_projected),
        _kept(
            "poles",
            _POLES,
            lambda call: torch.promote_types(call["A"].dtype, torch.float32),
            is_asked=_is_projected,
        ),
        _kept("x_dbl", ("batch", "seqlen", "projected")),
        _kept("y", _ROWS),
        _kept("u", _ROWS, is_asked=lambda call: call.options["checkpoint_lvl"] == 0),
        _kept("steps", _ROWS, is_asked=lambda call: call.options["checkpoint_lvl"] == 0),
        Result("states", ("saved values",), _states_dtype, chunk="state_chunk", recomputed=True),
    ],
    backward=(
        f"dout {' '.join(_plain_arguments().names)} xz_rows poles x_dbl y u steps states xz_dtype"
    ),
    derived={"xz_dtype": lambda inputs: inputs[0].dtype},
    gradient_like={"xz": _allocate_dxz},
    backward_arguments=_plain_arguments(),
    passed_gradients={"residual": "out"},
    donated="y",
    has_batching_rules=False,
    reference="mamba_inner_ref",
)
