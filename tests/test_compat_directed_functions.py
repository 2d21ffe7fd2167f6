"""mamba_inner_fn_no_out_proj and bimamba_inner_fn of Vim's fork, and run_layer below them."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import test_mamba_inner as layers
from directed import ROUNDING, assert_near, nudge, plain_rows
from selective_scan._mamba_operators import Layer
from selective_scan.compat.directions import bimamba_inner_fn, mamba_inner_fn_no_out_proj
from selective_scan.mamba_inner import run_layer

INPUTS = ("xz", "conv1d_weight", "conv1d_bias", "x_proj_weight", "delta_proj_weight")
BIASES = ("B", "C", "D", "delta_bias", "B_proj_bias", "C_proj_bias", "delta_softplus")
KINDS = {
    "all": "",
    "plain": "B_proj_bias C_proj_bias",
    "no bias": "conv1d_bias D delta_bias B_proj_bias C_proj_bias",
    "given B": "B_proj_bias",
    "given B and C": "B_proj_bias C_proj_bias conv1d_bias",
    "complex": "B_proj_bias",
}


def tensors_of(kind="all", dtype=torch.float64, seqlen=9, device="cpu", width=4) -> dict:
    """Returns the tensors of a layer, as leaves, with second poles and a C of each step."""
    case = layers.Case(
        *(2, 6, seqlen, 3, 2, 5, width),
        complex=kind == "complex",
        given={"given B": "B", "given B and C": "BC"}.get(kind, ""),
        absent=tuple(KINDS[kind].split()),
        dtype=dtype,
    )
    tensors = layers.tensors_of(case, device).items()
    tensors = {name: value for name, value in tensors if "rms" not in name}
    tensors["A_b"] = tensors["A"].detach().flip(0).requires_grad_()
    if "C" in case.given:
        tensors["C"] = torch.randn(2, 3, seqlen, dtype=dtype, device=device, requires_grad=True)
    return tensors


def plain_no_out_proj(*arguments):
    *inputs, A = arguments[:6]
    return plain_rows(*inputs, A, None, *arguments[6:]).transpose(1, 2)


def plain_bimamba(*arguments):
    inputs, (weight, bias), scanned = arguments[:5], arguments[5:7], arguments[7:]
    return F.linear(plain_rows(*inputs, *scanned), weight, bias)


FUNCTIONS = {mamba_inner_fn_no_out_proj: plain_no_out_proj, bimamba_inner_fn: plain_bimamba}
of_functions = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def arguments_of(function, tensors, **options):
    names = list(inspect.signature(function).parameters)
    given = tensors | {"delta_softplus": True, "discretization_method": "foh"} | options
    return [given[name] for name in names]


def gradients(out, arguments, cotangent):
    inputs = [a for a in arguments if isinstance(a, torch.Tensor)]
    return torch.autograd.grad(out, inputs, cotangent.to(out))


def test_arguments_are_those_of_the_fork():
    common = [*INPUTS, "A", *BIASES]
    assert list(inspect.signature(mamba_inner_fn_no_out_proj).parameters) == common
    with_projection = [*INPUTS, "out_proj_weight", "out_proj_bias", "A", "A_b", *BIASES]
    assert list(inspect.signature(bimamba_inner_fn).parameters) == with_projection


def test_the_import_path(compat_modules):
    import mamba_ssm.ops.selective_scan_interface as module

    for function in FUNCTIONS:
        assert getattr(module, function.__name__) is function


@of_functions
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "seqlen"),
    [*((dtype, 40) for dtype in ROUNDING), (torch.float64, 1), (torch.float64, 5)],
    ids=str,
)
def test_against_plain_pytorch(function, kind, dtype, seqlen, device):
    arguments = arguments_of(function, tensors_of(kind, dtype, seqlen, device))
    out = function(*arguments)
    assert out.dtype == dtype
    cotangent = torch.randn_like(out)

    def solve(size):
        plain = [nudge(a, size) if isinstance(a, torch.Tensor) else a for a in arguments]
        expected = FUNCTIONS[function](*plain)
        return [expected, *gradients(expected, plain, cotangent)]

    assert_near([out, *gradients(out, arguments, cotangent)], solve, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seqlen", [0, 1, 2, 3, 4, 40])
@pytest.mark.parametrize("layout", ["channels last", "contiguous", "sliced"])
def test_turned_around(kind, seqlen, layout, device):
    """`reverse` gives the results of flipped inputs and outputs, by other calls of kernels."""
    tensors = tensors_of(kind, seqlen=seqlen, device=device)
    if layout != "channels last":
        xz = tensors["xz"].detach().contiguous()
        xz = xz.repeat_interleave(2, 2)[..., ::2] if layout == "sliced" else xz
        tensors["xz"] = xz.requires_grad_()
    check_turned_around(tensors)


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("seqlen", [1, 7, 8, 20])
def test_turned_around_by_width(width, seqlen, device):
    check_turned_around(tensors_of("plain", seqlen=seqlen, device=device, width=width))


def check_turned_around(tensors):
    rows = dict.fromkeys(("out_proj_weight", "out_proj_bias", "A_b"))
    layer = Layer(**tensors | rows, delta_softplus=True, discretization_method="foh")
    actual = run_layer(layer._replace(reverse=True))
    C = None if layer.C is None else layer.C.flip(2)
    expected = run_layer(layer._replace(xz=layer.xz.flip(2), C=C)).flip(1)
    torch.testing.assert_close(actual, expected)
    cotangent = torch.randn_like(actual)
    tensors = [a for a in layer if isinstance(a, torch.Tensor)]
    torch.testing.assert_close(
        *(torch.autograd.grad(out, tensors, cotangent) for out in (actual, expected))
    )
