"""The class of every operator: with an operator defined here, and without parts of PyTorch."""

import contextlib

import pytest
import torch

import problem
import programs
import test_adaptive_unitary as unitary
import test_diagonal_scan as diagonal
from operator_cases import call_of
from selective_scan import _pytorch
from selective_scan._checks import INTEGER, REAL
from selective_scan._operator import Operator
from selective_scan._result import Result
from selective_scan._selective_scan import SELECTIVE_SCAN
from selective_scan._table import Option, Table, TensorArgument
from selective_scan.adaptive_unitary import _ADAPTIVE_UNITARY_SCAN
from selective_scan.diagonal_scan import DIAGONAL_SCAN
from test_compile import MINIMAL

# Each with a case of the tensors that its op requires.
OPERATORS = {
    SELECTIVE_SCAN: ("scan", MINIMAL),
    DIAGONAL_SCAN: ("diagonal scan", diagonal.Case(initial_state=None)),
    _ADAPTIVE_UNITARY_SCAN: ("unitary scan", unitary.Case(z=False, initial_state=False)),
}


# --- a new operator -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library():
    """The ops of an operator y[i] = factor·x[index[i]], and of one that adds in place."""
    library = torch.library.Library("selective_scan", "FRAGMENT")
    library.define(
        "gathered_fwd(Tensor x, Tensor index, Tensor? factor=None, bool negate=False) -> Tensor y"
    )
    library.define(
        "gathered_bwd(Tensor dy, Tensor x, Tensor index, Tensor? factor, bool negate) -> "
        "(Tensor dx, Tensor dfactor)"
    )
    library.define("raised(Tensor(a!) state, Tensor by) -> ()")

    def forward(x, index, factor=None, negate=False):
        y = x[index] * (1 if factor is None else factor)
        return -y if negate else y

    def backward(dy, x, index, factor, negate):
        dy = -dy if negate else dy
        dx = torch.zeros_like(x).index_add(0, index, dy * (1 if factor is None else factor))
        return dx, None if factor is None else (dy * x[index]).sum()[None]

    def add(state, by):
        state.add_(by)

    library.impl("gathered_fwd", forward, "CPU")
    library.impl("gathered_bwd", backward, "CPU")
    library.impl("raised", add, "CPU")
    yield
    library._destroy()


@pytest.fixture(scope="module")
def gathered(library):
    return Operator(
        "gathered",
        Table(
            TensorArgument("x", REAL, ("length",)),
            TensorArgument("index", INTEGER, ("entries",)),
            TensorArgument("factor", REAL, ("one",), optional=True),
            Option("negate"),
            anchor="x",
        ),
        results=[Result("y", ("entries",), lambda call: call["x"].dtype)],
        backward="dy x index factor negate",
    )


def test_schemas_follow_from_the_declaration(gathered):
    for name, schema in gathered.schemas().items():
        op = getattr(torch.ops.selective_scan, name).default
        assert torch._C.parse_schema(f"selective_scan::{name}{schema}") == op._schema


def gathered_inputs():
    x, index = torch.randn(5), torch.tensor([3, 0, 3])
    return x.requires_grad_(), index, torch.randn(1).requires_grad_()


@pytest.mark.parametrize("negate", [False, True])
def test_an_operator_of_a_few_lines(gathered, negate):
    x, index, factor = gathered_inputs()
    sign = -1 if negate else 1
    assert gathered.has_kernels((x, index, factor, negate, "auto"))
    for call in (gathered, torch.compile(gathered, fullgraph=True, backend="aot_eager")):
        y = call(x, index, factor, negate)
        expected = sign * factor * x[index]
        torch.testing.assert_close(y, expected)
        dy = torch.randn(3)
        torch.testing.assert_close(
            torch.autograd.grad(y, (x, factor), dy), torch.autograd.grad(expected, (x, factor), dy)
        )
    gradient = torch.func.grad(lambda x: gathered(x, index, None, negate).sum())(x.detach())
    torch.testing.assert_close(gradient, sign * torch.bincount(index, minlength=5).float())
    torch.library.opcheck(torch.ops.selective_scan.gathered_fwd, (x, index, factor, negate))


def test_bad_calls_of_an_operator_of_a_few_lines(gathered):
    x, index, factor = gathered_inputs()
    with pytest.raises(TypeError, match=r"^selective_scan: negate must be a bool, got int$"):
        gathered.has_kernels((x, index, factor, 1, "auto"))
    sentence = r"^selective_scan: index must have dtype int32 or int64, got float32$"
    with pytest.raises(RuntimeError, match=sentence):
        gathered(x.to("meta"), index.float().to("meta"), None, False)
    with pytest.raises(RuntimeError, match=", but by the reference, gathered_ref, which"):
        torch.func.jvp(lambda x: gathered(x, index, None, False), (x.detach(),), (torch.ones(5),))


def test_an_operator_of_a_few_lines_is_mapped(gathered):
    """No dimension of the operator is a batch, so vmap calls it for each entry."""
    x, index, factor = gathered_inputs()
    xs = torch.stack([x, 2 * x], dim=1).detach()
    indices = torch.stack([index, 1 + index])

    def gradient(x, index, factor):
        return torch.func.grad(lambda x: gathered(x, index, factor, False).square().sum())(x)

    for function in (lambda *inputs: gathered(*inputs, True), gradient):
        actual = torch.func.vmap(function, in_dims=(1, 0, None))(xs, indices, factor.detach())
        expected = [function(*xy, factor.detach()) for xy in zip(xs.T, indices, strict=True)]
        torch.testing.assert_close(actual, torch.stack(expected))


@pytest.fixture(scope="module")
def raised(library):
    return Operator(
        "raised",
        Table(
            TensorArgument("state", REAL, ("batch",), is_changed=True),
            TensorArgument("by", REAL, ("batch",)),
            anchor="state",
        ),
        results=[],
    )


@pytest.mark.parametrize("in_dims", [(0, 0), (1, None), (1, 0)])
def test_an_operator_that_writes_is_mapped(raised, in_dims):
    state, by = torch.ones(3, 3), torch.rand(3, 3) if in_dims[1] == 0 else torch.rand(3)
    expected = (state.movedim(in_dims[0], 0) + by).movedim(0, in_dims[0])

    def after(state, by):
        raised(state, by)
        return state

    torch.func.vmap(after, in_dims, out_dims=in_dims[0])(state, by)
    torch.testing.assert_close(state, expected)


def test_what_is_written_to_must_be_mapped(raised):
    sentence = "^selective_scan: state is written to, so vmap must map it where it maps by$"
    with pytest.raises(RuntimeError, match=sentence):
        torch.func.vmap(raised, in_dims=(None, 0))(torch.ones(2), torch.ones(3, 2))


def test_an_operator_without_a_derivative(raised):
    state, by = torch.ones(2), torch.rand(2, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=r"raised has no derivative; call it under torch\.no_grad"
    ):
        raised(state, by)
    with torch.no_grad():
        for call in (raised, torch.compile(raised, fullgraph=True, backend="aot_eager")):
            expected = state + by
            assert call(state, by) is None
            torch.testing.assert_close(state, expected)


# --- arguments that PyTorch leaves out ------------------------------------------------------------


class Context:
    """The context of an autograd node that has these inputs and no others."""

    def __init__(self, needs_input_grad):
        self.needs_input_grad = tuple(needs_input_grad)

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors):
        pass

    def set_materialize_grads(self, value):
        pass


def required(operator, device):
    """Returns the tensors that the op requires, with gradients enabled."""
    return list(call_of(*OPERATORS[operator], device).tensors.values())


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_as_many_gradients_as_inputs(operator, device):
    """A derivative returns a gradient for each input of its node: PyTorch 2.15 does not count
    optional arguments that a call leaves out."""
    tensors = required(operator, device)
    values = (*tensors, *operator.arguments.defaults[len(tensors) :])
    if operator is not DIAGONAL_SCAN:
        values = (*values, True)  # save_states
    results = getattr(torch.ops.selective_scan, f"{operator.name}_fwd")(*values)
    results = (results,) if isinstance(results, torch.Tensor) else results
    cotangent = torch.randn_like(results[0])
    expected = torch.autograd.grad(results[0], tensors, cotangent)
    nothing = [None] * len(results)
    for num_inputs in range(len(tensors), len(values) + 1):
        inputs = values[:num_inputs]
        context = Context([isinstance(value, torch.Tensor) for value in inputs])
        operator._derivative.save(context, inputs, results)
        backward = operator._derivative.found_by(operator._run_backward)
        with torch.no_grad():
            gradients = backward(context, cotangent, *nothing[1:])
            assert len(backward(context, *nothing)) == num_inputs
        assert len(gradients) == num_inputs
        torch.testing.assert_close(gradients[: len(tensors)], expected)
        assert all(gradient is None for gradient in gradients[len(tensors) :])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("operator", list(OPERATORS)[:2], ids=lambda operator: operator.name)
def test_gradients_of_ops_without_their_optional_arguments(operator, compiled, device):
    tensors = required(operator, device)
    op = getattr(torch.ops.selective_scan, f"{operator.name}_fwd")

    def first_result(*tensors):
        results = op(*tensors)
        return results if isinstance(results, torch.Tensor) else results[0]

    function = first_result
    if compiled:
        function = torch.compile(first_result, fullgraph=True, backend="aot_eager")
    actual = function(*tensors)
    expected = operator(*tensors, *operator.arguments.defaults[len(tensors) :])
    expected = expected if isinstance(expected, torch.Tensor) else expected[0]
    cotangent = torch.randn_like(actual)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, tensors, cotangent),
        torch.autograd.grad(expected, tensors, cotangent),
    )


# --- private names of PyTorch ---------------------------------------------------------------------

# The replacement of each name, for a PyTorch that lacks it.
INSTEAD = {
    "are_transforms_active": _pytorch._not_known,
    "is_tracing": torch.jit.is_tracing,
    "below_autograd": contextlib.nullcontext,
    "may_have_tangents": _pytorch._not_known,
    "_unwrap_if_dead": None,
}


@pytest.mark.slow
def test_an_import_with_a_pytorch_without_names_of_its_own():
    code = """
import importlib, torch
del importlib.import_module("torch._higher_order_ops.scan").scan_op
del torch.utils._python_dispatch.is_traceable_wrapper_subclass
del torch._assert_async, torch._foreach_copy_
import selective_scan.compat.generation
from selective_scan import _pytorch
tensor = torch.zeros(2, 3)
_pytorch.copy_each(tensor.unbind(), torch.ones(2, 3).unbind())
_pytorch.assert_async(tensor.all(), "all")
assert tensor.all() and not _pytorch.has_inner_tensors(tensor)
try:
    import selective_scan.onnx
except ImportError as error:
    print(error)
"""
    result = programs.run_python("-c", code)
    assert "selective_scan.onnx needs torch._higher_order_ops.scan.scan_op" in result.stdout, (
        result.stderr
    )


@pytest.mark.parametrize("names", [*([name] for name in INSTEAD), INSTEAD], ids="+".join)
def test_a_pytorch_without_names_of_its_own(names, device, monkeypatch):
    for name in names:
        monkeypatch.setattr(_pytorch, name, INSTEAD[name])
    for operator in OPERATORS:
        apply = _pytorch.apply_outside_transforms(operator._function)
        monkeypatch.setattr(operator, "_apply", apply)
    problem.check(problem.Case(dim=4, dstate=3, seqlen=70), device)
    diagonal.check(diagonal.Case(), device)
    unitary.check(unitary.Case(), device)
