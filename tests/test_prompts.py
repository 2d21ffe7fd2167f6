"""Prompts that fill or continue states, and tokens that the operator of a step does not take, run
by ops of several layers, as layer after layer does."""

import pytest
import torch

from layers import by_steps, error, tensors_of
from selective_scan import MambaMixer, _layer_stack, s6
from selective_scan._discretization import METHODS
from selective_scan.compat._called import what_is_called
from selective_scan.compat.generation import InferenceParams
from selective_scan.compat.mamba_simple import Mamba
from test_layer_stack import DIM, language_model, layer_by_layer, model_of

F32, F64, HALF, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
BOUNDS = {F64: 1e-12, F32: 2e-6, HALF: 5e-3, BF16: 4e-2}


@pytest.fixture
def ops(monkeypatch) -> list[int]:
    """Returns the number of layers of each op that is given states."""
    run, ran = _layer_stack._run, []

    def spy(*given, **options):
        if "states" in options and options["states"].states:
            ran.append(len(options["states"].states))
        return run(*given, **options)

    monkeypatch.setattr(_layer_stack, "_run", spy)
    return ran


def check(actual: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs) or error(ours, theirs) < bound


@pytest.fixture
def steps(monkeypatch) -> list[bool]:
    """Returns for each call whether the operator of a step took it."""
    step, taken = s6.step_in_one, []

    def spy(*given):
        taken.append((out := step(*given)) is not None)
        return out

    monkeypatch.setattr(s6, "step_in_one", spy)
    return taken


@pytest.mark.parametrize(
    ("options", "rows", "sizes"),
    [
        ({}, 2, [37]),
        ({"depth": 6}, 2, [20, 9, 1, 12]),
        ({"d_conv": 2, "bias": True, "conv_bias": False}, 3, [12, 30]),
        ({"d_conv": 6, "dt_soft_plus": False}, 70, [2, 1, 3, 9]),
        ({"d_conv": 1, "discretization_method": "foh"}, 70, [1, 2]),
        ({"discretization_method": "rk4"}, 70, [3, 2, 1]),
        *(({"discretization_method": method}, 2, [12, 9]) for method in METHODS[1:]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [F32, F64, HALF, BF16, "autocast"], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_s6(mode, dtype, options, rows, sizes, device, ops, steps):
    is_autocast = dtype == "autocast"
    model = model_of(device, **options).to(F32 if is_autocast else dtype)
    x = torch.randn(rows, sum(sizes), DIM, device=device, dtype=model.norm_f.weight.dtype)

    def run():
        with mode(), torch.autocast(device, BF16, enabled=is_autocast):
            cache = model.allocate_cache(rows)
            parts = [model(part, cache=cache) for part in x.split(sizes, 1)]
        return [*parts, *tensors_of(cache)]

    actual = run()
    # Few steps run by another operator, which does not know autocast, and under it one by parts.
    calls = steps.count(False) - (sizes.count(1) if is_autocast else 0)
    assert len(ops) == calls * -(-model.depth // _layer_stack.MOST_LAYERS)
    assert len(steps) == len(sizes)
    assert calls or not any(size > 1 and rows * size > 64 for size in sizes)
    check(actual, layer_by_layer(run), BOUNDS[BF16 if is_autocast else dtype])


@pytest.mark.parametrize("dtype", [F32, F64, HALF, BF16], ids=str)
def test_states_of_any_dtype(dtype, device, ops):
    model, x = model_of(device), torch.randn(2, 24, DIM, device=device)

    def run():
        cache = model.allocate_cache(2, dtype=dtype)
        with torch.no_grad():
            return [
                model(x[:, :13], cache=cache),
                model(x[:, 13:], cache=cache),
                *tensors_of(cache),
            ]

    actual = run()
    assert len(ops) == 2
    check(actual, layer_by_layer(run), BOUNDS[F32 if dtype == F64 else dtype])


def test_states_of_other_modules_are_left_to_them(device, ops):
    model, x = model_of(device, rotary=True, d_state=4), torch.randn(2, 24, DIM, device=device)
    with torch.no_grad():
        model(x, cache=model.allocate_cache(2))
    assert not ops


def test_layers_beside_one_that_must_be_called_run_alone(device, ops):
    model, x = model_of(device), torch.randn(2, 24, DIM, device=device)
    model.layers[1].conv1d.register_forward_hook(lambda module, arguments, result: 2 * result)

    def run():
        cache = model.allocate_cache(2)
        with torch.no_grad():
            out = model(x[:, :13], cache=cache), model(x[:, 13:], cache=cache)
        return [*out, *tensors_of(cache)]

    actual = run()
    assert ops == [1, 1, 1, 1]
    check(actual, layer_by_layer(run), BOUNDS[F32])


@pytest.mark.parametrize("rows", [2, 70])
@pytest.mark.parametrize("dtype", [F32, F64, HALF, BF16, "autocast"], ids=str)
@pytest.mark.parametrize("kind", ["MambaMixer", "Mamba"])
def test_mixers_alone(kind, dtype, rows, device, ops):
    is_autocast = dtype == "autocast"
    mixer = MambaMixer(DIM, d_state=5) if kind == "MambaMixer" else Mamba(DIM, 5, layer_idx=0)
    mixer = mixer.to(device, F32 if is_autocast else dtype)
    x = torch.randn(rows, 20, DIM, device=device, dtype=mixer.D.dtype)

    def run():
        with torch.no_grad(), torch.autocast(device, BF16, enabled=is_autocast):
            if kind == "Mamba":
                out, states = by_steps(mixer, x, 18)
                return [out, *states[0]]
            cache = mixer.allocate_cache(rows)
            parts = [mixer(part, cache=cache) for part in x.split([13, 5, 1, 1], 1)]
            return [*parts, *tensors_of(cache)]

    actual = run()
    # Few steps run by another operator, which takes no float64 on a GPU.
    by_another = rows == 2 and not is_autocast and not (dtype == F64 and device == "cuda")
    sizes = [18, 1, 1] if kind == "Mamba" else [13, 5, 1, 1]
    others = [size for size in sizes if size > 8 or not by_another]
    assert len(ops) == len(others) - (others.count(1) if is_autocast else 0)
    check(actual, layer_by_layer(run), BOUNDS[BF16 if is_autocast else dtype])


def test_no_state_changes_unless_all_fit(device):
    model, x = model_of(device), torch.randn(2, 24, DIM, device=device)
    with torch.no_grad():
        model(x, cache=model.allocate_cache(2))  # so that the stack is known
        cache = model.allocate_cache(2)
        cache.layers[2].state = cache.layers[2].state[:1]
        with pytest.raises(ValueError, match="state of cache must be"):
            model(x, cache=cache)
    assert not any(tensor.any() for tensor in tensors_of(cache))


def test_a_graph_sees_the_change(device):
    model, x = model_of(device), torch.randn(2, 24, DIM, device=device)
    cache = model.allocate_cache(2)
    scale = torch.ones((), device=device, requires_grad=True)
    for tensor in (cache.layers[0].conv_state, cache.layers[2].state):
        loss = (scale * tensor).sum()
        with torch.no_grad():
            model(x, cache=cache)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- published models -----------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [1, 2, 5, 30])
@pytest.mark.parametrize("residual_in_fp32", [False, True])
@pytest.mark.parametrize("dtype", [F32, HALF, BF16, "autocast"], ids=str)
def test_published_models(dtype, residual_in_fp32, prompt, device, ops):
    is_autocast = dtype == "autocast"
    model = language_model(residual_in_fp32, device).to(F32 if is_autocast else dtype)
    tokens = torch.randint(50, (2, prompt + 2), device=device)

    def run():
        with torch.no_grad(), torch.autocast(device, BF16, enabled=is_autocast):
            out, states = by_steps(model, tokens, prompt)
        return [out, *(state for pair in states.values() for state in pair)]

    actual = run()
    assert ops == [3]
    check(actual, layer_by_layer(run), BOUNDS[BF16 if is_autocast else dtype])


@pytest.mark.parametrize("residual_in_fp32", [False, True])
@pytest.mark.parametrize("dtype", [F32, HALF, BF16, "autocast"], ids=str)
def test_published_tokens_of_many_rows(dtype, residual_in_fp32, device, ops):
    is_autocast = dtype == "autocast"
    model = language_model(residual_in_fp32, device).to(F32 if is_autocast else dtype)
    tokens = torch.randint(50, (70, 8), device=device)

    def run():
        with torch.no_grad(), torch.autocast(device, BF16, enabled=is_autocast):
            out, states = by_steps(model, tokens, 5)
        return [out, *(state for pair in states.values() for state in pair)]

    actual = run()
    assert ops == [3] * (1 if is_autocast else 4)  # autocast keeps the weights that it has cast
    check(actual, layer_by_layer(run), BOUNDS[BF16 if is_autocast else dtype])


def test_a_published_prompt_begins_anew(device, ops):
    model, tokens = language_model(True, device), torch.randint(50, (2, 12), device=device)
    params = InferenceParams(max_seqlen=12, max_batch_size=2)

    def run():
        with torch.no_grad():
            out = model(tokens, inference_params=params)
        return [out, *(s.clone() for pair in params.key_value_memory_dict.values() for s in pair)]

    called = [*what_is_called(model)]
    first = run()
    assert [*what_is_called(model)] == called  # so that graphs that were captured before still hold
    assert all(map(torch.equal, run(), first))
    assert ops == [3, 3]
    check(layer_by_layer(run), first, BOUNDS[F32])


def test_states_of_inference_mode(device, ops):
    """PyTorch refuses to change them outside of that mode."""
    model, tokens = language_model(True, device), torch.randint(50, (2, 12), device=device)
    params = InferenceParams(max_seqlen=12, max_batch_size=2)
    with torch.inference_mode():
        first = model(tokens, inference_params=params)
        assert torch.equal(model(tokens, inference_params=params), first)
    assert ops == [3, 3]
    with torch.no_grad(), pytest.raises(RuntimeError, match="outside InferenceMode"):
        model(tokens, inference_params=params)


@pytest.mark.parametrize(
    ("change", "alone"), [("gradient", 0), ("batch", 0), ("slow path", 2), ("fused_add_norm", 3)]
)
def test_other_published_prompts_go_layer_by_layer(change, alone, device, ops):
    model, tokens = language_model(True, device), torch.randint(50, (2, 12), device=device)
    params = InferenceParams(max_seqlen=12, max_batch_size=2)
    with torch.set_grad_enabled(change == "gradient"):
        if change == "batch":  # one prompt for all sequences
            params.key_value_memory_dict = model.allocate_inference_cache(2, 12)
            tokens = tokens[:1]
        elif change == "slow path":
            model.layers[1].mixer.use_fast_path = False
        elif change == "fused_add_norm":
            model.fused_add_norm = False
        out = model(tokens, inference_params=params)
    assert out.requires_grad == (change == "gradient")
    assert ops == alone * [1]  # mixers alone


# --- the op ---------------------------------------------------------------------------------------


def test_the_op_refuses_what_does_not_fit(device, monkeypatch):
    calls = []
    call = _layer_stack._memory.call
    monkeypatch.setattr(
        _layer_stack._memory, "call", lambda op, given: calls.append((op, given)) or call(op, given)
    )
    model, x = model_of(device), torch.randn(2, 24, DIM, device=device)
    cache = model.allocate_cache(2)
    with torch.no_grad():
        model(x, cache=cache)
    (op, (*of_stack, conv_states, states, begins, saves)) = calls[0]
    before = [state.clone() for state in tensors_of(cache)]

    def refused(pattern, conv_states=conv_states, states=states, saves=saves, of_stack=of_stack):
        with pytest.raises(RuntimeError, match=pattern):
            call(op, (*of_stack, conv_states, states, begins, saves))
        assert all(map(torch.equal, tensors_of(cache), before))

    *others, last = states
    refused("one tensor per layer", states=others)
    refused("one tensor per layer", conv_states=[])
    refused("saves must be False", saves=True)
    refused(r"states must be \(batch, dim, dstate\)", states=[*others, last[:, 1:]])
    refused("states must be one of|states must have dtype", states=[*others, last.long()])
    refused("states", states=[*others, last[..., :1].expand_as(last)])
    refused("at least width-1 = 3", conv_states=[it[..., 1:] for it in conv_states])
    autocast, stream, out = of_stack[-3:]
    *head, cu_seqlens = of_stack[:-3]
    *head, bidirectional = head
    refused("bidirectional must be", of_stack=(*head, True, cu_seqlens, autocast, stream, out))
    boundaries = torch.tensor([0, 24], device=device)
    refused(
        "cu_seqlens must be", of_stack=(*head, bidirectional, boundaries, autocast, stream, out)
    )
    x, residual, weights, kinds, norm_f, eps, inner_eps, *rest = of_stack
    without_norms = (x, residual, weights[model.depth :], kinds[1:], norm_f, eps, inner_eps, *rest)
    refused("kinds must include 0 unless there is a mixer alone", of_stack=without_norms)
    normed = (x, residual, weights, kinds, norm_f, eps, 0.1, *rest)
    no_states = {"conv_states": [], "states": [], "saves": True}
    refused("inner_eps must be negative", of_stack=normed, **no_states)
