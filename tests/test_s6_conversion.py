"""Casts, copies and state dicts of the S6 module, and what they preserve."""

import pytest
import torch
from torch import nn

from layers import copies_of, error
from selective_scan import S6, mamba_inner_fn
from test_s6 import KINDS

HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("how", ["constructor", "default", "method", "to", "type"])
def test_half_types_are_those_of_every_parameter(how, dtype):
    if how == "constructor":
        model = S6(8, dtype=dtype)
    elif how == "default":
        torch.set_default_dtype(dtype)
        try:
            model = S6(8)
        finally:
            torch.set_default_dtype(torch.float32)
    elif how == "method":
        model = S6(8).half() if dtype == torch.float16 else S6(8).bfloat16()
    else:
        model = S6(8).to(dtype) if how == "to" else S6(8).type(dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    x = torch.randn(2, 9, 8, dtype=dtype)
    out = model(x)
    assert out.dtype == dtype
    # The scan uses its own parameters in float32, so only the projections round.
    assert error(out, model.float()(x.float())) < torch.finfo(dtype).eps
    model.to(dtype)
    model(x).sum().backward()
    assert all(parameter.grad.dtype == dtype for parameter in model.parameters())


def test_poles_and_steps_are_used_in_float32():
    """A half type costs nothing but the rounding of their parameters."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = S6(8, d_state=4).layers[0]
    finally:
        torch.set_default_dtype(torch.float32)
    hidden = torch.randn(1, 3, 8, dtype=torch.bfloat16)
    conv1d, x_proj, dt_proj, out_proj = layer.conv1d, layer.x_proj, layer.dt_proj, layer.out_proj
    out = mamba_inner_fn(
        layer.in_proj(layer.norm(hidden)).transpose(1, 2),
        *(conv1d.weight, conv1d.bias, x_proj.weight, dt_proj.weight, out_proj.weight, None),
        -layer.A_log.float().exp(),
        D=layer.D,
        delta_bias=dt_proj.bias,
    )
    assert torch.equal(layer(hidden), hidden + out)


def test_casting_back_and_forth(device):
    model = S6(8, depth=2, device=device)
    x = torch.randn(2, 30, 8, device=device)
    expected = model(x)
    assert all(parameter.dtype == torch.float64 for parameter in model.double().parameters())
    assert error(model(x.double()), expected) < 1e-6
    model.half()
    assert error(model(x.half()), expected) < 1e-3
    assert all(parameter.dtype == torch.float32 for parameter in model.float().parameters())
    assert error(model(x), expected) < 1e-3  # the parameters stay rounded


def test_casts_keep_gradients_and_other_properties():
    model = S6(8)
    model.layers[0].D.requires_grad_(False)
    model(torch.randn(2, 9, 8)).sum().backward()
    A_log = model.layers[0].A_log
    gradient = A_log.grad.clone()
    model.to(torch.bfloat16)
    assert model.layers[0].A_log is A_log
    assert torch.equal(A_log.grad, gradient.bfloat16())
    assert not model.layers[0].D.requires_grad
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


MARKS = {"A_log": "_no_weight_decay", "D": "_no_weight_decay", "dt_proj.bias": "_no_reinit"}


def marked(model: nn.Module) -> set[tuple[str, str]]:
    marks = {*MARKS.values()}
    return {(n, it) for n, p in model.named_parameters() for it in marks if getattr(p, it, False)}


def test_parameters_are_marked_whatever_is_done_to_the_model():
    names = {(f"layers.{i}.{name}", mark) for i in range(2) for name, mark in MARKS.items()}
    model = S6(8, depth=2)
    assert marked(model) == names
    assert all(marked(twin) == names for twin in copies_of(model))
    assert marked(model.to(torch.bfloat16)) == names
    assert marked(S6(8, depth=2, device="meta").to_empty(device="cpu")) == names
    model.load_state_dict(S6(8, depth=2).state_dict(), assign=True)
    assert marked(model) == names
    for switch in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion"):
        setter, getter = (getattr(torch.__future__, f"{verb}_{switch}") for verb in ("set", "get"))
        before = getter()
        setter(True)
        try:
            model.to(torch.float64)
            assert marked(model.to(torch.bfloat16)) == names
            model.load_state_dict(S6(8, depth=2).state_dict())
            assert marked(model) == names
        finally:
            setter(before)


@pytest.mark.parametrize("dtype", [*HALF, torch.float64])
def test_state_dict_of_another_dtype_can_be_assigned(dtype):
    state = {name: value.to(dtype) for name, value in S6(8).state_dict().items()}
    model = S6(8, device="meta")
    model.load_state_dict(state, assign=True)
    assert all(model.get_parameter(name).data_ptr() == state[name].data_ptr() for name in state)
    assert model(torch.randn(2, 9, 8, dtype=dtype)).dtype == dtype


def test_parameters_keep_their_order():
    """State dicts of optimizers identify parameters only by their positions."""
    names = (
        "A_log D norm.weight in_proj.weight in_proj.bias conv1d.weight conv1d.bias x_proj.weight "
        "dt_proj.weight dt_proj.bias out_proj.weight out_proj.bias norm_f.weight"
    )
    found = [name.removeprefix("layers.0.") for name, _ in S6(8, bias=True).named_parameters()]
    assert found == names.split()


def test_copies(device):
    model = S6(8, depth=2, bidirectional=True, device=device)
    x = torch.randn(2, 9, 8, device=device)
    expected = model(x)
    for other in copies_of(model):
        assert torch.equal(other(x), expected)
        assert other.layers[0].A_log is not model.layers[0].A_log


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_state_dict_round_trip(options):
    model, other = S6(8, depth=2, **options), S6(8, depth=2, **options)
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
