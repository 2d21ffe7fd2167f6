"""Stacks of plain layers run as one op and one autograd node, with the bits of single layers."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from accuracy import assert_same_bits
from changed_parts import CHANGES, Wrapper
from layers import copies_of, error, loss_of
from opchecks import Ops
from selective_scan import S6, _layer_stack
from selective_scan._discretization import METHODS
from selective_scan.compat.mixer_seq_simple import MixerModel

DIM = 16
F32, F64, HALF, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


@pytest.fixture
def stacks(monkeypatch) -> list[int]:
    """Returns the number of weights of the first op of each stack that runs so."""
    run, ran = _layer_stack._run, []

    def spy(options, x, residual, cu_seqlens, norm_f, *weights, **others):
        if residual is None:
            ran.append(len(weights))
        return run(options, x, residual, cu_seqlens, norm_f, *weights, **others)

    monkeypatch.setattr(_layer_stack, "_run", spy)
    return ran


def model_of(device: str = "cpu", **options: object) -> S6:
    model = S6(DIM, **{"depth": 3, "d_state": 5, "dt_min": 0.1, "dt_max": 1.0} | options)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.8, 1.2)
    return model.to(device)


def language_model(residual_in_fp32: bool, device: str) -> MixerModel:
    options = {"rms_norm": True, "fused_add_norm": True, "residual_in_fp32": residual_in_fp32}
    return MixerModel(DIM, 3, vocab_size=50, ssm_cfg={"d_state": 5}, **options, device=device)


def layer_by_layer(call, *arguments):
    """Calls with stacks that are too large for the op."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_layer_stack, "MOST_ELEMENTS", {"cpu": 0, "cuda": 0})
        return call(*arguments)


def results(model: S6, x: torch.Tensor, autocast=None, **options: object) -> list[torch.Tensor]:
    """Returns the output and the gradients of all that requires one."""
    leaves = [it for it in (x, *model.parameters()) if it.requires_grad]
    with torch.autocast(x.device.type, autocast or BF16, autocast is not None):
        out = model(x, **options)
    return [out.detach(), *torch.autograd.grad(loss_of(out), leaves)]


def check(model: nn.Module, x: torch.Tensor, stacks: list[int], **options: object) -> None:
    actual = results(model, x, **options)
    assert len(stacks) == 1
    expected = layer_by_layer(lambda: results(model, x, **options))
    assert len(stacks) == 1
    if isinstance(model, MixerModel) and options.get("autocast") and x.is_cuda:
        # The first layer's products would return a float32 gradient to their float32 input.
        assert torch.equal(actual[0], expected[0])
        assert all(error(*pair) < 1e-2 for pair in zip(actual, expected, strict=True))
    else:
        assert_same_bits(actual, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 1},
        {"depth": 6},
        {"depth": 9, "bidirectional": True},
        {"bidirectional": True},
        {"bias": True, "conv_bias": False, "d_conv": 2},
        {"dt_proj_bias": False, "dt_rank": 3, "dt_min": 1e-3, "dt_max": 0.1},
        {"dt_soft_plus": False, "expand": 1},
        *({"discretization_method": method} for method in METHODS[1:]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [F32, F64, HALF, BF16, "autocast"], ids=str)
def test_it_has_the_bits_of_layer_after_layer(options, dtype, device, stacks):
    model = model_of(device, **options)
    x = torch.randn(2, 37, DIM, device=device)
    if dtype == "autocast":
        return check(model, x.requires_grad_(), stacks, autocast=BF16)
    check(model.to(dtype), x.to(dtype).requires_grad_(), stacks)


@pytest.mark.parametrize("autocast", [None, BF16], ids=str)
@pytest.mark.parametrize("most", [1, 2])
def test_ops_of_few_layers(most, autocast, device, stacks, monkeypatch):
    monkeypatch.setattr(_layer_stack, "MOST_LAYERS", most)
    x = torch.randn(2, 21, DIM, device=device)
    check(model_of(device), x, stacks, autocast=autocast)
    stacks.clear()
    model = model_of(device, bidirectional=True)
    model.layers[0].requires_grad_(False)
    check(model, x, stacks, autocast=autocast)
    stacks.clear()
    check(model, x.requires_grad_(), stacks, autocast=autocast)
    stacks.clear()
    for residual_in_fp32 in (False, True):
        model = language_model(residual_in_fp32, device)
        check(model, torch.randint(50, (2, 21), device=device), stacks, autocast=autocast)
        stacks.clear()


@pytest.mark.parametrize("autocast", [None, BF16, HALF], ids=str)
def test_packed_sequences(autocast, device, stacks):
    model = model_of(device)
    x = torch.randn(1, 41, DIM, device=device, requires_grad=True)
    boundaries = torch.tensor([0, 3, 3, 30, 41], device=device)
    check(model, x, stacks, autocast=autocast, cu_seqlens=boundaries)


def test_inputs_of_any_strides(device, stacks):
    model = model_of(device)
    rows = torch.randn(9, 2, 2 * DIM, device=device, requires_grad=True)
    check(model, rows.transpose(0, 1)[..., ::2].detach().requires_grad_(), stacks)
    stacks.clear()
    check(model, rows.transpose(0, 1)[..., ::2], stacks)


@pytest.mark.parametrize("frozen", ["x", "weights", "all"])
def test_without_some_gradients(frozen, device, stacks):
    model = model_of(device)
    x = torch.randn(2, 9, DIM, device=device, requires_grad=frozen == "weights")
    if frozen == "weights":
        model.requires_grad_(False)
        model.layers[1].A_log.requires_grad_()
    if frozen != "all":
        return check(model, x, stacks)
    out = model.requires_grad_(False)(x)
    assert out.grad_fn is None
    assert len(stacks) == 1
    with torch.inference_mode():
        assert torch.equal(model(x), out)
    assert torch.equal(layer_by_layer(model, x), out)


def test_it_keeps_what_layers_keep(device):
    """What is saved for the backward pass is the same as layer after layer."""

    def kept(model, x):
        sizes = []

        def pack(tensor):
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
        return sum(sizes)

    model = model_of(device)
    x = torch.randn(2, 50, DIM, device=device)
    assert kept(model, x) <= layer_by_layer(kept, model, x)


@pytest.mark.parametrize("most", [2, 4])
def test_the_gradient_of_a_gradient_is_refused_as_by_layers(most, device, monkeypatch):
    monkeypatch.setattr(_layer_stack, "MOST_LAYERS", most)
    model = model_of(device, dtype=F64)
    x = torch.randn(2, 9, DIM, device=device, dtype=F64, requires_grad=True)

    def gradient():
        return torch.autograd.grad(loss_of(model(x)), x, create_graph=True)[0]

    assert_same_bits([gradient()], [layer_by_layer(gradient)])
    with pytest.raises(RuntimeError, match="double backward is not supported by the kernels"):
        torch.autograd.grad(gradient().sum(), x)


@pytest.mark.parametrize("most", [2, 4])
def test_several_cotangents_at_once(most, device, monkeypatch):
    monkeypatch.setattr(_layer_stack, "MOST_LAYERS", most)
    model = model_of(device, dtype=F64)
    x = torch.randn(2, 9, DIM, device=device, dtype=F64, requires_grad=True)
    cotangents = torch.randn(4, 2, 9, DIM, device=device, dtype=F64)
    weight = model.layers[1].x_proj.weight
    batched = torch.autograd.grad(model(x), (x, weight), cotangents, is_grads_batched=True)
    for i, cotangent in enumerate(cotangents):
        expected = torch.autograd.grad(model(x), (x, weight), cotangent)
        torch.testing.assert_close([it[i] for it in batched], [*expected])


def test_under_autocast_several_cotangents_have_its_dtype(device):
    model = model_of(device)
    x = torch.randn(2, 9, DIM, device=device, requires_grad=True)
    with torch.autocast(device, BF16):
        out = model(x)
    cotangents = torch.randn(2, *out.shape, device=device)
    (batched,) = torch.autograd.grad(out, x, cotangents, is_grads_batched=True, retain_graph=True)
    (expected,) = torch.autograd.grad(out, x, cotangents[1])
    torch.testing.assert_close(batched[1], expected, rtol=1e-2, atol=1e-2)


def test_gradients_by_differences(device):
    model = model_of(device, depth=5, d_state=2, dtype=F64)
    x = torch.randn(1, 4, DIM, device=device, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(model, x, fast_mode=True)


@pytest.mark.parametrize("residual_in_fp32", [False, True])
@pytest.mark.parametrize("dtype", [F32, F64, BF16, "autocast"], ids=str)
def test_published_models(residual_in_fp32, dtype, device, stacks):
    model = language_model(residual_in_fp32, device)
    tokens = torch.randint(50, (2, 37), device=device)
    autocast = BF16 if dtype == "autocast" else None
    model.to(F32 if autocast else dtype)
    check(model, tokens, stacks, autocast=autocast)
    packed = {"cu_seqlens": torch.tensor([0, 5, 37], device=device)}
    stacks.clear()
    check(model, tokens[:1], stacks, autocast=autocast, **packed)


@pytest.mark.parametrize("change", ["residual_in_fp32", "fused_add_norm", "use_fast_path", "hook"])
def test_changes_of_published_models(change, device, stacks):
    model = language_model(True, device)
    tokens = torch.randint(50, (2, 11), device=device)
    model(tokens)
    block = model.layers[1]
    if change == "hook":
        block.mixer.register_forward_hook(lambda _module, _inputs, out: 2 * out)
    else:
        setattr(block.mixer if change == "use_fast_path" else block, change, False)
    torch.testing.assert_close(model(tokens), layer_by_layer(model, tokens))
    assert len(stacks) == 1
    for it in (model, *model.layers):
        it.residual_in_fp32 = False
    if change == "residual_in_fp32":
        model(tokens)
        assert len(stacks) == 2


# --- which stacks it runs -------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHANGES)
def test_it_sees_what_has_changed(name, device, stacks):
    model = model_of(device, depth=2).requires_grad_(False)
    x = torch.randn(2, 11, DIM, device=device)
    before = model(x)
    assert torch.equal(model(x), before)
    assert len(stacks) == 2
    CHANGES[name].make(model)
    actual = model(x)
    assert_same_bits([actual], [layer_by_layer(model, x)])
    assert not torch.equal(actual, before) or name == "other strides"


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_hooks_are_called(kind, device, stacks):
    model = model_of(device)
    x = torch.randn(2, 11, DIM, device=device, requires_grad=True)
    results(model, x)
    for name in ("layers.0", "layers.1.norm", "layers.2.out_proj", "norm_f"):
        seen = []
        register = getattr(model.get_submodule(name), f"register_{kind}_hook")
        with register(lambda *_, seen=seen: seen.append(0)):
            results(model, x)
        assert seen == [0]
    assert len(stacks) == 1


def test_it_inspects_the_modules_once(device, monkeypatch, stacks):
    model, x = model_of(device), torch.randn(2, 11, DIM, device=device)
    inspections = []
    inspect = _layer_stack._inspect
    monkeypatch.setattr(
        _layer_stack, "_inspect", lambda *given: inspections.append(0) or inspect(*given)
    )
    for _ in range(3):
        results(model, x)
    model.layers[1] = copy.deepcopy(model.layers[1])
    results(model, x)
    assert (len(stacks), len(inspections)) == (4, 2)


@pytest.mark.parametrize("kind", ["wrapper", "order", "wide convolution", "rotary", "trapezoid"])
def test_other_stacks_go_layer_by_layer(kind, device, stacks):
    options = {
        "wide convolution": {"d_conv": 9},
        "rotary": {"rotary": True, "d_state": 4},
        "trapezoid": {"discretization_method": "trapezoid"},
    }
    model = model_of(device, **options.get(kind, {}))
    x = torch.randn(2, 11, DIM, device=device)
    if kind == "wrapper":
        model.layers[1] = Wrapper(model.layers[1], 0.5)
    elif kind == "order":
        model.layers.append(nn.Dropout(0.0))
    assert model(x).shape == x.shape
    assert not stacks


def test_large_inputs_go_layer_by_layer(device, stacks, monkeypatch):
    model = model_of(device)
    monkeypatch.setattr(_layer_stack, "MOST_ELEMENTS", dict.fromkeys(("cpu", "cuda"), 2 * 10 * 32))
    model(torch.randn(2, 10, DIM, device=device))
    assert len(stacks) == 1
    model(torch.randn(1, 21, DIM, device=device))
    assert len(stacks) == 1


def test_whoever_looks_on_sees_layers(device, stacks):
    model, x = model_of(device), torch.randn(2, 11, DIM, device=device)

    with Ops() as ops:
        model(x)
    assert ops.names.count("selective_scan_fwd") == model.depth
    torch.func.vmap(model)(x.unsqueeze(1))
    torch.compile(model, backend="eager")(x)
    assert not stacks


def test_parameters_of_a_call(device, stacks):
    """Weights that are computed get their gradients, and are not kept afterwards."""
    model, x = model_of(device), torch.randn(2, 11, DIM, device=device)
    factor = torch.tensor(1.5, device=device, requires_grad=True)

    def call():
        weights = {name: factor * weight for name, weight in model.named_parameters()}
        out = torch.func.functional_call(model, weights, (x,))
        return weights, [out.detach(), *torch.autograd.grad(loss_of(out), factor)]

    weights, actual = call()
    kept = weakref.ref(weights["layers.0.A_log"])
    del weights
    gc.collect()
    assert kept() is None
    assert_same_bits(actual, layer_by_layer(call)[1])
    assert len(stacks) == 1


def test_copies_inspect_their_own_modules(device, stacks):
    model, x = model_of(device), torch.randn(2, 11, DIM, device=device)
    expected = model(x)
    for other in copies_of(model):
        assert torch.equal(other(x), expected)
        other.layers[0].A_log.data.add_(1)
        assert not torch.equal(other(x), expected)
        assert torch.equal(model(x), expected)


def test_a_model_can_be_freed(device):
    model = model_of(device)
    model(torch.randn(2, 11, DIM, device=device))
    gone = weakref.ref(model.layers[0].A_log)
    del model
    gc.collect()
    assert gone() is None


def test_weights_that_do_not_fit_are_refused_as_by_layers(device):
    model = model_of(device)
    x = torch.randn(2, 11, DIM, device=device)
    model(x)
    model.layers[1].x_proj.weight.data = model.layers[1].x_proj.weight.data[:, 1:]
    with pytest.raises(RuntimeError) as refused:
        model(x)
    with pytest.raises(RuntimeError) as expected:
        layer_by_layer(model, x)
    assert str(refused.value) == str(expected.value)


def test_the_ops_refuse_lists_that_do_not_fit(device, monkeypatch):
    calls = []
    call = _layer_stack._memory.call
    monkeypatch.setattr(
        _layer_stack._memory, "call", lambda op, given: calls.append((op, given)) or call(op, given)
    )
    x = torch.randn(2, 11, DIM, device=device, requires_grad=True)
    results(model_of(device), x)
    (forward, given), (backward, given_backward) = calls
    x, residual, weights, kinds, *others = given

    def refused(pattern, op, *arguments):
        with pytest.raises(RuntimeError, match=pattern):
            call(op, arguments)

    refused("as many of each kind", forward, x, residual, weights[1:], kinds, *others)
    refused("as many of each kind", forward, x, residual, weights, [], *others)
    depth = len(weights) // len(kinds)
    refused("kinds must include 0", forward, x, residual, weights[depth:], kinds[1:], *others)
    dout, dstream, kept, *others = given_backward
    refused("the tensors of all layers", backward, dout, dstream, kept[1:], *others)
    refused("the tensors of all layers", backward, dout, dstream, [*kept, x], *others)
