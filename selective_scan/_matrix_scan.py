"""The Operator of the selective scan with full state matrices, and the choice between it and the
one with diagonal A."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from torch import Tensor

from ._checks import Call, fail
from ._operator import Operator
from ._selective_scan import POLE_DTYPES, SELECTIVE_SCAN, scan_operator
from ._table import CU_SEQLENS, TensorArgument


def _flops(call: Call) -> tuple[int, int]:
    """Returns the multiplications and additions of the forward and of the backward pass.

    For each entry of the matrix and step, forward takes 6 for an elimination, two products with a
    Hessenberg matrix and two substitutions, and 4 for B and C. Backward takes 22: the first 6
    again, as many for the adjoint, 2 for the gradient of A, 4 for B and C and 4 for their
    gradients. A complex multiplication with its addition counts as four real ones.
    """
    sizes = call.sizes
    entries = sizes["batch"] * sizes["dim"] * sizes["seqlen"] * sizes["dstate"] ** 2
    entries *= 4 if call.is_complex else 1
    return 10 * entries, 22 * entries


def _refuse(name: str, _tensor: Tensor, _call: Call) -> NoReturn:
    fail(f"{name} must be None where A is (dim, dstate, dstate)")


MATRIX_SCAN = scan_operator(
    "matrix_scan",
    TensorArgument("A", POLE_DTYPES, ("dim", "dstate", "dstate")),
    ("bilinear",),
    _flops,
    replace(CU_SEQLENS, shape=replace(CU_SEQLENS.shape, before=_refuse)),
)


def operator_for(A: Tensor, discretization_method: str) -> Operator:
    """Returns the operator that serves a call of selective_scan_fn with these arguments.

    A may be of any type; the operator's checks refuse a wrong one later.
    """
    if discretization_method == "bilinear" and isinstance(A, Tensor) and A.dim() == 3:
        return MATRIX_SCAN
    return SELECTIVE_SCAN
