"""Mamba layers of several directions, as in the forks of mamba_ssm, against plain PyTorch."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from directed import ROUNDING, assert_near, nudge, plain_layer
from layers import by_steps, copies_of
from opchecks import nodes_of
from selective_scan import MambaMixer, _library, causal_conv1d_fn, selective_scan_fn
from selective_scan.compat.mamba_simple import Mamba

TYPES = ("v1", "v2", "v3")


def make(bimamba_type, **options) -> Mamba:
    options = {"d_model": 12, "d_state": 4, "nslices": 3, "layer_idx": 0} | options
    layer = Mamba(bimamba_type=bimamba_type, **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "log" in name or name[0] in "Dg":  # parameters that are equal for all channels
                parameter += 0.3 * torch.rand_like(parameter)
    return layer


def assert_like_plain(layer, hidden, bimamba_type=None, run=None, dtype=None):
    """Asserts that a layer's result and all gradients match plain PyTorch; returns the result."""
    hidden = hidden.detach().requires_grad_()
    out = layer(hidden) if run is None else run(hidden)
    cotangent = torch.randn_like(out)
    inputs = [hidden, *layer.parameters()]

    def solve(size):
        twin, plain_hidden = copy.deepcopy(layer).double(), nudge(hidden, size)
        for parameter in twin.parameters():
            parameter.data = nudge(parameter, size).detach()
        plain = plain_layer(twin, plain_hidden, bimamba_type or layer.bimamba_type)
        leaves = [plain_hidden, *twin.parameters()]
        return [plain, *torch.autograd.grad(plain, leaves, cotangent.double())]

    gradients = torch.autograd.grad(out, inputs, cotangent)
    assert_near([out, *gradients], solve, dtype or hidden.dtype)
    assert all(g.dtype == i.dtype for g, i in zip(gradients, inputs, strict=True))
    return out


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"), [("dt_soft_plus", False), ("discretization_method", "foh")]
)
@pytest.mark.parametrize("use_fast_path", [True, False])
@torch.no_grad()
def test_every_direction_has_the_layers_options(use_fast_path, option, value):
    """Each direction is a one-way layer with the option; out_proj is linear, so results add up."""
    layer = make("v2", use_fast_path=use_fast_path)
    hidden, expected = torch.randn(2, 9, 12), 0
    layers = [make("none", use_fast_path=use_fast_path) for _ in range(2)]
    weights = layer.state_dict()
    for one, suffix in zip(layers, ("", "_b"), strict=True):
        setattr(one, option, value)
        one.dt_proj.bias.fill_(2)
        layer.get_submodule(f"dt_proj{suffix}").bias.fill_(2)
        for name, parameter in one.named_parameters():
            first, dot, last = name.partition(".")
            first = first.replace("_log", "") + suffix + "_log" * first.endswith("_log")
            own = weights.get(first + dot + last)
            parameter.copy_(weights[name] if own is None else own)
        turned = hidden.flip(1) if suffix else hidden
        out = one(turned)
        expected = expected + (out.flip(1) if suffix else out)
    before = layer(hidden)
    setattr(layer, option, value)
    assert not torch.allclose(before, expected, rtol=1e-3)
    torch.testing.assert_close(layer(hidden), expected)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("use_fast_path", [True, False])
@pytest.mark.parametrize("bimamba_type", TYPES)
def test_a_layer(bimamba_type, use_fast_path, dtype, device):
    for bias, conv_bias in ((False, True), (True, False)):
        options = {"bias": bias, "conv_bias": conv_bias, "use_fast_path": use_fast_path}
        layer = make(bimamba_type, **options, dtype=dtype).to(device)
        hidden = torch.randn(2, 21, 12, dtype=dtype, device=device)
        assert assert_like_plain(layer, hidden).dtype == dtype


@pytest.mark.parametrize("use_fast_path", [True, False])
@pytest.mark.parametrize(("bimamba_type", "count"), [("none", 1), ("v1", 1), ("v2", 2), ("v3", 3)])
def test_the_fast_path_is_one_node_for_each_set_of_parts(bimamba_type, count, use_fast_path):
    nodes = nodes_of(make(bimamba_type, use_fast_path=use_fast_path)(torch.randn(2, 6, 12)))
    assert nodes["mamba_innerBackward"] == (count if use_fast_path else 0)
    assert nodes["causal_conv1dBackward"] == (0 if use_fast_path else count)


@pytest.mark.parametrize("seqlen", [3, 6, 300])
@pytest.mark.parametrize("d_conv", [1, 4, 10])
@pytest.mark.parametrize("bimamba_type", TYPES)
def test_short_and_long_sequences_and_wide_convolutions(bimamba_type, d_conv, seqlen, device):
    layer = make(bimamba_type, d_conv=d_conv, dtype=torch.float64).to(device)
    hidden = torch.randn(2, seqlen, 12, dtype=torch.float64, device=device)
    assert_like_plain(layer, hidden)
    assert layer(hidden[:, :0]).shape == (2, 0, 12)


@pytest.mark.parametrize("bimamba_type", ["none", *TYPES])
@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("if_divide_out", [False, True])
def test_division_and_scale(bimamba_type, if_divide_out, scale):
    layer = make(bimamba_type, if_divide_out=if_divide_out, init_layer_scale=scale)
    assert_like_plain(layer, torch.randn(2, 6, 12))
    residual, hidden = torch.randn(2, 6, 12), torch.randn(2, 6, 12)
    expected = residual + layer(hidden)
    torch.testing.assert_close(layer._run(hidden, residual, None, None), expected)


def test_v3_without_slices_warns_of_vivims_once(monkeypatch, caplog):
    monkeypatch.setattr(_library, "_warned", set())
    make("v3")
    make("v2", nslices=None)
    assert not caplog.records
    for _ in range(2):
        assert make("v3", nslices=None).nslices == 5
    (record,) = caplog.records
    assert "if_divide_out" in record.getMessage()


def test_bimamba_is_v2_by_another_name():
    layer = make("none", bimamba=True)
    assert layer.bimamba_type == "v2"
    assert_like_plain(layer, torch.randn(2, 6, 12), "v2")
    assert make("v2", bimamba=True).state_dict().keys() == layer.state_dict().keys()


def test_no_type_is_one_direction():
    """Pan-Mamba passes None; whatever a fork does not know means one direction there."""
    layer = make(None)
    assert layer.bimamba_type == "none"
    assert [*layer.state_dict()] == [*MambaMixer(12, 4).state_dict()]
    layer.step(torch.randn(2, 1, 12), *layer.allocate_inference_cache(2, 1))


@pytest.mark.parametrize("bimamba_type", TYPES)
def test_autocast(bimamba_type, device):
    layer = make(bimamba_type, init_layer_scale=0.5).to(device)
    with torch.autocast(device, torch.bfloat16):
        out = assert_like_plain(layer, torch.randn(2, 21, 12, device=device), dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16


class OfItsOwn(Mamba):
    """Has its own forward, written with the layer's attributes like subclasses of mamba_ssm's."""

    def forward(self, hidden_states, inference_params=None):
        x, z = self.in_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)
        if self.use_fast_path:
            taps = self.conv1d.weight.squeeze(1)
            x = causal_conv1d_fn(x, taps, self.conv1d.bias, activation=self.activation)
        else:
            x = self.act(self.conv1d(x)[..., : x.shape[2]])
        sizes = [self.dt_rank, self.d_state, self.d_state]
        dt, B, C = self.x_proj(x.transpose(1, 2)).split(sizes, -1)
        dt = F.linear(dt, self.dt_proj.weight).transpose(1, 2)
        projections = (-self.A_log.exp(), B.transpose(1, 2), C.transpose(1, 2))
        y = selective_scan_fn(x, dt, *projections, self.D, z, self.dt_proj.bias, True)
        return self.out_proj(y.transpose(1, 2))


@pytest.mark.parametrize("use_fast_path", [True, False])
def test_a_subclass_with_a_forward_of_its_own(use_fast_path):
    layer = OfItsOwn(12, d_state=4, use_fast_path=use_fast_path)
    layer.reset_parameters()
    assert_like_plain(layer, torch.randn(2, 9, 12), "none")


@pytest.mark.parametrize("channels", [5, 24])
def test_steps_with_another_out_proj(channels):
    layer = make("none")
    layer.out_proj = nn.Linear(layer.d_inner, channels)
    hidden = torch.randn(2, 9, 12)
    out = assert_like_plain(layer, hidden, "none")
    assert out.shape == (2, 9, channels)
    with torch.no_grad():
        torch.testing.assert_close(by_steps(layer, hidden, 4)[0], out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [MambaMixer, Mamba])
def test_states_beside_a_convolution_of_integers(kind):
    layer = kind(12, layer_idx=0) if kind is Mamba else kind(12)
    layer.conv1d.weight = nn.Parameter(layer.conv1d.weight.char(), requires_grad=False)
    if kind is Mamba:
        states = layer.allocate_inference_cache(2, 1)
    else:
        states = layer.allocate_cache(2)._tensors()
    assert {state.dtype for state in states} == {torch.float32}


def test_a_state_of_another_batch_is_refused_before_any_changes():
    layer = make("none")
    conv_state, ssm_state = layer.allocate_inference_cache(2, 1)
    message = r"ssm_state must be \(batch, d_inner, d_state\) = \(2, 24, 4\), got \(1, 24, 4\)$"
    with pytest.raises(ValueError, match=message):
        layer.step(torch.randn(2, 1, 12), conv_state, ssm_state[:1])
    assert not conv_state.any()


@pytest.mark.parametrize("name", ["x_proj", "dt_proj", "out_proj"])
def test_a_projection_of_another_dtype_is_cast(name):
    mamba, x = Mamba(8, layer_idx=0), torch.randn(2, 9, 8)
    getattr(mamba, name).double()
    with torch.no_grad():
        torch.testing.assert_close(by_steps(mamba, x, 5)[0], mamba(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("d_model", "expand", "d_inner"), [(100, 1.15, 114), (9, 0.5, 4)])
def test_of_a_product_that_is_no_whole_number_the_rest_is_dropped(d_model, expand, d_inner):
    layer = Mamba(d_model, d_state=4, expand=expand)
    assert (layer.d_inner, layer.expand) == (d_inner, expand)
    assert layer.allocate_inference_cache(2, 9)[0].shape == (2, d_inner, 4)
    assert_like_plain(layer, torch.randn(2, 9, d_model), "none")


# --- parameters -----------------------------------------------------------------------------------

PARTS = {
    "conv1d{}.weight": (24, 1, 4),
    "conv1d{}.bias": (24,),
    "x_proj{}.weight": (9, 24),
    "dt_proj{}.weight": (24, 1),
    "dt_proj{}.bias": (24,),
}
SETS = {"none": [""], "v1": [""], "v2": ["", "_b"], "v3": ["", "_b", "_s"]}


@pytest.mark.parametrize("bimamba_type", SETS)
def test_names_order_and_shapes_are_those_of_the_checkpoints(bimamba_type):
    sets = SETS[bimamba_type]
    shapes = {"gamma": (12,)}
    for suffix in sets if bimamba_type != "v1" else ["", "_b"]:
        shapes[f"A{suffix}_log"] = (24, 4)
        if suffix in sets:
            shapes[f"D{suffix}"] = (24,)
    shapes["in_proj.weight"] = (48, 12)
    for suffix in sets:
        shapes |= {name.format(suffix): shape for name, shape in PARTS.items()}
    shapes["out_proj.weight"] = (12, 24)
    layer = make(bimamba_type, init_layer_scale=0.1)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == shapes
    assert [name for name, _ in layer.named_parameters()] == list(shapes)
    checkpoint = {name: torch.randn(shape) for name, shape in shapes.items()}
    layer.load_state_dict(checkpoint, strict=True)
    assert_like_plain(layer, torch.randn(2, 6, 12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_values_and_marks(dtype):
    layer = Mamba(12, 4, bimamba_type="v3", init_layer_scale=0.1, dtype=dtype)
    poles = {"A_log", "A_b_log", "A_s_log"}
    for _ in range(2):
        parameters = dict(layer.named_parameters())
        for name in poles:
            torch.testing.assert_close(parameters[name].exp(), torch.arange(1.0, 5).expand(24, 4))
        assert all((parameters[name] == 1).all() for name in ("D", "D_b", "D_s"))
        assert (parameters["gamma"] == 0.1).all()
        wide = {name for name, p in parameters.items() if p.dtype == torch.float32}
        assert dtype == torch.float32 or wide == {*poles, "D", "D_b", "D_s", "gamma"}
        marked = {name for name, p in parameters.items() if hasattr(p, "_no_weight_decay")}
        assert marked == {*poles, "D", "D_b", "D_s"}
        with torch.no_grad():
            for parameter in parameters.values():
                parameter += 1
        layer.reset_parameters()
    marked = {n for n, p in layer.double().named_parameters() if hasattr(p, "_no_weight_decay")}
    assert marked == {*poles, "D", "D_b", "D_s"}


@pytest.mark.parametrize("bimamba_type", TYPES)
def test_a_layer_is_copied_and_saved(bimamba_type):
    layer, hidden = make(bimamba_type, init_layer_scale=0.1), torch.randn(1, 6, 12)
    for twin in copies_of(layer):
        assert torch.equal(twin(hidden), layer(hidden))
    assert f"bimamba_type='{bimamba_type}'" in repr(layer)


# --- parts that are called ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv1d", "x_proj", "dt_proj"])
@pytest.mark.parametrize("suffix", ["", "_b", "_s"])
def test_what_has_hooks_or_was_replaced_is_called(name, suffix):
    """A part that is called adds its own bias, and no other bias is added to its result."""
    layer, hidden = make("v3", dtype=torch.float64), torch.randn(2, 6, 12, dtype=torch.float64)
    tripled, calls = copy.deepcopy(layer), []
    with torch.no_grad():
        for parameter in getattr(tripled, name + suffix).parameters():
            parameter *= 3
    part = getattr(layer, name + suffix)
    part.register_forward_hook(lambda module, inputs, out: calls.append(module) or 3 * out)
    torch.testing.assert_close(layer(hidden), tripled(hidden))
    assert calls == [part]
    if name != "conv1d":
        setattr(layer, name + suffix, nn.Sequential(part))
        torch.testing.assert_close(layer(hidden), tripled(hidden))


def test_projections_are_called_once():
    layer, calls = make("v3"), []
    for part in (layer.in_proj, layer.out_proj):
        part.register_forward_hook(lambda module, *_: calls.append(module))
    layer(torch.randn(2, 6, 12))
    assert calls == [layer.in_proj, layer.out_proj]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bimamba_type", TYPES)
def test_there_are_no_states(bimamba_type):
    layer, hidden = make(bimamba_type), torch.randn(2, 1, 12)
    params = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    states = make("none").allocate_inference_cache(2, 1)
    cache = MambaMixer(12, 4).allocate_cache(2)
    message = rf"bimamba_type must be 'none' where .*states.*, got '{bimamba_type}'"
    with torch.no_grad():
        for call in (
            partial(layer, hidden, inference_params=params),
            partial(layer.step, hidden, *states),
            partial(layer.allocate_inference_cache, 2, 10),
            partial(layer._run, hidden, None, cache, None),
        ):
            with pytest.raises(ValueError, match=message):
                call()
    with pytest.raises(ValueError, match="bidirectional must be False where there is a cache"):
        layer.allocate_cache(2)
    with pytest.raises(ValueError, match="cu_seqlens must be None where bimamba_type is not"):
        layer._run(hidden, None, None, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="bidirectional must be False for Mamba"):
        layer.to_mamba()


def test_division_as_vim_spelled_it_first():
    layer = Mamba(12, bimamba_type="v2", if_devide_out=True)
    assert layer.if_divide_out
    other = Mamba(12, bimamba_type="v2")
    other.load_state_dict(layer.state_dict())
    hidden = torch.randn(2, 6, 12)
    torch.testing.assert_close(layer(hidden), other(hidden) / 2)


def test_a_scale_goes_with_states():
    layer, hidden = make("none", init_layer_scale=0.5), torch.randn(2, 6, 12)
    with torch.no_grad():
        out, _ = by_steps(layer, hidden, 4)
        torch.testing.assert_close(out, layer(hidden), rtol=1e-4, atol=1e-5)
        cache = layer.allocate_cache(2)
        out = torch.cat([layer._run(hidden[:, t : t + 3], None, cache, None) for t in (0, 3)], 1)
        torch.testing.assert_close(out, layer(hidden), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bimamba_type": "v4"}, "bimamba_type must be one of none, v1, v2, v3, got 'v4'"),
        ({"bimamba_type": False}, "bimamba_type must be one of none, v1, v2, v3, got False"),
        ({"bimamba_type": "v1", "bimamba": True}, "bimamba_type must be 'none' or 'v2' where"),
        ({"bimamba": 1}, "bimamba must be a bool, got 1"),
        ({"if_divide_out": 1}, "if_divide_out must be a bool, got 1"),
        ({"if_devide_out": 1}, "if_devide_out must be a bool, got 1"),
        ({"init_layer_scale": "1"}, "init_layer_scale must be a finite number, got '1'"),
        ({"init_layer_scale": float("nan")}, "init_layer_scale must be a finite number, got nan"),
        ({"nslices": 0}, "nslices must be an integer of at least 1, got 0"),
        ({"d_model": 0}, "d_model must be an integer of at least 1, got 0"),
        ({"expand": 0}, "expand must be a positive finite number, got 0"),
        ({"expand": 1e308}, "expand·d_model must be a positive finite number, got inf"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Mamba(**{"d_model": 12} | options)


def test_slices_that_do_not_divide_the_sequence():
    layer = make("v3", nslices=4)
    with pytest.raises(ValueError, match="seqlen must be a multiple of nslices = 4, got 6"):
        layer(torch.randn(1, 6, 12))


@pytest.mark.parametrize("bimamba_type", ["none", "v3"])
def test_a_refused_input_has_the_argument_s_name(bimamba_type):
    with pytest.raises(ValueError, match=r"hidden_states must be \(batch, seqlen, d_model\)"):
        make(bimamba_type)(torch.randn(1, 6, 13))


# --- compilers ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bimamba_type", TYPES)
def test_compiled(bimamba_type):
    layer = make(bimamba_type, if_divide_out=True, init_layer_scale=0.5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_like_plain(layer, torch.randn(2, 9, 12), run=compiled)


@pytest.mark.parametrize("bimamba_type", TYPES)
def test_traced_by_fx_and_exported(bimamba_type):
    layer, hidden = make(bimamba_type), torch.randn(2, 9, 12)
    traced = torch.fx.symbolic_trace(layer, {"inference_params": None})
    torch.testing.assert_close(traced(hidden, None), layer(hidden))
    exported = torch.export.export(layer, (hidden,), strict=False).module()
    torch.testing.assert_close(exported(hidden), layer(hidden), rtol=1e-4, atol=1e-5)
