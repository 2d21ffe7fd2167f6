"""Layers with the exponential trapezoid or with states that rotate: their results, caches and
initialization. Tests that they share with other layers are in test_s6.py, test_cache.py,
test_compile.py and test_packed.py."""

import re

import pytest
import torch
from torch import nn

from layers import by_definition
from selective_scan import S6, MambaMixer
from selective_scan._discretization import LAYER_METHODS

BATCH, SEQLEN, DIM, DSTATE = 2, 29, 8, 6
F64 = torch.float64
BOTH = {"discretization_method": "trapezoid", "rotary": True}
OPTIONS = ({"rotary": True}, {"discretization_method": "trapezoid"}, BOTH)


def model_of(device="cpu", dtype=F64, **options) -> S6:
    """Returns a model of varied weights, whose steps are large enough for angles to matter."""
    sizes = {"d_state": DSTATE, "dt_rank": 2, "depth": 2, "dt_min": 0.2, "dt_max": 1.0}
    model = S6(DIM, **sizes | options, dtype=dtype, device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "x_proj" in name:
                parameter.mul_(4)
    return model


def sequence(device="cpu", dtype=F64, batch=BATCH, seqlen=SEQLEN) -> torch.Tensor:
    return torch.randn(batch, seqlen, DIM, dtype=dtype, device=device)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *({"rotary": True, "discretization_method": method} for method in LAYER_METHODS),
        {"discretization_method": "trapezoid"},
        {"d_conv": 1, **BOTH},
        {"d_conv": 9, **BOTH},
        {"bidirectional": True, **BOTH},
        {"bidirectional": True, "rotary": True},
        {"bidirectional": True, "discretization_method": "trapezoid"},
    ],
    ids=str,
)
def test_output_is_that_of_the_definition(options, device):
    model, x = model_of(device, **options), sequence(device)
    torch.testing.assert_close(model(x), by_definition(model, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_a_layer(options):
    mixer = MambaMixer(
        4, d_state=4, d_conv=2, expand=1, dt_min=0.2, dt_max=1.0, dtype=F64, **options
    )
    names, parameters = zip(*mixer.named_parameters(), strict=True)
    x = torch.randn(1, 5, 4, dtype=F64, requires_grad=True)

    def run(x, *values):
        return torch.func.functional_call(mixer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters))


def test_states_turn_by_nothing_where_angles_are_zero():
    """A rotary layer whose angles are 0 is one whose pairs of states share a pole."""
    model, x = model_of(depth=1, rotary=True), sequence()
    layer = model.layers[0]
    with torch.no_grad():
        layer.x_proj.weight[-DSTATE // 2 :] = 0
    other = model_of(depth=1, discretization_method="trapezoid")
    assert isinstance(other.layers[0].mix_proj, nn.Linear)
    state = other.state_dict() | {
        name: value for name, value in model.state_dict().items() if "A_log" not in name
    }
    del state["layers.0.x_proj.weight"]
    with torch.no_grad():
        other.load_state_dict(state, strict=False)
        other.layers[0].x_proj.weight[: 2 + 2 * DSTATE] = layer.x_proj.weight[: 2 + 2 * DSTATE]
        other.layers[0].A_log.copy_(layer.A_log.repeat_interleave(2, 1))
        other.layers[0].mix_proj.bias.fill_(1000.0)  # λ = 1 is zoh
    torch.testing.assert_close(model(x), other(x), rtol=1e-9, atol=1e-9)


def test_angles_of_long_sequences_keep_their_digits():
    """Of sums of some 10,000 radians, float32 would keep three digits after the point."""
    model = model_of(depth=1, rotary=True)
    with torch.no_grad():
        model.layers[0].x_proj.weight[-DSTATE // 2 :].abs_()
        x = sequence(seqlen=8000, batch=1)
        whole = model(x)
        cache = model.float().allocate_cache(1)
        narrow = torch.cat([model(part.float(), cache=cache) for part in x.split(700, dim=1)], 1)
    torch.testing.assert_close(narrow.double(), whole, rtol=1e-3, atol=1e-3)


# --- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_a_cache(dtype):
    cache = model_of(dtype=torch.float32, depth=1, **BOTH).allocate_cache(3, dtype).layers[0]
    inner = 2 * DIM
    kinds = {"state": (3, inner, DSTATE), "last_input": (3, inner, DSTATE)}
    for name, shape in kinds.items():
        tensor = getattr(cache, name)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
    # A rounded angle would not be the angle by which the states were rotated.
    assert (cache.angles.shape, cache.angles.dtype) == ((3, DSTATE // 2, 1), F64)


def test_caches_of_other_layers_are_refused():
    models = {
        "plain": model_of(),
        "rotary": model_of(rotary=True),
        "trapezoid": model_of(discretization_method="trapezoid"),
    }
    x = sequence()[:, :1]
    for kind, other, message in (
        ("plain", "rotary", "angles of cache must be None for this layer, got (2, 3, 1)"),
        ("plain", "trapezoid", "last_input of cache must be None for this layer, got (2, 16, 6)"),
        ("rotary", "plain", "angles of cache must be (batch, d_state/2, 1) = (2, 3, 1), got None"),
        (
            "trapezoid",
            "plain",
            "last_input of cache must be (batch, d_inner, d_state) = (2, 16, 6), got None",
        ),
    ):
        cache = models[other].allocate_cache(BATCH)
        with torch.no_grad(), pytest.raises(ValueError, match=re.escape(message)):
            models[kind](x, cache=cache)


# --- initialization, parts ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
def test_options_that_are_set_later_have_an_effect_or_are_refused(options):
    model, x = model_of(**options), sequence()
    layer = model.layers[1]
    rotary, method = options.get("rotary", False), options.get("discretization_method", "zoh")
    methods = [it for it in LAYER_METHODS if (it == "trapezoid") == (method == "trapezoid")]
    for other in LAYER_METHODS:
        if other in methods:
            layer.discretization_method = other
            torch.testing.assert_close(model(x), by_definition(model, x))
            continue
        wanted = f"method must be one of {', '.join(methods)} in this layer, .* got '{other}'"
        with pytest.raises(ValueError, match=wanted):
            layer.discretization_method = other
    layer.rotary = rotary
    wanted = f"rotary must be {rotary} in this layer, .* got {not rotary}"
    with pytest.raises(ValueError, match=wanted):
        layer.rotary = not rotary


def test_parameters():
    def shapes(**options):
        state = S6(DIM, d_state=DSTATE, dt_rank=2, **options).layers[0].state_dict()
        return {name: tuple(value.shape) for name, value in state.items()}

    inner, plain = 2 * DIM, shapes()
    shared = {"B_norm.weight", "C_norm.weight", "B_bias", "C_bias"}
    for options in OPTIONS:
        method, rotary = options.get("discretization_method"), options.get("rotary", False)
        own = shapes(**options)
        others = {"mix_proj.weight", "mix_proj.bias"} if method == "trapezoid" else set()
        assert own.keys() - plain.keys() == shared | others
        rows = 2 + 2 * DSTATE + (2 if method == "trapezoid" else 0) + (DSTATE // 2) * rotary
        assert own["x_proj.weight"] == (rows, inner)
        assert own["A_log"] == (inner, DSTATE // 2 if rotary else DSTATE)
        assert own["B_bias"] == own["C_bias"] == own["B_norm.weight"] == (DSTATE,)


def test_initial_values():
    model = S6(DIM, d_state=DSTATE, device="meta", **BOTH)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.reset_parameters()
    layer = model.layers[0]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    for tensor in (layer.B_bias, layer.C_bias, layer.B_norm.weight, layer.C_norm.weight):
        assert torch.equal(tensor, torch.ones(DSTATE))
    torch.testing.assert_close(layer.A_log, torch.arange(1.0, 4.0).log().expand(2 * DIM, 3))


def test_plain_layers_are_what_they_were():
    """Plain layers keep the order of their parameters and of their random draws."""
    torch.manual_seed(0)
    plain = S6(DIM)
    after = torch.rand(3)
    torch.manual_seed(0)
    named = S6(DIM, discretization_method="zoh", rotary=False)
    assert torch.equal(after, torch.rand(3))
    assert list(plain.state_dict()) == list(named.state_dict())
    assert "rotary" not in repr(plain)
    assert "rotary=True" in repr(S6(DIM, rotary=True))


@pytest.mark.parametrize("name", ["x_proj", "B_norm", "mix_proj", "out_proj"])
def test_parts_are_called(name):
    model, x = model_of(depth=1, **BOTH), sequence()
    expected, seen = model(x), []
    model.layers[0].get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    assert torch.equal(model(x), expected)
    assert seen == [name]
