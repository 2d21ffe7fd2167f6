"""Gradients against finite differences in float64, by torch.autograd.gradcheck."""

import itertools

import pytest
import torch

from opchecks import gradcheck
from problem import COMPLEX_KINDS, LAYOUTS, METHODS, REAL_KINDS, Case, inputs_on, make
from selective_scan import selective_scan_fn

SMALL = Case(dtype=torch.float64, dim=4, dstate=2, seqlen=4, B="shared", C="shared")
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
        events = base.with_(input_delta=torch.float64)
        yield from (events.with_(B=kind, C=kind) for kind in ("constant", kinds[-1]))
        yield events.with_(reverse=True, z=False, D=False)
        yield LONG.with_(complex=is_complex, method=method)
        yield LONG.with_(complex=is_complex, method=method, input_delta=torch.float64)
    for is_complex, layout in itertools.product((False, True), LAYOUTS):
        yield SMALL.with_(complex=is_complex, layout=layout, method="foh")
    yield LONG.with_(reverse=True)
    yield LONG.with_(complex=True, B="packed", C="packed", reverse=True)


@pytest.mark.parametrize("case", dict.fromkeys(cases()), ids=str)
def test_gradcheck(case, device):
    inputs = inputs_on(case, device)
    if case.layout == "expanded":
        # gradcheck perturbs strided leaves in place, so their elements must not share memory.
        inputs = {
            name: None if value is None else value.detach().clone().requires_grad_()
            for name, value in inputs.items()
        }
    gradcheck(selective_scan_fn, inputs, **make(case).options, return_last_state=True)


def test_the_reference_is_twice_differentiable():
    case = SMALL.with_(seqlen=2)
    inputs = inputs_on(case, "cpu")

    def scan(u, delta):
        changed = inputs | {"u": u, "delta": delta}
        return selective_scan_fn(**changed, **make(case).options, backend="reference")

    assert torch.autograd.gradgradcheck(scan, (inputs["u"], inputs["delta"]))
