"""Gradients of every operator against finite differences in float64, by PyTorch's gradcheck."""

import itertools

import torch

import test_adaptive_unitary as unitary
import test_causal_conv1d as convolution
import test_diagonal_scan as diagonal
import test_exponential_trapezoid as trapezoid
import test_matrix_scan as matrix
from opchecks import gradcheck
from operator_cases import call_of, each_case
from problem import COMPLEX_KINDS, LAYOUTS, METHODS, REAL_KINDS, Case, inputs_on, make
from selective_scan import selective_scan_fn

F64, C128 = torch.float64, torch.complex128
SMALL = Case(dtype=F64, dim=4, dstate=2, seqlen=4, B="shared", C="shared")
# Long enough for two inner chunk boundaries, where the backward pass reads saved states.
LONG = SMALL.with_(batch=1, dim=1, dstate=1, seqlen=67)


def cases():
    for is_complex, method in itertools.product((False, True), METHODS):
        base = SMALL.with_(complex=is_complex, method=method)
        kinds = COMPLEX_KINDS if is_complex else REAL_KINDS
        yield from (base.with_(B=kind, C=kind) for kind in kinds)
        yield base.with_(B="constant")
        yield base.with_(C="constant")
        yield base.with_(reverse=True)
        yield base.with_(
            D=False, z=False, delta_bias=False, delta_softplus=False, initial_state=False
        )
        yield from (base.with_(**{name: False}) for name in ("z", "delta_softplus"))
        events = base.with_(input_delta=F64)
        yield from (events.with_(B=kind, C=kind) for kind in ("constant", kinds[-1]))
        yield events.with_(reverse=True, z=False, D=False)
        yield LONG.with_(complex=is_complex, method=method)
        yield LONG.with_(complex=is_complex, method=method, input_delta=F64)
    for is_complex, layout in itertools.product((False, True), LAYOUTS):
        yield SMALL.with_(complex=is_complex, layout=layout, method="foh")
    yield LONG.with_(reverse=True)
    yield LONG.with_(complex=True, B="packed", C="packed", reverse=True)
    packed = Case(batch=1, dim=2, groups=1, dstate=2, seqlen=7, cu_seqlens=(0, 3, 3, 6), dtype=F64)
    yield from (packed, packed.with_(reverse=True, complex=True))


MATRIX = matrix.BASE.with_(dim=2, seqlen=4, dstate=3, batch=1, dtype=F64)
TRAPEZOID = trapezoid.BASE.with_(dim=2, dstate=2, seqlen=6, dtype=F64)
UNITARY = unitary.Case(1, 4, 3, 2, 1, dtype=F64, parameter_dtype=F64)
GROUPED = UNITARY.with_(groups=2, C="grouped")
CASES = {
    "scan": [*dict.fromkeys(cases())],
    "matrix scan": [
        case.with_(**kind)
        for case in (MATRIX, MATRIX.with_(input_delta=F64))
        for kind in ({}, {"complex": True, "B": "packed", "C": "constant"})
    ],
    "exponential trapezoid": [
        *TRAPEZOID.each(complex=(False, True)),
        *TRAPEZOID.with_(batch=1, cu_seqlens=(1, 3, 3, 5)).each(complex=(False, True)),
    ],
    "unitary scan": [
        UNITARY,
        UNITARY.with_(B="shared", z=False),
        GROUPED.with_(z=False),
        GROUPED.with_(B="grouped"),
    ],
    "diagonal scan": [
        *(
            diagonal.Case((2, 3, 5), a_shape, a, b, C128 if C128 in (a, b) else F64, reverse)
            for a, b in itertools.product((F64, C128), (F64, C128))
            for a_shape in (None, (3, 1), (5,))
            for reverse in (False, True)
        ),
        diagonal.Case((1, 3, 7), None, F64, F64, F64, cu_seqlens=(0, 3, 3, 6)),
    ],
    "convolution": convolution.SMALL_CASES,
}


@each_case(CASES)
def test_gradcheck(operator, case, device):
    call = call_of(operator, case, device)
    tensors = call.tensors
    if case.layout == "expanded":
        # gradcheck perturbs strided leaves in place, so their elements must not share memory.
        tensors = {name: it.detach().clone().requires_grad_() for name, it in tensors.items()}
    gradcheck(call.function, tensors, **call.options)


def test_the_reference_is_twice_differentiable():
    case = SMALL.with_(seqlen=2)
    inputs = inputs_on(case, "cpu")

    def scan(u, delta):
        changed = inputs | {"u": u, "delta": delta}
        return selective_scan_fn(**changed, **make(case).options, backend="reference")

    assert torch.autograd.gradgradcheck(scan, (inputs["u"], inputs["delta"]))
