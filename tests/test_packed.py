"""Packed sequences of the selective scan give the results of separate ones."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from accuracy import assert_same_bits
from cases import compiled_with_graphs
from graphs import capture
from path_cases import optional
from problem import (
    COMPLEX_KINDS,
    LAYOUTS,
    METHODS,
    REAL_KINDS,
    Case,
    check,
    generator,
    inputs_on,
    options_on,
    scan,
)
from properties import fresh
from selective_scan import (
    S6,
    MambaMixer,
    mamba_inner_fn,
    mamba_inner_ref,
    selective_scan_fn,
    selective_scan_ref,
)
from test_mamba_inner import BASE as LAYER
from test_mamba_inner import run, tensors_of
from test_s6 import KINDS

F64 = torch.float64

# Sequences without steps, of one step, of less and of more than a chunk, with no steps between
# them.
BOUNDS = (0, 30, 30, 31, 64, 130)
EDGED = (7, 40, 41, 100)  # has steps outside of all sequences
BASE = Case(batch=1, seqlen=130, cu_seqlens=BOUNDS)
# Short sequences beside a long one, which has segments.
LONG = Case(
    batch=1,
    dim=12,
    groups=1,
    seqlen=2600,
    dstate=3,
    step_shift=-3.0,
    cu_seqlens=(0, 5, 70, 71, 2300, 2310, 2600),
)
# Enough elements for the streamed kernels on CUDA.
MANY_CHANNELS = {"dim": 408, "dstate": 16}


def cases():
    for case in BASE.each(method=METHODS, complex=(False, True), dstate=(3,)):
        yield case.with_(reverse=case.complex)
    yield BASE.with_(reverse=True, dim=70, groups=1)
    for layout in LAYOUTS:
        yield BASE.with_(layout=layout, dtype=torch.bfloat16, reverse=layout == "channel_last")
    for dtype in (torch.float16, torch.float64):
        yield BASE.with_(dtype=dtype, layout="channel_last")
    for B, C in itertools.product(REAL_KINDS, REAL_KINDS):
        if (B, C) != ("grouped", "grouped"):
            yield BASE.with_(B=B, C=C, dstate=5, groups=1 if "shared" in (B, C) else 2)
    for kind in COMPLEX_KINDS:
        yield BASE.with_(B=kind, C=kind, complex=True, groups=1, dstate=2, reverse=True)
    yield from (*optional(BASE), BASE.with_(delta_softplus=False))
    yield BASE.with_(cu_seqlens=EDGED)
    yield BASE.with_(cu_seqlens=EDGED, reverse=True, B="constant", layout="channel_last")
    for method in METHODS:
        yield BASE.with_(method=method, input_delta=F64, dtype=F64, complex=True, cu_seqlens=EDGED)
        yield BASE.with_(method=method, input_delta=torch.float32, reverse=True, cu_seqlens=EDGED)
    yield LONG.with_(input_delta=torch.float32, method="foh")
    yield BASE.with_(cu_seqlens=(0, 130))
    yield BASE.with_(cu_seqlens=(0, 0, 130, 130), initial_state=False)
    yield BASE.with_(cu_seqlens=tuple(range(131)), dim=4, groups=1, dstate=1)
    yield LONG
    yield BASE.with_(dim=20, groups=20, reverse=True)  # lanes are groups


@pytest.mark.parametrize("case", [*cases()], ids=str)
def test_packed(case, device):
    check(case, device)


@pytest.mark.parametrize("reverse", [False, True])
def test_sequences_that_are_cut_beside_those_that_share_a_segment(reverse, cuda_device):
    check(LONG.with_(**MANY_CHANNELS, reverse=reverse, layout="channel_last"), cuda_device)


@pytest.mark.parametrize("changes", [{}, MANY_CHANNELS], ids=["few", "many"])
def test_what_is_not_finite_stays_in_its_sequence(changes, device):
    case = LONG.with_(**changes)
    inputs = inputs_on(case, device)
    with torch.no_grad():
        inputs["u"][..., 100] = torch.nan
    out, last = scan(case, inputs)
    du, dinitial_state = torch.autograd.grad(out.sum(), [inputs["u"], inputs["initial_state"]])
    for steps in (slice(71), slice(2300, None)):
        assert out[..., steps].isfinite().all()
        assert du[..., steps].isfinite().all()
    others = [0, 1, 2, 4, 5]
    assert last[3].isnan().any()
    assert last[others].isfinite().all()
    assert dinitial_state[others].isfinite().all()


@fresh(max_examples=30)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 31, 32, 33, 64, 65, 100]), max_size=12),
    ends=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    reverse=st.booleans(),
    layout=st.sampled_from(["contiguous", "channel_last", "offset"]),
    is_wide=st.booleans(),
    dim=st.sampled_from([1, 5, 40]),
)
def test_random_boundaries(lengths, ends, reverse, layout, is_wide, dim, device):
    bounds = tuple(itertools.accumulate(lengths, initial=ends[0]))
    case = Case(
        batch=1, dim=dim, groups=1, dstate=2, seqlen=bounds[-1] + ends[1], cu_seqlens=bounds,
        reverse=reverse, layout=layout, dtype=F64,
    )  # fmt: skip
    inputs, options = inputs_on(case, device), options_on(case, device)
    if not is_wide:
        options["cu_seqlens"] = options["cu_seqlens"].int()
    results = []
    for function in (selective_scan_fn, selective_scan_ref):
        out, last = function(**inputs, **options, return_last_state=True)
        loss = out.square().sum() + last.square().sum()
        gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        gradients = [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(inputs.values(), gradients, strict=True)
        ]
        results.append([out, last, *gradients])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


# --- transforms and compilers ---------------------------------------------------------------------

SMALL = Case(batch=1, dim=2, groups=1, dstate=2, seqlen=7, cu_seqlens=(0, 3, 3, 6), dtype=F64)


def test_other_boundaries_do_not_compile_again(device):
    case = BASE.with_(dim=4, dstate=2)
    inputs = inputs_on(case, device)
    options = options_on(case, device)

    def loss(cu_seqlens):
        given = inputs | options | {"cu_seqlens": cu_seqlens}
        return selective_scan_fn(**given).square().sum()

    compiled, graphs = compiled_with_graphs(loss)
    leaves = list(inputs.values())
    for bounds in (BOUNDS, (0, 1, 2, 3, 4, 5), (3, 3, 3, 90, 91, 130)):
        cu_seqlens = torch.tensor(bounds, device=device)
        actual, expected = (
            torch.autograd.grad(function(cu_seqlens), leaves) for function in (compiled, loss)
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert len(graphs) == 1


def test_vmap(device):
    case = SMALL.with_(seqlen=40, cu_seqlens=(0, 3, 33, 40), groups=2)
    inputs, options = inputs_on(case, device), options_on(case, device)
    inputs = {name: tensor.detach() for name, tensor in inputs.items()}
    cu_seqlens = torch.stack([options.pop("cu_seqlens"), torch.tensor([0, 10, 20, 35]).to(device)])

    def results(u, initial_state, cu_seqlens):
        given = inputs | {"u": u, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        return selective_scan_fn(**given, **options, return_last_state=True)

    def gradients(*values):
        return torch.func.grad(lambda *x: results(*x)[0].square().sum(), (0, 1))(*values)

    values = (
        torch.stack([inputs["u"], -inputs["u"]]),
        torch.stack([inputs["initial_state"], 2 * inputs["initial_state"]]),
    )
    for function in (results, gradients):
        for bounds, dim in ((cu_seqlens[0], None), (cu_seqlens, 0)):
            actual = vmap(function, (0, 0, dim))(*values, bounds)
            each = [bounds, bounds] if dim is None else bounds
            expected = [function(*given) for given in zip(*values, each, strict=True)]
            expected = tuple(map(torch.stack, zip(*expected, strict=True)))
            torch.testing.assert_close(actual, expected)


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [*KINDS, *({**it, "d_conv": 1} for it in KINDS[:2])], ids=str)
def test_a_packed_batch_trains_as_separate_sequences_do(options, device):
    model = S6(8, d_state=4, **options, depth=2, dtype=F64)
    model.to(device)
    parameters = [*model.parameters()]
    bounds = (0, 3, 40, 40, 41, 80)
    x, cotangent = torch.randn(2, 1, 80, 8, dtype=F64, device=device)
    x.requires_grad_()
    packed = model(x, cu_seqlens=torch.tensor(bounds, device=device))
    alone = torch.cat([model(x[:, a:b]) for a, b in itertools.pairwise(bounds)], 1)
    torch.testing.assert_close(packed, alone)
    torch.testing.assert_close(
        torch.autograd.grad(packed, [x, *parameters], cotangent),
        torch.autograd.grad(alone, [x, *parameters], cotangent),
    )


def test_what_takes_no_packed_sequences():
    x, cu_seqlens = torch.randn(1, 6, 8), torch.tensor([0, 2, 6])
    model = S6(8)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="cu_seqlens must be None where there is a cache"),
    ):
        model(x, cache=model.allocate_cache(1), cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="None where the convolution is wider than 8, got"):
        S6(8, d_conv=9)(x, cu_seqlens=cu_seqlens)
    for module, name in ((model, "x"), (MambaMixer(8), "hidden")):
        wanted = rf"^selective_scan: {name} must have batch of 1 where .*, got \(2, 6, 8\)$"
        with pytest.raises(ValueError, match=wanted):
            module(x.expand(2, 6, 8), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_mamba_inner(bidirectional, device):
    case = LAYER.with_(batch=1, seqlen=50, dtype=F64)
    bounds = torch.tensor([2, 9, 9, 45], device=device, dtype=torch.int32)
    case = case.with_(options=(("cu_seqlens", bounds), ("bidirectional", bidirectional)))
    tensors, cotangent = tensors_of(case, device), torch.randn(1, 50, case.d_model, dtype=F64)
    actual, expected = (
        run(function, case, tensors, cotangent) for function in (mamba_inner_fn, mamba_inner_ref)
    )
    torch.testing.assert_close(actual, expected)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": "channel_last", "dtype": torch.bfloat16},
        {"reverse": True, "dim": 400, "groups": 1},
        {"layout": "channel_last", "dstate": 5, "z": False, "delta_bias": False, "D": False},
    ],
    ids=str,
)
def test_streamed(changes, cuda_device):
    check(LONG.with_(**MANY_CHANNELS).with_(**changes), cuda_device)


@pytest.mark.parametrize("dim", [40, 1800])  # the floor, the streamed kernels
def test_a_captured_graph_takes_other_boundaries(dim, cuda_device):
    case = BASE.with_(seqlen=600, dim=dim, cu_seqlens=(0, 30, 300, 301, 600))
    inputs, options = inputs_on(case, cuda_device), options_on(case, cuda_device)
    cotangent = torch.randn(inputs["u"].shape, generator=generator(case)).to(cuda_device)

    def step():
        out, last = selective_scan_fn(**inputs, **options, return_last_state=True)
        return out, last, *torch.autograd.grad(out, list(inputs.values()), cotangent)

    graph, captured = capture(step)
    for bounds in ((0, 30, 300, 301, 600), (0, 0, 599, 600, 600), (5, 6, 7, 8, 90)):
        options["cu_seqlens"].copy_(torch.tensor(bounds))
        graph.replay()
        assert_same_bits(captured, step())
