"""The selective scan's ops in PyTorch: fake kernels, derivatives, torch.compile, make_fx,
export."""

import dataclasses

import pytest
import torch
import torch._inductor.config
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import test_adaptive_unitary as unitary
import test_exponential_trapezoid as trapezoid
from accuracy import assert_same_bits
from layers import error, loss_of
from opchecks import Ops, needs_pytorch, opcheck_forward
from operator_cases import call_of, each_case
from problem import TENSORS, Case, inputs_on, op_arguments
from selective_scan import S6, selective_scan_fn
from test_s6 import KINDS

SEQLENS = (16, 33, 64, 100, 257)  # with no, one and several saved states
SMALL = Case(dim=4, seqlen=70, dstate=3, delta_softplus=False)
MINIMAL = SMALL.with_(D=False, z=False, delta_bias=False, initial_state=False)
CASES = (
    SMALL,
    MINIMAL,
    SMALL.with_(B="constant", C="constant", method="foh"),
    SMALL.with_(complex=True, B="packed_grouped", C="grouped", method="rk4"),
    SMALL.with_(complex=True, B="constant", C="shared", method="bilinear"),
    SMALL.with_(dtype=torch.bfloat16, layout="channel_last"),
    SMALL.with_(dtype=torch.float64, layout="expanded", reverse=True),
    SMALL.with_(seqlen=0),
    SMALL.with_(batch=0),
    SMALL.with_(seqlen=1, delta_softplus=True),
    SMALL.with_(batch=1, cu_seqlens=(0, 33, 33, 70), reverse=True),
    SMALL.with_(input_delta=torch.bfloat16, method="foh"),
)


def ops():
    namespace = torch.ops.selective_scan
    return namespace.selective_scan_fwd.default, namespace.selective_scan_bwd.default


def gradients(outputs, inputs):
    return torch.autograd.grad(outputs, inputs, [torch.ones_like(output) for output in outputs])


def output_and_gradients(model, x):
    out = model(x)
    return [out, *torch.autograd.grad(loss_of(out), list(model.parameters()))]


# --- the ops --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_of_the_forward_op(case, device):
    forward, _ = ops()
    opcheck_forward(forward, op_arguments(case, inputs_on(case, device), requires_grad=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_of_the_backward_op(case, device):
    forward, backward = ops()
    inputs = op_arguments(case, inputs_on(case, device))
    out, last_state, states = forward(*inputs, True)
    for given in (
        (out, last_state, *inputs, states),
        (out, None, *inputs, None),
        (None, last_state, *inputs, states[:0]),
    ):
        torch.library.opcheck(backward, given)


def half_of_a_wider_tensor(like):
    if like.numel() == 0:  # opcheck takes no slice that begins past the end of its storage
        return torch.empty_like(like)
    return torch.cat((like, like), -1).chunk(2, -1)[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_of_the_backward_op_that_is_given_gradients(case, device):
    inputs = op_arguments(case, inputs_on(case, device))
    out, last_state, states = ops()[0](*inputs, True)
    given = {
        f"d{name}": None if tensor is None else half_of_a_wider_tensor(tensor)
        for name, tensor in zip(TENSORS, inputs, strict=False)
        if name in ("u", "delta", "B", "C", "z")
    }
    backward = torch.ops.selective_scan.selective_scan_bwd_out.default
    torch.library.opcheck(backward, (out, last_state, *inputs, states), given)


@pytest.mark.parametrize("return_last_state", [False, True])
@pytest.mark.parametrize(
    "case", [SMALL, MINIMAL, SMALL.with_(dstate=1, seqlen=16), CASES[-1]], ids=str
)
def test_the_function_and_the_registered_derivative_agree(case, return_last_state, device):
    """Eager calls bypass the op's registered derivative, and give the same bits."""
    inputs = op_arguments(case, inputs_on(case, device), requires_grad=True)
    leaves = [value for value in inputs if getattr(value, "requires_grad", False)]
    names = ("discretization_method", "initial_state", "reverse", "cu_seqlens", "input_delta")
    options = dict(zip(names, inputs[9:], strict=True))

    def by_function():
        results = selective_scan_fn(*inputs[:9], return_last_state, **options)
        return results if return_last_state else (results,)

    by_op = ops()[0](*inputs, True)[: 1 + return_last_state]
    results = by_function()
    expected = (*by_op, *gradients(by_op, leaves))
    actual = (*results, *gradients(results, leaves))
    with torch.no_grad():
        actual += by_function()
        expected += by_op
    assert_same_bits(actual, expected)


def test_a_gradient_of_a_subclass_of_tensor(device):
    called = set()

    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            called.add(str(function))
            return super().__torch_function__(function, types, args, kwargs)

    inputs = inputs_on(SMALL, device)
    out = selective_scan_fn(**inputs)
    dout = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, inputs["u"], dout, retain_graph=True)
    (actual,) = torch.autograd.grad(out, inputs["u"], dout.as_subclass(Tagged))
    assert torch.equal(actual.as_subclass(torch.Tensor), expected)
    assert "selective_scan.selective_scan_bwd.default" in called


def test_dispatch_modes_see_the_ops(device):
    """Dispatch modes see the public ops, not the internal ones of the function's shorter way."""
    inputs = list(inputs_on(MINIMAL, device).values())[:5]
    with Ops() as seen:
        gradients([selective_scan_fn(*inputs)], inputs)
    assert seen.names == ["selective_scan_fwd", "selective_scan_bwd"]


def test_fake_tensors(device):
    inputs = inputs_on(SMALL, device)
    mode = FakeTensorMode()
    fakes = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
    results = [selective_scan_fn(**inputs, return_last_state=True)]
    results.append(selective_scan_fn(**fakes, return_last_state=True))
    with mode:
        results.append(selective_scan_fn(**fakes, return_last_state=True))
    expected, *actual = [[(t.shape, t.dtype, t.stride()) for t in pair] for pair in results]
    assert actual == [expected, expected]


def test_gradient_of_a_tensor_that_outlives_a_transform(device):
    inputs = list(inputs_on(MINIMAL, device).values())[:5]
    kept = []

    def keep(u):
        kept.append(2 * u)
        return u.sum()

    torch.func.grad(keep)(inputs[0])
    actual = gradients([selective_scan_fn(kept[0], *inputs[1:])], inputs)
    expected = gradients([selective_scan_fn(2 * inputs[0], *inputs[1:])], inputs)
    assert_same_bits(actual, expected)


def test_double_backward_of_the_op_is_refused(device):
    inputs = inputs_on(MINIMAL, device)
    out = ops()[0](**inputs)[0]
    (du,) = torch.autograd.grad(out.square().sum(), inputs["u"], create_graph=True)
    with pytest.raises(RuntimeError, match="by the reference, selective_scan_ref, which"):
        du.sum().backward()


def test_gradients_of_inputs_that_need_none_are_none(device):
    inputs = op_arguments(SMALL, inputs_on(SMALL, device))
    inputs[2].requires_grad_()
    out = ops()[0](*inputs, True)[0]
    out.sum().backward()
    given = [i for i, tensor in enumerate(inputs) if getattr(tensor, "grad", None) is not None]
    assert given == [2]


def test_a_result_through_no_grad_needs_no_gradient(device):
    inputs = inputs_on(SMALL, device)
    with torch.no_grad():
        assert not selective_scan_fn(**inputs).requires_grad
    with torch.inference_mode():
        assert selective_scan_fn(**inputs).is_inference()
    assert selective_scan_fn(**inputs).requires_grad


def test_reentrant_checkpointing(device):
    inputs = list(inputs_on(MINIMAL, device).values())[:5]
    expected = gradients([selective_scan_fn(*inputs)], inputs)
    checkpoint(selective_scan_fn, *inputs, use_reentrant=True).sum().backward()
    assert all(torch.equal(it.grad, e) for it, e in zip(inputs, expected, strict=True))


# --- torch.compile --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [SMALL, SMALL.with_(complex=True, B="packed_grouped"), SMALL.with_(layout="channel_last")],
    ids=str,
)
def test_compiled_function_in_two_graphs(case, device):
    def scan(inputs):
        return selective_scan_fn(**inputs, delta_softplus=True, return_last_state=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(scan, fullgraph=True, backend=counter)
    for seqlen in SEQLENS:
        inputs = inputs_on(case.with_(seqlen=seqlen), device)
        leaves = list(inputs.values())
        actual, expected = compiled(inputs), scan(inputs)
        assert_same_bits(actual, expected)
        assert actual[0].stride() == expected[0].stride()
        assert_same_bits(gradients(actual, leaves), gradients(expected, leaves))
    assert counter.frame_count <= 2


def test_compiled_by_inductor():
    inputs = list(inputs_on(MINIMAL, "cpu").values())[:5]

    def scan(u, delta, *others):
        return selective_scan_fn(u * 2, delta.sigmoid(), *others).square()

    with torch._inductor.config.patch(force_disable_caches=True):
        actual, expected = torch.compile(scan, fullgraph=True)(*inputs), scan(*inputs)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(gradients([actual], inputs), gradients([expected], inputs))


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_compiled_s6_in_two_graphs(options, device):
    model = S6(8, d_state=4, **options, device=device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seqlen in SEQLENS:
        x = torch.randn(2, seqlen, 8, device=device)
        for pair in zip(*(output_and_gradients(it, x) for it in (compiled, model)), strict=True):
            assert error(*pair) < 1e-5
    assert counter.frame_count <= 2


def test_a_bad_call_is_refused_while_compiling():
    inputs = inputs_on(MINIMAL, "cpu")
    compiled = torch.compile(selective_scan_fn, fullgraph=True, backend="aot_eager")
    message = r"selective_scan: delta must be \(batch, dim, seqlen\) = \(2, 4, 70\), got \(2, 4, 69"
    with pytest.raises(RuntimeError, match=message):
        compiled(**inputs | {"delta": inputs["delta"][..., 1:]})


# --- tracing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx(tracing_mode, device):
    def step(*inputs):
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        return gradients([selective_scan_fn(*inputs)], inputs)

    inputs = [tensor.detach() for tensor in list(inputs_on(MINIMAL, device).values())[:5]]
    graph = make_fx(step, tracing_mode=tracing_mode)(*inputs)
    called = [node.target for node in graph.graph.nodes]
    assert all(op in called for op in ops())
    assert_same_bits(graph(*inputs), step(*inputs))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_of_s6_with_gradients(device):
    """PyTorch traces twice and compares the traces, the second time without gradients."""
    model = S6(8, d_state=4, device=device)
    traced = torch.jit.trace(model, torch.randn(2, 70, 8, device=device))
    x = torch.randn(3, 80, 8, device=device)
    for pair in zip(*(output_and_gradients(it, x) for it in (traced, model)), strict=True):
        assert error(*pair) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strict", "options"),
    [
        *((False, options) for options in KINDS if "rotary" not in options),
        *((True, options) for options in KINDS[:2]),
        *(
            pytest.param(False, options, marks=needs_pytorch("2.13", "turns of any length"))
            for options in KINDS
            if "rotary" in options
        ),
    ],
    ids=str,
)
def test_export_with_a_dynamic_length(strict, options, device):
    model = S6(8, d_state=4, **options, device=device)
    x = torch.randn(2, 40, 8, device=device)
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: length},), strict=strict)
    for seqlen in (2, 77):
        x = torch.randn(2, seqlen, 8, device=device)
        torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_export_with_any_number_of_sequences(options, device):
    model = S6(8, d_state=4, **options, device=device)
    given = {
        "x": torch.randn(1, 40, 8, device=device),
        "cu_seqlens": torch.tensor([0, 7, 40], device=device),
    }
    shapes = {"x": {1: torch.export.Dim.DYNAMIC}, "cu_seqlens": {0: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(model, (), given, dynamic_shapes=shapes)
    for bounds in ([0, 9, 50], [0, 3, 3, 20, 41]):
        x = torch.randn(1, bounds[-1], 8, device=device)
        given = {"x": x, "cu_seqlens": torch.tensor(bounds, device=device)}
        torch.testing.assert_close(program.module()(**given), model(**given))


@each_case(
    {
        "scan": [SMALL.with_(complex=True, B="constant", dtype=torch.bfloat16)],
        "exponential trapezoid": [
            trapezoid.BASE.with_(B=B, C=C)
            for B, C in (("constant", "variable"), ("variable", "constant"))
        ],
        "unitary scan": [unitary.Case()],
    }
)
def test_meta_tensors_have_the_results_shapes(operator, case):
    call = call_of(operator, case, "cpu")
    tensors = {name: it.detach().to("meta").requires_grad_() for name, it in call.tensors.items()}
    meta = dataclasses.replace(call, tensors=tensors)
    results = []
    for it in (call, meta):
        outputs = list(it.outputs().values())
        results.append((*outputs, *gradients(outputs, list(it.tensors.values()))))
    by_reference = [*meta.outputs(meta.reference).values()]
    assert [it.shape for it in by_reference] == [it.shape for it in outputs]
    for actual, expected in zip(*reversed(results), strict=True):
        assert actual.device.type == "meta"
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        assert actual.stride() == expected.stride()
