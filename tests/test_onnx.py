"""The operators in ONNX: results of onnxruntime against the references in float64."""

import itertools
import sys

import pytest
import torch

from exported import OPSETS, Call, Program, assert_close
from problem import METHODS, generator
from s6_step import s6_step
from selective_scan import (
    S6,
    causal_conv1d_fn,
    causal_conv1d_update,
    diagonal_scan_fn,
    mamba_inner_fn,
    selective_scan_fn,
    selective_scan_prefill,
    selective_state_update,
)
from selective_scan._s6_step import StackTensors
from selective_scan.onnx import decompose, export
from selective_scan.vision import cross_scan_fn

BATCH, DIM, DSTATE, SEQLEN = 2, 6, 3, 9


@pytest.fixture
def normal(request):
    random = generator(request.node.name)
    return lambda *shape, dtype=torch.float32: torch.randn(shape, generator=random, dtype=dtype)


LATEST, *OLDER = OPSETS


@pytest.fixture(
    params=[LATEST, *(pytest.param(opset, marks=pytest.mark.slow) for opset in OLDER)],
    ids=lambda opset: f"opset{opset}",
)
def opset(request):
    return request.param


@pytest.fixture
def check(tmp_path, opset):
    """Exports a function of a backend and tensors, and compares the program with the reference."""

    def run(function, *tensors, dynamic=None, calls=()):
        dynamic = None if dynamic is None else (dynamic,)
        model = Call(lambda *given: function("auto", *given))
        program = Program(model, tensors, tmp_path / "model.onnx", opset=opset, dynamic=dynamic)
        assert program.opset == opset
        for given in (tensors, *calls):
            doubles = [t.double() if t.is_floating_point() else t for t in given]
            assert_close(program(*given), function("reference", *doubles))
        return program

    return run


def joined(calls):
    """Joins calls into one program, since the fixed cost of an export is high. A call is a function
    of a backend and tensors, and the tensors. Returns a function for `check` of all tensors, and
    these."""
    calls = list(calls)

    def function(backend, *tensors):
        left, results = iter(tensors), []
        for call, given in calls:
            made = call(backend, *itertools.islice(left, len(given)))
            results += [made] if isinstance(made, torch.Tensor) else made
        return results

    # Clones, since a program cannot have the same tensor as two inputs.
    return function, *(tensor.clone() for _, given in calls for tensor in given)


def scanned(normal, seqlen=SEQLEN, groups=2, batch=BATCH):
    u, z = normal(2, batch, DIM, seqlen)
    B, C = normal(2, batch, groups, DSTATE, seqlen)
    A, state = -normal(DIM, DSTATE).exp(), normal(batch, DIM, DSTATE)
    return [u, normal(batch, DIM, seqlen), A, B, C, normal(DIM), z, normal(DIM), state]


def scan_by(method):
    """Returns a function for `check` of the tensors that `scanned` draws."""

    def function(backend, u, delta, A, B, C, D, z, bias, state):
        return selective_scan_fn(
            *(u, delta, A, B, C, D, z, bias, True, True),
            discretization_method=method,
            initial_state=state,
            backend=backend,
        )

    return function


# --- the scan -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_methods(normal, check):
    program = check(*joined((scan_by(method), scanned(normal)) for method in METHODS))
    is_new = program.opset == 27
    assert program.operators["LinearAttention"] == len(METHODS) * is_new
    assert program.operators["Scan"] == len(METHODS) * (not is_new)


@pytest.mark.slow
def test_a_step_of_the_input(normal, check):
    """The formula takes input_delta in its own place, also with B and C that all channels share."""

    def scan_by(method):
        def function(backend, u, delta, A, B, C, D, input_delta, *state):
            return selective_scan_fn(
                *(u, delta, A, B, C, D, None, None, True, True),
                discretization_method=method,
                initial_state=state[0] if state else None,
                input_delta=input_delta,
                backend=backend,
            )

        return function

    u, delta, A, B, C, D, z, _, state = scanned(normal)
    constant = normal(DIM, DSTATE)
    calls = [(scan_by(method), (u, delta, A, B, C, D, z, state)) for method in METHODS]
    calls.append((scan_by("zoh"), (u, delta, A, constant, constant, D, z)))
    calls.append((scan_by("foh"), (u, delta, A, constant, constant, D, z)))
    check(*joined(calls))


@pytest.mark.slow
def test_steps_of_any_size(normal, check):
    """foh's φ1 does not cancel near 0, and bilinear's factor may be 0 or negative."""
    steps = torch.tensor([0.0, 1e-7, 1e-3, 0.5, 1.0, 2.0, 3.0, 30.0, 1.0])
    u, _, _, B, C, _, _, _, state = scanned(normal)
    A = -torch.tensor([[1.0, 2.0, 4.0]]).expand(DIM, DSTATE)

    def scan_by(method):
        return lambda backend, u, delta, A, B, C, state: selective_scan_fn(
            *(u, delta, A, B, C),
            return_last_state=True,
            discretization_method=method,
            initial_state=state,
            backend=backend,
        )

    given = (u, steps.expand(u.shape), A, B, C, state)
    check(*joined((scan_by(method), given) for method in ("foh", "bilinear")))


@pytest.mark.slow
def test_projections_and_directions(normal, check):
    u, delta, A, grouped, *_ = scanned(normal)
    constant, shared = normal(DIM, DSTATE), normal(BATCH, DSTATE, SEQLEN)
    calls = [(constant, constant, False), (constant, grouped, True), (shared, shared, True)]

    def scan(reverse):
        options = {"return_last_state": True, "reverse": reverse, "delta_softplus": True}
        return lambda backend, *given: selective_scan_fn(*given, **options, backend=backend)

    check(*joined((scan(reverse), (u, delta, A, B, C)) for B, C, reverse in calls))


@pytest.mark.slow
def test_complex_poles_are_pairs_of_states(normal, tmp_path):
    u, delta, A, *_ = scanned(normal)
    B, C = normal(2, BATCH, DSTATE, 2 * SEQLEN)

    def function(backend, u, delta, decay, angle, B, C, state):
        A, results = torch.complex(decay, angle), []
        for method in METHODS:
            out, last = selective_scan_fn(
                *(u, delta, A, B, C, None, u, None, True, True),
                discretization_method=method,
                initial_state=torch.complex(*state.unbind(-1)),
                input_delta=u if method == "bilinear" else None,
                backend=backend,
            )
            results += [out, last.real.to(u.dtype), last.imag.to(u.dtype)]
        return results

    given = (u, delta, A, normal(DIM, DSTATE), B, C, normal(BATCH, DIM, DSTATE, 2))
    model = Call(lambda *tensors: function("auto", *tensors))
    program = Program(model, given, tmp_path / "model.onnx", opset=18)
    assert_close(program(*given), function("reference", *[t.double() for t in given]))


@pytest.mark.slow
def test_a_length_of_its_own_goes_by_chunks(normal, check):
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")

    steps, of_batch = {0: batch, 2: length}, {0: batch}
    projections = {0: batch, 3: length}
    dynamic = (steps, steps, {}, projections, projections, {}, steps, {}, of_batch)
    calls = [scanned(normal, seqlen, batch=n) for seqlen, n in ((1, 3), (256, 1), (600, 1))]
    program = check(scan_by("bilinear"), *scanned(normal), dynamic=dynamic, calls=calls)
    assert "Scan" in program.operators


def test_a_long_sequence_goes_by_chunks(normal, check):
    def function(backend, a, b):
        return diagonal_scan_fn(a, b, backend=backend)

    program = check(function, normal(BATCH, 3, 300).sin(), normal(BATCH, 3, 300))
    assert program.operators["Scan"] == 1
    assert program.operators["LinearAttention"] == (program.opset == 27)


def test_double_precision(normal, tmp_path):
    u, delta, *others = (tensor.double() for tensor in scanned(normal)[:5])
    given = (u, delta.abs(), *others)
    names = {"input_names": ["u", "delta", "A", "B", "C"], "output_names": ["y"]}
    program = Program(Call(selective_scan_fn), given, tmp_path / "model.onnx", opset=27, **names)
    assert [it.name for it in program.model.graph.input] == names["input_names"]
    assert [it.name for it in program.model.graph.output] == names["output_names"]
    assert_close(program(*given), selective_scan_fn(*given, backend="reference"), 1e-12)


def test_half_precision_of_an_exported_program(normal, tmp_path):
    """Inputs and output are in half precision, poles and arithmetic are not."""
    u, delta, A, B, C, *_ = scanned(normal)
    given = (u.half(), delta.abs().half(), A, B.half(), C.half())
    made = torch.export.export(Call(selective_scan_fn), given)
    program = Program(made, (), tmp_path / "model.onnx", opset=27)
    (out,) = program(*given)
    assert out.dtype == torch.float16
    expected = selective_scan_fn(*(tensor.double() for tensor in given), backend="reference")
    assert_close([out], expected, 1e-3)


# --- the other operators --------------------------------------------------------------------------


@pytest.mark.slow
def test_diagonal_scan(normal, check):
    def function(backend, a, b, state):
        return (
            diagonal_scan_fn(a, b, initial_state=state, backend=backend),
            diagonal_scan_fn(a[:, :1], b, reverse=True, backend=backend),
            diagonal_scan_fn(a[0], b[0], backend=backend),
            diagonal_scan_fn(a[0, 0], b[0, 0], backend=backend),
        )

    check(function, *normal(2, BATCH, 3, SEQLEN), normal(BATCH, 3))


def test_convolution(normal, check):
    def wide(backend, x, weight, bias, states):
        plain = causal_conv1d_fn(x, weight, backend=backend)
        options = {"return_final_states": True, "activation": "silu", "backend": backend}
        return plain, *causal_conv1d_fn(x, weight, bias, initial_states=states, **options)

    def narrow(backend, x, weight, bias):  # a program cannot have empty inputs
        return wide(backend, x, weight, bias, None)[:2]

    x, bias = normal(BATCH, DIM, SEQLEN), normal(DIM)
    calls = [(narrow, (x, normal(DIM, 1), bias))]
    check(*joined([*calls, (wide, (x, normal(DIM, 4), bias, normal(BATCH, DIM, 3)))]))


def test_convolution_is_one_operator(normal, check, opset):
    def function(backend, x, weight):
        return causal_conv1d_fn(x, weight, activation="silu", backend=backend)

    program = check(function, normal(BATCH, DIM, SEQLEN), normal(DIM, 4))
    assert (set(program.operators) == {"CausalConvWithState", "Unsqueeze"}) == (opset == 27)


def test_layer(normal, check):
    rank, d_model = 2, 5

    def layer(bidirectional):
        def function(backend, *tensors):
            *given, A, D, bias = tensors
            return mamba_inner_fn(
                *(*given, None, A),
                D=D,
                delta_bias=bias,
                bidirectional=bidirectional,
                backend=backend,
            )

        return function

    shapes = [(DIM, 1, 4), (DIM,), (rank + 2 * DSTATE, DIM), (DIM, rank), (d_model, DIM)]
    weights = [normal(*shape) / shape[-1] ** 0.5 for shape in shapes]
    A = -normal(DIM, DSTATE).exp()
    given = (normal(BATCH, 2 * DIM, SEQLEN), *weights, A, normal(DIM), normal(DIM))
    check(*joined((layer(bidirectional), given) for bidirectional in (False, True)))


@pytest.mark.slow
def test_cross_scan(normal, check):
    height, width = 2, 5

    def function(backend, x, delta, A, B, C, D):
        return cross_scan_fn(x, delta, A, B, C, D, delta_softplus=True, backend=backend)

    x, delta = normal(BATCH, DIM, height, width), normal(BATCH, 4, DIM, height, width)
    A, D = -normal(4, DIM, DSTATE).exp(), normal(4, DIM)
    B, C = normal(2, BATCH, 4, DSTATE, height, width)
    check(function, x, delta, A, B, C, D)


def test_convolution_update(normal, check):
    def function(backend, x, state, weight, bias):
        state = state.clone()
        return causal_conv1d_update(x, state, weight, bias, "silu", backend=backend), state

    others = normal(BATCH, DIM, 5), normal(DIM, 4), normal(DIM)
    check(*joined((function, (normal(BATCH, DIM, *steps), *others)) for steps in ((), (3,))))


@pytest.mark.slow
def test_state_update(normal, check):
    def function(backend, state, x, dt, A, B, C, D, z, bias):
        state = state.clone()
        arguments = (state, x, dt, A, B, C, D, z, bias, True)
        options = {"discretization_method": "foh", "backend": backend}
        y = selective_state_update(*arguments, **options)
        return y, selective_state_update(*arguments, **options, input_delta=z), state

    def tensors(steps, heads):
        rows, channels = (BATCH, *steps, *heads, DIM), (*heads, DIM)
        B, C = normal(2, BATCH, *steps, 2, DSTATE)
        poles = -normal(*channels, DSTATE).exp()
        x, dt, z = normal(3, *rows)
        state = normal(BATCH, *channels, DSTATE)
        return state, x, dt, poles, B, C, normal(*channels), z, normal(*channels)

    sizes = itertools.product(((), (3,)), ((), (2,)))
    check(*joined((function, tensors(*size)) for size in sizes))


@pytest.mark.slow
def test_prefill_of_one_sequence(normal, check):
    total, slots = 11, 3

    def prefill(slot, goes_on):
        def function(backend, u, states, conv_states, weight, delta, A, B, C, z, bounds):
            states, conv_states = states.clone(), conv_states.clone()
            where = {
                "cache_indices": torch.tensor([slot]),
                "has_initial_state": torch.tensor([goes_on]),
            }
            x = causal_conv1d_fn(
                *(u[None], weight, None, None, None, False, None, "silu"),
                cu_seqlens=bounds,
                conv_states=conv_states,
                **where,
                backend=backend,
            )
            arguments = (u, states, delta, A, B, C, None, z, None, True)
            where |= {"cu_seqlens": bounds, "input_delta": z if goes_on else None}
            y = selective_scan_prefill(*arguments, **where, backend=backend)
            return x, conv_states, y, states

        return function

    u, delta, z = normal(3, DIM, total)
    pools = normal(slots, DIM, DSTATE), normal(slots, DIM, 3)
    B, C = normal(2, 2, DSTATE, total)
    given = (u, *pools, normal(DIM, 4), delta, -normal(DIM, DSTATE).exp(), B, C, z)
    # A sequence that ends beyond the last step ends there.
    kinds = ((1, True, 9), (2, False, total + 3), (-1, True, 9))
    check(*joined((prefill(*kind), (*given, torch.tensor([2, end]))) for *kind, end in kinds))


@pytest.mark.slow
def test_step_through_a_stack(normal, check):
    d_model, rank, depth = 4, 2, 2
    shapes = {
        "norm": (d_model,),
        "in_proj": (2 * DIM, d_model),
        "conv1d": (DIM, 1, 4),
        "x_proj": (rank + 2 * DSTATE, DIM),
        "dt_proj": (DIM, rank),
        "dt_proj_bias": (DIM,),
        "A_log": (DIM, DSTATE),
        "D": (DIM,),
        "out_proj": (d_model, DIM),
        "conv_state": (BATCH, DIM, 3),
        "state": (BATCH, DIM, DSTATE),
    }

    def function(backend, hidden, head, *tensors):
        lists = dict(zip(shapes, zip(*[iter(tensors)] * depth, strict=True), strict=True))
        for name in ("conv_state", "state"):
            lists[name] = [tensor.clone() for tensor in lists[name]]
        given = {name: [*lists[name]] if name in lists else None for name in StackTensors._fields}
        out = s6_step(hidden, StackTensors(**given), None, head, backend=backend)
        return out, *given["conv_state"], *given["state"]

    tensors = [normal(*shape) / 2 for shape in shapes.values() for _ in range(depth)]
    check(function, normal(BATCH, 2, d_model), normal(7, d_model), *tensors)


# --- refusals -------------------------------------------------------------------------------------


def refused_calls():
    """Yields the name of an argument, a function and its tensors."""
    u, A, B = torch.randn(1, 4, 8), -torch.rand(4, 3), torch.randn(1, 3, 8)
    bounds, state = torch.tensor([0, 3, 8]), torch.randn(2, 4, 3)
    seq_idx, slots = torch.zeros(1, 8, dtype=torch.int32), torch.tensor([1])
    step = (state, u[..., 0], u[..., 0], A, B[..., 0], B[..., 0])

    def scan(name):
        return lambda u, A, B, it: selective_scan_fn(u, u, A, B, B, **{name: it})

    def convolve(name):
        return lambda x, weight, it: causal_conv1d_fn(x, weight, **{name: it})

    def scan_by_matrices(u, A, B):
        return selective_scan_fn(u, u, A, B, B, discretization_method="bilinear")

    def update(state, x, dt, A, B, C, slots):
        return selective_state_update(state, x, dt, A, B, C, state_batch_indices=slots)

    def prefill(u, A, B, bounds, states):
        return selective_scan_prefill(u, states, u, A, B, B, cu_seqlens=bounds)

    yield "cu_seqlens", scan("cu_seqlens"), (u, A, B, bounds)
    yield "cu_seqlens", scan("cu_seqlens"), (u, A, B, torch.tensor([0, 8]))
    yield "cu_seqlens", convolve("cu_seqlens"), (u, A, bounds)
    yield "seq_idx", convolve("seq_idx"), (u, A, seq_idx)
    yield "cu_seqlens", lambda a, c: diagonal_scan_fn(a, a, cu_seqlens=c), (u, bounds)
    yield "a", lambda a, b: diagonal_scan_fn(torch.complex(a, b), b), (u, u)
    yield "state_batch_indices", update, (*step, slots)
    yield "cu_seqlens", prefill, (u[0], A, B, bounds, state)
    yield "A", scan_by_matrices, (u, torch.randn(4, 3, 3), B)


@pytest.mark.parametrize(
    ("name", "function", "given"),
    [pytest.param(*call, id=f"{i}-{call[0]}") for i, call in enumerate(refused_calls())],
)
def test_what_has_no_form_is_refused_by_its_name(name, function, given):
    with pytest.raises(RuntimeError, match=rf"^selective_scan: {name} must be .* for ONNX, got "):
        export(Call(function), given)


def test_other_operators_are_refused_by_name():
    from selective_scan import adaptive_unitary_scan_fn

    u, x, D = torch.randn(2, 4, 8), torch.randn(4, 3, 4), torch.ones(4)
    given = (u, u, x, x[0].T.contiguous(), *torch.randn(2, 3, dtype=torch.complex64), D)
    with pytest.raises(RuntimeError, match="adaptive_unitary_scan_fwd has no form in ONNX"):
        export(Call(adaptive_unitary_scan_fn), given)


@pytest.mark.parametrize("opset", [17, 28, True, "27"])
def test_opset_is_checked(opset):
    with pytest.raises(ValueError, match="selective_scan: opset must be from 18 to 27, got "):
        export(S6(8), (torch.randn(1, 3, 8),), opset=opset)


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package_is_named(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs the package {package}; pip install onnx"):
        export(S6(8), (torch.randn(1, 3, 8),))


def test_decompose_leaves_the_program_and_pytorchs_operators(normal):
    given = [tensor.abs() if i == 1 else tensor for i, tensor in enumerate(scanned(normal)[:5])]
    program = torch.export.export(Call(selective_scan_fn), (*given,))
    before = str(program.graph)
    made = decompose(program, opset=18)
    assert str(program.graph) == before
    namespaces = {getattr(node.target, "namespace", "") for node in made.graph.nodes}
    assert "selective_scan" not in namespaces
    assert_close([made.module()(*given)], selective_scan_fn(*given))
