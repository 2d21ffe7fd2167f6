"""torch.func.vmap and batched gradients: they agree with a loop over the entries."""

import functools
import itertools
import operator
import warnings

import pytest
import torch
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap

import operator_calls
import problem
import test_adaptive_unitary as unitary
import test_causal_conv1d as convolution
import test_diagonal_scan as diagonal
import test_matrix_scan as matrix
from layers import error, loss_of
from opchecks import Ops
from operator_cases import call_of
from selective_scan import S6, selective_scan_fn, selective_scan_ref

ENTRIES = 3
F64, C128 = torch.float64, torch.complex128
SMALL = problem.Case(dim=4, seqlen=70, dstate=3, dtype=F64)
UNITARY = unitary.Case(dim=4, seqlen=70, dstate=3, dtype=F64, parameter_dtype=F64)
CONVOLUTION = convolution.Case(
    dim=4, seqlen=9, width=3, states=False, dtype=F64, weight_dtype=F64, state_dtype=F64
)
DIAGONAL = diagonal.Case(shape=(2, 4, 9), a=F64, b=F64, initial_state=F64)
CASES = {
    "grouped": ("scan", SMALL),
    "shared": ("scan", SMALL.with_(B="shared", C="shared", reverse=True, method="foh")),
    "constant B": (
        "scan",
        SMALL.with_(B="constant", z=False, delta_bias=False, initial_state=False),
    ),
    "constant B and C": ("scan", SMALL.with_(B="constant", C="constant", D=False)),
    "complex": ("scan", SMALL.with_(complex=True, B="packed", C="shared")),
    "packed groups": ("scan", SMALL.with_(complex=True, B="packed_grouped", C="constant")),
    "matrix": ("matrix scan", matrix.BASE.with_(dstate=3, dtype=F64, input_delta=F64)),
    "unitary": ("unitary scan", UNITARY),
    "unitary, grouped B": ("unitary scan", UNITARY.with_(B="grouped")),
    "unitary, shared": ("unitary scan", UNITARY.with_(B="shared", C="shared", z=False)),
    "convolution": ("convolution", CONVOLUTION),
    "convolution with states": ("convolution", CONVOLUTION.with_(states=True)),
    "packed convolution": ("convolution", CONVOLUTION.with_(batch=1, cu_seqlens=(0, 4, 9))),
    "diagonal": ("diagonal scan", DIAGONAL),
    "diagonal, a pole a channel": (
        "diagonal scan",
        DIAGONAL.with_(a_shape=(4, 1), a=C128, initial_state=None),
    ),
}


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    """Makes vmap's warning an error: that an op without a batching rule is called for each
    entry."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="There is a performance drop")
        yield


@pytest.fixture(params=CASES.values(), ids=CASES)
def call(request, device):
    """A function from tensors to a tuple of tensors, and the tensors."""
    made = call_of(*request.param, device)

    def results(*tensors):
        return made.function(**dict(zip(made.tensors, tensors, strict=True)), **made.options)

    return operator_calls.with_tuple(results), [tensor.detach() for tensor in made.tensors.values()]


@pytest.fixture
def plain(device):
    """The tensors u, delta, A, B, C."""
    inputs = problem.inputs_on(SMALL.with_(delta_softplus=False), device)
    return [tensor.detach() for tensor in list(inputs.values())[:5]]


def loss(results):
    return functools.reduce(operator.add, (result.abs().square().sum() for result in results))


def gradient_of(results, tensors):
    """Returns the function that computes the gradients of all tensors."""
    return grad(lambda *given: loss(results(*given)), argnums=tuple(range(len(tensors))))


def entries_of(tensor, dim):
    return [tensor] * ENTRIES if dim is None else list(tensor.unbind(dim))


def mapped_inputs(tensors, is_mapped):
    """Returns the tensors, some with a mapped dimension at varying places, and their in_dims."""
    mapped, in_dims = [], []
    for i, (tensor, has_entries) in enumerate(zip(tensors, is_mapped, strict=True)):
        if not has_entries:
            mapped.append(tensor)
            in_dims.append(None)
            continue
        dim = (0, -1, 1)[i % 3]
        scale = torch.linspace(0.7, 1, ENTRIES, dtype=F64, device=tensor.device)
        stacked = torch.stack([factor.to(tensor.dtype) * tensor for factor in scale], dim)
        mapped.append(stacked)
        in_dims.append(dim)
    return mapped, tuple(in_dims)


def subsets(num_tensors):
    """Yields which tensors are mapped: each alone, all, every second one."""
    for i in range(num_tensors):
        yield [j == i for j in range(num_tensors)]
    yield [True] * num_tensors
    yield [j % 2 == 0 for j in range(num_tensors)]


def of_each(function, tensors, in_dims):
    """Computes by a loop over the entries what vmap must return."""
    columns = [entries_of(t, dim) for t, dim in zip(tensors, in_dims, strict=True)]
    rows = [function(*entry) for entry in zip(*columns, strict=True)]
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def test_results_and_the_gradients_of_a_mapped_call(call):
    results, tensors = call
    for is_mapped in subsets(len(tensors)):
        inputs, in_dims = mapped_inputs(tensors, is_mapped)
        inputs = [tensor.requires_grad_() for tensor in inputs]
        expected = of_each(results, inputs, in_dims)
        actual = vmap(results, in_dims)(*inputs)
        gradients = torch.autograd.grad(loss(actual), inputs)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(gradients, torch.autograd.grad(loss(expected), inputs))
        with torch.no_grad():
            torch.testing.assert_close(vmap(results, in_dims)(*inputs), expected)


def test_gradients_of_each_entry(call):
    """vmap of grad returns each entry's gradient of every tensor, mapped or not."""
    results, tensors = call
    gradient = gradient_of(results, tensors)
    for is_mapped in subsets(len(tensors)):
        inputs, in_dims = mapped_inputs(tensors, is_mapped)
        actual = vmap(gradient, in_dims)(*inputs)
        torch.testing.assert_close(actual, of_each(gradient, inputs, in_dims))


@pytest.mark.parametrize("is_mapped", [[True, True, False, True, True], [True] + [False] * 4])
def test_mapped_sequences_take_one_launch(plain, is_mapped):
    inputs, in_dims = mapped_inputs(plain, is_mapped)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    with Ops() as seen:
        actual = vmap(selective_scan_fn, in_dims)(*inputs)
        gradients = torch.autograd.grad(actual.square().sum(), inputs)
    assert seen.names == ["selective_scan_fwd", "selective_scan_bwd"]
    (expected,) = of_each(lambda *given: (selective_scan_fn(*given),), inputs, in_dims)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), inputs))


@pytest.mark.parametrize("scan", [selective_scan_fn, selective_scan_ref])
def test_every_subset_of_the_arguments(scan, plain):
    def results(*given):
        return scan(*given, return_last_state=True)

    for is_mapped in itertools.product([False, True], repeat=5):
        if any(is_mapped):
            inputs, in_dims = mapped_inputs(plain, is_mapped)
            actual = vmap(results, in_dims)(*inputs)
            torch.testing.assert_close(actual, of_each(results, inputs, in_dims))


def test_jacobians(device):
    inputs = problem.inputs_on(SMALL.with_(seqlen=3, batch=1), device)
    u, fixed = inputs.pop("u").detach(), {k: v.detach() for k, v in inputs.items()}

    def scan(u):
        return selective_scan_fn(u, **fixed)

    expected = torch.autograd.functional.jacobian(scan, u)
    vectorized = torch.autograd.functional.jacobian(scan, u, vectorize=True)
    for actual in (vectorized, jacrev(scan)(u), jacrev(scan, chunk_size=2)(u)):
        torch.testing.assert_close(actual, expected)


def test_gradcheck_of_batched_gradients(call):
    """Batched gradients are those of a loop over the cotangents."""
    results, tensors = call
    inputs = [tensor.requires_grad_() for tensor in tensors]
    assert torch.autograd.gradcheck(results, inputs, check_batched_grad=True, fast_mode=True)


def test_per_sample_gradients_of_s6(device):
    model = S6(8, d_state=4, depth=2, device=device)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    samples = torch.randn(ENTRIES, 20, 8, device=device)

    def of_sample(parameters, sample):
        return loss_of(functional_call(model, parameters, sample[None]))

    actual = vmap(grad(of_sample), in_dims=(None, 0))(parameters, samples)
    for i, sample in enumerate(samples):
        for name, expected in grad(of_sample)(parameters, sample).items():
            assert error(actual[name][i], expected) < 1e-5, name


def test_ensemble_of_s6(device):
    models = [S6(8, d_state=4, device=device) for _ in range(ENTRIES)]
    parameters, buffers = stack_module_state(models)
    x = torch.randn(2, 20, 8, device=device)

    def of_model(parameters, buffers, x):
        return functional_call(models[0], (parameters, buffers), x)

    actual = vmap(of_model, in_dims=(0, 0, None))(parameters, buffers, x)
    loss_of(actual).backward()
    for i, model in enumerate(models):
        out = model(x)
        torch.testing.assert_close(actual[i], out)
        loss_of(out).backward()
        for name, parameter in model.named_parameters():
            assert error(parameters[name].grad[i], parameter.grad) < 1e-5, name


def test_nested_maps(plain):
    u, delta, A, B, C = plain
    us = torch.stack([u, -u])
    As = torch.stack([A, 2 * A, 3 * A], dim=1)

    def of(u, A):
        return selective_scan_fn(u, delta, A, B, C)

    def mapped(function):
        return vmap(vmap(function, in_dims=(None, 1)), in_dims=(0, None))(us, As)

    gradient = grad(lambda u, A: of(u, A).square().sum(), argnums=(0, 1))
    actual, gradients = mapped(of), mapped(gradient)
    for (i, u), (j, A) in itertools.product(enumerate(us), enumerate(As.unbind(1))):
        torch.testing.assert_close(actual[i, j], of(u, A))
        for several, one in zip(gradients, gradient(u, A), strict=True):
            torch.testing.assert_close(several[i, j], one)


def test_a_map_over_nothing(call):
    results, tensors = call
    one = results(*tensors)
    gradient = gradient_of(results, tensors)
    for i, tensor in enumerate(tensors):
        inputs, in_dims = list(tensors), [None] * len(tensors)
        inputs[i], in_dims[i] = tensor.new_zeros(0, *tensor.shape), 0
        mapped = vmap(results, tuple(in_dims))(*inputs)
        assert [m.shape for m in mapped] == [(0, *result.shape) for result in one]
        gradients = vmap(gradient, tuple(in_dims))(*inputs)
        assert [g.shape for g in gradients] == [(0, *tensor.shape) for tensor in tensors]


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: grad(lambda *x: f(*x).sum())])
def test_ops_themselves(transform, plain):
    u, delta, A, B, C = plain
    us = torch.stack([u, -u])

    def by_op(u):
        return torch.ops.selective_scan.selective_scan_fwd(u, delta, A, B, C)[0]

    actual = vmap(transform(by_op))(us)
    expected = [transform(lambda u: selective_scan_fn(u, delta, A, B, C))(u) for u in us]
    torch.testing.assert_close(actual, torch.stack(expected))


def test_saved_states_of_a_mapped_op(plain):
    """The mapped backward op takes the states that the mapped forward op saved."""
    ops = torch.ops.selective_scan
    us = torch.stack([plain[0], -plain[0], 2 * plain[0]])

    def gradients(u):
        values = (u, *plain[1:], None, None, None, False, "zoh", None, False, None, None)
        out, _, states = ops.selective_scan_fwd(*values, True)
        return tuple(g for g in ops.selective_scan_bwd(out, None, *values, states)[:5])

    actual = vmap(gradients)(us)
    torch.testing.assert_close(actual, of_each(gradients, [us], [0]))


def test_a_bad_mapped_call_is_refused_as_any_other(plain):
    u, delta, A, B, C = plain
    with pytest.raises(
        RuntimeError, match=r"^selective_scan: delta must be \(batch, dim, seqlen\)"
    ):
        vmap(lambda u: selective_scan_fn(u, delta[..., 1:], A, B, C))(torch.stack([u, u]))


@pytest.mark.slow
def test_compiled(plain):
    u, delta, A, B, C = plain
    poles = torch.stack([A, 2 * A])

    def ensemble(poles):
        return vmap(lambda A: selective_scan_fn(u, delta, A, B, C))(poles)

    compiled = torch.compile(ensemble, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(poles), ensemble(poles))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", operator_calls.DIFFERENTIABLE)
def test_every_operator(name, device):
    """Every operator works under vmap; ops without a batching rule are called for each entry."""
    function, tensors = operator_calls.make(name, device)
    tensors = [tensor.to(torch.promote_types(tensor.dtype, F64)) for tensor in tensors]
    results = operator_calls.with_tuple(function)
    gradient = gradient_of(results, tensors)
    for is_mapped in ([True] * len(tensors), [i == 0 for i in range(len(tensors))]):
        inputs, in_dims = mapped_inputs(tensors, is_mapped)
        for each in (results, gradient):
            actual = vmap(each, in_dims)(*inputs)
            torch.testing.assert_close(actual, of_each(each, inputs, in_dims))


@pytest.mark.parametrize("name", operator_calls.IN_PLACE)
def test_what_is_written_in_place_is_written_for_each_entry(name, device):
    function, tensors = operator_calls.make(name, device)
    before = [tensor.clone() for tensor in tensors]
    function(*tensors)
    is_written = [not torch.equal(*pair) for pair in zip(tensors, before, strict=True)]
    # Either all tensors are mapped, or only the first one and those that are written.
    for is_mapped in ([True] * len(tensors), [True, *is_written[1:]]):
        in_dims = [0 if has_entries else None for has_entries in is_mapped]
        mapped = [
            torch.stack([it, 0.5 * it if it.is_floating_point() else it]) if dim == 0 else it
            for it, dim in zip(before, in_dims, strict=True)
        ]
        alone = [tensor.clone() for tensor in mapped]
        out = vmap(function, tuple(in_dims))(*mapped)
        columns = [it if dim == 0 else [it, it] for it, dim in zip(alone, in_dims, strict=True)]
        expected = [function(*entry) for entry in zip(*columns, strict=True)]
        assert torch.equal(out, torch.stack(expected))
        assert all(map(torch.equal, mapped, alone))
