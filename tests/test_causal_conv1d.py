"""The causal convolution: kernels against the reference in fp64 and against torch's convolution."""

import itertools
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from accuracy import assert_accurate
from cases import Axes, ones
from opchecks import in_order
from problem import (
    LAYOUTS,
    Draws,
    detached,
    differentiate,
    laid_out,
    lay_out,
    moved,
    plain_solutions,
)
from selective_scan import causal_conv1d_fn, causal_conv1d_ref

F32, F64, HALF, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case(Axes):
    """One call. The defaults are the base case, and a test changes one axis at a time."""

    batch: int = 2
    dim: int = 21
    seqlen: int = 70
    width: int = 4
    activation: str | None = "silu"
    bias: bool = True
    states: bool = True  # initial and final states
    dtype: torch.dtype = F32  # of x
    weight_dtype: torch.dtype = F32  # of weight and bias
    state_dtype: torch.dtype = F32
    layout: str = "contiguous"
    cu_seqlens: tuple[int, ...] | None = None
    seq_idx: bool = False  # the sequences by their index: those of cu_seqlens, or random ones
    cotangents: tuple[str, ...] = ("out", "final_states")


@dataclass(frozen=True)
class Problem:
    tensors: dict[str, torch.Tensor]  # only those that are present
    options: dict
    cotangents: dict[str, torch.Tensor]


def make(case: Case, device: str) -> Problem:
    draws = Draws(case.with_(layout="contiguous"))
    normal = draws.normal
    sequences = case.batch if case.cu_seqlens is None else len(case.cu_seqlens) - 1
    states = (sequences, case.dim, case.width - 1)
    options = {"activation": case.activation}
    tensors = {
        "x": normal(case.batch, case.dim, case.seqlen).to(case.dtype),
        "weight": (normal(case.dim, case.width) / case.width**0.5).to(case.weight_dtype),
    }
    if case.bias:
        tensors["bias"] = normal(case.dim).to(case.weight_dtype)
    if case.states:
        tensors["initial_states"] = normal(*states).to(case.state_dtype)
        options["return_final_states"] = True
    if case.cu_seqlens is not None:
        bounds = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=device)
        step = torch.arange(case.seqlen, device=device)
        index = torch.bucketize(step, bounds, right=True, out_int32=True) - 1
        index[case.cu_seqlens[-1] :] = -1
        options |= {"seq_idx": index[None]} if case.seq_idx else {"cu_seqlens": bounds}
    elif case.seq_idx:
        lengths = torch.randint(1, 9, (case.batch, case.seqlen), generator=draws.generator)
        options["seq_idx"] = torch.stack(
            [torch.arange(case.seqlen).repeat_interleave(row)[: case.seqlen] for row in lengths]
        ).to(device, torch.int32)
        options["seq_idx"][:, 9:12] = -1
    cotangents = {"out": normal(case.batch, case.dim, case.seqlen).to(case.dtype)}
    if case.layout == "channel_last":  # as the next part of a layer produces it
        cotangents["out"] = lay_out(cotangents["out"], case.layout)
    if case.states:
        cotangents["final_states"] = normal(*states).to(case.dtype)
    given = {name: cotangents[name].to(device) for name in case.cotangents if name in cotangents}
    return Problem(laid_out(tensors, case.layout, device), options, given)


def run(conv, tensors, options, cotangents) -> dict[str, torch.Tensor]:
    """Returns outputs and gradients."""
    result = conv(**tensors, **options)
    names = ("out", "final_states") if isinstance(result, tuple) else ("out",)
    outputs = dict(zip(names, result if isinstance(result, tuple) else (result,), strict=True))
    return outputs | differentiate(outputs, tensors, cotangents)


def run_kernels(problem: Problem) -> dict[str, torch.Tensor]:
    return run(causal_conv1d_fn, problem.tensors, problem.options, problem.cotangents)


def solve(problem: Problem, inputs: dict) -> dict[str, torch.Tensor]:
    """Computes outputs and gradients by the reference on the CPU, in the dtype of the inputs."""
    options = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in problem.options.items()
    }
    cotangents = {
        name: value.detach().to(inputs["x"]) for name, value in problem.cotangents.items()
    }
    return run(causal_conv1d_ref, inputs, options, cotangents)


def check(case: Case, device: str) -> None:
    problem = make(case, device)
    actual = run_kernels(problem)
    exact = solve(problem, moved(problem.tensors, F64))
    x = problem.tensors["x"]
    if case.layout in ("contiguous", "channel_last", "dim_first"):
        assert actual["out"].stride() == x.stride()
    is_double = F64 in (case.dtype, case.weight_dtype) or (case.states and case.state_dtype == F64)
    compute = torch.finfo(F64 if is_double else F32).eps
    for name, value in actual.items():
        source = problem.tensors.get(name[1:], x)
        assert value.dtype == source.dtype, name
        if exact[name] is None:  # the loss does not depend on it
            assert not value.any(), name
            continue
        assert value.shape == exact[name].shape, name
        if value.numel() == 0:
            continue
        plain = partial(plain_solutions, partial(solve, problem), problem.tensors, is_double)
        assert_accurate(name, value, exact, 4 * compute, torch.finfo(value.dtype).eps, plain)


def case_list():
    base = Case()
    cases = [base]
    cases += [base.with_(width=width, states=width % 2 == 0) for width in range(1, 9)]
    cases += [base.with_(width=width, activation=None) for width in (1, 3, 4)]
    cases += [base.with_(bias=False), base.with_(states=False), base.with_(activation="swish")]
    cases += [
        base.with_(dim=dim, seqlen=seqlen, layout=layout)
        for dim, seqlen in ((1, 1), (16, 3), (3, 1000), (300, 65), (33, 257))
        for layout in ("contiguous", "channel_last")
    ]
    cases += [base.with_(seqlen=seqlen, width=8) for seqlen in (1, 2, 6, 7, 8)]
    vectors = base.with_(dim=20, layout="channel_last")  # vectors of 2 or 4 channels
    cases += [
        vectors.with_(width=width, dtype=dtype, states=states)
        for width in (1, 3, 4, 5, 8)
        for dtype, states in itertools.product((F32, HALF, BF16), (False, True))
    ]
    for width, dtype in itertools.product((3, 4), (HALF, BF16)):
        cases.append(base.with_(width=width, dtype=dtype))
        cases.append(vectors.with_(width=width, dtype=dtype, seq_idx=True, states=False))
    for layout in LAYOUTS:
        changed = base.with_(layout=layout, seqlen=130)
        cases += [changed, changed.with_(dtype=BF16), changed.with_(dtype=HALF, dim=64)]
        cases.append(changed.with_(seq_idx=True, states=False))
        cases.append(changed.with_(batch=1, cu_seqlens=(0, 3, 3, 64, 65, 130)))
    cases += [
        base.with_(dtype=x, weight_dtype=weight, state_dtype=states, layout=layout)
        for x, weight, states in (
            (BF16, BF16, BF16),
            (HALF, F32, HALF),
            (F32, BF16, HALF),
            (F64, F64, F64),
            (BF16, F64, F32),
            (F32, F32, F64),
        )
        for layout in ("contiguous", "channel_last")
    ]
    packed = base.with_(batch=1)
    cases += [
        packed.with_(cu_seqlens=bounds, width=width)
        for bounds in ((0, 70), (0, 0, 70, 70), (5, 6, 8, 40, 60), (0,), (70, 70, 70))
        for width in (2, 5)
    ]
    cases += [base.with_(seq_idx=True, states=False, width=width) for width in (1, 2, 8)]
    cases += [base.with_(cotangents=names) for names in (("out",), ("final_states",))]
    cases.append(packed.with_(cu_seqlens=(0, 30, 70), cotangents=("final_states",)))
    cases.append(packed.with_(dim=3, seqlen=5, activation=None, cu_seqlens=(0, 0, 5)))
    return list(dict.fromkeys(cases))


@pytest.mark.parametrize("case", case_list(), ids=str)
def test_matches_reference(case, device):
    check(case, device)


def test_agrees_with_torchs_convolution(device):
    x, weight, bias = (torch.randn(shape, device=device) for shape in ((2, 9, 50), (9, 5), (9,)))
    expected = F.conv1d(F.pad(x, (4, 0)), weight[:, None], bias, groups=9)
    torch.testing.assert_close(causal_conv1d_fn(x, weight, bias), expected)
    torch.testing.assert_close(causal_conv1d_ref(x, weight, bias), expected)


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
def test_calls_that_go_on_from_a_state_give_the_bits_of_one_call(layout, device):
    case = Case(layout=layout, seqlen=40)
    tensors = make(case, device).tensors
    x, state = tensors.pop("x"), tensors.pop("initial_states")
    options = {"return_final_states": True, "activation": "silu"}
    whole, last = causal_conv1d_fn(x, **tensors, initial_states=state, **options)
    outs = []
    for part in x.split([1, 2, 0, 20, 17], dim=2):
        out, state = causal_conv1d_fn(part, **tensors, initial_states=state, **options)
        outs.append(out)
    assert torch.equal(torch.cat(outs, 2), whole)
    assert torch.equal(state, last)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_final_states_are_written_to_a_given_tensor(dtype, device):
    case = Case(seqlen=9)
    tensors = make(case, device).tensors
    expected = causal_conv1d_fn(**tensors, return_final_states=True)[1]
    for conv in (causal_conv1d_fn, causal_conv1d_ref):
        memory = torch.zeros(2, 3, 21, dtype=dtype, device=device).transpose(1, 2)
        given = memory.clone()
        _, final = conv(**tensors, return_final_states=True, final_states_out=given)
        assert final is given
        torch.testing.assert_close(given, expected.to(dtype))
        weight = torch.rand_like(given)
        gradient = torch.autograd.grad((given * weight).sum(), tensors["x"])[0]
        torch.testing.assert_close(gradient[..., -3:], weight.float())


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_gradient_of_x_is_written_to_given_memory(dtype, layout, device):
    """The gradient can be written to one half of a wider row, whose other half is unchanged."""
    case = Case(dtype=dtype, layout=layout)
    x, weight, bias, initial = (tensor.detach() for tensor in make(case, device).tensors.values())
    dout = torch.randn_like(x)
    arguments = (dout, None, x, weight, bias, None, None, initial, "silu")
    ops = torch.ops.selective_scan
    dx, *expected = ops.causal_conv1d_bwd(*arguments)
    row = torch.full((case.batch, case.seqlen, 2 * case.dim), 7.0, dtype=dtype, device=device)
    half = row[..., case.dim :].transpose(1, 2)
    torch.testing.assert_close(ops.causal_conv1d_bwd_out(*arguments, dx=half), tuple(expected))
    torch.testing.assert_close(half, dx)
    assert (row[..., : case.dim] == 7).all()
    with pytest.raises(RuntimeError, match=r"selective_scan: dx must have the shape of x, "):
        ops.causal_conv1d_bwd_out(*arguments, dx=half[..., 1:])


# --- neighbors, bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_what_a_channel_holds_changes_no_bit_of_another(value, layout, device):
    clean, broken = (make(Case(layout=layout), device) for _ in range(2))
    with torch.no_grad():
        broken.tensors["x"][:, 5, 20] = value
        broken.tensors["weight"][7] = value
    expected, actual = map(run_kernels, (clean, broken))
    others = [channel for channel in range(21) if channel not in (5, 7)]
    for name, one in actual.items():
        other = expected[name]
        along = 0 if one.shape[0] == 21 else 1
        one, other = (tensor.movedim(along, 0)[others] for tensor in (one, other))
        assert torch.equal(one, other), name


@pytest.mark.parametrize("by", ["cu_seqlens", "seq_idx"])
@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
def test_what_a_sequence_holds_changes_no_bit_of_another(layout, by, device):
    case = Case(batch=1, layout=layout, cu_seqlens=(0, 20, 40, 70))
    case = case.with_(seq_idx=by == "seq_idx", states=by == "cu_seqlens")
    problems = [make(case, device) for _ in range(2)]
    with torch.no_grad():
        problems[1].tensors["x"][..., 20:40] = torch.nan
        problems[1].cotangents["out"][..., 20:40] = torch.inf
    expected, actual = map(run_kernels, problems)
    others = [*range(20), *range(40, 70)]
    for name in ("out", "dx"):
        assert torch.equal(actual[name][..., others], expected[name][..., others]), name
    if by == "cu_seqlens":
        for name in ("final_states", "dinitial_states"):
            assert torch.equal(actual[name][[0, 2]], expected[name][[0, 2]]), name


@pytest.mark.parametrize("bounds", [(0, 5, 4), (-1, 6), (0, 7), (9, -9, 9, 2**40)])
def test_boundaries_that_do_not_rise_do_no_harm(bounds, cuda_device):
    x, weight = (tensor.to(cuda_device) for tensor in (ones(1, 4, 6), ones(4, 3)))
    cu_seqlens = torch.tensor(bounds, device=cuda_device)
    out, final = causal_conv1d_fn(
        x, weight, cu_seqlens=cu_seqlens, return_final_states=True, activation="silu"
    )
    assert out.isfinite().all()
    assert final.isfinite().all()


BIG = [
    Case(dim=700, seqlen=600, layout="channel_last"),
    Case(dim=40, seqlen=3000, dtype=BF16),
    Case(batch=1, seqlen=3000, cu_seqlens=(0, 1000, 1001, 2500)),
]


@pytest.mark.parametrize("case", BIG, ids=str)
def test_large_problems_match_the_reference(case, device):
    check(case, device)


# So many channels and steps that each thread of a GPU has many steps.
MANY_STEPS = Case(dim=1024, seqlen=2100, layout="channel_last")


@pytest.mark.parametrize(
    "case",
    [
        MANY_STEPS.with_(dtype=dtype, states=states, width=width)
        for dtype in (F32, BF16)
        for states, width in ((False, 3), (False, 4), (False, 7), (True, 4))
    ],
    ids=str,
)
def test_threads_of_many_steps_match_the_reference(case, cuda_device):
    check(case, cuda_device)


# --- derivatives and ops --------------------------------------------------------------------------

SMALL = Case(batch=2, dim=3, seqlen=5, dtype=F64, weight_dtype=F64, state_dtype=F64)
SMALL_CASES = [
    SMALL,
    SMALL.with_(activation=None, bias=False, states=False),
    SMALL.with_(width=1),
    SMALL.with_(width=8, layout="channel_last"),
    SMALL.with_(seq_idx=True, states=False),
    SMALL.with_(batch=1, cu_seqlens=(0, 1, 1, 5)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
def test_opcheck(case, device):
    problem = make(case, device)
    ops = torch.ops.selective_scan
    given = problem.tensors | problem.options
    torch.library.opcheck(ops.causal_conv1d_fwd, in_order(ops.causal_conv1d_fwd, given))
    given = detached(problem.tensors) | problem.options
    given |= {f"d{name}": cotangent for name, cotangent in problem.cotangents.items()}
    arguments = in_order(ops.causal_conv1d_bwd, given)
    torch.library.opcheck(ops.causal_conv1d_bwd, arguments)
    dx = {"dx": torch.empty_like(given["x"])}
    torch.library.opcheck(ops.causal_conv1d_bwd_out, arguments, dx)


def test_compiled_code_writes_final_states(device):
    def function(x, weight, out):
        return causal_conv1d_fn(x, weight, None, None, None, True, out, activation="silu")

    leaves = [
        torch.randn(shape, device=device, requires_grad=True) for shape in ((2, 4, 9), (4, 4))
    ]
    out = torch.zeros(2, 4, 3, device=device)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(*leaves, out), function(*leaves, out.clone())
    torch.testing.assert_close(actual, expected)
    assert torch.equal(out, expected[1])
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum(), leaves) for y, _ in (actual, expected))
    )


def test_the_reference_makes_tensors_where_x_is(device):
    """The reference creates its tensors on the device of x, not on the default device."""
    x, weight = torch.randn(1, 2, 6, device=device), torch.randn(2, 3, device=device)
    cu_seqlens = torch.tensor([0, 2, 6], device=device)
    with torch.device("meta"):
        out = causal_conv1d_ref(x, weight, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(out, causal_conv1d_ref(x, weight, cu_seqlens=cu_seqlens))
