"""Extreme sizes, values that are not finite, odd tensors, and partial requests for gradients."""

import math

import pytest
import torch

from problem import (
    TENSORS,
    Case,
    Tolerance,
    check,
    complaint,
    detached,
    generator,
    inputs_on,
    lay_out,
    make,
    reference,
    run,
)
from selective_scan import selective_scan_fn

SMALL = Case(dim=4, dstate=4, seqlen=40)
STATE_SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 128, 255, 256)


def scan(case, inputs, **options):
    return selective_scan_fn(**inputs, **(make(case).options | options), return_last_state=True)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dstate", STATE_SIZES)
@pytest.mark.parametrize("is_complex", [False, True])
def test_state_sizes(dstate, is_complex, device):
    check(Case(dstate=dstate, complex=is_complex, dim=4, seqlen=35, method="foh"), device)


@pytest.mark.parametrize("dstate", [3, 33, 256])
@pytest.mark.parametrize("kind", ["constant", "shared", "grouped"])
def test_state_sizes_in_bfloat16(dstate, kind, device):
    groups = 2 if kind == "grouped" else 1
    check(
        Case(dstate=dstate, dim=4, seqlen=34, dtype=torch.bfloat16, B=kind, C=kind, groups=groups),
        device,
    )


def test_a_state_size_beyond_the_limit_works_or_is_refused(device):
    # Of few channels, one whose 3000 terms of ddelta_bias cancel would count for all.
    case = Case(dstate=1000, dim=32, seqlen=3)
    try:
        actual = run(case, device)
    except RuntimeError as error:
        assert str(error).startswith("selective_scan: A must have dstate of at most ")  # noqa: PT017
        return
    for name, exact in reference(case).items():
        assert not complaint(actual[name], exact, Tolerance(1e-5)), name


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"dim": 0}, {"batch": 0, "dim": 0}], ids=str)
@pytest.mark.parametrize("is_complex", [False, True])
def test_no_batch_or_no_channels(sizes, is_complex, device):
    case = SMALL.with_(complex=is_complex, **sizes)
    inputs = inputs_on(case, device)
    out, last_state = scan(case, inputs)
    assert out.shape == (case.batch, case.dim, case.seqlen)
    assert last_state.shape == (case.batch, case.dim, case.dstate)
    (out.sum() + last_state.abs().sum()).backward()
    for value in inputs.values():
        assert value.grad.shape == value.shape
        assert not value.grad.any()


@pytest.mark.parametrize("initial_state", [False, True])
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_an_empty_sequence_keeps_the_initial_state(initial_state, is_complex, reverse, device):
    case = SMALL.with_(seqlen=0, initial_state=initial_state, complex=is_complex, reverse=reverse)
    inputs = inputs_on(case, device)
    out, last_state = scan(case, inputs)
    assert out.shape == (case.batch, case.dim, 0)
    if initial_state:
        assert torch.equal(last_state, inputs["initial_state"])
    else:
        assert not last_state.any()
    cotangent = torch.randn_like(last_state)
    last_state.backward(cotangent)
    for name, value in inputs.items():
        if name == "initial_state" and value is not None:
            assert torch.equal(value.grad, cotangent)
        elif value is not None:
            assert value.grad is None or not value.grad.any(), name


def test_an_empty_sequence_of_packed_projections(device):
    case = SMALL.with_(seqlen=0, complex=True, B="packed_grouped", C="packed_grouped")
    out, _ = scan(case, inputs_on(case, device))
    assert out.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_channels_than_a_grid_dimension_holds(dtype, device):
    check(Case(batch=1, dim=70_000, seqlen=3, dstate=2, dtype=dtype), device)


def test_a_large_batch(device):
    check(Case(batch=70_000, dim=1, groups=1, seqlen=2, dstate=1), device)


# What exceeds 2^31 elements: u and its like, the states saved for backward, or B and C.
LARGE = {
    "sequences": {"batch": 3, "dim": 4096, "seqlen": 180_000, "dstate": 1, "groups": 1},
    "states": {"batch": 1, "dim": 8192, "seqlen": 35_200, "dstate": 256, "groups": 1},
    "projections": {"batch": 1, "dim": 64, "seqlen": 140_000, "dstate": 256, "groups": 64},
}


def assert_equal_but_for_rounding(actual, expected):
    """Runs of other sizes divide the work otherwise, so single values may round the other way."""
    atol = 2**-8 * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=atol)


@pytest.mark.cuda
@pytest.mark.xdist_group("gpu_memory")  # one at a time
@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("what", LARGE)
def test_more_elements_than_32_bits_count(what, layout, cuda_device):
    """Slices of the result are those of a run on the slice."""
    batch, dim, seqlen, dstate, groups = LARGE[what].values()
    elements = {
        "sequences": batch * dim * seqlen,
        "states": batch * dim * dstate * (seqlen // 32 - 1),
        "projections": batch * groups * dstate * seqlen,
    }
    assert elements[what] > 2**31
    needed = 16 * elements["sequences"] + 8 * elements["states"] + 24 * elements["projections"]
    # Partial sums of dB and dC, one for each block that runs at a time.
    multiprocessors = torch.cuda.get_device_properties(cuda_device).multi_processor_count
    needed += 8 * elements["projections"] * min(dim // groups // 5, multiprocessors)
    torch.cuda.empty_cache()  # what earlier tests left behind counts as free
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory, there are {free >> 30}")

    def random(*shape):
        shape = shape if layout == "contiguous" else (*shape[:-2], shape[-1], shape[-2])
        value = torch.rand(shape, dtype=torch.bfloat16, device=cuda_device)
        return value if layout == "contiguous" else value.transpose(-1, -2)

    inputs = {name: random(batch, dim, seqlen) for name in ("u", "delta")}
    inputs |= {name: random(batch, groups, dstate, seqlen) for name in ("B", "C")}
    A = -torch.rand(dim, dstate, device=cuda_device)
    dout = random(batch, dim, seqlen)
    for value in inputs.values():
        value.requires_grad_()
    out = selective_scan_fn(**inputs, A=A)
    gradients = dict(
        zip(inputs, torch.autograd.grad(out, list(inputs.values()), dout), strict=True)
    )

    # The first and the last channel of the last batch, by themselves.
    for channel in (0, dim - 1):
        part = (slice(batch - 1, batch), slice(channel, channel + 1))
        group = channel // (dim // groups)
        of = dict.fromkeys(("u", "delta"), part)
        of |= {name: (part[0], slice(group, group + 1)) for name in ("B", "C")}
        alone = {name: value.detach()[of[name]].requires_grad_() for name, value in inputs.items()}
        expected = selective_scan_fn(**alone, A=A[channel : channel + 1])
        assert_equal_but_for_rounding(out[part], expected)
        names = list(alone) if groups == dim else ["u", "delta"]
        wanted = torch.autograd.grad(expected, [alone[name] for name in names], dout[part])
        for name, value in zip(names, wanted, strict=True):
            assert_equal_but_for_rounding(gradients[name][of[name]], value)


# --- values ---------------------------------------------------------------------------------------

CHANNEL_GRADIENTS = ("u", "delta", "A", "z", "D", "delta_bias", "initial_state")


def results_of(case, inputs):
    """Outputs, and the gradients that belong to one channel alone."""
    outputs = scan(case, inputs)
    cotangents = [
        value.to(output.device)
        for value, output in zip(make(case).cotangents.values(), outputs, strict=True)
    ]
    gradients = torch.autograd.grad(
        outputs, [inputs[name] for name in CHANNEL_GRADIENTS], cotangents
    )
    names = ("out", "last_state", *CHANNEL_GRADIENTS)
    return dict(zip(names, (*outputs, *gradients), strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["u", "delta", "z", "initial_state", "A", "D"])
@pytest.mark.parametrize("is_complex", [False, True])
def test_what_is_not_finite_stays_in_its_channel(name, value, is_complex, device):
    case = Case(complex=is_complex, dim=10, dstate=5, seqlen=70, batch=3, method="foh")
    clean = inputs_on(case, device)
    dirty = {key: tensor.detach().clone() for key, tensor in clean.items()}
    channel, per_batch = 3, name not in ("A", "D")
    position = {"A": (channel, 2), "D": (channel,)}.get(name, (0, channel, 2))
    dirty[name][position] = value
    expected = results_of(case, clean)
    actual = results_of(case, {key: tensor.requires_grad_() for key, tensor in dirty.items()})
    if math.isnan(value):
        assert actual["out"][0, channel].isnan().any()

    others = torch.ones(case.batch, case.dim, dtype=torch.bool, device=device)
    others[0 if per_batch else slice(None), channel] = False
    for key, wanted in expected.items():
        mask = others.all(0) if key in ("A", "D", "delta_bias") else others
        assert torch.equal(actual[key][mask], wanted[mask]), key


@pytest.mark.parametrize("name", ["B", "C"])
def test_what_is_not_finite_in_a_projection_stays_in_its_batch_and_group(name, device):
    case = Case(dim=4, dstate=5, seqlen=70, batch=3)
    clean = detached(inputs_on(case, device))
    dirty = clean | {name: clean[name].clone()}
    dirty[name][1, 0, 2, 30] = math.nan
    expected, actual = scan(case, clean)[0], scan(case, dirty)[0]
    assert actual[1, :2].isnan().any()
    assert torch.equal(actual[1, 2:], expected[1, 2:])
    assert torch.equal(actual[[0, 2]], expected[[0, 2]])
    assert torch.equal(actual[1, :2, :30], expected[1, :2, :30])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dstate", [1, 16, 33])
@pytest.mark.parametrize("masked", [slice(5, 40), slice(0, 70)], ids=["some", "all"])
def test_a_step_of_minus_infinity_before_softplus_leaves_the_state(dtype, dstate, masked, device):
    case = Case(dim=8, dstate=dstate, dtype=dtype)
    inputs = detached(inputs_on(case, device))
    inputs["delta"][..., masked] = -math.inf
    kept = torch.ones(case.seqlen, dtype=torch.bool, device=device)
    kept[masked] = False
    without = {
        name: value[..., kept] if name in ("u", "delta", "z", "B", "C") else value
        for name, value in inputs.items()
    }
    (out, last_state), (expected, expected_state) = scan(case, inputs), scan(case, without)
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-2, 1e-2)
    torch.testing.assert_close(out[..., kept], expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(last_state, expected_state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_past_does_not_know_the_future(reverse, device):
    """Causality, with NaN as the tracer: before the step it enters the output is bit-identical."""
    case = SMALL.with_(reverse=reverse, seqlen=100)
    clean = detached(inputs_on(case, device))
    step = int(torch.randint(100, (), generator=generator("step")))
    dirty = clean | {"u": clean["u"].clone()}
    dirty["u"][..., step] = math.nan
    expected, actual = scan(case, clean)[0], scan(case, dirty)[0]
    before = slice(step + 1, None) if reverse else slice(0, step)
    after = slice(0, step + 1) if reverse else slice(step, None)
    assert torch.equal(actual[..., before], expected[..., before])
    assert actual[..., after].isnan().all()


@pytest.mark.parametrize("method", ["foh", "bilinear", "rk4"])
@pytest.mark.parametrize("is_complex", [False, True])
def test_poles_and_steps_of_zero(method, is_complex, device):
    """x = delta * A = 0 exactly, where (exp(x) - 1)/x is 0/0."""
    case = SMALL.with_(
        method=method,
        complex=is_complex,
        dtype=torch.float64,
        delta_softplus=False,
        delta_bias=False,
    )
    problem = make(case)
    tensors = {key: None if v is None else v.clone() for key, v in problem.tensors.items()}
    tensors["A"][:, :2] = 0
    tensors["delta"][..., ::3] = 0
    results = []
    for backend, where in (("reference", "cpu"), ("auto", device)):
        inputs = {
            key: None if value is None else value.to(where).requires_grad_()
            for key, value in ((k, None if v is None else v.clone()) for k, v in tensors.items())
        }
        outputs = scan(case, inputs, backend=backend)
        present = [value for value in inputs.values() if value is not None]
        cotangents = [problem.cotangents[key].to(where) for key in ("out", "last_state")]
        results.append([*outputs, *torch.autograd.grad(outputs, present, cotangents)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 3e-5), (torch.float64, 1e-11)])
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("seqlen", [70, 500])
@pytest.mark.parametrize("dim", [4, 37])
def test_poles_of_any_size(dtype, allowed, is_complex, seqlen, dim):
    """foh takes one form or another by the sizes of the poles that a vector holds."""
    case = SMALL.with_(method="foh", complex=is_complex, dtype=dtype, dim=dim, dstate=11)
    case = case.with_(seqlen=seqlen, groups=1, B="shared", C="shared")
    inputs = detached(inputs_on(case, "cpu"))
    random = generator("sizes")
    A = inputs["A"]
    size = 10 ** torch.empty(A.shape).uniform_(-4, 1.5, generator=random)
    for state, power in ((0, -2), (1, -17), (2, -3), (5, -30)):
        size[:, state] *= 10.0**power
    size[:, 3] = 0
    size[::3, 6] = 0
    A.mul_((size / A.abs().clamp(min=1e-3)).to(A.dtype))
    cotangents = [make(case).cotangents[key] for key in ("out", "last_state")]

    def results(inputs, **options):
        inputs = {key: v if v is None else v.requires_grad_() for key, v in inputs.items()}
        outputs = scan(case, inputs, **options)
        names = [key for key, value in inputs.items() if value is not None]
        gradients = torch.autograd.grad(
            outputs,
            [inputs[key] for key in names],
            [value.to(output.dtype) for value, output in zip(cotangents, outputs, strict=True)],
        )
        named = zip(("out", "last_state", *names), (*outputs, *gradients), strict=True)
        return {key: value.detach() for key, value in named}

    wide = {
        key: v if v is None else v.to(torch.complex128 if v.is_complex() else torch.float64)
        for key, v in inputs.items()
    }
    exact = results(wide, backend="reference")
    for name, actual in results(inputs, backend="cpu").items():
        # Every state by itself: gradients of small poles are large.
        states = range(A.shape[1]) if name == "A" else (...,)
        for state in states:
            reason = complaint(actual[..., state], exact[name][..., state], Tolerance(allowed))
            assert not reason, (name, state, reason)


def test_growing_states_overflow_to_infinity_without_an_error(device):
    case = SMALL.with_(seqlen=500, delta_softplus=False)
    inputs = detached(inputs_on(case, device))
    out, _ = scan(case, inputs | {"A": -10 * inputs["A"]})
    assert not out[..., -1].isfinite().all()
    assert out[..., 0].isfinite().all()


# --- odd tensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["A", "B", "C", "initial_state"])
def test_lazily_conjugated_tensors(name, device):
    case = SMALL.with_(complex=True)
    inputs = detached(inputs_on(case, device))
    lazy, eager = inputs[name].conj(), inputs[name].conj().resolve_conj()
    assert lazy.is_conj()
    assert not eager.is_conj()
    assert_same_with(case, inputs, name, lazy, eager)


@pytest.mark.parametrize("name", ["u", "delta", "z"])
def test_lazily_negated_tensors(name, device):
    case = SMALL.with_(complex=False)
    inputs = detached(inputs_on(case, device))
    lazy = torch.complex(torch.zeros_like(inputs[name]), -inputs[name].abs()).conj().imag
    assert lazy.is_neg()
    assert_same_with(case, inputs, name, lazy, lazy.resolve_neg())


def assert_same_with(case, inputs, name, lazy, eager):
    results = []
    for value in (lazy, eager):
        leaf = value.detach().requires_grad_()
        out, last_state = scan(case, inputs | {name: leaf})
        (gradient,) = torch.autograd.grad(out.sum() + last_state.abs().sum(), leaf)
        results.append((out, last_state, gradient))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["B", "C"])
def test_packed_projections_as_views_of_complex_ones(name, device):
    """view_as_real(...).flatten(-2): how packed projections come about."""
    case = SMALL.with_(complex=True, seqlen=33)
    inputs = detached(inputs_on(case, device))
    packed = torch.view_as_real(inputs[name]).flatten(-2)
    expected = scan(case, inputs)
    actual = scan(case, inputs | {name: packed})
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_one_tensor_for_several_arguments(device):
    case = SMALL.with_(delta_softplus=True)
    inputs = detached(inputs_on(case, device))
    shared = inputs["u"].clone().requires_grad_()
    out, _ = scan(case, inputs | {"u": shared, "delta": shared, "z": shared})
    cotangent = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, shared, cotangent)
    apart = [inputs["u"].clone().requires_grad_() for _ in range(3)]
    other, _ = scan(case, inputs | dict(zip(("u", "delta", "z"), apart, strict=True)))
    torch.testing.assert_close(out, other)
    torch.testing.assert_close(gradient, sum(torch.autograd.grad(other, apart, cotangent)))


def test_inputs_are_not_written_to(device):
    case = SMALL.with_(complex=True, layout="sliced")
    inputs = inputs_on(case, device)
    before = {name: value.detach().clone() for name, value in inputs.items()}
    versions = {name: value._version for name, value in inputs.items()}
    out, last_state = scan(case, inputs)
    (out.sum() + last_state.abs().sum()).backward()
    for name, value in inputs.items():
        assert torch.equal(value, before[name]), name
        assert value._version == versions[name], name


def test_results_share_no_memory_with_inputs(device):
    case = SMALL.with_(seqlen=0)
    inputs = inputs_on(case, device)
    _, last_state = scan(case, inputs)
    assert last_state.data_ptr() != inputs["initial_state"].data_ptr()


# --- gradients in part ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("is_complex", [False, True])
def test_a_single_input_requires_grad(name, is_complex, device):
    case = SMALL.with_(complex=is_complex)
    everything = inputs_on(case, device)
    out, last_state = scan(case, everything)
    loss = out.sum() + last_state.abs().square().sum()
    (expected,) = torch.autograd.grad(loss, everything[name])

    inputs = detached(inputs_on(case, device))
    inputs[name].requires_grad_()
    out, last_state = scan(case, inputs)
    (out.sum() + last_state.abs().square().sum()).backward()
    assert torch.equal(inputs[name].grad, expected)
    for other, value in inputs.items():
        assert other == name or value.grad is None


@pytest.mark.parametrize("is_complex", [False, True])
def test_a_gradient_may_have_stride_zero(is_complex, device):
    """sum().backward() hands the operator an expanded scalar."""
    case = SMALL.with_(complex=is_complex)
    results = []
    for dense in (False, True):
        inputs = inputs_on(case, device)
        out, _ = scan(case, inputs)
        if dense:
            out.backward(torch.ones_like(out))
        else:
            out.sum().backward()
        results.append({name: value.grad for name, value in inputs.items()})
    for name, expected in results[1].items():
        torch.testing.assert_close(results[0][name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["channel_last", "sliced"])
def test_a_gradient_may_have_any_strides(layout, device):
    case = SMALL.with_(complex=True)
    dout, dlast_state = (make(case).cotangents[name].to(device) for name in ("out", "last_state"))
    results = []
    for kind in ("contiguous", layout):
        inputs = inputs_on(case, device)
        torch.autograd.backward(
            scan(case, inputs), [lay_out(dout, kind), lay_out(dlast_state, kind)]
        )
        results.append({name: value.grad for name, value in inputs.items()})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-5, atol=1e-5)


def test_a_conjugated_gradient_of_the_last_state(device):
    case = SMALL.with_(complex=True, cotangents=("last_state",))
    cotangent = make(case).cotangents["last_state"].to(device)
    results = []
    for value in (cotangent.conj(), cotangent.conj().resolve_conj()):
        inputs = inputs_on(case, device)
        _, last_state = scan(case, inputs)
        results.append(torch.autograd.grad(last_state, inputs["A"], value)[0])
    assert torch.equal(*results)


def test_backward_twice_with_a_retained_graph(device):
    case = SMALL
    inputs = inputs_on(case, device)
    out, _ = scan(case, inputs)
    first = torch.autograd.grad(out.sum(), inputs["B"], retain_graph=True)[0]
    second = torch.autograd.grad(out.sum(), inputs["B"])[0]
    assert torch.equal(first, second)


def test_no_graph_under_no_grad_and_inference_mode(device):
    inputs = inputs_on(SMALL, device)
    with torch.no_grad():
        assert not scan(SMALL, inputs)[0].requires_grad
    with torch.inference_mode():
        assert scan(SMALL, inputs)[0].is_inference()


# --- states that decay within a step --------------------------------------------------------------


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_foh_leaves_of_a_state_is_relatively_accurate(dtype, is_complex, device):
    """abar reaches last_state, and the gradients of initial_state, as exp(x) for every x."""
    x = torch.linspace(-80, 1, 400, dtype=dtype)
    A = torch.complex(x, torch.ones_like(x)) if is_complex else x
    u, delta = torch.zeros(1, 400, 1, dtype=dtype), torch.ones(1, 400, 1, dtype=dtype)
    B = C = torch.ones(1, 1, 2 if is_complex else 1, dtype=dtype)
    initial_state = torch.ones(1, 400, 1, dtype=A.dtype, device=device, requires_grad=True)
    tensors = [tensor.to(device) for tensor in (u, delta, A[:, None], B, C)]
    _, last_state = selective_scan_fn(
        *tensors, initial_state=initial_state, discretization_method="foh", return_last_state=True
    )
    (gradient,) = torch.autograd.grad(last_state, initial_state, torch.ones_like(last_state))
    wide = A.to(torch.complex128 if is_complex else torch.float64)
    exact = wide.exp()[None, :, None]
    tolerance = 100 * torch.finfo(dtype).eps  # x itself is rounded in another unit
    for value, wanted in ((last_state, exact), (gradient, exact.conj())):
        error = (value.detach().cpu() - wanted).abs() / wanted.abs()
        assert error.max() <= tolerance


@pytest.mark.parametrize("is_complex", [False, True])
def test_fohs_gradient_of_a_step_is_relatively_accurate(is_complex):
    """It is Re Σ exp(x)·(A·h + B·u), tiny where |x| is large. The reference's own cancels there,
    and so may that of CUDA's kernels."""
    random = generator(is_complex)
    decay = torch.tensor([1.0, 5.0, 10.0, 20.0, 50.0, 60.0, 70.0, 80.0]).double()
    u, delta, angle, *rest = torch.randn(9, 8, generator=random).double().float().double()
    delta = 1 + 0.01 * delta.abs()
    before, B, C = rest[:3]
    A = -decay
    if is_complex:
        A, before, B, C = map(torch.complex, (A, before, B, C), (angle, *rest[3:6]))
    half = [
        value.to(torch.complex64 if is_complex else torch.float32) for value in (A, before, B, C)
    ]
    step = delta.float().requires_grad_()
    out = selective_scan_fn(
        u.float()[None, :, None],
        step[None, :, None],
        half[0][:, None],
        half[2][:, None],
        half[3][:, None],
        initial_state=half[1][None, :, None],
        discretization_method="foh",
    )
    out.sum().backward()
    A, before, B, C = (value.to(B.dtype) for value in half)
    exact = (C * (step.detach().double() * A).exp() * (A * before + B * u.float().double())).real
    exact = exact * (2 if is_complex else 1)
    terms = (C * (delta * A).exp()).abs() * ((A * before).abs() + (B * u).abs())
    error = (step.grad.double() - exact).abs() / terms
    assert (error <= 2e-5).all(), error
