"""Derivatives refused with a message: forward mode, and any of in-place operators."""

import functools

import pytest
import torch
from torch.autograd import forward_ad

import operator_calls
import problem
import selective_scan
import test_adaptive_unitary as unitary
import test_diagonal_scan as diagonal
import test_mamba_inner as mamba_inner
from operator_cases import call_of

FORWARD_MODE = (
    "^selective_scan: forward-mode differentiation is not supported by the kernels"
    "(, but by the reference, {}, which functions run with backend='reference')?$"
)
OPERATORS = {
    "scan": problem.Case(seqlen=5),
    "diagonal scan": diagonal.Case(),
    "unitary scan": unitary.Case(),
}


@pytest.fixture(params=OPERATORS)
def operator(request, device):
    """The function, its reference, its inputs, and the name of one of them."""
    made = call_of(request.param, OPERATORS[request.param], device)
    return made.function, made.reference, made.tensors, "b" if "b" in made.tensors else "u"


def test_forward_mode_refuses(operator):
    function, reference, inputs, name = operator
    tangent = torch.ones_like(inputs[name])
    sentence = FORWARD_MODE.format(reference.__name__).replace("?$", "$")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(inputs[name], tangent)
        with pytest.raises(RuntimeError, match=sentence):
            function(**{**inputs, name: dual})
        wanted = forward_ad.unpack_dual(reference(**{**inputs, name: dual})).tangent
        assert wanted is not None
        function(**inputs)  # no tangent to lose

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
            with pytest.raises(RuntimeError, match=FORWARD_MODE.format("diagonal_scan_ref")):
                op(dual, *others)
            op(a, *others)


def test_forward_mode_of_a_layer_names_what_supports_it(device):
    tensors = problem.detached(mamba_inner.tensors_of(mamba_inner.BASE, device))
    xz = tensors.pop("xz")
    function = functools.partial(selective_scan.mamba_inner_fn, **tensors)
    layer, x = selective_scan.S6(8).to(device), torch.randn(2, 5, 8, device=device)
    sentence = FORWARD_MODE.format("mamba_inner_ref").replace("?$", "$")
    for call, given in ((layer, x), (function, xz)):
        with pytest.raises(RuntimeError, match=sentence):
            torch.func.jvp(call, (given,), (given,))


# --- operators in place ---------------------------------------------------------------------------


@pytest.fixture(params=operator_calls.IN_PLACE)
def call_in_place(request, device):
    """The op's name, the function and its tensors."""
    operator, _ = operator_calls.in_place(request.param, device)
    return operator.op.__name__, *operator_calls.make(request.param, device)


def test_what_is_written_in_place_has_no_derivative(call_in_place):
    name, function, tensors = call_in_place
    refusal = rf"^selective_scan: {name} has no derivative; call it under torch\.no_grad\(\)$"
    for i, tensor in enumerate(tensors):
        if not tensor.is_floating_point():
            continue
        tensor.requires_grad_()
        with pytest.raises(RuntimeError, match=refusal):
            function(*tensors)
        with torch.no_grad():
            result = function(*tensors)
        assert result is tensor or not result.requires_grad
        tensor.requires_grad_(False)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
            with pytest.raises(RuntimeError, match=FORWARD_MODE.format(r"\w+_ref")):
                function(*tensors[:i], dual, *tensors[i + 1 :])


@pytest.mark.parametrize("name", [it for it in operator_calls.OPERATORS_IN_PLACE if it != "step"])
def test_references_that_write_in_place_have_no_derivative(name):
    """States would be made part of a graph that grows from call to call."""
    operator, arguments = operator_calls.in_place(name, "cpu")
    arguments[operator.x].requires_grad_()
    for function in (operator.function, operator.reference):
        with pytest.raises(RuntimeError, match=r"has no derivative; call it under torch\.no_grad"):
            function(**arguments | {"backend": "reference"})
    assert not arguments[operator.states].requires_grad
    with torch.no_grad():
        operator.reference(**arguments)


def test_what_a_graph_has_saved_is_not_changed_in_place_without_a_word(call_in_place):
    _, function, tensors = call_in_place
    before = [tensor.clone() for tensor in tensors]
    weight = torch.ones((), device=tensors[0].device, requires_grad=True)
    products = [weight * tensor for tensor in tensors]
    with torch.no_grad():
        function(*tensors)
    changed = [not torch.equal(*pair) for pair in zip(tensors, before, strict=True)]
    assert any(changed)
    for product, is_changed in zip(products, changed, strict=True):
        if is_changed:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()
