"""The reference itself, against independent solutions of the differential equation

    h'(t) = A·h(t) + B·u(t)

that every method discretizes."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.linalg
import torch

import exact
from problem import METHODS, Case, generator, make
from selective_scan import selective_scan_ref

NAMES = ("u", "delta", "A", "B", "C")


def system(is_complex, dstate=3, seqlen=5):
    """Returns one channel in float64, as (1, 1, ...) tensors."""
    sizes = {"batch": 1, "dim": 1, "dstate": dstate, "seqlen": seqlen}
    kinds = {"dtype": torch.float64, "complex": is_complex, "B": "constant", "C": "shared"}
    absent = dict.fromkeys(("delta_softplus", "D", "z", "delta_bias"), False)
    return make(Case(**sizes, **kinds, **absent)).tensors


def scan(tensors, **options):
    return selective_scan_ref(**tensors, **options, return_last_state=True)


def output(C, states):
    """Computes y from the states (seqlen, dstate) by its definition."""
    y = (np.asarray(C)[0].T * states).sum(-1)
    return 2 * y.real if np.iscomplexobj(y) else y


@pytest.mark.parametrize("is_complex", [False, True])
def test_foh_solves_the_equation_for_a_piecewise_constant_input(is_complex):
    tensors = system(is_complex)
    u, delta, A, B = (tensors[name].numpy() for name in ("u", "delta", "A", "B"))
    h, states = tensors["initial_state"].numpy()[0, 0], []
    for step, value in zip(delta[0, 0], u[0, 0], strict=True):
        solution = scipy.integrate.solve_ivp(
            lambda _, h, value=value: A[0] * h + B[0] * value,
            (0, step),
            h,
            rtol=1e-12,
            atol=1e-13,
            method="DOP853",
        )
        h = solution.y[:, -1]
        states.append(h)
    out, last_state = scan(tensors, discretization_method="foh")
    np.testing.assert_allclose(last_state[0, 0], h, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(out[0, 0], output(tensors["C"], np.array(states)), atol=1e-9)


@pytest.mark.parametrize("is_complex", [False, True])
def test_foh_is_the_exponential_of_the_augmented_matrix(is_complex):
    """exp(Δ·[[A, B], [0, 0]]) = [[abar, bbar·B], [0, 1]], without a formula for φ1."""
    tensors = system(is_complex, seqlen=1)
    u, delta, A, B = (tensors[name].numpy() for name in ("u", "delta", "A", "B"))
    matrix = np.zeros((4, 4), A.dtype)
    matrix[:3, :3], matrix[:3, 3] = np.diag(A[0]), B[0]
    step = scipy.linalg.expm(delta[0, 0, 0] * matrix)
    start = np.append(tensors["initial_state"].numpy()[0, 0], u[0, 0, 0])
    _, last_state = scan(tensors, discretization_method="foh")
    np.testing.assert_allclose(last_state[0, 0], (step @ start)[:3], rtol=1e-13)


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("method", [method for method in METHODS if method != "bilinear"])
def test_states_decay_exactly_without_input(method, is_complex):
    tensors = system(is_complex)
    tensors = tensors | {"u": torch.zeros_like(tensors["u"])}
    _, last_state = scan(tensors, discretization_method=method)
    decay = scipy.linalg.expm(np.diag(tensors["A"][0].numpy() * tensors["delta"].sum().item()))
    expected = decay @ tensors["initial_state"][0, 0].numpy()
    np.testing.assert_allclose(last_state[0, 0], expected, rtol=1e-12)


# The orders p: one step of size Δ errs by a multiple of Δ^(p+1), all steps of a given time together
# by Δ^p. For an input that is constant in time, zoh is of first order; highorder, poly and rk4 have
# one, two and three terms more; foh is exact. bilinear is of second order.
ORDERS = {"zoh": 1, "highorder": 2, "poly": 3, "rk4": 4, "bilinear": 2}


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("method", ORDERS)
def test_order_of_convergence(method, is_complex):
    tensors = system(is_complex, seqlen=1)
    time, A = 1.0, tensors["A"]
    start = tensors["initial_state"]
    exact = (A * time).exp() * start + torch.expm1(A * time) / A * tensors["B"] * tensors["u"]
    errors = []
    for steps in (16, 32, 64):
        refined = tensors | {
            "u": tensors["u"].expand(1, 1, steps),
            "delta": torch.full((1, 1, steps), time / steps, dtype=torch.float64),
            "C": tensors["C"].expand(1, -1, steps),
        }
        _, last_state = scan(refined, discretization_method=method)
        errors.append((last_state - exact).norm().item())
    order = math.log2(errors[1] / errors[2])
    assert abs(order - ORDERS[method]) < 0.2, errors
    assert errors[0] > errors[1] > errors[2]


def test_foh_of_a_constant_input_does_not_depend_on_the_step():
    tensors = system(True, seqlen=1)
    results = []
    for steps in (1, 7, 50):
        refined = tensors | {
            "u": tensors["u"].expand(1, 1, steps),
            "delta": torch.full((1, 1, steps), 1 / steps, dtype=torch.float64),
            "C": tensors["C"].expand(1, -1, steps),
        }
        results.append(scan(refined, discretization_method="foh")[1])
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


def printed_bilinear(tensors):
    """Computes the form (1 − x/2)/(1 + x/2), Δ/(1 + x/2), as one description prints it."""
    u, delta, A, B, C = (tensors[name] for name in NAMES)
    h, out = tensors["initial_state"], []
    for t in range(u.shape[-1]):
        half = delta[..., t, None] * A / 2
        h = (1 - half) / (1 + half) * h
        h = h + delta[..., t, None] / (1 + half) * B * u[..., t, None]
        y = (C[..., t][:, None] * h).sum(-1)
        out.append(2 * y.real if y.is_complex() else y)
    return torch.stack(out, -1), h


@pytest.mark.parametrize("is_complex", [False, True])
def test_the_printed_form_of_bilinear_is_bilinear_at_the_negative_pole(is_complex):
    tensors = system(is_complex)
    out, last_state = scan(tensors | {"A": -tensors["A"]}, discretization_method="bilinear")
    expected_out, expected_state = printed_bilinear(tensors)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(last_state, expected_state)


@pytest.mark.parametrize("is_complex", [False, True])
def test_the_printed_form_of_bilinear_diverges_where_bilinear_is_stable(is_complex):
    seqlen = 400
    tensors = system(is_complex, seqlen=seqlen)
    _, stable = scan(tensors, discretization_method="bilinear")
    _, diverging = printed_bilinear(tensors)
    assert stable.abs().max() < 100
    assert diverging.abs().min() > 1e6


def test_softplus_is_the_identity_strictly_above_20():
    above = math.nextafter(20.0, 30.0)
    raw = torch.tensor([-800.0, -30.0, 0.0, 19.0, 20.0, above, 300.0], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    # With A = 0, B = C = u = 1 the state is the sum of the steps.
    given = (torch.ones(len(raw), 1, 1, dtype=torch.float64), raw[:, None, None], 0 * one, one, one)
    _, steps = selective_scan_ref(*given, delta_softplus=True, return_last_state=True)
    expected = [value if value > 20 else math.log1p(math.exp(value)) for value in raw.tolist()]
    np.testing.assert_allclose(steps.flatten(), expected, rtol=1e-14)
    assert steps.flatten()[4] > 20
    assert steps.flatten()[5] == above


def test_delta_bias_is_added_before_softplus():
    tensors = make(Case(dtype=torch.float64)).tensors
    shifted = tensors | {
        "delta": tensors["delta"] + tensors["delta_bias"][:, None],
        "delta_bias": None,
    }
    torch.testing.assert_close(
        selective_scan_ref(**tensors, delta_softplus=True),
        selective_scan_ref(**shifted, delta_softplus=True),
    )


def test_conjugate_poles_are_one_complex_state():
    """A complex state stands for itself and its conjugate, hence 2·Re: NumPy computes the same real
    system with both written out."""
    tensors = system(True)
    u, delta, A, B, C = (tensors[name].numpy() for name in NAMES)
    A2, B2 = (np.concatenate([value[0], value[0].conj()]) for value in (A, B))
    start = tensors["initial_state"].numpy()[0, 0]
    h, out = np.concatenate([start, start.conj()]), []
    for t in range(u.shape[-1]):
        step = delta[0, 0, t]
        h = np.exp(step * A2) * h + step * B2 * u[0, 0, t]
        out.append(np.concatenate([C[0, :, t], C[0, :, t].conj()]) @ h)
    actual, _ = scan(tensors)
    np.testing.assert_allclose(np.imag(out), 0, atol=1e-12)
    np.testing.assert_allclose(actual[0, 0], np.real(out), rtol=1e-12)


@pytest.mark.parametrize("kind", ["packed", "packed_grouped"])
def test_packed_projections_are_complex_ones_interleaved(kind):
    case = Case(dtype=torch.float64, complex=True, B=kind, C=kind)
    tensors = make(case).tensors
    unpacked = tensors | {
        name: torch.view_as_complex(tensors[name].unflatten(-1, (-1, 2)).contiguous())
        for name in ("B", "C")
    }
    assert torch.equal(selective_scan_ref(**tensors), selective_scan_ref(**unpacked))


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("value", [0.0, 1e-300, 1e-12, 1e-9, 1e-5, 0.1, 0.999, 1.001, 30.0])
def test_phi1_and_its_gradient_near_zero(value, is_complex):
    """foh over a step of 1 from h = 0 gives φ1(A)·B·u; the gradient of A is then φ1'(A)."""
    at = complex(-value, value) if is_complex else -value
    A = torch.tensor([[at]], dtype=torch.complex128 if is_complex else torch.float64)
    A.requires_grad_()
    one = torch.ones(1, 1, dtype=A.dtype)
    step = torch.ones(1, 1, 1, dtype=torch.float64)
    _, h = selective_scan_ref(
        step, step, A, one, one, discretization_method="foh", return_last_state=True
    )
    (slope,) = torch.autograd.grad(h, A, torch.ones_like(h))
    number = exact.number(A.detach().numpy()[0, 0])
    assert h.item() == pytest.approx(complex(exact.phi1(number)), rel=1e-13)
    derivative = complex(exact.phi1_derivative(number)).conjugate()
    assert slope.item() == pytest.approx(derivative, rel=1e-13)


@pytest.mark.parametrize("is_complex", [False, True])
def test_it_is_linear_in_the_input_and_the_initial_state(is_complex):
    tensors = system(is_complex)
    scale = torch.rand((), generator=generator("scale"), dtype=torch.float64).item()
    scaled = tensors | {name: scale * tensors[name] for name in ("u", "initial_state")}
    for one, other in zip(scan(tensors), scan(scaled), strict=True):
        torch.testing.assert_close(scale * one, other)


@pytest.mark.parametrize("is_complex", [False, True])
def test_impulses_decay_from_when_they_come(is_complex):
    """With input_delta = 1 a step adds B·u itself, and h(T) is the sum of what has not decayed."""
    tensors = system(is_complex) | {"initial_state": None}
    u, delta, A, B = (tensors[name][0] for name in ("u", "delta", "A", "B"))
    age = delta.sum() - delta.cumsum(-1)
    left = (A * age[0, :, None]).exp() * B * u[0, :, None]
    impulses = {"input_delta": torch.ones_like(tensors["u"])}
    for method in ("zoh", "foh"):
        _, h = scan(tensors | impulses, discretization_method=method)
        hold = (
            1 if method == "zoh" else torch.expm1(A * delta[0, :, None]) / (A * delta[0, :, None])
        )
        torch.testing.assert_close(h[0, 0], (hold * left).sum(0))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_complex", [False, True])
def test_steps_of_the_input_that_are_delta_change_nothing(is_complex, method):
    """The gradient of delta is then the sum of its own and that of input_delta."""
    tensors = system(is_complex)
    results = []
    for has_own in (False, True):
        given = {
            name: None if t is None else t.clone().requires_grad_() for name, t in tensors.items()
        }
        given["input_delta"] = given["delta"] if has_own else None
        out, last_state = scan(given, discretization_method=method)
        loss = out.square().sum() + last_state.abs().square().sum()
        results.append((out, last_state, *torch.autograd.grad(loss, (given["u"], given["delta"]))))
    torch.testing.assert_close(results[1], results[0])
