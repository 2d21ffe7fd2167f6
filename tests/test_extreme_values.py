"""Values that are not finite, zero, tiny or huge: what they affect, and others' accuracy."""

import math

import pytest
import torch

from accuracy import Tolerance, assert_same_bits, complaint
from problem import (
    METHODS,
    Case,
    check,
    detached,
    generator,
    inputs_on,
    laid_out,
    make,
    moved,
    run_on,
    scan,
)
from selective_scan import selective_scan_fn, selective_scan_ref
from test_edges import SMALL


def expected_and_actual(case, tensors, device):
    """Returns the reference's and the device's outputs and gradients, all on the CPU."""
    expected, actual = (
        run_on(case, laid_out(tensors, "contiguous", where), backend=backend)
        for backend, where in (("reference", "cpu"), ("auto", device))
    )
    return expected, {name: value.cpu() for name, value in actual.items()}


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
    """Causality, traced by NaN: before the step where it enters, the output is bit-identical."""
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


@pytest.mark.parametrize("input_delta", [None, torch.float64], ids=["", "input_delta"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_complex", [False, True])
def test_poles_and_steps_of_zero(method, is_complex, input_delta, device):
    """x = delta * A may be 0, where (exp(x) - 1)/x is 0/0. No step of input_delta is 0."""
    case = SMALL.with_(
        method=method,
        input_delta=input_delta,
        complex=is_complex,
        dtype=torch.float64,
        delta_softplus=False,
        delta_bias=False,
    )
    tensors = {key: None if v is None else v.clone() for key, v in make(case).tensors.items()}
    tensors["A"][:, :2] = 0
    tensors["delta"][..., ::3] = 0
    expected, actual = expected_and_actual(case, tensors, device)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("dstate", [1, 3, 16, 33])
@pytest.mark.parametrize("softplus", [False, True])
def test_an_infinite_step_is_no_step(softplus, dstate, is_complex, method, device):
    """An infinite step leaves the same entries finite on every backend, except in the gradients of
    B and C of the channel's group, which sum over channels."""
    case = SMALL.with_(method=method, complex=is_complex, dstate=dstate, delta_softplus=softplus)
    channel, step = 1, 30
    tensors = dict(make(case).tensors)
    tensors["delta"] = tensors["delta"].clone()
    tensors["delta"][0, channel, step] = math.inf
    expected, actual = expected_and_actual(case, tensors, device)
    for name, value in expected.items():
        wanted, finite = (
            torch.isfinite(torch.view_as_real(it) if it.is_complex() else it)
            for it in (value, actual[name])
        )
        if name in ("dB", "dC"):
            assert not finite[0, 0].all()
            finite[0, 0] = wanted[0, 0]
        assert torch.equal(finite, wanted), name
    inputs = {name: None if v is None else v.to(device) for name, v in tensors.items()}
    out, last_state = scan(case, inputs)
    assert out[0, channel, step:].isnan().all()
    assert out[0, channel, :step].isfinite().all()
    assert out[0, :channel].isfinite().all()
    assert last_state[0, channel].isnan().all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dstate", [1, 3, 16])
def test_fast_poles(dstate, dtype, is_complex, method, device):
    """Poles so fast that a step leaves next to nothing of a state."""
    case = Case(dim=8, seqlen=40, dstate=dstate, decay=1000.0, method=method, complex=is_complex)
    case = case.with_(dtype=dtype, delta_softplus=False, delta_bias=False, initial_state=False)
    check(case, device)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize(("dim", "seqlen"), [(4, 70), (4, 500), (37, 70)])
def test_poles_of_any_size(dtype, allowed, is_complex, seqlen, dim):
    """foh chooses among its forms by the sizes of the poles in a vector."""
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
    wide = moved(inputs, torch.float64)
    exact = detached(run_on(case, wide, backend="reference"))
    actual = detached(run_on(case, laid_out(inputs, "contiguous", "cpu"), backend="cpu"))
    # Each state separately, since gradients of small poles are large. They are sums over all
    # outputs, whose terms may cancel, so their errors are compared with the size of such sums: the
    # root mean square of what the terms add up to if their signs are random.
    count = 8
    signed = [
        value * (2 * torch.randint(2, (count, *value.shape), generator=random) - 1)
        for value in make(case).cotangents.values()
    ]
    outputs = scan(case, wide, backend="reference")
    signed = [value.to(output.dtype) for value, output in zip(signed, outputs, strict=True)]
    (gradients,) = torch.autograd.grad(outputs, wide["A"], signed, is_grads_batched=True)
    sizes = gradients.norm(dim=(0, 1)) / count**0.5
    errors = (actual.pop("dA") - exact["dA"]).norm(dim=0) / sizes
    assert (errors <= allowed).all(), errors
    for name, value in actual.items():
        reason = complaint(value, exact[name], Tolerance(allowed))
        assert not reason, (name, reason)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("dstate", [1, 2, 17])
def test_slow_memories_do_not_drift(dstate, is_complex, method, device):
    """One-sided rounding errors of single steps would add up over all steps in memory."""
    slow = Case(batch=2, dim=16, groups=2, seqlen=1000, decay=1e-3, dstate=dstate)
    check(slow.with_(complex=is_complex, method=method), device)


@pytest.mark.parametrize("method", METHODS)
def test_steps_and_poles_of_any_size_side_by_side(method, device):
    """In float64, abar of one state may be a number and that of the next 0, or both alike."""
    case = SMALL.with_(
        method=method,
        dtype=torch.float64,
        dstate=5,
        delta_softplus=False,
        delta_bias=False,
        initial_state=False,
    )
    tensors, random = dict(make(case).tensors), generator(method)

    def sizes(low, high, like):
        return 10 ** torch.empty_like(like).uniform_(low, high, generator=random)

    tensors["A"] = -sizes(-3, 2.5, tensors["A"])
    tensors["delta"] = sizes(-2, 2.5, tensors["delta"])
    tensors["A"][0, 1] = tensors["delta"][0, :, 3] = 0
    if method in ("zoh", "foh", "bilinear"):  # the other methods use powers of the product
        # States are of size 1/|A|: beyond 1e296 their last digits would be denormals, which kernels
        # treat as 0, and the gradient of delta contains |A| times the loss.
        tensors["A"][1, 2], tensors["delta"][1, 0, 5] = -1e295, 1e-290
    expected, actual = expected_and_actual(case, tensors, device)
    for name, value in expected.items():
        atol = 1e-11 * value.abs().max().item()
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=atol)


@pytest.mark.parametrize("method", METHODS)
def test_a_pole_far_away_changes_no_bit_of_its_neighbour(method, device):
    """In float64 a step has shorter forms, used if they are valid for all poles at hand."""
    case = SMALL.with_(method=method, dtype=torch.float64, dstate=2)
    tensors = dict(make(case).tensors)
    # The second state contributes nothing, whatever its pole.
    tensors |= {name: tensors[name].clone() for name in ("B", "C", "initial_state")}
    tensors["B"][..., 1, :] = tensors["C"][..., 1, :] = tensors["initial_state"][..., 1] = 0

    def results(pole):
        A = tensors["A"].clone()
        A[:, 1] = pole
        results = run_on(case, laid_out(tensors | {"A": A}, "contiguous", device))
        del results["dB"], results["dC"]  # sums over channels and states
        of_states = ("last_state", "dA", "dinitial_state")
        return results | {name: results[name][..., 0] for name in of_states}

    assert_same_bits(results(-1.0), results(-1e4))


def test_growing_states_overflow_to_infinity_without_an_error(device):
    case = SMALL.with_(seqlen=500, delta_softplus=False)
    inputs = detached(inputs_on(case, device))
    out, _ = scan(case, inputs | {"A": -10 * inputs["A"]})
    assert not out[..., -1].isfinite().all()
    assert out[..., 0].isfinite().all()


# --- states that decay within a step --------------------------------------------------------------


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_foh_leaves_of_a_state_is_relatively_accurate(dtype, is_complex, device):
    """last_state and the gradient of initial_state contain abar, which is exp(x) for every x."""
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
    """The gradient is Re Σ exp(x)·(A·h + B·u), which is tiny if |x| is large. The reference's own
    gradient cancels there, and so may that of the CUDA kernels."""
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
    # exp(x) is computed as a sum whose denormal terms are flushed.
    flushed = torch.finfo(torch.float32).smallest_normal / (delta * A).exp().abs()
    assert (error <= 2e-5 + 2 * flushed).all(), error


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize(
    ("dim", "dstate", "seqlen", "pole"),
    [
        *((dim, 16, 2048, 6.0) for dim in (2, 300, 1100)),
        *((12, dstate, 3073, 6.0) for dstate in (3, 16)),  # a GPU cuts these into segments
        (1, 3, 2048, 2.0),  # a CPU's vectors hold segments of these
    ],
)
def test_the_states_of_an_unstable_system_stay_numbers(
    dim, dstate, seqlen, pole, is_complex, device
):
    """The growth over a chunk or segment may overflow while the state before it is still 0."""
    dtype = torch.complex64 if is_complex else torch.float32
    u, delta = torch.zeros(1, dim, seqlen), torch.ones(1, dim, seqlen)
    u[..., -2:] = 1
    A, B = torch.full((dim, dstate), pole, dtype=dtype), torch.ones(1, dstate, seqlen, dtype=dtype)
    inputs = [tensor.to(device) for tensor in (u, delta, A, B, B)]
    torch.testing.assert_close(selective_scan_fn(*inputs), selective_scan_ref(*inputs))
