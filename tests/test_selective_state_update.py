"""The state update: against the reference in fp64, against the scan, and what it leaves alone."""

from dataclasses import dataclass

import pytest
import torch

from accuracy import Error
from cases import Axes
from in_place import check_in_place
from problem import METHODS, Draws, counterpart, laid_out
from selective_scan import selective_scan_fn, selective_state_update, selective_state_update_ref
from selective_scan.selective_state_update import update_by_log

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128
HALF, BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case(Axes):
    """One call. The defaults are the base case, and a test changes one axis at a time."""

    batch: int = 3
    dim: int = 20
    dstate: int = 16
    heads: int | None = None
    steps: int | None = None
    groups: int | None = None
    method: str = "zoh"
    state: torch.dtype = F32
    x: torch.dtype = F32  # also of dt, z, B and C; B and C are complex if states are
    pole: torch.dtype = F32  # of A, D and dt_bias; A is complex if states are
    optional: tuple[str, ...] = ("D", "z", "dt_bias")
    dt_softplus: bool = True
    indices: torch.dtype | None = None  # None: every row has its own slot
    destinations: int = 0  # dimensions of dst_state_batch_indices
    layout: str = "contiguous"
    input_delta: torch.dtype | None = None  # None: the input has no separate step

    @property
    def compute_eps(self) -> float:
        return torch.finfo(
            F64 if {F64, C128} & {self.state, self.x, self.pole, self.input_delta} else F32
        ).eps


def make(case: Case, device: str) -> dict:
    """Returns the arguments by name. Poles are stable; without softplus steps are positive."""
    draws = Draws(case.with_(layout="contiguous"))
    normal, uniform, is_complex = draws.normal, draws.uniform, case.state.is_complex

    heads = () if case.heads is None else (case.heads,)
    steps = () if case.steps is None else (case.steps,)
    groups = () if case.groups is None else (case.groups,)
    slots = case.batch if case.indices is None and not case.destinations else 4 * case.batch + 8
    rows = (case.batch, *steps, *heads, case.dim)
    A = -uniform(0.2, 2.0, *heads, case.dim, case.dstate)
    if is_complex:
        A = torch.complex(A, uniform(-3.0, 3.0, *A.shape))
    dt = normal(*rows) - 1 if case.dt_softplus else uniform(0.05, 0.6, *rows)
    projections = [
        normal(case.batch, *steps, *groups, case.dstate, dtype=counterpart(case.x, is_complex))
        for _ in "BC"
    ]
    tensors = {
        "state": normal(slots, *heads, case.dim, case.dstate, dtype=case.state),
        "x": normal(*rows).to(case.x),
        "dt": dt.to(case.x),
        "A": A.to(counterpart(case.pole, is_complex)),
        "B": projections[0],
        "C": projections[1],
        "D": normal(*heads, case.dim).to(case.pole),
        "z": normal(*rows).to(case.x),
        "dt_bias": uniform(0.0, 0.3, *heads, case.dim).to(case.pole),
        "input_delta": None if case.input_delta is None else normal(*rows).to(case.input_delta),
    }
    for name in {"D", "z", "dt_bias"} - set(case.optional):
        tensors[name] = None
    arguments = laid_out(tensors, case.layout, device, vectors=False, requires_grad=False)
    if case.layout == "expanded":
        arguments["state"] = tensors["state"].to(device)
    arguments["dt_softplus"] = case.dt_softplus
    arguments["discretization_method"] = case.method
    order = torch.randperm(slots, generator=draws.generator)
    if case.indices is not None or case.destinations:
        indices = order[: case.batch].to(case.indices or torch.int64)
        if case.batch > 1:
            indices[1] = -1
        arguments["state_batch_indices"] = indices.to(device)
    if case.destinations:
        shape = (case.batch,) if case.destinations == 1 else (case.batch, case.steps or 1)
        count = torch.Size(shape).numel()
        chosen = order[case.batch : case.batch + count].view(shape).clone()
        chosen.view(-1)[-1] = slots + 1  # padding by pad_slot_id
        arguments["dst_state_batch_indices"] = chosen.to(case.indices or torch.int64).to(device)
        arguments["pad_slot_id"] = slots + 1
    return arguments


def check(case: Case, device: str, **changes) -> None:
    arguments = make(case, device) | changes
    out, is_untouched = check_in_place(
        selective_state_update, selective_state_update_ref, arguments, "state", 8 * case.compute_eps
    )
    assert (out.shape, out.dtype) == (arguments["x"].shape, case.x)
    if case.layout in ("contiguous", "dim_first"):
        assert out.stride() == arguments["x"].stride()
    if case.indices is not None:
        assert is_untouched.any()
        assert not is_untouched.all()


def case_list():
    base = Case()
    complex_base = Case(state=C64)
    heads = Case(heads=6, dim=7, dstate=24, groups=3)
    steps = Case(steps=3, groups=2, indices=torch.int32, destinations=2)
    cases = [
        base.with_(method=method, state=state, steps=steps)
        for method in METHODS
        for state in (F32, C64)
        for steps in (None, 2)
    ]
    cases += [base.with_(state=dtype) for dtype in (BF16, HALF, F64)]
    cases += [base.with_(x=dtype, state=state) for dtype in (BF16, HALF) for state in (BF16, HALF)]
    cases += [base.with_(x=F64), base.with_(pole=F64), complex_base.with_(state=C128)]
    cases += [complex_base.with_(x=F64), base.with_(x=BF16, state=F64)]
    cases += [base.with_(dstate=n, state=s) for n in (1, 2, 5, 17, 64, 200) for s in (F32, BF16)]
    cases += [complex_base.with_(dstate=n) for n in (1, 3, 8, 16, 40)]
    cases += [base.with_(dstate=200, state=s, method=m) for s in (F64, C64, C128) for m in METHODS]
    # Many rows with few channels: terms may cancel in one output, but hardly in all of them.
    cases += [base.with_(batch=64, dim=n, state=s) for n in (1, 2) for s in (F32, HALF)]
    cases += [base.with_(dim=n, state=s) for n in (33, 300) for s in (F32, HALF)]
    cases += [base.with_(batch=1, dim=1536, x=BF16), base.with_(batch=70, dim=48)]
    # A GPU's blocks have several rows each, the last one fewer.
    cases += [
        base.with_(batch=45, dim=1000, x=BF16, state=dtype, indices=torch.int64, destinations=1)
        for dtype in (F32, BF16)
    ]
    # Cases for a GPU's kernel of fixed sizes, with nothing absent.
    full = base.with_(dim=64)
    kinds = [(F32, F32), (F32, BF16), (BF16, BF16), (F32, HALF), (HALF, HALF)]
    cases += [full.with_(state=state, x=dtype) for state, dtype in kinds]
    cases += [full.with_(method=method, state=BF16, x=BF16) for method in METHODS]
    cases += [full.with_(indices=dtype) for dtype in (torch.int32, torch.int64)]
    cases += [full.with_(heads=4, dim=32, x=BF16), full.with_(batch=1, indices=torch.int32)]
    cases += [heads, heads.with_(state=BF16, x=BF16), heads.with_(state=C64), heads.with_(steps=4)]
    cases += [Case(heads=4, dim=64, dstate=128, x=BF16, state=s) for s in (BF16, F32)]
    cases += [base.with_(groups=n) for n in (1, 4, 20)] + [complex_base.with_(groups=5, steps=3)]
    cases += [steps, steps.with_(state=BF16), steps.with_(state=C64), steps.with_(heads=4, dim=8)]
    cases += [steps.with_(destinations=n, indices=torch.int64) for n in (0, 1)]
    cases += [base.with_(indices=torch.int32), base.with_(destinations=1), base.with_(steps=1)]
    cases += [base.with_(destinations=2), base.with_(steps=40, dim=3, state=HALF)]
    cases += [base.with_(optional=names) for names in ((), ("D",), ("dt_bias",), ("z",))]
    cases += [base.with_(dt_softplus=False)]
    for start in (full, complex_base, steps, heads, base.with_(layout="offset", x=BF16)):
        cases += [start.with_(method=method, input_delta=F32) for method in METHODS]
        cases += [start.with_(input_delta=dtype) for dtype in (BF16, F64)]
    for layout in ("dim_first", "sliced", "offset", "expanded", "channel_last"):
        for start in (base, heads.with_(steps=2), complex_base, base.with_(state=BF16, x=BF16)):
            cases.append(start.with_(layout=layout))
    return list(dict.fromkeys(cases))


@pytest.mark.parametrize("case", case_list(), ids=str)
def test_matches_reference(case, device):
    check(case, device)


@pytest.mark.parametrize("parameter", [F32, BF16, None], ids=["single", "input", "mixed"])
@pytest.mark.parametrize("state", [F32, BF16])
@pytest.mark.parametrize("batch", [1, 5])
def test_as_a_layer_calls_it(batch, state, parameter, device):
    """z, B and C are slices of projections' results; D and dt_bias have the weights' dtype."""
    case = Case(batch=batch, dim=64, state=state, x=BF16, indices=torch.int32)
    arguments = make(case, device)
    rows = torch.randn(batch, 80, dtype=BF16, device=device)
    changes = {
        "z": torch.randn(batch, 128, dtype=BF16, device=device)[:, 64:],
        "B": rows[:, 48:64],
        "C": rows[:, 64:],
        "D": arguments["D"].to(parameter or F32),
        "dt_bias": arguments["dt_bias"].to(parameter or BF16),
    }
    check(case, device, **changes)


@pytest.mark.parametrize("x", [F32, BF16, HALF])
@pytest.mark.parametrize("pole", [F32, BF16, HALF, F64])
@pytest.mark.parametrize("dim", [20, 64])
@pytest.mark.parametrize("steps", [None, 2])
def test_poles_by_their_logarithm(steps, dim, pole, x, device):
    """Layers pass A_log, and kernels compute A = −exp(A_log) when they read it."""
    case = Case(dim=dim, steps=steps, x=x, pole=F64 if pole == F64 else F32)
    given = make(case, device)
    A_log = (-given["A"]).log().to(pole)
    exact = given | {"A": -A_log.double().exp().to(case.pole)}
    state = given["state"]
    expected_state = state.clone()
    names = ("B", "C", "D", "z", "dt_bias", "dt_softplus")
    out = update_by_log(
        *(given[name] for name in ("state", "x", "dt")),
        A_log,
        *(given[name] for name in names),
        discretization_method=case.method,
    )
    expected = selective_state_update_ref(**exact | {"state": expected_state})
    allowed = 8 * case.compute_eps
    rounding = 0 if x == F32 else torch.finfo(x).eps
    assert Error.of(out.double(), expected.double()).relative_l2 < allowed + rounding
    assert Error.of(state.double(), expected_state.double()).relative_l2 < allowed


def test_poles_by_their_logarithm_are_real(device):
    arguments = make(Case(state=C64), device)
    tensors = [arguments[name] for name in ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")]
    message = "A must have dtype float32, float16, bfloat16 or float64"
    with pytest.raises(RuntimeError, match=message):
        update_by_log(*tensors, True, discretization_method="zoh")


@pytest.mark.parametrize("has_own_steps", [False, True], ids=["", "input_delta"])
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("method", METHODS)
def test_steps_give_what_the_scan_gives(method, is_complex, has_own_steps, device):
    """Single steps, and several at a time, continue from a scan of the first steps."""
    batch, dim, dstate, seqlen, first = 2, 18, 16, 12, 5
    pole = C64 if is_complex else F32
    u, dt, z = torch.randn(3, batch, dim, seqlen, device=device)
    A = -torch.rand(dim, dstate, dtype=pole, device=device) - 0.1
    B, C = torch.randn(2, batch, 2, dstate, seqlen, dtype=pole, device=device)
    D, bias = torch.randn(2, dim, device=device)
    own_steps = torch.randn(batch, dim, seqlen, device=device) if has_own_steps else None
    options = {"discretization_method": method}

    def input_delta(steps):
        return {"input_delta": own_steps[..., steps]} if has_own_steps else {}

    def scan(steps):
        return selective_scan_fn(
            u[..., steps], dt[..., steps], A, B[..., steps], C[..., steps], D, z[..., steps], bias,
            True, True, **options, **input_delta(steps),
        )  # fmt: skip

    expected, last_state = scan(slice(None))
    for width in (1, 3):
        _, state = scan(slice(first))
        for begin in range(first, seqlen, width):
            part = slice(begin, begin + width)
            x_t, dt_t, z_t = (tensor[..., part].movedim(-1, 1) for tensor in (u, dt, z))
            B_t, C_t = (tensor[..., part].movedim(-1, 1) for tensor in (B, C))
            own = {name: steps.movedim(-1, 1) for name, steps in input_delta(part).items()}
            out = selective_state_update(
                state, x_t, dt_t, A, B_t, C_t, D, z_t, bias, True, **options, **own
            )
            error = Error.of(out.movedim(1, -1).cpu(), expected[..., part].cpu())
            assert error.relative_l2 < 2e-6, (width, begin, error)
        assert Error.of(state.cpu(), last_state.cpu()).relative_l2 < 2e-6


@pytest.mark.parametrize("steps", [None, 2])
def test_a_pool_without_slots_serves_padding(steps, device):
    shape = (3, 4) if steps is None else (3, steps, 4)
    x, B = (torch.ones(*shape[:-1], size, device=device) for size in (4, 5))
    A = -torch.ones(4, 5, device=device)
    padding = torch.full((3,), -1, device=device)
    for function in (selective_state_update, selective_state_update_ref):
        state = torch.zeros(0, 4, 5, device=device)
        out = function(state, x, x, A, B, B, state_batch_indices=padding)
        assert torch.equal(out, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [F32, HALF, C64])
def test_every_step_can_be_gone_back_to(dtype, device):
    """Each step's destination holds the state that a call of the steps so far leaves."""
    steps = 4
    arguments = make(Case(batch=2, steps=steps, state=dtype), device)
    pool = torch.zeros(12, 20, 16, dtype=dtype, device=device)
    pool[:2] = arguments["state"]
    destinations = torch.tensor([[4, 5, 6, 7], [8, -1, 10, 1]], device=device)
    changes = {
        "state": pool,
        "state_batch_indices": torch.tensor([0, 1], device=device, dtype=torch.int32),
        "dst_state_batch_indices": destinations,
    }
    out = selective_state_update(**(arguments | changes))
    assert torch.equal(pool[0], arguments["state"][0])
    assert not pool[[2, 3, 9, 11]].any()
    for count in range(1, steps + 1):
        state = arguments["state"].clone()
        parts = {name: arguments[name][:, :count] for name in ("x", "dt", "z", "B", "C")}
        prefix = selective_state_update(**(arguments | parts | {"state": state}))
        assert Error.of(out[:, :count].cpu(), prefix.cpu()).relative_l2 < 1e-6
        for row in range(2):
            if destinations[row, count - 1] >= 0:
                kept = pool[destinations[row, count - 1]]
                assert (
                    Error.of(kept.cpu(), state[row].cpu()).relative_l2
                    < 1e-6 + torch.finfo(dtype).eps / 8
                )


def test_values_per_head_by_strides_of_0(device):
    """A, dt, D and dt_bias have one value per head, as in Mamba-2, and all rows share B."""
    case = Case(heads=6, dim=10, groups=2, dstate=32)
    arguments = make(case, device)
    small = {
        "A": arguments["A"][:, :1, :1].expand(6, 10, 32),
        "dt": arguments["dt"][..., :1].expand(3, 6, 10),
        "D": arguments["D"][:, :1].expand(6, 10),
        "dt_bias": arguments["dt_bias"][:, :1].expand(6, 10),
        "B": arguments["B"][:1].expand(3, 2, 32),
    }
    results = []
    for given in (small, {name: value.contiguous() for name, value in small.items()}):
        state = arguments["state"].clone()
        results.append((selective_state_update(**(arguments | given | {"state": state})), state))
    for actual, expected in zip(*results, strict=True):
        assert Error.of(actual.cpu(), expected.cpu()).relative_l2 < 1e-6


@pytest.mark.parametrize("function", [selective_state_update, selective_state_update_ref])
def test_a_state_of_no_rows_may_have_strides_of_0(function, device):
    """An empty state has no elements that share memory."""
    arguments = make(Case(), device)
    for name in ("state", "x", "dt", "B", "C", "z"):
        arguments[name] = arguments[name][:0]
    arguments["state"] = arguments["state"][..., :1].expand(*arguments["state"].shape)
    assert arguments["state"].stride(-1) == 0
    assert function(**arguments).shape == arguments["x"].shape


@pytest.mark.parametrize("function", [selective_state_update, selective_state_update_ref])
def test_a_state_that_memory_holds_otherwise_is_refused(function, device):
    """PyTorch passes an op a copy of such views, and fails if the op changes it."""
    state = torch.zeros(3, 20, 16, dtype=C64, device=device)
    x, dt = torch.rand(2, 3, 20, device=device)
    B, C = torch.randn(2, 3, 16, dtype=C64, device=device)
    A = torch.randn(20, 16, dtype=C64, device=device)
    function(state, x, dt, A.conj(), B.conj(), C)
    with pytest.raises(RuntimeError, match="state must have no conjugate bit, got a view"):
        function(state.conj(), x, dt, A, B, C)
    with pytest.raises(RuntimeError, match="state must have no negative bit, got a view"):
        function(state.conj().imag, x, dt, A.real, B.real, C.real)
    out = torch.zeros(3, 20, dtype=C64, device=device).conj().imag
    with pytest.raises(RuntimeError, match="out must have no negative bit, got a view"):
        function(state, x, dt, A, B, C, out=out)


def test_rows_are_independent(device):
    """A row's result has the bits that it has alone, whatever the values of the others."""
    case = Case(batch=9, dim=130, state=BF16, x=BF16)
    arguments = make(case, device)
    for name in ("state", "x"):
        arguments[name][4] = torch.nan
    single = {name: arguments[name][2:3].clone() for name in ("state", "x", "dt", "z", "B", "C")}
    alone = selective_state_update(**(arguments | single))
    out = selective_state_update(**arguments)
    assert torch.equal(out[2:3], alone)
    assert torch.equal(arguments["state"][2:3], single["state"])
    assert out[5:].isfinite().all()


@pytest.mark.parametrize(
    "case",
    [Case(batch=0), Case(dim=0), Case(steps=0), Case(heads=0), Case(batch=0, indices=torch.int32)],
    ids=str,
)
def test_empty(case, device):
    arguments = make(case, device)
    before = arguments["state"].clone()
    for function in (selective_state_update, selective_state_update_ref):
        out = function(**arguments)
        assert out.shape == arguments["x"].shape
        assert torch.equal(arguments["state"], before)


@pytest.mark.slow
def test_a_pool_of_more_than_2_31_elements(device):
    slots, dim, dstate = 2**31 // (64 * 16) + 3, 64, 16
    state = torch.empty(slots, dim, dstate, dtype=BF16, device=device)  # takes no pages yet
    arguments = make(Case(batch=2, dim=dim), device)
    small = arguments["state"].to(BF16)
    state[-2:] = small
    indices = torch.tensor([slots - 2, slots - 1], device=device)
    out = selective_state_update(**(arguments | {"state": state, "state_batch_indices": indices}))
    assert torch.equal(out, selective_state_update(**(arguments | {"state": small})))
    assert torch.equal(state[-2:], small)
