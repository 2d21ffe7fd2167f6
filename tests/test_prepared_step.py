"""Repeated steps: they are prepared, give the bits of other calls, and see every change."""

import copy
import pickle

import pytest
import torch
from torch import nn

import selective_scan._plain_stack as plain_stack
from accuracy import assert_same_bits
from changed_parts import CHANGES
from layers import tensors_of
from opchecks import Ops
from selective_scan import S6, S6Cache
from selective_scan._ops import ops
from selective_scan._prepared_step import PreparedStep
from test_plain_stack import BATCH, DIM, F32, HALF, model_of, steps_of

pytestmark = pytest.mark.usefixtures("no_gradients", "step_kernel")


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


def prepared(model: S6, cache: S6Cache, x: torch.Tensor, **options: object) -> PreparedStep:
    """Returns the prepared step that a cache has after three calls."""
    for _ in range(3):
        model(x, cache=cache, **options)
    step = cache.layers[0]._steps[x.shape]
    assert isinstance(step, PreparedStep)
    return step


def warm(device: str, **options: object) -> tuple[S6, S6Cache, torch.Tensor]:
    """Returns a model, a cache with a prepared step, and its input."""
    model = model_of(device, **options)
    cache, x = model.allocate_cache(BATCH), steps_of(model, BATCH, 1)
    prepared(model, cache, x)
    return model, cache, x


def anew(model: S6, cache: S6Cache, x: torch.Tensor, **options: object) -> torch.Tensor:
    """Returns the result of a call without a prepared step, which a cache's copy does not have."""
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
        assert_same_bits(tensors_of(cache), tensors_of(twin))


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


def replace_state(cache: S6Cache) -> None:
    cache.layers[1].state = torch.randn_like(cache.layers[1].state)


def turn_state(cache: S6Cache) -> None:
    state = cache.layers[0].state
    cache.layers[0].state = torch.randn_like(state.mT).mT


def replace_cache(cache: S6Cache) -> None:
    cache.layers = (cache.layers[0], copy.deepcopy(cache.layers[1]))
    cache.layers[1].state.add_(1)


OF_CACHES = {
    "another state": replace_state,
    "a state of other strides": turn_state,
    "another cache": replace_cache,
}


@pytest.mark.parametrize("change", [*CHANGES, *OF_CACHES])
def test_it_sees_what_has_changed(change, device):
    model, cache, x = warm(device)
    before = anew(model, cache, x)
    if change in CHANGES:
        CHANGES[change].make(model)
    else:
        OF_CACHES[change](cache)
    expected = anew(model, cache, x)
    assert not torch.equal(before, expected)
    assert torch.equal(model(x, cache=cache), expected)
    for _ in range(3):  # and later calls
        expected = anew(model, cache, x)
        assert torch.equal(model(x, cache=cache), expected)


OF_CONVOLUTIONS = {"dilation": (2,), "padding": "same", "padding_mode": "circular"}


@pytest.mark.parametrize("option", OF_CONVOLUTIONS)
def test_it_sees_what_has_changed_of_a_convolution(option, device):
    model, cache, x = warm(device)
    setattr(model.layers[1].conv1d, option, OF_CONVOLUTIONS[option])
    with pytest.raises(ValueError, match=r"conv1d must be .* where there is a cache"):
        model(x, cache=cache)


def test_copied_weights_are_copied_anew():
    """Weights whose rows are not vectors are read from copies, which must follow the weights."""
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
    """A dispatch mode sees the op, and a call that may need a gradient is refused."""
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
        assert twin.layers[0]._steps == {}
        expected = anew(model, cache, x)
        before = [state.clone() for state in tensors_of(cache)]
        for _ in range(3):
            out = model(x, cache=twin)
        assert not torch.equal(out, expected)
        assert_same_bits(tensors_of(cache), before)


def test_what_is_prepared_goes_with_its_cache():
    model, cache, x = warm("cpu")
    number = cache.layers[0]._steps[x.shape]._number
    expected = anew(model, cache, x)
    assert torch.equal(ops.s6_step_again(x, number), expected)
    del cache  # nothing else keeps it alive, not even until garbage is collected
    with pytest.raises(RuntimeError, match=f"there is no prepared step {number}"):
        ops.s6_step_again(x, number)


def test_another_hidden_is_another_call():
    _, cache, x = warm("cpu")
    number = cache.layers[0]._steps[x.shape]._number
    for other in (x[:1], x.half(), x.expand(2, BATCH, 1, DIM)):
        assert ops.s6_step_again(other, number) is None


def test_a_captured_token_goes_on(cuda_device):
    """A prepared step can be captured, too."""
    model, cache, x = warm(cuda_device)
    twin = copy.deepcopy(cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x, cache=cache)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, model(x, cache=twin))
