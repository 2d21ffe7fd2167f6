"""The selective scan as an Operator: what its ops take and return, and what is refused."""

from __future__ import annotations

from torch import Tensor

from ._checks import (
    COMPLEX,
    REAL,
    SINGLE_OR_DOUBLE,
    Call,
    Dtypes,
    Option,
    Projection,
    Table,
    TensorArgument,
    state_dtypes,
)
from ._discretization import METHODS
from ._operator import Operator, Result

_SEQUENCE = ("batch", "dim", "seqlen")
_STATE = ("batch", "dim", "dstate")
_POLES = ("dim", "dstate")
_CHANNELS = ("dim",)


def _projection_dtypes(tensor: Tensor, call: Call) -> tuple[Dtypes, str]:
    if not call.is_complex:
        return REAL, ""
    if tensor.dim() == len(_POLES):
        return COMPLEX, " (complex A, constant B and C)"
    return (*COMPLEX, *REAL), ""


SELECTIVE_SCAN = Operator(
    "selective_scan",
    Table(
        TensorArgument("u", REAL, _SEQUENCE),
        TensorArgument("delta", REAL, _SEQUENCE),
        TensorArgument("A", (*SINGLE_OR_DOUBLE, *COMPLEX), _POLES),
        TensorArgument("B", _projection_dtypes, Projection(_POLES)),
        TensorArgument("C", _projection_dtypes, Projection(_POLES)),
        TensorArgument("D", REAL, _CHANNELS, optional=True),
        TensorArgument("z", REAL, _SEQUENCE, optional=True),
        TensorArgument("delta_bias", REAL, _CHANNELS, optional=True),
        Option("delta_softplus"),
        Option("discretization_method", METHODS),
        TensorArgument("initial_state", state_dtypes, _STATE, optional=True),
        Option("reverse"),
        anchor="u",
        complex_by=("A",),
    ),
    results=[
        Result("out", _SEQUENCE, lambda call: call["u"].dtype, like="u"),
        Result("last_state", _STATE, lambda call: call.state_dtype),
        Result(
            "states",
            ("saved values",),
            lambda call: call.state_dtype,
            chunk="state_chunk",
            recomputed=True,
        ),
    ],
    backward=(
        "dout dlast_state u delta A B C D z delta_bias delta_softplus discretization_method "
        "initial_state reverse states"
    ),
)
