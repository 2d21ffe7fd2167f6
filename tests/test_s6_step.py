"""A step through a stack of layers: against the reference in fp64, and independence of its bits."""

import re
from dataclasses import dataclass

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accuracy import Error, assert_same_bits
from cases import Axes
from in_place import in_float64
from problem import METHODS, generator
from s6_step import s6_step, s6_step_ref
from selective_scan._s6_step import StackTensors

pytestmark = pytest.mark.usefixtures("step_kernel")

F32, F64, HALF, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
# The error that arithmetic alone may cause, relative in the Euclidean norm.
ARITHMETIC = {F32: 5e-6, F64: 1e-13}
# A GPU's kernels round activations between parts to the dtype of the weights.
ROUNDED = {BF16: 2e-2, HALF: 2e-3}


@dataclass(frozen=True)
class Case(Axes):
    """One call. The defaults are the base case, and a test changes one axis at a time."""

    batch: int = 2
    steps: int = 1
    layers: int = 2
    d_model: int = 32
    d_inner: int = 64
    dstate: int = 16
    rank: int = 2
    width: int = 4
    hidden: torch.dtype = F32
    weights: torch.dtype = F32
    vectors: torch.dtype = F32  # norms, biases, A_log and D
    states: torch.dtype = F32
    biases: tuple[str, ...] = ("conv1d", "dt_proj")
    has_norms: bool = True
    has_norm_f: bool = True
    vocabulary: int = 0
    slots: int = 0  # of a pool; 0: every row has its own slot
    padding: int = 0  # rows that are padding
    indices: torch.dtype = torch.int64
    softplus: bool = True
    method: str = "zoh"
    inner_eps: float = -1.0

    @property
    def compute_dtype(self) -> torch.dtype:
        return F64 if F64 in (self.hidden, self.weights, self.vectors, self.states) else F32


def make(case: Case, device: str = "cpu") -> dict:
    """Returns the arguments of a call, all of whose layers affect its result."""
    random = generator(str(case))
    inner, projected = case.d_inner, case.rank + 2 * case.dstate

    def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0, mean: float = 0.0):
        value = mean + scale * torch.randn(shape, generator=random, dtype=F64)
        return value.to(device, dtype)

    def of_layers(*shape: int, dtype: torch.dtype = case.vectors, **options) -> list:
        return [normal(*shape, dtype=dtype, **options) for _ in range(case.layers)]

    def matrices(rows: int, columns: int) -> list:
        return of_layers(rows, columns, dtype=case.weights, scale=max(columns, 1) ** -0.5)

    def biases(name: str, rows: int, **options) -> list | None:
        return of_layers(rows, **options) if name in case.biases else None

    slots = case.slots or case.batch
    # With negative steps states would grow exponentially, and any error with them.
    delta = {"mean": -1.0} if case.softplus else {"mean": 1.0, "scale": 0.2}
    stack = StackTensors(
        norm=of_layers(case.d_model, mean=1.0, scale=0.2) if case.has_norms else None,
        in_proj=matrices(2 * inner, case.d_model),
        in_proj_bias=biases("in_proj", 2 * inner, scale=0.3),
        conv1d=of_layers(inner, 1, case.width, dtype=case.weights, scale=0.5),
        conv1d_bias=biases("conv1d", inner, scale=0.3),
        x_proj=matrices(projected, inner),
        dt_proj=matrices(inner, case.rank),
        dt_proj_bias=biases("dt_proj", inner, **delta),
        A_log=of_layers(inner, case.dstate, scale=0.5),
        D=of_layers(inner),
        out_proj=matrices(case.d_model, inner),
        out_proj_bias=biases("out_proj", case.d_model, scale=0.3),
        # As in a cache, channels are contiguous.
        conv_state=[
            state.transpose(1, 2)
            for state in of_layers(slots, case.width - 1, inner, dtype=case.states)
        ],
        state=of_layers(slots, inner, case.dstate, dtype=case.states),
    )
    indices = None
    if case.slots:
        indices = torch.randperm(slots, generator=random)[: case.batch]
        indices[torch.randperm(case.batch, generator=random)[: case.padding]] = -1
        indices = indices.to(device, case.indices)
    head = normal(case.vocabulary, case.d_model, dtype=case.weights) if case.vocabulary else None
    return {
        "hidden": normal(case.batch, case.steps, case.d_model, dtype=case.hidden),
        "stack": stack,
        "norm_f": normal(case.d_model, dtype=case.vectors, mean=1.0) if case.has_norm_f else None,
        "head": head,
        "state_batch_indices": indices,
        "delta_softplus": case.softplus,
        "discretization_method": case.method,
        "inner_eps": case.inner_eps,
    }


def copy_of(arguments: dict) -> dict:
    """Returns the arguments with separate states."""
    states = {
        name: [tensor.clone() for tensor in getattr(arguments["stack"], name)]
        for name in ("conv_state", "state")
    }
    return arguments | {"stack": arguments["stack"]._replace(**states)}


def exact(arguments: dict) -> dict:
    """Returns the arguments on the CPU in fp64."""
    stack = StackTensors(*([in_float64(x) for x in part or ()] for part in arguments["stack"]))
    return {name: in_float64(value) for name, value in arguments.items()} | {"stack": stack}


def states_of(arguments: dict) -> list[torch.Tensor]:
    return [*arguments["stack"].conv_state, *arguments["stack"].state]


def check(case: Case, device: str) -> None:
    """Asserts that out and states are within arithmetic and one rounding of the fp64 reference."""
    arguments = make(case, device)
    wanted = exact(arguments)
    expected = s6_step_ref(**wanted)
    before = [state.clone() for state in states_of(arguments)]
    out = s6_step(**arguments)
    assert out.dtype == (case.weights if case.vocabulary else case.hidden)
    arithmetic = ARITHMETIC[case.compute_dtype] + (ROUNDED.get(case.weights, 0) * (device != "cpu"))
    pairs = [(out, expected), *zip(states_of(arguments), states_of(wanted), strict=True)]
    for i, (actual, exact_result) in enumerate(pairs):
        assert actual.shape == exact_result.shape
        if actual.numel() > 0:
            error = Error.of(actual.cpu().to(F64), exact_result)
            assert error.relative_l2 < arithmetic + torch.finfo(actual.dtype).eps, f"{i}: {error}"
    if case.slots:
        used = arguments["state_batch_indices"].cpu()
        assert not out.cpu()[used < 0].any()
        is_idle = torch.ones(case.slots, dtype=torch.bool)
        is_idle[used[used >= 0].long()] = False
        for actual, old in zip(states_of(arguments), before, strict=True):
            assert torch.equal(actual.cpu()[is_idle], old.cpu()[is_idle])


# --- against the reference ------------------------------------------------------------------------

BASE = Case()
CASES = [
    BASE,
    *(BASE.with_(method=method) for method in METHODS[1:]), BASE.with_(softplus=False),
    *(BASE.with_(batch=batch, steps=steps) for batch, steps in ((1, 8), (3, 2), (7, 1), (16, 1))),
    *(BASE.with_(hidden=t, weights=t, vectors=t) for t in (BF16, HALF)),
    BASE.with_(hidden=BF16, weights=BF16, states=BF16),
    BASE.with_(hidden=HALF, weights=HALF, vectors=BF16, states=HALF, steps=3),
    BASE.with_(width=1), BASE.with_(width=2, steps=4), BASE.with_(width=8, steps=3),
    BASE.with_(dstate=1), BASE.with_(dstate=5, rank=3), BASE.with_(dstate=64, rank=1),
    BASE.with_(biases=()), BASE.with_(biases=("in_proj", "conv1d", "dt_proj", "out_proj")),
    BASE.with_(layers=1, has_norms=False, has_norm_f=False), BASE.with_(has_norm_f=False),
    BASE.with_(layers=3, has_norms=False), BASE.with_(layers=1, has_norms=False, vocabulary=9),
    BASE.with_(vocabulary=51), BASE.with_(vocabulary=300, has_norm_f=False, batch=3, steps=2),
    BASE.with_(vocabulary=40, hidden=F32, weights=BF16),
    BASE.with_(batch=5, slots=9, padding=2, indices=torch.int32, steps=2),
    BASE.with_(batch=3, slots=4, padding=3, vocabulary=9),
    BASE.with_(layers=5, d_model=96, d_inner=160),
    BASE.with_(d_model=208, d_inner=1616, rank=13, vocabulary=5, batch=3, steps=3),
    *(BASE.with_(d_model=784, d_inner=2096, weights=t, biases=("in_proj", "out_proj"), batch=rows)
      for t in (BF16, HALF) for rows in (1, 7, 16)),
    BASE.with_(dstate=50, rank=32, batch=2, steps=3, slots=5, padding=1),
    # Lanes that take several states in turn, or several pairs of entries.
    BASE.with_(dstate=50, batch=8), BASE.with_(dstate=33, batch=15, slots=20, padding=4),
    # Norms of dt, B and C.
    *(BASE.with_(inner_eps=0.1, batch=batch, steps=steps, rank=rank, dstate=n)
      for batch, steps, rank, n in ((1, 1, 2, 16), (2, 3, 13, 5), (16, 1, 40, 1), (5, 1, 1, 64))),
    *(BASE.with_(inner_eps=1e-6, hidden=t, weights=t, vectors=t) for t in (BF16, HALF)),
    BASE.with_(inner_eps=0.0, layers=3, has_norms=False, vocabulary=9, slots=4, padding=1),
]  # fmt: skip
# Cases that the GPU's kernel does not take.
CPU_CASES = [
    *(BASE.with_(method=method, hidden=F64, weights=F64, vectors=F64, states=F64)
      for method in METHODS),
    BASE.with_(states=F64), BASE.with_(vectors=F64, weights=BF16), BASE.with_(hidden=F64),
    BASE.with_(d_model=24, d_inner=40, dstate=5, rank=3, batch=3, width=3),
    BASE.with_(d_model=7, d_inner=9, dstate=3, rank=1, batch=2, steps=3, vocabulary=5,
               biases=("in_proj", "conv1d", "dt_proj", "out_proj"), weights=BF16),
    BASE.with_(d_model=1, d_inner=1, dstate=1, rank=1, batch=1, weights=HALF),
    BASE.with_(inner_eps=0.1, hidden=F64, weights=F64, vectors=F64, states=F64),
    BASE.with_(inner_eps=0.1, d_model=7, d_inner=9, dstate=3, rank=1, batch=33),
    BASE.with_(batch=64), BASE.with_(batch=8, steps=8, weights=BF16), BASE.with_(batch=9, steps=11),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_reference(case, device):
    check(case, device)


@pytest.mark.parametrize("case", CPU_CASES, ids=str)
def test_on_a_cpu_any_sizes_against_the_reference(case):
    check(case, "cpu")


@pytest.mark.parametrize("case", [BASE.with_(batch=0), BASE.with_(steps=0)], ids=str)
@pytest.mark.parametrize("function", [s6_step, s6_step_ref])
def test_nothing_of_no_steps(function, case, device):
    arguments = make(case, device)
    before = copy_of(arguments)
    assert function(**arguments).shape == (case.batch, case.steps, case.d_model)
    assert_same_bits(states_of(arguments), states_of(before))


def test_any_strides(device):
    arguments = make(BASE.with_(batch=3, steps=2), device)
    other = copy_of(arguments)
    stack = other["stack"]
    other["hidden"] = other["hidden"].transpose(0, 2).contiguous().transpose(0, 2)
    other["stack"] = stack._replace(
        in_proj=[weight.T.contiguous().T for weight in stack.in_proj],
        D=[D.repeat_interleave(2)[::2] for D in stack.D],
        conv_state=[state.contiguous() for state in stack.conv_state],
        state=[state.transpose(0, 2).contiguous().transpose(0, 2) for state in stack.state],
    )
    assert torch.equal(s6_step(**other), s6_step(**arguments))
    assert_same_bits(states_of(other), states_of(arguments))


# --- independence of bits -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        BASE.with_(batch=7, steps=2, vocabulary=30),
        BASE.with_(batch=13, weights=BF16, hidden=BF16),
        BASE.with_(batch=3, steps=5, dstate=5, weights=HALF),
    ],
    ids=str,
)
def test_a_row_has_the_bits_that_it_has_alone(case, device):
    arguments = make(case, device)
    before = copy_of(arguments)
    out = s6_step(**arguments)
    for row in range(case.batch):
        alone = {name: [t[row : row + 1] for t in getattr(before["stack"], name)]
                 for name in ("conv_state", "state")}  # fmt: skip
        alone = before | {
            "hidden": before["hidden"][row : row + 1],
            "stack": before["stack"]._replace(**alone),
        }
        assert torch.equal(s6_step(**alone), out[row : row + 1])
    # The calls of single rows changed `before` in place.
    assert_same_bits(states_of(before), states_of(arguments))


def test_steps_together_have_the_bits_of_one_after_the_other(device):
    arguments = make(BASE.with_(batch=2, steps=7), device)
    other = copy_of(arguments)
    out = s6_step(**arguments)
    parts = [s6_step(**other | {"hidden": part}) for part in other["hidden"].split([1, 2, 1, 3], 1)]
    assert torch.equal(torch.cat(parts, 1), out)
    assert_same_bits(states_of(other), states_of(arguments))


LARGE = BASE.with_(d_model=200, d_inner=400, layers=3, vocabulary=700, rank=13)


def test_runs_agree_bit_by_bit(device):
    arguments = make(LARGE.with_(d_model=208, batch=3, steps=2), device)
    first = s6_step(**copy_of(arguments))
    for _ in range(4):
        assert torch.equal(s6_step(**copy_of(arguments)), first)


@pytest.mark.parametrize("neighbour", [float("nan"), float("inf"), 1e30])
def test_what_another_row_holds_changes_no_bit(neighbour, device):
    arguments = make(BASE.with_(batch=5), device)
    other = copy_of(arguments)
    other["hidden"] = other["hidden"].clone()
    other["hidden"][2] = neighbour
    for state in states_of(other):
        state[2] = neighbour
    rest = [0, 1, 3, 4]
    assert torch.equal(s6_step(**other)[rest], s6_step(**arguments)[rest])
    for state, expected in zip(states_of(other), states_of(arguments), strict=True):
        assert torch.equal(state[rest], expected[rest])


def test_a_workspace_changes_nothing(device):
    """Calls of several sizes and dtypes may use one workspace in turn."""
    workspace = torch.zeros(1 << 22, dtype=torch.uint8, device=device)
    if device == "cpu":
        workspace.random_(256)
    base = LARGE.with_(d_model=208)
    calls = [
        make(case, device)
        for case in (base, base.with_(batch=7, steps=2), BASE, base.with_(weights=BF16, batch=5))
    ]
    expected = [s6_step(**copy_of(arguments)) for arguments in calls]
    for _ in range(3):
        for arguments, out in zip(calls, expected, strict=True):
            assert torch.equal(s6_step(**copy_of(arguments), workspace=workspace), out)


def test_a_workspace_that_is_too_small():
    arguments = make(BASE.with_(d_model=512, d_inner=1024, batch=8))
    workspace = torch.empty(100, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"workspace must have at least \d+ bytes, got 100$"):
        s6_step(**arguments, workspace=workspace)


def test_weights_may_begin_anywhere(device):
    """Weights may be views of one flat tensor, as some loaders and optimizers create them."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=device)
        return flat[1:].view(tensor.shape).copy_(tensor)

    arguments = make(BASE.with_(vocabulary=9, weights=BF16), device)
    other = copy_of(arguments)
    names = ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj", "A_log", "norm", "D")
    lists = {name: [moved(x) for x in getattr(other["stack"], name)] for name in names}
    other |= {"stack": other["stack"]._replace(**lists), "head": moved(other["head"])}
    assert torch.equal(s6_step(**other), s6_step(**arguments))


def test_a_large_stream_does_not_overflow(device):
    """float16 holds at most 65504, but the norm scales the stream down before it is rounded."""
    case = BASE.with_(weights=HALF, vocabulary=9)
    arguments = make(case, device)
    arguments["hidden"] *= 1e5
    expected = s6_step_ref(**exact(arguments))
    assert Error.of(s6_step(**arguments).cpu().to(F64), expected).relative_l2 < 5e-3


def test_flops_are_two_for_each_weight(device):
    arguments = make(BASE.with_(vocabulary=6, layers=1, steps=3), device)
    weights = 128 * 32 + 64 * 4 + 34 * 64 + 64 * 2 + 32 * 64 + 6 * 32
    with FlopCounterMode(display=False) as counter:
        s6_step(**arguments)
    assert counter.get_total_flops() == 2 * 3 * (2 * weights + 7 * 64 * 16)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_workspace", [False, True])
@pytest.mark.parametrize(
    "case", [LARGE.with_(d_model=208, batch=3), BASE.with_(weights=BF16)], ids=str
)
def test_a_graph_goes_on_as_calls_do(case, has_workspace, cuda_device):
    """A graph continues token by token, although other calls use its workspace meanwhile."""
    arguments = make(case, cuda_device)
    if has_workspace:
        arguments["workspace"] = torch.zeros(1 << 20, dtype=torch.uint8, device=cuda_device)
    other = copy_of(arguments)
    s6_step(**copy_of(arguments))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = s6_step(**arguments)
    for _ in range(200):
        arguments["hidden"].normal_()
        graph.replay()
        assert torch.equal(captured, s6_step(**other))
    assert_same_bits(states_of(arguments), states_of(other))


def test_calls_on_several_streams(cuda_device):
    """Calls have separate memory, and two whose blocks hold the GPU do not wait for each other."""
    base = LARGE.with_(d_model=208)
    cases = [base, base.with_(weights=BF16, batch=5), BASE, BASE.with_(weights=HALF, steps=3)]
    calls = [make(case, cuda_device) for case in cases]
    expected = [[s6_step(**own) for _ in range(30)] for own in map(copy_of, calls)]
    outs, own = [[] for _ in calls], [*map(copy_of, calls)]
    busy = torch.randn(4096, 4096, device=cuda_device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            busy = torch.nn.functional.normalize(busy @ busy)
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(30):
        for stream, arguments, results in zip(streams, own, outs, strict=True):
            with torch.cuda.stream(stream):
                results.append(s6_step(**arguments))
    torch.cuda.synchronize()
    for results, wanted in zip(outs, expected, strict=True):
        assert all(map(torch.equal, results, wanted))


def test_a_device_that_is_not_current(cuda_device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with torch.cuda.device(0):
        check(BASE.with_(weights=BF16, vocabulary=9), "cuda:1")
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("size", ["d_model", "d_inner"])
def test_a_stack_without_channels_is_refused(size, device):
    with pytest.raises(RuntimeError, match=f"must have {size} of at least 1, got"):
        s6_step(**make(BASE.with_(**{size: 0}), device))


def test_it_does_not_synchronize(cuda_device):
    arguments = make(BASE.with_(slots=4, padding=1), cuda_device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        s6_step(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 17}, "batch*steps must be at most 16 on CUDA, got 17"),
        ({"d_model": 24}, "d_model must be a positive multiple of 16 on CUDA, got 24"),
        ({"d_inner": 40}, "d_inner must be a positive multiple of 16 on CUDA, got 40"),
        ({"layers": 129}, "layers must be at most 128 on CUDA, got 129"),
        ({"states": F64}, "all tensors must be of at most 4 bytes an element on CUDA, got 8"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take_changes_nothing(change, message, cuda_device):
    arguments = make(BASE.with_(**change), cuda_device)
    before = copy_of(arguments)
    with pytest.raises(RuntimeError, match=re.escape(f"selective_scan: {message}") + "$"):
        s6_step(**arguments)
    assert_same_bits(states_of(arguments), states_of(before))


def test_a_workspace_that_begins_elsewhere(cuda_device):
    workspace = torch.zeros(1 << 16, dtype=torch.uint8, device=cuda_device)[8:]
    with pytest.raises(RuntimeError, match=r"workspace must begin at a multiple of 16 bytes$"):
        s6_step(**make(BASE, cuda_device), workspace=workspace)
