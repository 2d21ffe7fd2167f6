"""Casts, copies and state dicts of the S6 module: what it keeps and what it gives up."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from selective_scan import S6

FLOAT_PARAMETERS = ("A_log", "D", "dt_proj.bias")
HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("how", ["constructor", "default", "method", "to", "type"])
def test_half_types_keep_sensitive_parameters_in_float32(how, dtype):
    if how == "constructor":
        model = S6(8, dtype=dtype)
    elif how == "default":
        torch.set_default_dtype(dtype)
        try:
            model = S6(8)
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        model = S6(8)
        exact = copy.deepcopy(model.state_dict())
        if how == "method":
            model = model.half() if dtype == torch.float16 else model.bfloat16()
        else:
            model = model.to(dtype) if how == "to" else model.type(dtype)
        for name in FLOAT_PARAMETERS:
            name = f"layers.0.{name}"
            assert torch.equal(model.state_dict()[name], exact[name])
    for name, parameter in model.named_parameters():
        is_kept = name.removeprefix("layers.0.") in FLOAT_PARAMETERS
        assert parameter.dtype == (torch.float32 if is_kept else dtype), name
    x = torch.randn(2, 9, 8, dtype=dtype)
    out = model(x)
    assert out.dtype == dtype
    out.sum().backward()
    assert all(parameter.grad.dtype == parameter.dtype for parameter in model.parameters())


def test_casting_back_and_forth(device):
    model = S6(8, depth=2, device=device)
    x = torch.randn(2, 30, 8, device=device)
    expected = model(x)
    assert all(parameter.dtype == torch.float64 for parameter in model.double().parameters())
    torch.testing.assert_close(model(x.double()), expected.double(), rtol=1e-4, atol=1e-4)
    model.half()
    torch.testing.assert_close(model(x.half()).float(), expected, rtol=0.02, atol=0.02)
    assert all(parameter.dtype == torch.float32 for parameter in model.float().parameters())
    torch.testing.assert_close(model(x), expected, rtol=0.02, atol=0.02)


def test_casts_keep_gradients_and_other_properties():
    model = S6(8)
    model.layers[0].D.requires_grad_(False)
    model(torch.randn(2, 9, 8)).sum().backward()
    A_log = model.layers[0].A_log
    gradient = A_log.grad.clone()
    model.to(torch.bfloat16)
    assert model.layers[0].A_log is A_log
    assert torch.equal(A_log.grad, gradient)
    assert not model.layers[0].D.requires_grad
    assert model.layers[0].in_proj.weight.grad.dtype == torch.bfloat16
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_casts_under_pytorchs_other_ways_to_convert():
    for switch in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion"):
        setter, getter = (getattr(torch.__future__, f"{verb}_{switch}") for verb in ("set", "get"))
        before = getter()
        setter(True)
        try:
            model = S6(8).to(torch.bfloat16)
        finally:
            setter(before)
        assert model.layers[0].A_log.dtype == torch.float32
        assert model.layers[0].dt_proj.bias.dtype == torch.float32
        assert model.layers[0].dt_proj.weight.dtype == torch.bfloat16


def test_half_type_state_dict_can_be_assigned():
    """Checkpoints that store everything in bfloat16 work, even where they replace parameters."""
    state = {name: value.to(torch.bfloat16) for name, value in S6(8).state_dict().items()}
    model = S6(8)
    model.load_state_dict(state, assign=True)
    assert model(torch.randn(2, 9, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    model.to(torch.bfloat16)
    assert model.layers[0].A_log.dtype == torch.float32


def test_copies(device):
    model = S6(8, depth=2, bidirectional=True, device=device)
    x = torch.randn(2, 9, 8, device=device)
    expected = model(x)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ):
        assert torch.equal(other(x), expected)
        assert other.layers[0].A_log is not model.layers[0].A_log
        other.half()
        assert other.layers[0].A_log.dtype == torch.float32
        other.load_state_dict(model.state_dict() | {"layers.1.A_negexp": torch.zeros(16, 16)})


def test_state_dict_round_trip():
    model, other = S6(8, depth=2), S6(8, depth=2)
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 9, 8)
    assert torch.equal(other(x), model(x))


def test_legacy_buffer_is_ignored():
    model = S6(8, depth=2)
    state = model.state_dict()
    legacy = {f"layers.{i}.A_negexp": -state[f"layers.{i}.A_log"].exp() for i in range(2)}
    given = state | legacy
    for strict in (True, False):
        result = S6(8, depth=2).load_state_dict(given, strict=strict)
        assert not result.missing_keys
        assert not result.unexpected_keys
    assert set(legacy) <= set(given)  # the caller's dict is left as it is

    wrapped = nn.Sequential(S6(8, depth=2))
    wrapped.load_state_dict({f"0.{name}": value for name, value in given.items()})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*layers\.0\.A_neg"):
        S6(8, depth=2).load_state_dict(state | {"layers.0.A_neg": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.0\.A_log"):
        S6(8, depth=2).load_state_dict(legacy, strict=True)
