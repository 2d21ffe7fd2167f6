"""What lies between a Mamba layer's in_proj and its out_proj: layers of several sets of weights do
it once for each set, and the projections once."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _pytorch
from ._checks import COMPLEX, SINGLE_OR_DOUBLE, Call, Dtypes, fail
from ._composed import ComposedOperator
from ._mamba_inner import Layer, backward_rows, forward_rows
from ._mamba_operators import AUTOCAST_DTYPE, MAMBA_INNER, check_x_proj_weight
from ._result import Kept, Result
from ._table import Option, Table, TensorArgument
from .causal_conv1d import causal_conv1d_fn, causal_conv1d_ref
from .functional import selective_scan_fn, selective_scan_ref
from .mamba_inner import autocast_dtype_of, project_rows

_NAMES = (
    *("xz", "conv1d_weight", "conv1d_bias", "x_proj_weight", "delta_proj_weight", "A", "A_b"),
    *("B", "C", "D", "delta_bias", "B_proj_bias", "C_proj_bias", "delta_softplus", "reverse"),
)
_ABSENT = dict.fromkeys(
    ("out_proj_weight", "out_proj_bias", "cu_seqlens", "b_rms_weight", "c_rms_weight",
     "dt_rms_weight")
)  # fmt: skip
_NUM_KEPT = 3


def _second_poles(_tensor: Tensor, call: Call) -> tuple[Dtypes, str]:
    return COMPLEX if call.is_complex else SINGLE_OR_DOUBLE, ""


def _check_relations(call: Call) -> None:
    check_x_proj_weight(call)
    if "A_b" in call.tensors and call.options["reverse"]:
        fail("reverse must be False where A_b is given, got True")


def _arguments(*own: Option) -> Table:
    known = {argument.name: argument for argument in MAMBA_INNER.arguments.arguments}
    known["A_b"] = TensorArgument("A_b", _second_poles, ("dim", "dstate"), optional=True)
    known["reverse"] = Option("reverse")
    return Table(
        *(known[name] for name in _NAMES),
        *own,
        anchor="xz",
        complex_by=("A",),
        relations=_check_relations,
    )


def _layer(arguments: tuple) -> Layer:
    given = dict(zip((*_NAMES, "autocast_dtype"), arguments, strict=True))
    return Layer(
        **given,
        **_ABSENT,
        checkpoint_lvl=1,
        b_c_dt_rms_eps=0.0,
        discretization_method="zoh",
        bidirectional=False,
    )


def _forward(*arguments) -> tuple[Tensor | None, ...]:
    *arguments, saves = arguments
    y, x_dbl, _, _, *states = forward_rows(_layer(arguments), saves)
    return (y, x_dbl, *states) if saves else (y, *[None] * _NUM_KEPT)


def _backward(dy: Tensor, *arguments) -> tuple[Tensor | None, ...]:
    arguments, kept = arguments[:-_NUM_KEPT], arguments[-_NUM_KEPT:]
    if kept[0] is None:  # the forward op was not asked to keep anything
        _, *kept = _forward(*arguments, True)
    x_dbl, *states = kept
    gradients = backward_rows(_layer(arguments), dy, x_dbl, None, None, *states)
    return tuple(gradients[argument.name] for argument in MAMBA_ROWS.arguments.tensors)


_FUNCTION_ARGUMENTS = _arguments()
MAMBA_ROWS = ComposedOperator(
    "mamba_rows",
    _arguments(AUTOCAST_DTYPE),
    results=[
        Result("y", ("batch", "seqlen", "dim"), lambda call: call["xz"].dtype),
        *map(Kept, ("x_dbl", "states", "second_states")),
    ],
    backward=f"dy {' '.join(_NAMES)} autocast_dtype x_dbl states second_states",
    forward_kernel=_forward,
    backward_kernel=_backward,
    function_arguments=_FUNCTION_ARGUMENTS,
)


def mamba_rows(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    A_b: Tensor | None = None,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    reverse: bool = False,
) -> Tensor:
    """What mamba_inner_fn's out_proj takes, (batch, seqlen, dim).

    With A_b a second scan of the same inputs, by these poles, from the last step to the first, is
    added; either is gated and has D. With `reverse` it is as if xz were turned around, and the
    result too: the convolution looks at the steps to come.
    """
    arguments = (
        *(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A, A_b, B, C, D),
        *(delta_bias, B_proj_bias, C_proj_bias, delta_softplus, reverse),
    )
    if not MAMBA_ROWS.has_kernels((*arguments, "auto")):
        _FUNCTION_ARGUMENTS.check_values(arguments)
        return _compose(selective_scan_ref, causal_conv1d_ref, *arguments)
    if torch.compiler.is_compiling():
        # Without Python there are the parts alone.
        is_whole = not torch.compiler.is_exporting()
    else:
        # The parts have batching rules, which their composition as one operator can not have.
        is_whole = not _pytorch.are_transforms_active()
    if is_whole:
        return MAMBA_ROWS(*arguments, autocast_dtype_of(xz.device))[0]
    MAMBA_ROWS.refuse_tangents(arguments)
    return _compose(selective_scan_fn, causal_conv1d_fn, *arguments)


def _compose(scan, convolve, xz, *arguments) -> Tensor:
    """The same, of a selective scan, a causal convolution and PyTorch."""
    *arguments, delta_softplus, reverse = arguments
    conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A, A_b, *given = arguments
    B, C, D, delta_bias, B_proj_bias, C_proj_bias = given
    dtype = xz.dtype
    if dtype != torch.float64:
        dtype = autocast_dtype_of(xz.device) or dtype
    x, z = (xz.flip(2) if reverse else xz).to(dtype).chunk(2, dim=1)
    u = convolve(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    delta, B, C = project_rows(
        u, x_proj_weight, delta_proj_weight, A, B, C, B_proj_bias, C_proj_bias
    )
    options = {"delta_bias": delta_bias, "delta_softplus": delta_softplus}
    y = scan(u, delta, A, B, C, D, z, **options)
    if A_b is not None:
        y = y + scan(u, delta, A_b, B, C, D, z, **options, reverse=True)
    return (y.flip(2) if reverse else y).transpose(1, 2)
