"""The binding modules that forks call below autograd, and the calls of published models."""

import copy
import importlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import published_calls
from selective_scan import selective_scan_ref
from selective_scan.compat import bindings


def make_scan(dtype=torch.float32, is_complex=False) -> dict:
    A = -torch.rand(8, 4) - 0.1
    A = torch.complex(A, torch.randn(8, 4)) if is_complex else A
    width = 2 * 11 if is_complex else 11
    u, delta, z, dout = torch.randn(4, 2, 8, 11).to(dtype)
    B, C = torch.randn(2, 2, 2, 4, width).to(dtype)
    D, delta_bias = torch.randn(2, 8)
    scan = {"u": u, "delta": delta, "A": A, "B": B, "C": C}
    return scan | {"D": D, "z": z, "delta_bias": delta_bias, "dout": dout}


def solve(scan: dict, has_z: bool) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """out, last_state and gradients of the reference in float64."""
    wide = {name: t.to(torch.promote_types(t.dtype, torch.float64)) for name, t in scan.items()}
    dout = wide.pop("dout")
    if not has_z:
        wide["z"] = None
    leaves = {name: t.requires_grad_() for name, t in wide.items() if t is not None}
    out, last = selective_scan_ref(**wide, delta_softplus=True, return_last_state=True)
    gradients = torch.autograd.grad(out, list(leaves.values()), dout)
    return out.detach(), last.detach(), dict(zip(leaves, gradients, strict=True))


def assert_near(actual, expected, rounding=1e-4):
    wide = actual.to(expected.dtype)
    assert (wide - expected).norm() <= rounding * expected.norm() + 1e-6


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("has_z", [False, True])
def test_selective_scan_cuda(compat_modules, has_z, is_complex):
    import selective_scan_cuda

    scan = make_scan(is_complex=is_complex)
    expected, last, gradients = solve(scan, has_z)
    dout, z = scan.pop("dout"), scan.pop("z")
    z = z if has_z else None
    inputs = (*[scan[name] for name in ("u", "delta", "A", "B", "C", "D")], z, scan["delta_bias"])
    out, x, *rest = selective_scan_cuda.fwd(*inputs, True)
    assert len(rest) == has_z
    assert_near(rest[0] if has_z else out, expected)
    assert x.dtype == scan["A"].dtype
    assert x.shape == (2, 8, 1, 8)
    assert_near(x[:, :, -1, 1::2], last)
    steps = F.softplus(scan["delta"].double() + scan["delta_bias"][:, None])
    assert_near(x[:, :, -1, 0::2], (steps.sum(-1, keepdim=True) * scan["A"]).exp())

    dxz = torch.zeros(2, 16, 11)
    dz = dxz[:, 8:] if has_z else None
    result = selective_scan_cuda.bwd(*inputs, dout, x, out if has_z else None, dz, True, has_z)
    order = ["u", "delta", "A", "B", "C", "D", "delta_bias", *["z"] * has_z]
    for name, gradient in zip(order, result, strict=False):
        assert gradient.dtype == scan.get(name, dout).dtype
        assert_near(gradient, gradients[name])
    assert len(result) == len(order) + has_z
    if has_z:
        assert result[7] is dz
        assert_near(dxz[:, 8:], gradients["z"])
        assert_near(result[8], expected)
    without = selective_scan_cuda.bwd(
        *inputs[:5], None, None, None, dout, None, None, None, False, False
    )
    assert [gradient is None for gradient in without] == [False] * 5 + [True] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["selective_scan_cuda_core", "selective_scan_cuda_oflex"])
def test_vmamba_bindings(compat_modules, name, dtype):
    module = importlib.import_module(name)
    scan = make_scan(dtype)
    scan["dout"] = scan["dout"].float()
    expected, last, gradients = solve(scan, has_z=False)
    dout = scan.pop("dout")
    del scan["z"]
    for flag in [(False,), (True,)] if name.endswith("oflex") else [()]:
        out, x, *_ = module.fwd(*scan.values(), True, 1, *flag)
        is_wide = flag == (True,)
        assert out.dtype == (torch.float32 if is_wide else dtype)
        assert_near(out, expected, 1e-4 if is_wide or dtype == torch.float32 else 1e-2)
        assert_near(x[:, :, -1, 1::2], last)
    result = module.bwd(*scan.values(), dout, x, True, 1)
    for name_of_input, gradient in zip(scan, result, strict=True):
        assert gradient.dtype == scan[name_of_input].dtype
        rounding = 1e-4 if gradient.dtype == torch.float32 else 1e-2
        assert_near(gradient, gradients[name_of_input], rounding)
    with pytest.raises(ValueError, match="nrows must be 1, got 2"):
        module.bwd(*scan.values(), dout, x, True, 2)


class ScanBelowAutograd(torch.autograd.Function):
    """How VMamba calls the bindings."""

    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, delta_bias):
        out, x, *_ = bindings.core_fwd(u, delta, A, B, C, D, delta_bias, True, 1)
        ctx.save_for_backward(u, delta, A, B, C, D, delta_bias, x)
        return out

    @staticmethod
    def backward(ctx, dout):
        *inputs, x = ctx.saved_tensors
        return tuple(bindings.core_bwd(*inputs, dout, x, True, 1))


def scan_below_autograd(u, delta, A, B, C, D, delta_bias, delta_softplus):
    assert delta_softplus
    return ScanBelowAutograd.apply(u, delta, A, B, C, D, delta_bias)


# --- published models -----------------------------------------------------------------------------


def train(model: nn.Module, image: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """One training step: the output and the gradients before it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = copy.deepcopy(model.state_dict())
    out = model(image)
    out.square().mean().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    assert all(not torch.equal(before[name], after) for name, after in model.state_dict().items())
    return out.detach(), gradients


@pytest.mark.parametrize(
    ("model", "function"),
    [
        ("Vim", "mamba_inner"),
        ("VideoMamba", "mamba_inner"),
        ("VMamba", "selective_scan"),
        ("MambaVision", "selective_scan"),
        ("VMamba", "bindings"),
        ("Caduceus", "Mamba"),
    ],
)
def test_published_model_trains_one_step(compat_modules, model, function):
    interface = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    if function == "bindings":
        calls = [scan_below_autograd, interface.selective_scan_ref]
    elif function == "Mamba":
        mamba = importlib.import_module("mamba_ssm.modules.mamba_simple").Mamba
        calls = [mamba, partial(mamba, use_fast_path=False)]
    else:
        calls = [getattr(interface, f"{function}_{kind}") for kind in ("fn", "ref")]
    ours, exact = (getattr(published_calls, model)(call) for call in calls)
    exact.load_state_dict(ours.state_dict())
    image = torch.randn(2, published_calls.DIM, 3, 5)
    out, gradients = train(ours, image)
    expected, exact_gradients = train(exact.double(), image.double())
    assert out.shape == (2, 15, published_calls.DIM)
    assert_near(out, expected, 1e-5)
    for name, gradient in gradients.items():
        assert_near(gradient, exact_gradients[name], 1e-4)
