"""Steps that come again: they are prepared, give the same bits, and see whatever has changed."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

import selective_scan._plain_stack as plain_stack
from opchecks import Ops
from selective_scan import S6, S6Cache
from selective_scan._ops import ops
from selective_scan._prepared_step import PreparedStep
from test_plain_stack import BATCH, DIM, F32, HALF, model_of, steps_of, tensors_of

pytestmark = pytest.mark.usefixtures("no_gradients", "step_kernel")


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


def prepared(model: S6, cache: S6Cache, x: torch.Tensor, **options: object) -> PreparedStep:
    """What the cache has of such a call after three of them."""
    for _ in range(3):
        model(x, cache=cache, **options)
    step = cache.layers[0]._steps[x.shape]
    assert isinstance(step, PreparedStep)
    return step


def warm(device: str, **options: object) -> tuple[S6, S6Cache, torch.Tensor]:
    """A model, a cache that has a prepared step, and its input."""
    model = model_of(device, **options)
    cache, x = model.allocate_cache(BATCH), steps_of(model, BATCH, 1)
    prepared(model, cache, x)
    return model, cache, x


def anew(model: S6, cache: S6Cache, x: torch.Tensor, **options: object) -> torch.Tensor:
    """What a call gives that has nothing prepared: the cache's copy has not."""
    return model(x, cache=copy.deepcopy(cache), **options)


@pytest.mark.parametrize("dtype", [F32, HALF])
@pytest.mark.parametrize("has_head", [False, True])
def test_it_has_the_bits_of_any_call(dtype, has_head, device):
    model = model_of(device, dtype=dtype)
    head = nn.Linear(DIM, 32, bias=False, device=device, dtype=dtype) if has_head else None
    cache = model.allocate_cache(BATCH)
    for steps in (1, 2):
        prepared(model, cache, steps_of(model, BATCH, steps), head=head)
    for steps in (1, 2, 1, 1, 2):
        twin, x = copy.deepcopy(cache), steps_of(model, BATCH, steps)
        expected = model(x, cache=twin, head=head)
        turned = x.transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(model(turned, cache=cache, head=head), expected)
        for state, wanted in zip(tensors_of(cache), tensors_of(twin), strict=True):
            assert torch.equal(state, wanted)


def test_it_does_not_look_at_the_modules_again(monkeypatch):
    model, cache, x = warm("cpu")
    expected = anew(model, cache, x)

    def look(*_):
        raise AssertionError("looked at a layer")

    monkeypatch.setattr(plain_stack, "_entry_of", look)
    with torch.inference_mode():
        assert torch.equal(model(x, cache=cache), expected)
    with pytest.raises(AssertionError, match="looked at a layer"):
        model(steps_of(model, BATCH, 2), cache=cache)


def _replace_a_weight(model, cache):
    model.layers[1].x_proj.weight = nn.Parameter(torch.randn_like(model.layers[1].x_proj.weight))


def _replace_memory(model, cache):
    weight = model.layers[0].out_proj.weight
    weight.data = torch.randn_like(weight)


def _turn_a_weight(model, cache):
    """The same memory, dtype and shape."""
    weight = model.layers[0].out_proj.weight
    weight.data = weight.data.as_strided(weight.shape, (1, weight.shape[0]))


def _change_values(model, cache):
    for weight in model.parameters():
        weight.mul_(1.1)


def _change_dtype(model, cache):
    model.layers[1].D.data = (model.layers[1].D.data + 0.5).to(torch.bfloat16)


def _hook_a_part(model, cache):
    model.layers[0].in_proj.register_forward_hook(lambda _module, _inputs, out: 2 * out)


def _hook_the_input_of_a_layer(model, cache):
    model.layers[1].register_forward_pre_hook(lambda _module, inputs: (2 * inputs[0],))


def _hook_a_norm_in_new_hooks(model, cache):
    model.norm_f._forward_hooks = OrderedDict()
    model.norm_f.register_forward_hook(lambda _module, _inputs, out: 2 * out)


def _override_forward(model, cache):
    model.layers[0].dt_proj.forward = lambda x: torch.zeros(
        *x.shape[:-1], 2 * DIM, device=x.device, dtype=x.dtype
    )


class _Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _change_a_class(model, cache):
    model.layers[0].out_proj.__class__ = _Doubled


def _replace_a_part(model, cache):
    old = model.layers[1].in_proj
    new = _Doubled(*reversed(old.weight.shape), bias=False)
    model.layers[1].in_proj = new.to(old.weight.device)


def _replace_a_layer(model, cache):
    model.layers[0] = copy.deepcopy(model.layers[0]).requires_grad_(False)
    model.layers[0].A_log.add_(1)


def _replace_the_final_norm(model, cache):
    model.norm_f = nn.RMSNorm(DIM, eps=1.0, device=model.norm_f.weight.device)


def _change_an_option(model, cache):
    model.layers[0].dt_soft_plus = model.layers[1].dt_soft_plus = False


def _change_the_method(model, cache):
    model.layers[1].discretization_method = "bilinear"


def _change_eps(model, cache):
    for norm in (model.norm_f, *(layer.norm for layer in model.layers)):
        norm.eps = 0.5


def _replace_a_state(model, cache):
    cache.layers[1].state = torch.randn_like(cache.layers[1].state)


def _replace_a_state_by_one_of_other_strides(model, cache):
    state = cache.layers[0].state
    cache.layers[0].state = torch.randn_like(state.mT).mT


def _replace_a_cache(model, cache):
    cache.layers = (cache.layers[0], copy.deepcopy(cache.layers[1]))
    cache.layers[1].state.add_(1)


def _replace_parameters(model, cache):
    """Of a module, all at once, behind its back."""
    dt_proj = model.layers[0].dt_proj
    dt_proj._parameters = {n: nn.Parameter(p + 1) for n, p in dt_proj._parameters.items()}


_KINDS = ("_replace", "_turn", "_change", "_hook", "_override")
CHANGES = [value for name, value in [*globals().items()] if name.startswith(_KINDS)]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_it_sees_what_has_changed(change, device):
    model, cache, x = warm(device)
    before = anew(model, cache, x)
    change(model, cache)
    expected = anew(model, cache, x)
    assert not torch.equal(before, expected)
    assert torch.equal(model(x, cache=cache), expected)
    for _ in range(3):  # and goes on
        expected = anew(model, cache, x)
        assert torch.equal(model(x, cache=cache), expected)


def test_copied_weights_are_copied_anew():
    """Kernels read weights whose rows are no vectors' from a copy."""
    model = model_of()
    for layer in model.layers:
        layer.in_proj.weight.data = layer.in_proj.weight.data.t().contiguous().t()
    cache, x = model.allocate_cache(BATCH), steps_of(model, BATCH, 1)
    step = prepared(model, cache, x)
    for layer in model.layers:
        layer.in_proj.weight.mul_(1.5)
    expected = anew(model, cache, x)
    assert torch.equal(model(x, cache=cache), expected)
    assert cache.layers[0]._steps[x.shape] is step


def test_whoever_looks_on_sees_the_op():
    """A mode of PyTorch, and one that may need a gradient."""
    model, cache, x = warm("cpu")
    with Ops() as seen:
        model(x, cache=cache)
    assert seen.names == ["s6_step"]
    with torch.enable_grad(), pytest.raises(RuntimeError, match="cache takes no gradient"):
        model(x.clone().requires_grad_(), cache=cache)


def test_a_graph_that_has_saved_a_state_is_told():
    model, cache, x = warm("cpu")
    weight = torch.ones((), requires_grad=True)
    with torch.enable_grad():
        loss = (cache.layers[1].state * weight).sum()
    model(x, cache=cache)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_of_a_cache_have_nothing_prepared(device):
    model, cache, x = warm(device)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert twin.layers[0]._steps == {x.shape: None}
        expected = anew(model, cache, x)
        before = [state.clone() for state in tensors_of(cache)]
        for _ in range(3):
            out = model(x, cache=twin)
        assert not torch.equal(out, expected)
        for state, kept in zip(tensors_of(cache), before, strict=True):
            assert torch.equal(state, kept)


def test_what_is_prepared_goes_with_its_cache():
    model, cache, x = warm("cpu")
    number = cache.layers[0]._steps[x.shape]._number
    expected = anew(model, cache, x)
    assert torch.equal(ops.s6_step_again(x, number), expected)
    del cache  # which nothing else keeps, not even until garbage is collected
    with pytest.raises(RuntimeError, match=f"there is no prepared step {number}"):
        ops.s6_step_again(x, number)


def test_another_hidden_is_another_call():
    _, cache, x = warm("cpu")
    number = cache.layers[0]._steps[x.shape]._number
    for other in (x[:1], x.half(), x.expand(2, BATCH, 1, DIM)):
        assert ops.s6_step_again(other, number) is None


def test_a_captured_token_goes_on(cuda_device):
    """What is prepared is captured, too."""
    model, cache, x = warm(cuda_device)
    twin = copy.deepcopy(cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x, cache=cache)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, model(x, cache=twin))
