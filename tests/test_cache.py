"""Models with a cache: splits of a sequence, rows reset or reordered, compiled code, refusals."""

import copy
import re

import pytest
import torch

from layers import error, tensors_of
from opchecks import needs_pytorch
from problem import generator
from selective_scan import S6, MambaMixer, MixerCache, S6Cache
from selective_scan._discretization import METHODS
from test_s6 import KINDS

BATCH, SEQLEN, DIM = 3, 29, 8
# Layers that keep more state than others, in a precision that shows a fraction of a turn.
ROTARY, TRAPEZOID, BOTH = ({"d_state": 6, "dtype": torch.float64} | kind for kind in KINDS[2:5])
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def model_of(device: str = "cpu", **options: object) -> S6:
    model = S6(DIM, **{"depth": 2, "d_state": 5, "dt_min": 0.1, "dt_max": 1.0} | options)
    return model.to(device).requires_grad_(False)


def sequence(model: S6, seqlen: int = SEQLEN, batch: int = BATCH) -> torch.Tensor:
    weight = model.norm_f.weight
    return torch.randn(batch, seqlen, DIM, dtype=weight.dtype, device=weight.device)


def random_split(name: object, seqlen: int = SEQLEN) -> list[int]:
    """Returns lengths that add up to seqlen, among them 0 and 1."""
    random, lengths = generator(name), [0, 1, 2, 1]
    while sum(lengths) < seqlen:
        longest = min(9, seqlen - sum(lengths))
        lengths.append(int(torch.randint(0, longest + 1, (), generator=random)))
    return lengths


def by_parts(model: torch.nn.Module, x: torch.Tensor, lengths, cache) -> torch.Tensor:
    return torch.cat([model(part, cache=cache) for part in x.split(lengths, dim=1)], 1)


# --- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *({"d_conv": width} for width in (1, 2, 3, 4, 5, 6, 7, 8, 9, 30)),
        *({"discretization_method": method} for method in METHODS[1:]),
        *({"dtype": dtype} for dtype in BOUNDS if dtype != torch.float32),
        {"conv_bias": False, "bias": True, "expand": 1.5},
        {"dt_proj_bias": False, "dt_min": 1e-3, "dt_max": 0.1},
        {"dt_soft_plus": False},
        *(ROTARY, TRAPEZOID, BOTH, {**BOTH, "d_conv": 9}),
        *(
            {**kind, "dtype": dtype}
            for kind in (ROTARY, TRAPEZOID, BOTH)
            for dtype in (torch.bfloat16, torch.float16)
        ),
    ],
    ids=str,
)
def test_any_split_gives_what_the_whole_gives(options, device):
    model = model_of(device, **options)
    x = sequence(model)
    expected = copy.deepcopy(model).double()(x.double())
    bound = BOUNDS[x.dtype]
    assert error(model(x), expected) < bound
    for lengths in ([1] * SEQLEN, [SEQLEN], random_split(f"{options} {device}")):
        cache = model.allocate_cache(BATCH)
        y = by_parts(model, x, lengths, cache)
        assert y.dtype == x.dtype
        assert error(y, expected) < bound, lengths


def test_a_mixer_takes_its_part(device):
    mixer = MambaMixer(DIM, bias=True, device=device).requires_grad_(False)
    x = torch.randn(BATCH, SEQLEN, DIM, device=device)
    cache = mixer.allocate_cache(BATCH)
    assert isinstance(cache, MixerCache)
    y = by_parts(mixer, x, random_split(device), cache)
    assert error(y, mixer(x)) < BOUNDS[x.dtype]


@pytest.mark.parametrize("of_model", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_states_may_be_of_another_dtype(dtype, of_model, device):
    model = model_of(device, dtype=of_model)
    x = sequence(model)
    cache = model.allocate_cache(BATCH, dtype=dtype)
    assert {tensor.dtype for tensor in tensors_of(cache)} == {dtype}
    y = by_parts(model, x, random_split(f"{dtype} {device}"), cache)
    assert y.dtype == x.dtype
    assert {tensor.dtype for tensor in tensors_of(cache)} == {dtype}
    assert error(y, model(x)) < max(BOUNDS[dtype], BOUNDS[x.dtype])


def test_dtypes_of_states_by_default(device):
    for dtype, of_states in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        for layer in model_of(device, dtype=dtype).allocate_cache(2).layers:
            assert (layer.conv_state.dtype, layer.state.dtype) == (dtype, of_states)
            assert layer.state.device.type == device


def test_under_autocast(device):
    model = model_of(device)
    x = sequence(model)
    cache = model.allocate_cache(BATCH)
    with torch.autocast(device, torch.bfloat16):
        y, whole = by_parts(model, x, random_split(device), cache), model(x)
    assert error(y, whole) < BOUNDS[torch.bfloat16]
    assert {tensor.dtype for tensor in tensors_of(cache)} == {torch.float32}


@pytest.mark.parametrize("name", ["conv1d", "x_proj", "dt_proj", "out_proj"])
def test_a_part_of_another_dtype_is_cast(name, device):
    model = model_of(device, bias=True)
    getattr(model.layers[1], name).double()
    x, cache = sequence(model), model.allocate_cache(BATCH)
    y = by_parts(model, x, random_split(device), cache)
    assert y.dtype == x.dtype
    assert error(y, model(x)) < BOUNDS[x.dtype]


@pytest.mark.parametrize("width", [1, 4, 9])
def test_a_convolution_with_a_hook_is_called(width, device):
    model = model_of(device, d_conv=width)
    for layer in model.layers:
        layer.conv1d.register_forward_hook(lambda module, inputs, out: 3 * out)
    x, cache = sequence(model), model.allocate_cache(BATCH)
    lengths = random_split(width)
    outs = by_parts(model, x, lengths, cache)
    for layer in model.layers:
        layer.conv1d._forward_hooks.clear()
        layer.conv1d.weight *= 3
        layer.conv1d.bias *= 3
    assert error(outs, model(x)) < 1e-5
    expected = model.allocate_cache(BATCH)
    model(x, cache=expected)
    torch.testing.assert_close(tensors_of(cache), tensors_of(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seqlen", [0, 1, 4])
def test_an_empty_batch(seqlen, device):
    model = model_of(device)
    x = sequence(model, seqlen, batch=0)
    assert model(x, cache=model.allocate_cache(0)).shape == (0, seqlen, DIM)


def test_a_stack_without_layers(device):
    model = model_of(device, depth=1)
    del model.layers[0]
    x, cache = sequence(model, 4), model.allocate_cache(BATCH)
    cache.reset()
    cache.reset([0])
    cache.reset(torch.zeros(BATCH, dtype=torch.bool, device=device))
    cache.reorder([0] * BATCH)
    torch.testing.assert_close(model(x, cache=cache), model.norm_f(x))


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, BOTH], ids=str)
@pytest.mark.parametrize("rows", [None, [1], [], torch.tensor([True, False, True])], ids=str)
def test_reset(rows, options, device):
    model = model_of(device, **options)
    x, cache = sequence(model), model.allocate_cache(BATCH)
    places = [tensor.data_ptr() for tensor in tensors_of(cache)]
    continued, fresh = (model(part) for part in (torch.cat([x, x], 1), x))
    model(x, cache=cache)
    cache.reset(rows)
    y = model(x, cache=cache)
    is_reset = torch.zeros(BATCH, dtype=torch.bool)
    is_reset[slice(None) if rows is None else rows] = True
    expected = torch.where(is_reset.to(device)[:, None, None], fresh, continued[:, SEQLEN:])
    assert error(y, expected) < BOUNDS[x.dtype]
    assert places == [tensor.data_ptr() for tensor in tensors_of(cache)]


@pytest.mark.parametrize("options", [{}, BOTH], ids=str)
@pytest.mark.parametrize("rows", [[2, 0, 0], torch.tensor([1, 2, 0], dtype=torch.int32)], ids=str)
def test_reorder(rows, options, device):
    model = model_of(device, **options)
    x, cache = sequence(model), model.allocate_cache(BATCH)
    places = [tensor.data_ptr() for tensor in tensors_of(cache)]
    model(x[:, :-3], cache=cache)
    cache.reorder(rows)
    chosen = torch.as_tensor(rows).tolist()
    y = model(x[chosen, -3:], cache=cache)
    assert error(y, model(x)[chosen, -3:]) < BOUNDS[x.dtype]
    assert places == [tensor.data_ptr() for tensor in tensors_of(cache)]


@pytest.mark.parametrize("options", [{}, BOTH], ids=str)
def test_a_saved_cache_goes_on(options, device, tmp_path):
    model = model_of(device, **options)
    x, cache = sequence(model), model.allocate_cache(BATCH)
    model(x[:, :-5], cache=cache)
    for i in range(-5, -2):  # single steps are prepared
        model(x[:, i : i + 1], cache=cache)
    torch.save(cache, tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt")
    assert torch.equal(model(x[:, -2:], cache=loaded), model(x[:, -2:], cache=cache))


def test_rows_do_not_depend_on_each_other(device):
    model = model_of(device, dtype=torch.float64)
    x = sequence(model)
    together, alone = model.allocate_cache(BATCH), model.allocate_cache(1)
    lengths = random_split(device)
    by_parts(model, x, lengths, together)
    by_parts(model, x[1:2], lengths, alone)
    for several, one in zip(tensors_of(together), tensors_of(alone), strict=True):
        torch.testing.assert_close(several[1:2], one, rtol=1e-12, atol=1e-12)


# --- gradients, inference mode, compiled code -----------------------------------------------------


def test_a_call_that_needs_a_gradient_is_refused(device):
    model = model_of(device).requires_grad_()
    x, cache = sequence(model), model.allocate_cache(BATCH)
    message = r"^selective_scan: cache takes no gradient; call the model under torch\.no_grad\(\)"
    for part in (x, x[:, :1]):
        with pytest.raises(RuntimeError, match=message):
            model(part, cache=cache)
        with pytest.raises(RuntimeError, match=message):
            model.layers[0](part, cache=cache.layers[0])
        with pytest.raises(RuntimeError, match=message):
            model.requires_grad_(False)(part.clone().requires_grad_(), cache=cache)
        model.requires_grad_()
    assert not any(tensor.any() for tensor in tensors_of(cache))
    with torch.no_grad():
        assert not by_parts(model, x, [SEQLEN - 1, 1], cache).requires_grad


def test_a_cache_outlives_inference_mode(device):
    model = model_of(device).requires_grad_()
    x = sequence(model)
    with torch.inference_mode():
        cache = model.allocate_cache(BATCH)
        y = [model(x[:, :7], cache=cache), model(x[:, 7:8], cache=cache)]
        cache.reorder(range(BATCH))
    with torch.no_grad():
        y += [model(x[:, 8:9], cache=cache), model(x[:, 9:], cache=cache)]
        assert error(torch.cat(y, 1), model(x)) < BOUNDS[x.dtype]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "lengths", "options"),
    [
        ("aot_eager", [9, 1, 1, 7, 1, 10, 0], {}),
        ("aot_eager", [9, 1, 1, 7, 1, 10, 0], {"d_conv": 9}),
        ("aot_eager", [9, 1, 1, 7, 1, 10, 0], BOTH),
        ("inductor", [3, 1, 1], {}),
    ],
    ids=str,
)
def test_compiled(backend, lengths, options, device):
    model = model_of(device, **{"depth": 1} | options)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = sequence(model, sum(lengths))
    expected, cache = model(x), model.allocate_cache(BATCH)
    for _ in range(2):
        assert error(by_parts(compiled, x, lengths, cache), expected) < BOUNDS[x.dtype]
        cache.reset()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"depth": 2}, BOTH], ids=str)
def test_a_compiled_loop_of_any_sizes(options, device):
    model = model_of(device, **{"depth": 1} | options)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def generate(x, cache):
        return by_parts(model, x, [x.shape[1] - 2, 1, 1], cache)

    for batch, seqlen in ((BATCH, SEQLEN), (BATCH + 1, SEQLEN - 9)):
        x = sequence(model, seqlen, batch)
        assert error(generate(x, model.allocate_cache(batch)), model(x)) < BOUNDS[x.dtype]
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        (list, "aot_eager"),
        (torch.tensor, "aot_eager"),
        pytest.param(
            *(torch.tensor, "inductor"),
            marks=needs_pytorch("2.13", "an assertion of Inductor's own fails before"),
        ),
    ],
)
def test_compiled_rows(kind, backend):
    cache = model_of(depth=1).allocate_cache(BATCH)

    @torch.compile(fullgraph=True, backend=backend)
    def change(to_reset, order):
        cache.reset(to_reset)
        cache.reorder(order)

    for tensor in tensors_of(cache):
        tensor.copy_(torch.tensor([1.0, 2.0, 3.0])[:, None, None].expand_as(tensor))
    change(kind([1]), kind([2, 1, 0]))
    assert all(tensor[:, 0, 0].tolist() == [3, 0, 1] for tensor in tensors_of(cache))
    for rows in ([3, 1, 0], [2, -1, 0]):
        with pytest.raises(RuntimeError, match="selective_scan: rows must be from 0 to batch - 1"):
            change(kind([1]), kind(rows))


@pytest.mark.slow
def test_compiled_step_and_reorder(device):
    """A compiled step with a reorder is correct. Inductor by itself would read rows of the state
    that the step has changed while it writes them."""
    model = model_of(device, depth=1)
    caches = [model.allocate_cache(BATCH) for _ in range(2)]

    def step(x, cache, rows):
        y = model(x, cache=cache)
        cache.reorder(rows)
        return y

    rows = torch.tensor([2, 1, 0], device=device)
    for part in sequence(model, 3).split(1, 1):
        expected = step(part, caches[0], rows)
        y = torch.compile(step, fullgraph=True)(part, caches[1], rows)
        assert error(y, expected) < BOUNDS[y.dtype]
        torch.testing.assert_close(*map(tensors_of, caches))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"rotary": True}], ids=str)
def test_bidirectional_is_refused(options):
    model = model_of(bidirectional=True, d_state=6, **options)
    cache = model_of().allocate_cache(BATCH)
    message = r"^selective_scan: bidirectional must be False where there is a cache, .*, got True$"
    for call in (
        lambda: model.allocate_cache(BATCH),
        lambda: model.layers[0].allocate_cache(BATCH),
        lambda: model(sequence(model), cache=cache),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_stack_of_other_modules_has_no_cache():
    model = model_of()
    model.layers.insert(1, torch.nn.Dropout())
    message = "^selective_scan: layers must be Mamba layers where there is a cache, got 'Dropout'$"
    with pytest.raises(ValueError, match=message):
        model.allocate_cache(BATCH)


@pytest.mark.parametrize("seqlen", [1, 9])
def test_a_cache_of_another_kind_is_refused(seqlen):
    model = model_of()
    x, cache = sequence(model, seqlen), model.allocate_cache(BATCH)

    def refused(kind, message, *, of=model, given=cache):
        with pytest.raises(kind, match=f"^selective_scan: {message}$"):
            of(x, cache=given)

    refused(
        ValueError,
        r"conv_state of cache must be \(batch, d_inner, d_conv - 1\) = \(3, 16, 3\), "
        r"got \(2, 16, 3\)",
        given=model.allocate_cache(2),
    )
    refused(
        ValueError,
        r"state of cache must be \(batch, d_inner, d_state\) = \(3, 16, 5\), got \(3, 16, 6\)",
        given=model_of(d_state=6).allocate_cache(BATCH),
    )
    refused(ValueError, "cache must be of depth = 2 layers, got 1", given=S6Cache(cache.layers[:1]))
    refused(
        ValueError,
        "cache must be on cpu, as the input is, got 'meta'",
        given=model.allocate_cache(BATCH, device="meta"),
    )
    first, last = cache.layers[0], model.allocate_cache(2).layers[1]
    refused(ValueError, r"conv_state of cache must be .*", given=S6Cache((first, last)))
    message = "cache must be None or the {} of allocate_cache, got {}"
    refused(TypeError, message.format("S6Cache", "MixerCache"), given=cache.layers[0])
    refused(TypeError, message.format("MixerCache", "S6Cache"), of=model.layers[0])
    assert not any(tensor.any() for tensor in tensors_of(cache))


@pytest.mark.parametrize("seqlen", [1, 9])
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (torch.Tensor.long, RuntimeError, "must have dtype .*, got int64"),
        (lambda state: state[:1].expand_as(state), RuntimeError, "must have no stride of 0, .*"),
        (lambda _: None, ValueError, r"must be \(batch, d_inner, .*, got None"),
    ],
    ids=["dtype", "expanded", "none"],
)
@pytest.mark.parametrize("name", ["conv_state", "state"])
def test_a_cache_of_wrong_tensors_is_refused_before_it_changes(name, change, kind, message, seqlen):
    model = model_of()
    x, cache = sequence(model, seqlen), model.allocate_cache(BATCH)
    last = cache.layers[1]
    setattr(last, name, change(getattr(last, name)))
    with pytest.raises(kind, match=f"^selective_scan: {name} of cache {message}$"):
        model(x, cache=cache)
    assert not any(tensor.any() for tensor in tensors_of(cache))


def test_a_cache_serves_one_layer():
    layer = model_of().layers[0].allocate_cache(BATCH)
    with pytest.raises(TypeError, match=r"layers must be MixerCaches, got tuple$"):
        S6Cache((layer, (layer.conv_state, layer.state)))
    with pytest.raises(ValueError, match=r"layers must be 2 different caches, got 1$"):
        S6Cache((layer, layer))


@pytest.mark.parametrize("seqlen", [1, 9])
def test_a_head_that_is_no_module_is_refused(seqlen):
    model, head = model_of(), torch.nn.Linear(DIM, 5)
    x, cache = sequence(model, seqlen), model.allocate_cache(BATCH)
    with pytest.raises(TypeError, match=r"^selective_scan: head must be .*, got Parameter$"):
        model(x, cache=cache, head=head.weight)
    assert not any(tensor.any() for tensor in tensors_of(cache))


@pytest.mark.parametrize("options", [{}, ROTARY, TRAPEZOID, BOTH], ids=str)
def test_a_traced_graph_takes_no_cache(options):
    model = model_of(**options)
    x, cache = sequence(model), model.allocate_cache(BATCH)
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), model(x))
    with pytest.raises(TypeError, match="cache must be None"):
        traced(x, cache=cache)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "batch_size must be an integer of at least 0, got -1"),
        ((2.0,), "batch_size must be an integer of at least 0, got 2.0"),
        ((2, torch.int8), "dtype must be float32, float16, bfloat16, float64 or None"),
    ],
    ids=str,
)
def test_bad_sizes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^selective_scan: {re.escape(message)}"):
        model_of().allocate_cache(*arguments)


@pytest.mark.parametrize(
    ("method", "rows", "kind", "message"),
    [
        ("reset", [0, 3], ValueError, "rows must be from 0 to batch - 1 = 2, got 3"),
        ("reset", [-1], ValueError, "rows must be from 0 to batch - 1 = 2, got -1"),
        ("reset", 1, ValueError, "rows must be one-dimensional, got ()"),
        ("reset", [True, False], ValueError, "rows must be a mask (batch,) = (3,), got (2,)"),
        ("reset", [0.5], TypeError, "rows must be integers or a mask of bools, got torch.float32"),
        ("reorder", [0, 1], ValueError, "rows must be (batch,) = (3,), got (2,)"),
        ("reorder", [0, 1, 3], ValueError, "rows must be from 0 to batch - 1 = 2, got 3"),
        ("reorder", [True] * 3, TypeError, "rows must be integers, got torch.bool"),
        (
            "reset",
            torch.tensor([3], dtype=torch.uint16),
            ValueError,
            "rows must be from 0 to batch - 1 = 2, got 3",
        ),
        ("reorder", None, TypeError, "rows must be integers, got NoneType"),
        ("reset", {0}, TypeError, "rows must be integers or a mask of bools, got set"),
        ("reset", [[0], [1, 2]], TypeError, "rows must be integers or a mask of bools, got list"),
    ],
    ids=str,
)
def test_bad_rows_are_refused(method, rows, kind, message):
    cache = model_of().allocate_cache(BATCH)
    with pytest.raises(kind, match=f"^selective_scan: {re.escape(message)}$"):
        getattr(cache, method)(rows)


def test_rows_of_a_list_are_on_the_host_whatever_the_default_device():
    cache = model_of().allocate_cache(3)
    with torch.device("meta"):
        cache.reset([0])
        cache.reorder([2, 1, 0])
        with pytest.raises(ValueError, match="rows must be from 0 to batch - 1 = 2, got 3"):
            cache.reset([3])
