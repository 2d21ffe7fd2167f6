"""What PyTorch does around the derivative of every operator: it checkpoints results, requests
several gradients at once, applies autocast, and compiles or traces the pass."""

import functools
import warnings

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import operator_calls
from layers import error, loss_of
from selective_scan import S6, MambaMixer, _library

NAMESPACE = "selective_scan"
UPDATES = ("update", "convolution's update", "prefill")  # in place, on floating-point tensors
COTANGENTS = 3
DOUBLE_BACKWARD = (
    r"^selective_scan: double backward is not supported by the kernels"
    r"(, but by the reference, \w+_ref, which functions run with backend='reference')?$"
)


def make(name, device, **sizes):
    """Returns a function from tensors to a tuple of tensors, and its leaves."""
    function, tensors = operator_calls.make(name, device, **sizes)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    return operator_calls.with_tuple(function), leaves


@pytest.fixture(params=operator_calls.DIFFERENTIABLE)
def call(request, device):
    return make(request.param, device)


def cotangents_of(results, *sizes):
    return [torch.randn(*sizes, *it.shape, dtype=it.dtype, device=it.device) for it in results]


def assert_same_gradients(actual, expected, leaves):
    cotangents = cotangents_of(expected)
    gradients = [torch.autograd.grad(it, leaves, cotangents) for it in (actual, expected)]
    assert_equal(*gradients)


def is_number(tensor):
    return tensor.is_floating_point() or tensor.is_complex()


def assert_equal(actual, expected):
    """Asserts equality up to the rounding of sums in another order."""
    pairs = [(actual, expected)] if torch.is_tensor(actual) else zip(actual, expected, strict=True)
    for one, other in pairs:
        largest = max([1.0, *other.detach().abs().flatten().tolist()])
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * largest)


# --- selective activation checkpointing -----------------------------------------------------------


@pytest.mark.parametrize("kept", ["all", "ours", "others", "none"])
def test_selective_checkpointing(kept, call):
    function, leaves = call
    expected = function(*leaves)
    decided = []

    def policy(context, op, *args, **kwargs):
        is_ours = op.namespace == NAMESPACE
        is_kept = {"all": True, "none": False, "ours": is_ours, "others": not is_ours}[kept]
        decided.append(op)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.MUST_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    actual = checkpoint(function, *leaves, use_reentrant=False, context_fn=contexts)
    assert any(op.namespace == NAMESPACE for op in decided)
    assert_equal(actual, expected)
    assert_same_gradients(actual, expected, leaves)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_selective_checkpointing_of_models(bidirectional, device):
    x = torch.randn(2, 9, 8, device=device)

    def policy(context, op, *args, **kwargs):
        is_kept = op.namespace == NAMESPACE or op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for model in (
        MambaMixer(8, d_state=4, bidirectional=bidirectional, device=device),
        S6(8, d_state=4, bidirectional=bidirectional, depth=2, device=device),
    ):
        parameters = list(model.parameters())
        actual = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        gradients = [torch.autograd.grad(loss_of(it), parameters) for it in (actual, model(x))]
        for pair in zip(*gradients, strict=True):
            assert error(*pair) < 1e-5


# --- several gradients at once --------------------------------------------------------------------


@pytest.mark.parametrize("way", ["is_grads_batched", "vmap"])
def test_several_gradients_at_once(way, call):
    function, leaves = call
    results = function(*leaves)
    cotangents = cotangents_of(results, COTANGENTS)
    expected = [
        torch.autograd.grad(results, leaves, entry, retain_graph=True)
        for entry in zip(*cotangents, strict=True)
    ]

    def gradients(cotangents, **options):
        return torch.autograd.grad(results, leaves, cotangents, retain_graph=True, **options)

    with warnings.catch_warnings():  # PyTorch calls a layer's op for each of them, and warns
        warnings.filterwarnings("ignore", message="There is a performance drop")
        if way == "vmap":
            actual = torch.func.vmap(lambda *entry: gradients(entry))(*cotangents)
        else:
            actual = gradients(cotangents, is_grads_batched=True)
    for several, entries in zip(actual, zip(*expected, strict=True), strict=True):
        assert_equal(several, torch.stack(entries))


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, COTANGENTS])
@pytest.mark.parametrize("name", ["layer", "layer of two directions"])
def test_ops_that_are_called_for_each_entry(name, count, device):
    """Batches of a layer's op run entry by entry, also in torch.compile, which sees a layer as one
    op, while vmap alone sees its parts."""
    function, (xz, *others) = operator_calls.make(name, device)
    xzs = torch.randn(count, *xz.shape, device=device)

    def mapped(function):
        return torch.func.vmap(function, in_dims=(0, *[None] * len(others)))(xzs, *others)

    gradient = torch.func.grad(lambda *given: function(*given).square().sum())
    for each in (function, gradient):
        compiled = torch.compile(mapped, fullgraph=True, backend="aot_eager")
        assert_equal(compiled(each), mapped(each))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_by_torch_func(call):
    """torch.func.grad agrees with autograd, and a second derivative is refused."""
    function, leaves = call
    tensors = [leaf.detach() for leaf in leaves]

    def loss(*tensors):
        return sum(result.abs().square().sum() for result in function(*tensors))

    gradient = torch.func.grad(loss, argnums=tuple(range(len(tensors))))
    assert_equal(gradient(*tensors), torch.autograd.grad(loss(*leaves), leaves))
    with pytest.raises(RuntimeError, match=DOUBLE_BACKWARD):
        torch.func.jacrev(lambda first: torch.func.grad(loss)(first, *tensors[1:]))(tensors[0])


def test_double_backward_is_refused(call):
    function, leaves = call
    loss = sum(result.abs().square().sum() for result in function(*leaves))
    (gradient,) = torch.autograd.grad(loss, leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=DOUBLE_BACKWARD):
        gradient.sum().backward()


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize(
    "name", [it for it in (*operator_calls.DIFFERENTIABLE, *UPDATES) if "layer" not in it]
)
def test_autocast_casts_nothing(name, is_double, device, monkeypatch):
    """Autocast changes nothing outside of layers, neither by kernels nor by the reference."""
    function, tensors = operator_calls.make(name, device)
    function = operator_calls.with_tuple(function)
    has_gradient = name in operator_calls.DIFFERENTIABLE
    if is_double:
        tensors = [
            it.to(torch.promote_types(it.dtype, torch.float64)) if is_number(it) else it
            for it in tensors
        ]

    def results(enabled):
        given = [tensor.clone().requires_grad_(has_gradient) for tensor in tensors]
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            made = function(*given)
            losses = [result.abs().sum() for result in made]
            gradients = torch.autograd.grad(losses, given) if has_gradient else []
        return [*made, *filter(is_number, given)], gradients

    (expected, gradients), (actual, others) = results(False), results(True)
    assert all(map(torch.equal, actual, expected))
    assert all(map(torch.equal, others, gradients))
    monkeypatch.setattr(_library, "devices", set())
    monkeypatch.setattr(_library, "_fallback_allowed", True)
    by_reference, _ = results(True)
    for value, wanted in zip(by_reference, expected, strict=True):
        assert value.dtype == wanted.dtype
        assert (value - wanted).abs().max() < 1e-4 * max(1.0, wanted.abs().max().item())


# --- compiled and traced --------------------------------------------------------------------------

# The operators left out are composed of the ops of these, except the cross scan, whose Python node
# compiled autograd does not accept.
OF_OPS = [
    name
    for name in operator_calls.DIFFERENTIABLE
    if not name.startswith(("packed", "scan of turned", "exponential", "cross", "layer without"))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [(name, True) for name in operator_calls.DIFFERENTIABLE] + [(name, False) for name in OF_OPS],
)
def test_compiled(name, dynamic, device):
    function, _ = make(name, device)
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen in (33, 130):
        _, leaves = make(name, device, seqlen=seqlen)
        actual, expected = compiled(*leaves), function(*leaves)
        assert_equal(actual, expected)
        assert_same_gradients(actual, expected, leaves)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_OPS)
def test_compiled_autograd_of_an_eager_forward(name, device):
    function, leaves = make(name, device)
    results = function(*leaves)
    cotangents = cotangents_of(results)
    expected = torch.autograd.grad(results, leaves, cotangents, retain_graph=True)
    compiler = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    with compiled_autograd._enable(compiler):
        actual = torch.autograd.grad(results, leaves, cotangents)
    assert_equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("bidirectional", [False, True])
def test_compiled_autograd_of_a_model(bidirectional, device):
    """Compiled autograd works by its public switch, also for a second length in another graph."""
    model = S6(8, d_state=4, depth=2, bidirectional=bidirectional, device=device)

    def gradients(x):
        model.zero_grad()
        loss_of(model(x)).backward()
        return [parameter.grad for parameter in model.parameters()]

    @torch.compile(backend="aot_eager")
    def compiled(loss):
        loss.backward()

    for seqlen in (9, 80):
        x = torch.randn(2, seqlen, 8, device=device)
        expected = gradients(x)
        model.zero_grad()
        loss = loss_of(model(x))
        with torch._dynamo.config.patch(compiled_autograd=True):
            compiled(loss)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert error(parameter.grad, gradient) < 1e-5


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace(call):
    """torch.jit.trace takes every operator: ops that may return None have a variant for it."""
    function, leaves = call
    traced = torch.jit.trace(function, tuple(leaves), check_trace=False)
    assert f"{NAMESPACE}::" in str(traced.graph)
    actual, expected = traced(*leaves), function(*leaves)
    assert_equal(actual, expected)
    constants = tuple(leaf.detach() for leaf in leaves)
    assert_equal(torch.jit.trace(function, constants, check_trace=False)(*constants), expected)
    assert_same_gradients(actual, expected, leaves)
