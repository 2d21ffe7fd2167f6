"""Forward mode, which the operators refuse with a sentence."""

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

    primal = inputs[name].detach()
    with pytest.raises(RuntimeError, match=sentence):
        torch.func.jvp(of_one, (primal,), (tangent,))
    with pytest.raises(RuntimeError, match=sentence):
        torch.func.jacfwd(of_one)(primal)
    with pytest.raises(RuntimeError, match=sentence):
        torch.func.hessian(lambda value: of_one(value).abs().sum())(primal)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_of_ops_refuses(requires_grad, device):
    a, b = torch.rand(2, 3, 5, device=device).requires_grad_(requires_grad)
    ops = torch.ops.selective_scan
    for op, others in (
        (ops.diagonal_scan_fwd, (b,)),
        (ops.diagonal_scan_bwd, (a, b, None, False, None, False)),
    ):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(a, torch.ones_like(a))
            with pytest.raises(RuntimeError, match="is not supported by the kernels"):
                op(dual, *others)
            op(a, *others)
