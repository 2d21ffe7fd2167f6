"""The selective scan as an Operator: the arguments and results of its ops, and their checks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ._checks import COMPLEX, REAL, SINGLE_OR_DOUBLE, Call, fail
from ._discretization import METHODS
from ._operator import Operator
from ._result import Kept, Result
from ._table import (
    CU_SEQLENS,
    PROJECTION_DTYPES,
    PROJECTIONS,
    STATE_DTYPES,
    Option,
    Shape,
    Table,
    TensorArgument,
)

_SEQUENCE = ("batch", "dim", "seqlen")
_STATE = ("sequences", "dim", "dstate")
POLES = ("dim", "dstate")
_CHANNELS = ("dim",)
INPUT_DELTA = TensorArgument("input_delta", REAL, _SEQUENCE, optional=True)
PROJECTION = Shape((POLES, *PROJECTIONS), two_of="seqlen", divided=("dim",))


def scan_flops(call: Call) -> tuple[int, int]:
    """Returns the multiplications, additions and exponentials of the forward and of the backward
    pass, zoh's for all methods.

    For each state and step, forward takes 7: x = Δ·A and exp(x), abar·h, bbar·u, their sum, C·h and
    its sum. Backward takes 22: all but the last two again, and 17 for the gradient of h, and from
    it of A, B, C, Δ and u. A complex multiplication with its addition counts as four real ones.
    """
    states = call[call.anchor].numel() * call.sizes["dstate"] * (4 if call.is_complex else 1)
    return 7 * states, 22 * states


def _refuse_matrices(name: str, tensor: Tensor, call: Call) -> None:
    method = call.options["discretization_method"]
    if tensor.dim() == 3 and method != "bilinear":
        shape = tuple(tensor.shape)
        fail(f"{name} of shape {shape} needs discretization_method bilinear, got '{method}'")


def scanned(A: TensorArgument) -> tuple[TensorArgument | Option, ...]:
    """Returns the arguments with which every scan of this kind of A begins."""
    return (
        TensorArgument("u", REAL, _SEQUENCE),
        TensorArgument("delta", REAL, _SEQUENCE),
        A,
        TensorArgument("B", PROJECTION_DTYPES, PROJECTION),
        TensorArgument("C", PROJECTION_DTYPES, PROJECTION),
        TensorArgument("D", REAL, _CHANNELS, optional=True),
        TensorArgument("z", REAL, _SEQUENCE, optional=True),
        TensorArgument("delta_bias", REAL, _CHANNELS, optional=True),
        Option("delta_softplus"),
    )


def scan_arguments(
    A: TensorArgument,
    methods: tuple[str, ...],
    *others: TensorArgument | Option,
) -> Table:
    """Returns the table of the scan's arguments, followed by `others`."""
    return Table(
        *scanned(A),
        Option("discretization_method", methods),
        TensorArgument("initial_state", STATE_DTYPES, _STATE, optional=True),
        Option("reverse"),
        *others,
        anchor="u",
        complex_by=("A",),
    )


def scan_operator(
    name: str,
    A: TensorArgument,
    methods: tuple[str, ...],
    flops: Callable[[Call], tuple[int, int]],
    cu_seqlens: TensorArgument = CU_SEQLENS,
    given_gradients: str = "",
) -> Operator:
    """Returns the operator for this kind of A, whose ops are named by `name`."""
    return Operator(
        name,
        scan_arguments(A, methods, cu_seqlens, INPUT_DELTA),
        results=[
            Result("out", _SEQUENCE, lambda call: call["u"].dtype, like="u"),
            Result("last_state", _STATE, lambda call: call.state_dtype),
            Kept("states", ("saved values",), lambda call: call.state_dtype, chunk="state_chunk"),
        ],
        backward=(
            "dout dlast_state u delta A B C D z delta_bias delta_softplus discretization_method "
            "initial_state reverse cu_seqlens input_delta states"
        ),
        flops=flops,
        given_gradients=given_gradients,
        reference="selective_scan_ref",
    )


POLE_DTYPES = (*SINGLE_OR_DOUBLE, *COMPLEX)
SELECTIVE_SCAN = scan_operator(
    "selective_scan",
    TensorArgument("A", POLE_DTYPES, Shape((POLES,), before=_refuse_matrices)),
    METHODS,
    scan_flops,
    given_gradients="u delta B C z",
)
