"""Calls with a cache run as one operator if the layers are plain and the steps few. All others go
through the modules. Both give the results of a model in fp64 through its modules."""

import copy

import pytest
import torch
from torch import nn

from accuracy import assert_same_bits
from changed_parts import CHANGES, Wrapper, hooked
from gpu_kernels import has_step
from layers import error, tensors_of
from opchecks import Ops
from selective_scan import S6, MambaMixer, S6Cache, _plain_stack
from selective_scan._discretization import METHODS
from selective_scan._plain_stack import MAX_ROWS, step_in_one
from selective_scan.cache import MixerCache

BATCH, DIM = 3, 16
F32, F64, HALF, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
# Layers that are plain, and differ by more than dtypes and sizes.
PLAIN = (
    {},
    *({"discretization_method": method} for method in METHODS[1:]),
    {"dt_proj_bias": False, "dt_min": 1e-3, "dt_max": 0.1, "depth": 1},
    {"dt_soft_plus": False, "d_conv": 1, "dt_rank": 3},
)
BOUNDS = {F64: 1e-12, F32: 1e-5, BF16: 3e-2, HALF: 4e-3}


def model_of(device: str = "cpu", **options: object) -> S6:
    """Returns a model whose states, layers and norms all affect its output."""
    model = S6(DIM, **{"depth": 2, "d_state": 5, "dt_min": 0.1, "dt_max": 1.0} | options)
    for layer in model.layers:
        nn.init.normal_(layer.out_proj.weight, std=0.5)
    for norm in (model.norm_f, *(layer.norm for layer in model.layers)):
        nn.init.uniform_(norm.weight, 0.8, 1.2)
    return model.to(device).requires_grad_(False)


def steps_of(model: nn.Module, batch: int, steps: int) -> torch.Tensor:
    weight = next(model.parameters())
    return torch.randn(batch, steps, DIM, dtype=weight.dtype, device=weight.device)


def ops_of(model: nn.Module, x: torch.Tensor, cache: object) -> list[str]:
    with Ops() as ops:
        model(x, cache=cache)
    return ops.names


def through_modules(model: nn.Module) -> nn.Module:
    """Returns a copy in fp64 in which every part is called."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if isinstance(module, nn.Linear | nn.RMSNorm):
            module.register_forward_hook(lambda *_: None)
    return exact


def check(model: nn.Module, batch: int, lengths: list[int], *, in_one: bool) -> None:
    """Asserts that calls of these lengths are right, and that each or none is one operator."""
    exact = through_modules(model)
    cache, exact_cache = model.allocate_cache(batch), exact.allocate_cache(batch)
    for steps in lengths:
        x = steps_of(model, batch, steps)
        expected = exact(x.double(), cache=exact_cache)
        with Ops() as ops:
            out = model(x, cache=cache)
        assert out.dtype == x.dtype
        assert error(out, expected) < BOUNDS[x.dtype]
        assert (ops.names == ["s6_step"]) == in_one, ops.names
        if not in_one and isinstance(model, MambaMixer):
            assert "s6_step" not in ops.names
    for state, expected in zip(tensors_of(cache), tensors_of(exact_cache), strict=True):
        assert state.numel() == 0 or error(state, expected) < BOUNDS[x.dtype]


# --- one operator ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *PLAIN,
        *({"dtype": dtype} for dtype in BOUNDS if dtype != F32),
        {"conv_bias": False, "bias": True, "expand": 1.5, "d_state": 64, "d_conv": 8},
    ],
    ids=str,
)
def test_plain_layers_are_one_operator(options):
    model = model_of(**options)
    check(model, BATCH, [1, 1, 2, 8, 1], in_one=True)
    check(model, 64, [1, 1], in_one=True)
    check(model.layers[0], BATCH, [1, 3], in_one=True)


def test_a_mixer_is_one_operator():
    check(MambaMixer(DIM, bias=True).requires_grad_(False), BATCH, [1, 8, 2], in_one=True)


@pytest.mark.parametrize(("batch", "steps"), [(1, 9), (9, 8), (65, 1), (1, 0)])
def test_many_steps_go_through_the_modules(batch, steps):
    model = model_of()
    x = steps_of(model, batch, steps)
    assert "s6_step" not in ops_of(model, x, model.allocate_cache(batch))


def test_a_head_is_part_of_it():
    model, head = model_of(), nn.Linear(DIM, 40, bias=False).requires_grad_(False)
    exact, exact_head = through_modules(model), copy.deepcopy(head).double()
    cache, exact_cache = model.allocate_cache(BATCH), exact.allocate_cache(BATCH)

    def outcome(steps: int) -> tuple[list[str], float]:
        x = steps_of(model, BATCH, steps)
        expected = exact(x.double(), cache=exact_cache, head=exact_head)
        with Ops() as ops:
            out = model(x, cache=cache, head=head)
        return ops.names, error(out, expected)

    for steps in (1, 3, 20, 1):
        names, off = outcome(steps)
        assert off < BOUNDS[F32]
        assert (names == ["s6_step"]) == (steps < 9)
    assert torch.equal(model(x := steps_of(model, BATCH, 5), head=head), head(model(x)))
    for one in (head, exact_head):
        one.register_forward_hook(lambda _module, _inputs, out: 2 * out)
    names, off = outcome(1)
    assert off < BOUNDS[F32]
    assert names == ["s6_step"]


def test_a_head_without_a_stack():
    mixer, head = MambaMixer(DIM).requires_grad_(False), nn.Linear(DIM, 40, bias=False)
    x, (cache, other) = steps_of(mixer, BATCH, 3), (mixer.allocate_cache(BATCH) for _ in "12")
    with torch.no_grad():
        out = step_in_one((mixer,), x, (cache,), head=head)
        torch.testing.assert_close(out, head(mixer(x, cache=other)), rtol=1e-5, atol=1e-5)


def test_a_head_with_a_bias_is_called():
    model, head = model_of(), nn.Linear(DIM, 40).requires_grad_(False)
    cache, other = model.allocate_cache(BATCH), model.allocate_cache(BATCH)
    x = steps_of(model, BATCH, 1)
    assert torch.equal(model(x, cache=cache, head=head), head(model(x, cache=other)))


def test_a_head_may_learn_where_the_model_does_not():
    model, head = model_of(), nn.Linear(DIM, 40, bias=False)
    cache, other = model.allocate_cache(BATCH), model.allocate_cache(BATCH)
    with torch.enable_grad():
        for x in (steps_of(model, BATCH, 1) for _ in range(3)):
            out = model(x, cache=cache, head=head)
            expected = head(model(x, cache=other))
            assert torch.equal(out, expected)
            gradients = [torch.autograd.grad(it.sum(), head.weight)[0] for it in (out, expected)]
            assert torch.equal(*gradients)


def test_it_sees_new_weights():
    model = model_of()
    check(model, BATCH, [1], in_one=True)
    layer = model.layers[1]
    layer.x_proj.weight.mul_(2)
    layer.out_proj.weight.data = torch.randn_like(layer.out_proj.weight)
    layer.A_log = nn.Parameter(torch.rand_like(layer.A_log), requires_grad=False)
    model.load_state_dict({name: 1.1 * it for name, it in model.state_dict().items()})
    check(model, BATCH, [1], in_one=True)
    check(model.to(BF16), BATCH, [1], in_one=True)
    layer.in_proj.register_forward_hook(lambda *_: None)
    check(model, BATCH, [1], in_one=False)


def test_a_layer_in_a_wrapper_is_called():
    model = model_of()
    model.layers[0] = Wrapper(model.layers[0])
    cache = model.allocate_cache(BATCH)
    assert ops_of(model, steps_of(model, BATCH, 1), cache) == 2 * ["s6_step"]  # one per mixer


def test_a_cache_that_was_made_elsewhere(device):
    """The cache may have another dtype and other strides than those of allocate_cache."""
    model = model_of(device)
    exact = through_modules(model)
    # Only states are rounded to the cache's dtype, and they are a part of the output.
    for dtype, of_outputs, of_states in ((F32, BOUNDS[F32], BOUNDS[F32]), (BF16, 2e-3, 8e-3)):
        cache = S6Cache(
            tuple(
                MixerCache(*(x.contiguous() for x in tensors_of(layer)))
                for layer in model.allocate_cache(BATCH, dtype=dtype).layers
            )
        )
        exact_cache = exact.allocate_cache(BATCH)
        for _ in range(3):
            x = steps_of(model, BATCH, 1)
            expected = exact(x.double(), cache=exact_cache)
            assert error(model(x, cache=cache), expected) < of_outputs
        for state, expected in zip(tensors_of(cache), tensors_of(exact_cache), strict=True):
            assert state.dtype == dtype
            assert error(state, expected) < of_states


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *PLAIN,
        *({"dtype": dtype} for dtype in (BF16, HALF)),
        {"conv_bias": False, "bias": True, "expand": 3, "d_state": 64, "d_conv": 8},
    ],
    ids=str,
)
def test_plain_layers_are_one_launch(options, cuda_device):
    """Plain layers are one launch, or run as modules on a GPU that does not have the kernel."""
    model, in_one = model_of(cuda_device, **options), has_step()
    check(model, BATCH, [1, 1, 2, 1], in_one=in_one)
    check(model, MAX_ROWS["cuda"], [1, 1], in_one=in_one)
    check(model, 1, [8, 1, 5], in_one=in_one)
    check(model.layers[0], BATCH, [1, 2], in_one=in_one)


@pytest.mark.parametrize(
    ("options", "batch"),
    [({"dtype": F64}, 1), ({"expand": 1.5}, 1), ({}, MAX_ROWS["cuda"] + 1)],
    ids=str,
)
def test_what_the_kernel_does_not_take_goes_through_the_modules(options, batch, cuda_device):
    model = model_of(cuda_device, **options)
    check(model, batch, [1, 1], in_one=False)
    check(model.layers[0], batch, [1], in_one=False)


def test_states_of_float64_go_through_the_modules(cuda_device):
    model = model_of(cuda_device)
    cache = model.allocate_cache(BATCH, dtype=F64)
    assert "s6_step" not in ops_of(model, steps_of(model, BATCH, 1), cache)


@pytest.mark.usefixtures("step_kernel")
def test_a_cache_keeps_its_workspace(cuda_device):
    """A workspace serves any number of steps, as graphs keep using it; copies have their own."""
    model = model_of(cuda_device)
    cache = model.allocate_cache(BATCH)
    model(steps_of(model, BATCH, 1), cache=cache)
    workspace = cache.layers[0]._workspace
    model(steps_of(model, BATCH, 2), cache=cache)
    model.layers[0](steps_of(model, BATCH, 2), cache=cache.layers[0])
    assert cache.layers[0]._workspace is workspace
    assert cache.layers[1]._workspace is None
    twin = copy.deepcopy(cache)
    x = steps_of(model, BATCH, 1)
    assert torch.equal(model(x, cache=cache), model(x, cache=twin))
    assert twin.layers[0]._workspace.data_ptr() != workspace.data_ptr()


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_captured_token_goes_on_as_calls_do(is_warm, cuda_device):
    """The captured call may also be the first one with the cache."""
    model, head = model_of(cuda_device), nn.Linear(DIM, 40, bias=False, device=cuda_device)
    head.requires_grad_(False)
    cache, other = model.allocate_cache(BATCH), model.allocate_cache(BATCH)
    x = steps_of(model, BATCH, 1)
    for one in (cache, other) if is_warm else (other,):
        model(x, cache=one, head=head)
        one.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model(x, cache=cache, head=head)
    for step in range(100):
        x.normal_()
        graph.replay()
        assert torch.equal(captured, model(x, cache=other, head=head))
        if step % 10 == 0:  # without the graph, from its state
            x.normal_()
            assert torch.equal(model(x, cache=cache, head=head), model(x, cache=other, head=head))
    assert_same_bits(tensors_of(cache), tensors_of(other))


def test_models_on_several_streams(cuda_device):
    models = [model_of(cuda_device, dtype=dtype, depth=3) for dtype in (F32, BF16, HALF)]
    inputs = [steps_of(model, BATCH, 50) for model in models]

    def run(streams: list[torch.cuda.Stream]) -> list[torch.Tensor]:
        caches, outs = [model.allocate_cache(BATCH) for model in models], [[] for _ in models]
        torch.cuda.synchronize()
        for step in range(50):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    outs[i].append(models[i](inputs[i][:, step : step + 1], cache=caches[i]))
        torch.cuda.synchronize()
        return [torch.cat(out, 1) for out in outs]

    expected = run([torch.cuda.current_stream() for _ in models])
    assert all(map(torch.equal, run([torch.cuda.Stream() for _ in models]), expected))


def test_compiled_code_on_a_gpu_calls_the_operator(cuda_device):
    model = model_of(cuda_device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache, other = model.allocate_cache(BATCH), model.allocate_cache(BATCH)
    for steps in (1, 1, 2, 2):
        x = steps_of(model, BATCH, steps)
        assert torch.equal(compiled(x, cache=cache), model(x, cache=other))


# --- the modules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_more_than_its_weights_goes_through_the_modules(change):
    model = model_of()
    CHANGES[change].make(model)
    model.requires_grad_(False)
    check(model, BATCH, [1, 2, 1], in_one=not CHANGES[change].goes_through_modules)


@pytest.mark.parametrize("options", [{"d_conv": 9}, {"d_state": 65}], ids=str)
def test_what_the_operator_does_not_take_goes_through_the_modules(options):
    model = model_of(**options)
    check(model, BATCH, [1, 2], in_one=False)
    check(model.layers[0], BATCH, [1, 2], in_one=False)


def test_autocast_goes_through_the_modules():
    model = model_of()
    with torch.autocast("cpu", BF16):
        x, cache = steps_of(model, BATCH, 1), model.allocate_cache(BATCH)
        assert "s6_step" not in ops_of(model, x, cache)


def test_one_layer_that_is_called_leaves_the_others_alone():
    model = model_of(depth=3)
    hooked(model.layers[1].in_proj)
    x = steps_of(model, BATCH, 1)
    assert ops_of(model, x, model.allocate_cache(BATCH)).count("s6_step") == 2


def test_an_input_of_another_dtype_is_refused_as_by_the_modules():
    model = model_of()
    x = steps_of(model, BATCH, 1).to(BF16)
    with pytest.raises(RuntimeError, match="dtype"):
        model(x, cache=model.allocate_cache(BATCH))


# --- compiled code --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["S6", "MambaMixer"])
def test_compiled_code_calls_the_operator(kind):
    model = model_of()
    model = model if kind == "S6" else model.layers[0]
    targets = []

    def watch(graph, _):
        targets.extend(node.target for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=watch)
    cache, other = model.allocate_cache(BATCH), model.allocate_cache(BATCH)
    for steps in (1, 1, 3, 8):
        x = steps_of(model, BATCH, steps)
        # A layer's norm has a separate kernel, which compiled code does not call.
        torch.testing.assert_close(compiled(x, cache=cache), model(x, cache=other))
    assert torch.ops.selective_scan.s6_step.default in targets


# --- many steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1500, pytest.param(20_000, marks=pytest.mark.slow)])
@torch.no_grad()
def test_many_steps_do_not_drift(steps):
    """After many single tokens the operator is as close to fp64 as the modules in fp32. The
    modules take 500 tokens at a time, whose states are as accurate, and the last ones singly."""
    model = model_of(depth=3)
    exact, called = through_modules(model), copy.deepcopy(model)
    for layer in called.layers:
        layer.in_proj.register_forward_hook(lambda *_: None)
    cache, called_cache, exact_cache = (it.allocate_cache(1) for it in (model, called, exact))
    errors = [0.0, 0.0]
    for length in [500] * (steps // 500) + [1] * 50:
        x = steps_of(model, 1, length)
        for token in x.split(1, dim=1):
            out = model(token, cache=cache)
        outs, expected = (out, called(x, cache=called_cache)), exact(x.double(), cache=exact_cache)
        if length == 1:
            errors = [max(e, error(out, expected)) for e, out in zip(errors, outs, strict=True)]
    assert errors[0] < 2 * errors[1] + 1e-6


@pytest.mark.usefixtures("step_kernel")
@pytest.mark.parametrize(("d_model", "d_conv"), [(768, 4), (1536, 8), (2560, 4)])
def test_as_many_rows_are_one_launch_as_have_room(d_model, d_conv, cuda_device):
    """With one row more, the call goes through the layers."""
    model = S6(d_model, depth=1, d_conv=d_conv, device=cuda_device, dtype=BF16)
    model.requires_grad_(False)

    def names_of(rows: int) -> list[str]:
        x = torch.randn(rows, 1, d_model, device=cuda_device, dtype=BF16)
        return ops_of(model, x, model.allocate_cache(rows))

    sizes = (1, d_model, 2 * d_model, 16, d_model // 16, d_conv, 0)
    most = _plain_stack._most_rows(torch.empty(0, device=cuda_device, dtype=BF16), sizes)
    assert most > 0
    assert names_of(most) == ["s6_step"]
    assert "s6_step" not in names_of(most + 1)
