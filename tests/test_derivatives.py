"""Derivatives that the operators refuse, each with a sentence: second ones, and forward mode."""

import pytest
import torch
from torch.autograd import forward_ad

import problem
import selective_scan
import test_adaptive_unitary as unitary
import test_diagonal_scan as diagonal

OPERATORS = ("selective_scan", "diagonal_scan", "adaptive_unitary_scan")


@pytest.fixture(params=OPERATORS)
def operator(request, device):
    """(function, reference, inputs, name of one of them)."""
    function = getattr(selective_scan, f"{request.param}_fn")
    reference = getattr(selective_scan, f"{request.param}_ref")
    if request.param == "selective_scan":
        return function, reference, problem.inputs_on(problem.Case(seqlen=5), device), "u"
    cases, name = (diagonal, "b") if request.param == "diagonal_scan" else (unitary, "u")
    return function, reference, cases.make(cases.Case(), device), name


def test_double_backward_refuses(operator):
    function, _, inputs, name = operator
    result = function(**inputs)
    (gradient,) = torch.autograd.grad(result.square().sum(), inputs[name], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        gradient.sum().backward()


def test_forward_mode_refuses(operator):
    function, reference, inputs, name = operator
    tangent = torch.ones_like(inputs[name])
    sentence = f"not supported by the kernels; {reference.__name__}, or backend='reference'"
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs[name], tangent)
        with pytest.raises(RuntimeError, match=sentence):
            function(**{**inputs, name: dual})
        wanted = forward_ad.unpack_dual(reference(**{**inputs, name: dual})).tangent
        assert wanted is not None
        function(**inputs)  # nothing to be lost

    def of_one(value):
        return function(**{**inputs, name: value})

    with pytest.raises(RuntimeError, match=sentence):
        torch.func.jvp(of_one, (inputs[name].detach(),), (tangent,))
