"""The norms of mamba_ssm's import paths, against their formulas in float64."""

import importlib
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from layers import error

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float64: 1e-14}


def norm_of(x, weight, bias, eps, is_rms):
    x = x.double()
    mean = 0 if is_rms else x.mean(-1, keepdim=True)
    y = (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("residual_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_rms", [False, True])
def test_norm(compat_modules, dtype, residual_dtype, is_rms, device):
    module = importlib.import_module("mamba_ssm.ops.triton.layer_norm")
    x = torch.randn(2, 5, 16, dtype=dtype, device=device)
    weight, bias = torch.randn(2, 16, device=device)
    residual = None
    if residual_dtype is not None:
        residual = torch.randn(2, 5, 16, dtype=residual_dtype, device=device)
    function = module.rms_norm_fn if is_rms else module.layer_norm_fn
    for keep_wide, shift in itertools.product((False, True), (bias, None)):
        out, total = function(
            x, weight, shift, residual, eps=0.1, prenorm=True, residual_in_fp32=keep_wide
        )
        exact = x.double() + (0 if residual is None else residual.double())
        assert out.dtype == dtype
        wide = torch.promote_types(dtype, torch.float32)
        assert total.dtype == (residual_dtype or (wide if keep_wide else dtype))
        assert error(total, exact) < ROUNDING[total.dtype]
        normed = norm_of(exact, weight, shift, 0.1, is_rms)
        assert error(out, normed) < ROUNDING[dtype]
        if dtype == torch.bfloat16:  # nothing is rounded on the way, neither is the sum
            assert (out == normed.to(dtype)).double().mean() > 0.95
        assert torch.equal(function(x, weight, shift, residual, eps=0.1), out)


@pytest.mark.parametrize("upcast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("residual_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_rms", [False, True])
def test_norm_references(compat_modules, dtype, residual_dtype, is_rms, upcast):
    module = importlib.import_module("mamba_ssm.ops.triton.layer_norm")
    function = module.rms_norm_ref if is_rms else module.layer_norm_ref
    x, (weight, bias) = torch.randn(2, 5, 16, dtype=dtype), torch.randn(2, 16)
    residual = None if residual_dtype is None else torch.randn(2, 5, 16).to(residual_dtype)
    out, total = function(x, weight, bias, residual, eps=0.1, prenorm=True, upcast=upcast)
    expected = x.double() + (0 if residual is None else residual.double())
    assert out.dtype == dtype
    assert total.dtype == (torch.float32 if upcast and dtype == torch.bfloat16 else dtype)
    roundings = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}
    rounding = roundings[total.dtype]
    torch.testing.assert_close(total.double(), expected, rtol=rounding, atol=rounding)
    rounding = roundings[dtype]
    normed = norm_of(expected, weight, bias, 0.1, is_rms)
    torch.testing.assert_close(out.double(), normed, rtol=rounding, atol=rounding)
    assert torch.equal(function(x, weight, bias, residual, eps=0.1), out)
    with pytest.raises(ValueError, match="dropout_mask1 must be None"):
        function(x, weight, bias, dropout_mask1=x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("is_rms", [False, True])
def test_norm_and_linear(compat_modules, dtype, is_rms):
    from mamba_ssm.ops.triton.layer_norm import layer_norm_linear_fn

    x, residual = torch.randn(2, 2, 5, 16, dtype=dtype)
    (weight, bias), rows, shift = torch.randn(2, 16), torch.randn(7, 16), torch.randn(7)
    given = (x, weight, bias, rows, shift, residual)
    out, total = layer_norm_linear_fn(*given, eps=0.1, prenorm=True, is_rms_norm=is_rms)
    expected = x.double() + residual.double()
    rounding = 3e-2 if dtype == torch.bfloat16 else 1e-12
    torch.testing.assert_close(total.double(), expected, rtol=rounding, atol=rounding)
    normed = norm_of(expected, weight, bias, 0.1, is_rms)
    expected = F.linear(normed, rows.double(), shift.double())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=4 * rounding)
    assert torch.equal(layer_norm_linear_fn(*given, eps=0.1, is_rms_norm=is_rms), out)


def test_rms_norm_module(compat_modules):
    from mamba_ssm.ops.triton.layernorm import RMSNorm

    norm, x = RMSNorm(16, eps=0.1, dtype=torch.float64), torch.randn(3, 16, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), norm_of(x, norm.weight, None, 0.1, True))
    out, total = norm(x, residual=x, prenorm=True)
    torch.testing.assert_close(out, norm(2 * x))
    assert torch.equal(total, 2 * x)
    assert dict(norm.named_parameters()).keys() == {"weight"}


def test_norm_refuses_what_is_not_covered(compat_modules):
    from mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_fn

    x = torch.randn(3, 16)
    for name in ("x1", "weight1", "bias1", "rowscale"):
        with pytest.raises(ValueError, match=f"{name} must be None"):
            layer_norm_fn(x, x[0], None, **{name: x})
    with pytest.raises(ValueError, match="return_dropout_mask must be False"):
        layer_norm_fn(x, x[0], None, return_dropout_mask=True)
    for call in (partial(layer_norm_fn, x, x[0], None), partial(RMSNorm, 16)):
        with pytest.raises(ValueError, match=r"dropout_p must be 0, got 0\.5"):
            call(dropout_p=0.5)
    wanted = r"residual must be of the shape of x, \(3, 16\), got \(6, 16\)"
    for bias in (None, x[0]):
        with pytest.raises(ValueError, match=wanted):
            layer_norm_fn(x, x[0], bias, torch.zeros(6, 16), is_rms_norm=bias is None)
    for arguments, message in (
        ((x, x[0, :8], None), r"weight must be \(hidden_size,\) = \(16,\), got \(8,\)"),
        ((x, x[0], x), r"bias must be \(hidden_size,\) = \(16,\), got \(3, 16\)"),
        ((x.int(), x[0], None), r"x must be of a floating dtype, got torch\.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            layer_norm_fn(*arguments, is_rms_norm=True)
