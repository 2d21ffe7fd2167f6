"""The Operator of everything between a Mamba layer's projections: its arguments and results."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ._checks import REAL, SINGLE_OR_DOUBLE, Call, Dtypes, check_dims, fail, size_of
from ._derivative import Derivative
from ._discretization import METHODS, at_least_single
from ._operator import Operator
from ._result import Kept, Result
from ._selective_scan import POLE_DTYPES, POLES, PROJECTION
from ._table import (
    CU_SEQLENS,
    PROJECTION_DTYPES,
    STATE_DTYPES,
    Case,
    Cases,
    Number,
    Option,
    Shape,
    Table,
    TensorArgument,
)


def _check_x_proj_weight(call: Call) -> None:
    """Checks that x_proj_weight has rows for dt, and for B and C unless they are given."""
    sizes = dict(call.sizes)
    states = "2*dstate" if call.is_complex else "dstate"
    parts = ["dt_rank", *[states] * sum(name not in call.tensors for name in "BC")]
    sizes["+".join(parts)] = sum(size_of(part, sizes) for part in parts)
    check_dims("x_proj_weight", call["x_proj_weight"], ("+".join(parts), "dim"), sizes)


def _check_relations(call: Call) -> None:
    """Checks arguments against each other; csrc/torch/layer_call.h has the same checks and
    messages."""
    _check_x_proj_weight(call)
    if "out_proj_bias" in call.tensors and "out_proj_weight" not in call.tensors:
        fail("out_proj_bias must be None where out_proj_weight is None")
    for name, others in {
        "reverse": ("bidirectional", "A_b", "cu_seqlens"),
        "bidirectional": ("A_b",),
    }.items():
        for other in others:
            if call.options[name] and (call.options.get(other) or other in call.tensors):
                fail(f"{name} must be False where {other} is given, got True")
    if "A_b" in call.tensors and "in_proj_weight" in call.tensors:
        fail("A_b must be None where in_proj_weight is given")


def _projected_states(projection: str) -> Shape:
    """Returns the shape of a bias or norm weight of B or C, which has two entries for each complex
    state."""

    def refuse_beside(name: str, _tensor: Tensor, call: Call) -> None:
        if projection in call.tensors:
            fail(f"{name} must be None where {projection} is given")

    return Shape((("dstate",),), two_of="dstate", before=refuse_beside)


_CHANNELS = ("dim",)
_ROWS = ("batch", "seqlen", "dim")
_ROWS_OUT = ("batch", "seqlen", "d_model")
_XZ = ("batch", "2*dim", "seqlen")
# Without an output projection the result is the rows that would enter it.
_EQUAL_SIZES = {"cu_seqlens": ("sequences", "batch"), "out_proj_weight": ("d_model", "dim")}

# The arguments of a layer, whether it runs as an op or as a composition. If A_b is given, a second
# scan with these poles runs from the last step to the first; each scan applies D and the gate. With
# reverse the only scan runs in that direction, and the convolution also looks at the following
# steps.
LAYER_ARGUMENTS = Table(
    TensorArgument("xz", REAL, _XZ),
    TensorArgument("conv1d_weight", REAL, ("dim", "1", "width")),
    TensorArgument("conv1d_bias", REAL, _CHANNELS, optional=True),
    TensorArgument("x_proj_weight", REAL, ("projected", "dim")),
    TensorArgument("delta_proj_weight", REAL, ("dim", "dt_rank")),
    TensorArgument("out_proj_weight", REAL, ("d_model", "dim"), optional=True),
    TensorArgument("out_proj_bias", REAL, ("d_model",), optional=True),
    TensorArgument("A", POLE_DTYPES, POLES),
    TensorArgument("A_b", STATE_DTYPES, POLES, optional=True),
    TensorArgument("B", PROJECTION_DTYPES, PROJECTION, optional=True),
    TensorArgument("C", PROJECTION_DTYPES, PROJECTION, optional=True),
    TensorArgument("D", REAL, _CHANNELS, optional=True),
    TensorArgument("delta_bias", REAL, _CHANNELS, optional=True),
    TensorArgument("B_proj_bias", REAL, _projected_states("B"), optional=True),
    TensorArgument("C_proj_bias", REAL, _projected_states("C"), optional=True),
    Option("delta_softplus"),
    Option("checkpoint_lvl", (1, 0)),
    TensorArgument("b_rms_weight", REAL, _projected_states("B"), optional=True),
    TensorArgument("c_rms_weight", REAL, _projected_states("C"), optional=True),
    TensorArgument("dt_rms_weight", REAL, _CHANNELS, optional=True),
    Number("b_c_dt_rms_eps", 1e-6, low=0),
    Option("discretization_method", METHODS),
    Option("bidirectional"),
    Option("reverse"),
    CU_SEQLENS,
    anchor="xz",
    complex_by=("A",),
    equal_sizes=_EQUAL_SIZES,
    relations=_check_relations,
)
Layer = namedtuple("Layer", LAYER_ARGUMENTS.names, defaults=LAYER_ARGUMENTS.defaults)
# The tensors that the op of a layer does not support: the op is real, and takes B and C from x
# unchanged.
ABSENT_FROM_OP = (
    *("B", "C", "B_proj_bias", "C_proj_bias"),
    *("b_rms_weight", "c_rms_weight", "dt_rms_weight"),
)

# --- the ops --------------------------------------------------------------------------------------

_INPUT = ("batch", "seqlen", "d_input")
# If in_proj_weight is given, A is A_log.
_LOGARITHM_OR_POLES = Cases((Case(REAL, given="in_proj_weight"), Case(POLE_DTYPES)))
_OF_OP = {
    "xz": TensorArgument("xz", REAL, Shape((_INPUT,), where="in_proj_weight", otherwise=(_XZ,))),
    "A": TensorArgument("A", _LOGARITHM_OR_POLES, POLES),
    "A_b": TensorArgument("A_b", SINGLE_OR_DOUBLE, POLES, optional=True),
}


def _arguments(*own: TensorArgument) -> Table:
    xz, *others = (
        _OF_OP.get(argument.name, argument)
        for argument in LAYER_ARGUMENTS.arguments
        if argument.name not in (*ABSENT_FROM_OP, "b_c_dt_rms_eps")
    )
    return Table(
        xz,
        TensorArgument("in_proj_weight", REAL, ("2*dim", "d_input"), optional=True),
        TensorArgument("in_proj_bias", REAL, ("2*dim",), optional=True),
        *others,
        Option("autocast_dtype", (torch.float16, torch.bfloat16), optional=True),
        *own,
        anchor="xz",
        equal_sizes=_EQUAL_SIZES,
        relations=_check_relations,
    )


def products_dtype(call: Call) -> torch.dtype:
    dtype = call["xz"].dtype
    return dtype if dtype == torch.float64 else call.options["autocast_dtype"] or dtype


def residual_dtypes(product_dtype: torch.dtype) -> Dtypes:
    """Returns the dtypes that a residual may have, which must be no less precise than out."""
    wide = at_least_single(product_dtype)
    return (product_dtype,) if wide == product_dtype else (product_dtype, wide)


def _out_dtype(call: Call) -> torch.dtype:
    residual = call.tensors.get("residual")
    return products_dtype(call) if residual is None else residual.dtype


def states_dtype(call: Call) -> torch.dtype:
    """Returns the dtype of the scan's states. The weights of the convolution and of the products do
    not affect it."""
    names = ("A", "A_b", "D", "delta_bias")
    given = [call.tensors[name].dtype for name in names if name in call.tensors]
    is_double = torch.float64 in (products_dtype(call), *given)
    return torch.float64 if is_double else torch.float32


def _is_projected(call: Call) -> bool:
    return "in_proj_weight" in call.tensors


def has_second_scan(call: Call) -> bool:
    return call.options["bidirectional"] or "A_b" in call.tensors


def _keeps_all(call: Call) -> bool:
    return call.options["checkpoint_lvl"] == 0


class _LayerDerivative(Derivative):
    """The derivative of a layer.

    Its backward op is given the cast copy of the layer's input, if there is one, in place of xz. It
    does not return the gradient of the residual, which is that of out.
    """

    def _arguments_and_results(self, inputs: tuple, results: tuple) -> list:
        row = super()._arguments_and_results(inputs, results)
        input = results[1]
        if input is not None:
            row[0] = input
        return row

    def _differentiate(self, run: Callable, ctx, dout: Tensor | None, *others) -> tuple:
        gradients = super()._differentiate(run, ctx, dout, *others)
        if not any(ctx.needs_input_grad[_RESIDUAL_PLACE : _RESIDUAL_PLACE + 1]):
            return gradients
        return *gradients[:_RESIDUAL_PLACE], dout, *gradients[_RESIDUAL_PLACE + 1 :]


class _LayerOperator(Operator):
    """The operator of a layer."""

    _derivative_type = _LayerDerivative
    _has_defaults = False
    _has_batching_rules = False

    def _gradient_dtypes(self, result: Result, call: Call) -> Dtypes:
        # The residual, which determines the dtype of out, is not passed to the backward op.
        return REAL if result.name == "out" else super()._gradient_dtypes(result, call)


def _allocate_dxz(given: dict) -> Tensor:
    xz, dtype = given["xz"], given["xz_dtype"]
    if given["in_proj_weight"] is not None:
        return torch.empty_like(xz, dtype=dtype, memory_format=torch.contiguous_format)
    batch, channels, seqlen = xz.shape
    return xz.new_empty(batch, seqlen, channels, dtype=dtype).transpose(1, 2)


_RESIDUAL = TensorArgument(
    "residual",
    lambda tensor, call: (residual_dtypes(products_dtype(call)), ""),
    _ROWS_OUT,
    optional=True,
)
_RESIDUAL_PLACE = len(_arguments().names)


def make_layer_operator(name: str, *own: Option, kept: Sequence[Kept] = ()) -> Operator:
    """Returns the operator of a layer whose ops have this name.

    The ops are written in C++, since host time bounds small layers. If in_proj_weight is given, xz
    is the layer's input, (batch, seqlen, d_input), and A is A_log. The residual is added to out.

    Args:
        own: additional arguments after the residual, which the backward op is given as well.
        kept: additional results that the backward op is given.
    """
    states = {"dims": ("saved values",), "dtype": states_dtype, "chunk": "state_chunk"}
    results = [
        Result("out", _ROWS_OUT, _out_dtype),
        Kept(
            "input",
            _INPUT,
            products_dtype,
            is_asked=lambda call: _is_projected(call) and call["xz"].dtype != products_dtype(call),
        ),
        Kept("xz_rows", ("batch", "seqlen", "2*dim"), products_dtype, is_asked=_is_projected),
        Kept(
            "poles",
            POLES,
            lambda call: at_least_single(call["A"].dtype),
            is_asked=_is_projected,
        ),
        Kept("x_dbl", ("batch", "seqlen", "projected"), products_dtype),
        Kept("y", _ROWS, products_dtype, is_asked=lambda call: "out_proj_weight" in call.tensors),
        Kept("u", _ROWS, products_dtype, is_asked=_keeps_all),
        Kept("steps", _ROWS, products_dtype, is_asked=_keeps_all),
        Kept("states", **states),
        Kept("second_states", **states, is_asked=has_second_scan),
        *kept,
    ]
    given = [*_arguments(*own).names, *(result.name for result in results[2:]), "xz_dtype"]
    return _LayerOperator(
        name,
        _arguments(_RESIDUAL, *own),
        results,
        backward=f"dout {' '.join(given)}",
        derived={Option("xz_dtype", REAL): lambda inputs: inputs[0].dtype},
        function_arguments=LAYER_ARGUMENTS,
        reference="" if own else None,  # the reference does not support several ranks
        backward_arguments=_arguments(*own),
        gradient_like={"xz": _allocate_dxz},
    )


MAMBA_INNER = make_layer_operator("mamba_inner")
