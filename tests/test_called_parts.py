"""Parts of a layer that are called because their weights do not determine what they compute:
adapters, other modules, hooks, weights that are tensors of another type, offloaded weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as modules
from torch.nn.utils import prune
from torch.utils.module_tracker import ModuleTracker

from accuracy import assert_same_bits
from changed_parts import Adapter, NoBias, OwnBias, Unbiased, hooked, scaled
from layers import by_steps, error, loss_of
from selective_scan import S6, MambaMixer, selective_scan_ref
from selective_scan.compat.mamba_simple import Mamba
from test_mamba_mixer import gradients_of

BATCH, SEQLEN, DIM = 2, 11, 16
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-2}
PARTS = ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj")
LAYERS = {
    "MambaMixer": MambaMixer,
    "bidirectional": lambda *sizes, **where: MambaMixer(*sizes, **where, bidirectional=True),
    "wide": lambda *sizes, **where: MambaMixer(*sizes, **where, d_conv=9),
    "S6": lambda *sizes, **where: S6(*sizes, **where).layers[0],
    "Mamba": lambda *sizes, **where: Mamba(*sizes, **where, layer_idx=0),
}


def make(kind: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> MambaMixer:
    """Returns a layer that depends on all of its weights, and whose steps differ much."""
    layer = LAYERS[kind](DIM, 4, dt_rank=3, device=device, dtype=dtype)
    with torch.no_grad():
        for part in PARTS:
            weight = layer.get_submodule(part).weight
            weight.normal_(std=weight[0].numel() ** -0.5)
        layer.dt_proj.bias.uniform_(-3, -1)
        layer.D.div_(8)
        layer.out_proj.weight.mul_(32)  # an output that matters beside a residual
    return layer


def sequence(device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(BATCH, SEQLEN, DIM, device=device, dtype=dtype)


def exact(layer: MambaMixer, x: torch.Tensor) -> torch.Tensor:
    """Computes the layer in float64: calls each of its parts, and scans by the reference."""
    layer, x = copy.deepcopy(layer).double(), x.double()
    hidden = layer.norm(x) if hasattr(layer, "norm") else x
    inner, z = layer.in_proj(hidden).transpose(1, 2).chunk(2, 1)
    u = F.silu(layer.conv1d(inner)[..., : x.shape[1]])
    sizes = [layer.dt_rank, layer.d_state, layer.d_state]
    dt, B, C = layer.x_proj(u.transpose(1, 2)).split(sizes, -1)
    scanned = (u, layer.dt_proj(dt).transpose(1, 2), -layer.A_log.exp())
    scanned += (B.transpose(1, 2), C.transpose(1, 2))
    y = selective_scan_ref(*scanned, layer.D, delta_softplus=True)
    if layer.bidirectional:
        y = y + selective_scan_ref(*scanned, delta_softplus=True, reverse=True)
    out = layer.out_proj((y * F.silu(z)).transpose(1, 2))
    return (out + x if hasattr(layer, "norm") else out).detach()


def results(layer: MambaMixer, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns the output of one call, and that of calls which each continue the previous one."""
    outs = [layer(x).detach()]
    if layer.bidirectional:
        return outs
    with torch.no_grad():
        if isinstance(layer, Mamba):
            return [*outs, by_steps(layer, x, 5)[0]]
        cache = layer.allocate_cache(BATCH)
        parts = [layer(part, cache=cache) for part in x.split([5, 1, 1, SEQLEN - 7], 1)]
        return [*outs, torch.cat(parts, 1)]


def check(layer: MambaMixer, x: torch.Tensor, expected: torch.Tensor | None = None) -> None:
    expected = exact(layer, x) if expected is None else expected
    for out in results(layer, x):
        assert out.dtype == x.dtype
        assert error(out, expected) < BOUNDS[x.dtype]


# --- replacements of dt_proj ----------------------------------------------------------------------


def as_linear(plain: nn.Linear) -> nn.Linear:
    where = {"device": plain.weight.device, "dtype": plain.weight.dtype}
    linear = nn.Linear(plain.in_features, plain.out_features, **where)
    linear.load_state_dict(plain.state_dict())
    return linear


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("replace", [OwnBias, NoBias, Unbiased, scaled, as_linear, hooked])
@pytest.mark.parametrize("kind", LAYERS)
def test_what_stands_in_the_place_of_dt_proj_is_all_that_adds_a_bias(kind, replace, dtype, device):
    layer, x = make(kind, device, dtype), sequence(device, dtype)
    layer.dt_proj = replace(layer.dt_proj)
    check(layer, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_plain_linear_layer_is_as_precise_as_dt_proj(kind, dtype, device):
    """The scan adds the bias of an nn.Linear in place of dt_proj too, in full precision."""
    layer, x = make(kind, device, dtype), sequence(device, dtype)
    expected = results(layer, x)
    layer.dt_proj = as_linear(layer.dt_proj)
    assert_same_bits(results(layer, x), expected)


@pytest.mark.parametrize(
    ("part", "other"), [("in_proj", "x_proj"), ("x_proj", "out_proj"), ("out_proj", "in_proj")]
)
@pytest.mark.parametrize("kind", ["MambaMixer", "wide", "S6", "Mamba"])
def test_other_parts_that_are_called_leave_the_bias_to_the_scan(kind, part, other, device):
    """The baseline has a hook too: a plain layer's few steps from a cache round less in between."""
    layer, x = make(kind, device, torch.bfloat16), sequence(device, torch.bfloat16)
    plain, _ = results(layer, x)
    layer.get_submodule(other).register_forward_hook(lambda *_: None)
    expected = results(layer, x)
    assert torch.equal(plain, expected[0])
    layer.get_submodule(part).register_forward_hook(lambda *_: None)
    assert_same_bits(results(layer, x), expected)


def test_dt_proj_by_itself_is_a_linear_layer(device):
    """dt_proj works as a linear layer on its own, as other packages call it."""
    dt_proj, dt = make("MambaMixer", device).dt_proj, torch.randn(3, 7, 3, device=device)
    assert torch.equal(dt_proj(dt), F.linear(dt, dt_proj.weight, dt_proj.bias))


def test_weights_for_mamba_are_of_plain_layers_alone():
    model = S6(DIM)
    model.layers[0].dt_proj = NoBias(model.layers[0].dt_proj)
    for part in (model, model.layers[0]):
        message = r"parameters must be those of Mamba alone, got 'dt_proj\.base_layer\.bias'$"
        with pytest.raises(ValueError, match=message):
            part.to_mamba()


# --- other types of layers ------------------------------------------------------------------------


def convolution(layer: MambaMixer, kernel_size: int | None = None, **options: object) -> nn.Conv1d:
    """Returns a convolution padded by as many zeros as it looks back, unless the options differ."""
    channels, width = layer.d_inner, kernel_size or layer.d_conv
    given = {"padding": (width - 1) * options.get("dilation", 1), "groups": channels} | options
    return nn.Conv1d(channels, channels, width, **given, device=layer.D.device)


class Doubling(nn.Conv1d):
    """Overrides a method that nn.Conv1d.forward calls, not forward itself."""

    def _conv_forward(self, *arguments: object) -> torch.Tensor:
        return 2 * super()._conv_forward(*arguments)


def bias_x_proj(layer: MambaMixer) -> None:
    layer.x_proj.bias = nn.Parameter(torch.randn_like(layer.x_proj.weight[:, 0]))


def join_channels(layer: MambaMixer) -> None:
    layer.conv1d = convolution(layer, groups=2)


def contain_the_convolution(layer: MambaMixer) -> None:
    layer.conv1d = nn.Sequential(hooked(layer.conv1d), nn.Dropout(0))


def double_the_convolution(layer: MambaMixer) -> None:
    layer.conv1d.__class__ = Doubling


@pytest.mark.parametrize(
    "change", [bias_x_proj, join_channels, contain_the_convolution, double_the_convolution]
)
@pytest.mark.parametrize("kind", LAYERS)
def test_what_a_part_became_is_called(kind, change, device):
    layer, x = make(kind, device), sequence(device)
    change(layer)
    check(layer, x)


# Convolutions that need other steps than a cache keeps, and what a cache asks for instead.
BEYOND_A_CACHE = [
    ({"dilation": 2}, "without dilation"),
    *(
        (options, "padded by . zeros")
        for options in (
            {"padding": "same"},
            {"padding_mode": "circular"},
            {"padding_mode": "reflect"},
        )
    ),
]


@pytest.mark.parametrize(("options", "wanted"), BEYOND_A_CACHE, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_a_convolution_of_other_steps_is_called_and_takes_no_cache(kind, options, wanted, device):
    layer, x = make(kind, device), sequence(device)
    layer.conv1d = convolution(layer, **options)
    assert error(layer(x), exact(layer, x)) < BOUNDS[x.dtype]
    refusal = f"conv1d must be {wanted} where there is a"
    if not layer.bidirectional:
        with pytest.raises(ValueError, match=refusal):
            results(layer, x)
    if kind == "MambaMixer":
        with torch.no_grad(), pytest.raises(ValueError, match=refusal):
            layer(x[:, :1], cache=layer.allocate_cache(BATCH))


@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("kernel_size", [2, 6, 12])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_convolution_of_another_width(kind, kernel_size, is_hooked, device):
    """With a cache, which keeps d_conv - 1 steps, the convolution may be at most d_conv wide."""
    layer, x = make(kind, device), sequence(device)
    layer.conv1d = convolution(layer, kernel_size=kernel_size)
    if is_hooked:
        hooked(layer.conv1d)
    assert error(layer(x), exact(layer, x)) < BOUNDS[x.dtype]
    if kernel_size <= layer.d_conv:
        check(layer, x)
    elif not layer.bidirectional:
        with pytest.raises(ValueError, match="conv1d must be of kernel_size at most d_conv = "):
            results(layer, x)


# --- adapters -------------------------------------------------------------------------------------


def test_adapters_attach_to_every_linear_layer():
    model, x = S6(DIM, dt_rank=3), sequence()
    merged = S6(DIM, dt_rank=3)
    merged.load_state_dict(model.state_dict())
    layer = model.layers[0]
    linear = [name for name, module in layer.named_children() if isinstance(module, nn.Linear)]
    assert linear == ["in_proj", "x_proj", "dt_proj", "out_proj"]
    for name in linear:
        adapter = Adapter(getattr(layer, name))
        setattr(layer, name, adapter)
        with torch.no_grad():
            merged.layers[0].get_submodule(name).weight += adapter.up.weight @ adapter.down.weight
    torch.testing.assert_close(model(x), merged(x))
    gradients = gradients_of(model, x)
    for name in linear:
        assert gradients[f"layers.0.{name}.up.weight"].any()
        assert gradients[f"layers.0.{name}.base_layer.weight"].any()


ADAPTERS = {
    "LoRA": ("LoraConfig", {"r": 2}),
    "LoRA with a bias": ("LoraConfig", {"r": 2, "lora_bias": True}),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "HRA": ("HRAConfig", {"r": 2}),
    "RoAd": ("RoadConfig", {"group_size": 8}),
    "OFT": ("OFTConfig", {"r": 1, "oft_block_size": 0}),
    "VeRA": ("VeraConfig", {"r": 2}),
    "LoHa": ("LoHaConfig", {"r": 2}),
}


@pytest.mark.parametrize("replace", [nn.Identity(), as_linear], ids=["dt_proj", "nn.Linear"])
@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        *(("MambaMixer", adapter) for adapter in ADAPTERS),
        *((kind, "LoRA with a bias") for kind in LAYERS if kind != "MambaMixer"),
    ],
)
def test_adapters_of_peft(kind, adapter, replace, device):
    peft = pytest.importorskip("peft", reason="needs the package peft")
    layer, x = make(kind, device), sequence(device)
    layer.dt_proj = replace(layer.dt_proj)
    expected = exact(layer, x)
    name, options = ADAPTERS[adapter]
    config = getattr(peft, name)(target_modules=["dt_proj"], **options)
    model = peft.get_peft_model(layer, config).eval()
    check(layer, x, expected)  # an adapter is initialized without effect
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    expected = exact(layer, x)
    check(layer, x)
    model.merge_adapter()
    check(layer, x, expected)
    model.unmerge_adapter()
    model.merge_and_unload()
    assert isinstance(layer.dt_proj, nn.Linear)
    check(layer, x, expected)


def test_an_adapter_of_peft_trains_in_a_half_type(device):
    peft = pytest.importorskip("peft", reason="needs the package peft")
    layer, x = make("MambaMixer", device, torch.bfloat16), sequence(device, torch.bfloat16)
    expected = exact(layer, x)
    parts, ranks = ["dt_proj", "conv1d"], {"dt_proj": 2, "conv1d": 2 * DIM}
    config = peft.LoraConfig(target_modules=parts, rank_pattern=ranks)
    model = peft.get_peft_model(layer, config, autocast_adapter_dtype=False)
    check(layer, x, expected)
    gradients = gradients_of(model, x)
    given = {name for name, gradient in gradients.items() if gradient is not None}
    assert given == {name for name in gradients if "lora_" in name}


# --- hooks ----------------------------------------------------------------------------------------


def test_a_hook_sees_what_it_is_for(device):
    mixer, x = MambaMixer(DIM, device=device), sequence(device)
    expected, seen = mixer(x), []
    mixer.dt_proj.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    torch.testing.assert_close(mixer(x), expected)
    assert seen == [(BATCH, SEQLEN, 2 * DIM)]


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"d_conv": 9}], ids=str)
def test_a_pruned_convolution_trains(options, device):
    """A pruned convolution trains: a hook computes its weight at each call."""
    mixer, x = MambaMixer(DIM, **options, device=device), sequence(device)
    plain = copy.deepcopy(mixer)
    prune.random_unstructured(mixer.conv1d, "weight", 0.5)
    for _ in range(2):
        with torch.no_grad():
            mixer.conv1d.weight_orig.add_(1)
            plain.conv1d.weight.copy_(mixer.conv1d.weight_orig * mixer.conv1d.weight_mask)
        torch.testing.assert_close(mixer(x), plain(x), rtol=1e-4, atol=1e-5)
        expected = gradients_of(plain, x)["conv1d.weight"] * mixer.conv1d.weight_mask
        gradient = gradients_of(mixer, x)["conv1d.weight_orig"]
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"cu_seqlens must be None where conv1d .*, got a Tensor of shape \(2,\)$"
    ):
        mixer(x[:1], cu_seqlens=torch.tensor([0, SEQLEN], device=device))


REGISTRATIONS = {
    "forward": modules.register_module_forward_hook,
    "forward_pre": modules.register_module_forward_pre_hook,
    "backward": modules.register_module_full_backward_hook,
    "backward_pre": modules.register_module_full_backward_pre_hook,
}


@pytest.fixture
def register_for_all():
    """Registers hooks for all modules until the end of the test."""
    handles = []
    yield lambda register, hook: handles.append(register(hook))
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("when", REGISTRATIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_hooks_for_all_modules_see_every_part(kind, when, register_for_all, device):
    layer, x = make(kind, device), sequence(device).requires_grad_()
    expected, seen = exact(layer, x), []
    register_for_all(REGISTRATIONS[when], lambda module, *_: seen.append(module))
    layer(x).sum().backward()
    for part in PARTS:
        assert seen.count(layer.get_submodule(part)) == 1
    check(layer, x.detach(), expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_what_hooks_for_all_modules_return_counts(kind, register_for_all, device):
    layer, x = make(kind, device), sequence(device)

    def scale(module, inputs, out):
        return 1.5 * out if isinstance(module, (nn.Linear, nn.Conv1d)) else None

    register_for_all(modules.register_module_forward_hook, scale)
    check(layer, x)


class RegistersAnother:
    """A hook at whose inspection another thread registers a hook."""

    def __call__(self, *_: object) -> None:
        """Changes nothing."""

    @property
    def __self__(self) -> ModuleTracker:
        modules.register_module_forward_hook(lambda *_: None).remove()
        return ModuleTracker()


def test_hooks_for_all_modules_may_come_and_go_meanwhile(register_for_all, device):
    """A FlopCounterMode in another thread registers and removes hooks at any time."""
    layer, x = make("S6", device), sequence(device)
    expected = layer(x)
    for _ in range(2):
        register_for_all(modules.register_module_forward_hook, RegistersAnother())
    assert torch.equal(layer(x), expected)


def test_packed_sequences_with_hooks_for_all_modules(register_for_all, device):
    """All parts are called except conv1d, which takes no boundaries."""
    layer, x = make("MambaMixer", device), sequence(device)[:1]
    boundaries = torch.tensor([0, 4, SEQLEN], device=device)
    expected = torch.cat([exact(layer, part) for part in x.split([4, SEQLEN - 4], 1)], 1)
    seen = []
    register_for_all(modules.register_module_forward_hook, lambda part, *_: seen.append(part))
    assert error(layer(x, cu_seqlens=boundaries), expected) < 1e-5
    assert {layer.get_submodule(part) for part in PARTS} - set(seen) == {layer.conv1d}


# --- weights of other tensor types ----------------------------------------------------------------


class Int8(torch.Tensor):
    """A weight of integers with a scale per row, like those of quantization packages. Only a linear
    layer and a convolution can use it."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor):
        options = {"dtype": scale.dtype, "device": values.device}
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, **options)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Int8":
        rows = weight.detach().flatten(1).abs().amax(1).view(-1, *[1] * (weight.dim() - 1))
        return cls((weight.detach() / rows * 127).round().char(), rows / 127)

    def dequantized(self) -> torch.Tensor:
        return self.values.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (F.linear, torch.conv1d):
            x, weight, *others = args
            return function(x, weight.dequantized(), *others, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        raise NotImplementedError(f"{function} of a weight of integers")


def quantize(layer: MambaMixer, parts: tuple[str, ...]) -> MambaMixer:
    """Quantizes parts of a layer in place; returns a layer with the same values as plain
    weights."""
    plain = copy.deepcopy(layer)
    for name in parts:
        part = layer.get_submodule(name)
        part.weight = nn.Parameter(Int8.of(part.weight), requires_grad=False)
        assert type(part.weight) is Int8
        with torch.no_grad():
            plain.get_submodule(name).weight.copy_(part.weight.dequantized())
    return plain


@pytest.mark.parametrize("parts", [*((part,) for part in PARTS), PARTS], ids="-".join)
@pytest.mark.parametrize("kind", LAYERS)
def test_weights_of_another_kind_are_left_to_their_modules(kind, parts, device):
    layer, x = make(kind, device), sequence(device)
    plain = quantize(layer, parts)
    check(layer, x, exact(plain, x))
    loss_of(layer(x)).backward()
    wanted = gradients_of(plain, x)
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            assert error(parameter.grad, wanted[name].double()) < 1e-4


def test_a_weight_of_another_kind_that_is_no_parameter(device):
    layer, x = make("MambaMixer", device), sequence(device)
    expected = exact(quantize(layer, ("out_proj",)), x)
    weight = layer.out_proj.weight
    del layer.out_proj.weight
    layer.out_proj.weight = weight.detach()
    assert "weight" not in layer.out_proj._parameters
    check(layer, x, expected)


def test_tensors_that_trace_stand_for_plain_weights(device):
    """Export traces the operator that runs in eager mode."""
    layer, x = make("MambaMixer", device, torch.bfloat16), sequence(device, torch.bfloat16)
    exported = torch.export.export(layer, (x,))
    assert torch.equal(exported.module()(x), layer(x))
    called = {str(node.target) for node in exported.graph.nodes}
    assert "selective_scan.mamba_inner_fwd.default" in called


# --- offloaded weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("preloaded", [None, "S6Layer"])
def test_weights_that_accelerate_moves(preloaded, device):
    accelerate = pytest.importorskip("accelerate", reason="needs the package accelerate")
    model, x = S6(DIM, depth=2), sequence(device)
    nn.init.uniform_(model.layers[1].dt_proj.bias, -2, 1)
    expected = copy.deepcopy(model).to(device)(x).detach().double()
    options = {"preload_module_classes": [preloaded]} if preloaded else {}
    accelerate.cpu_offload(model, execution_device=torch.device(device), **options)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert error(model(x), expected) < 1e-5
    with torch.no_grad():
        cache = model.allocate_cache(BATCH, device=device)
        parts = [model(part, cache=cache) for part in x.split([5, 1, SEQLEN - 6], 1)]
    assert error(torch.cat(parts, 1), expected) < 1e-5
