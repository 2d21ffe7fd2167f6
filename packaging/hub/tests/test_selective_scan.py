"""Compares the kernels that `kernels.get_kernel` loads with the reference in float64."""

import pytest
import torch

METHODS = ("zoh", "foh", "bilinear", "poly", "highorder", "rk4")


def make_inputs(device, dtype=torch.float32):
    batch, dim, dstate, seqlen = 2, 12, 16, 67
    shapes = {
        "u": (batch, dim, seqlen),
        "delta": (batch, dim, seqlen),
        "A": (dim, dstate),
        "B": (batch, 2, dstate, seqlen),
        "C": (batch, 2, dstate, seqlen),
        "D": (dim,),
        "z": (batch, dim, seqlen),
    }
    inputs = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    inputs["delta"] = 0.1 * torch.rand_like(inputs["delta"])
    inputs["A"] = -inputs["A"].abs() - 0.5
    return {name: tensor.to(dtype) for name, tensor in inputs.items()}


def with_gradients(function, inputs, **options):
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = function(**leaves, **options)
    return [out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("method", METHODS)
def test_forward_and_backward(selective_scan, device, method):
    if method not in selective_scan.backends()[device.type].build["methods"].split(","):
        pytest.skip(f"{method} was left out of this build")
    inputs = make_inputs(device)
    exact = {name: tensor.double() for name, tensor in inputs.items()}
    options = {"discretization_method": method}
    found = with_gradients(selective_scan.selective_scan_fn, inputs, **options)
    expected = with_gradients(selective_scan.selective_scan_ref, exact, **options)
    for value, reference in zip(found, expected):  # noqa: B905
        assert (value.double() - reference).norm() <= 1e-5 * reference.norm()


@pytest.mark.kernels_ci
def test_a_compiled_call(selective_scan, device):
    inputs = make_inputs(device)
    compiled = torch.compile(selective_scan.selective_scan_fn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs), selective_scan.selective_scan_fn(**inputs))


@pytest.mark.kernels_ci
def test_a_refusal(selective_scan, device):
    inputs = make_inputs(device)
    inputs["B"] = inputs["B"][..., 1:]
    with pytest.raises(Exception, match="selective_scan: B must be"):
        selective_scan.selective_scan_fn(**inputs)


@pytest.mark.kernels_ci
def test_a_layer(selective_scan, device):
    model = selective_scan.S6(d_model=16, d_state=8, depth=2).to(device)
    x = torch.randn(2, 20, 16, device=device)
    model(x).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
