"""Chunked prefill: against the reference in fp64, against the scan of whole sequences for any
chunking, and what it leaves alone."""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from accuracy import Error
from cases import Axes, assert_refused
from in_place import check_in_place
from problem import METHODS, Draws, counterpart, laid_out
from selective_scan import selective_scan_fn, selective_scan_prefill, selective_scan_prefill_ref

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128
HALF, BF16 = torch.float16, torch.bfloat16
# Sequences without steps, of one step, of less and of more than a chunk of the kernels, and steps
# outside of all sequences. The first sequence is padding, and so is the last but one.
BOUNDS = (1, 4, 40, 40, 41, 70, 75, 148)
POSITIONS = (0, 3, 16, 15, 0, 9, 52)
OPTIONAL = ("D", "z", "delta_bias")
EVENTS = (*OPTIONAL, "input_delta")


@dataclass(frozen=True)
class Case(Axes):
    """One call. The defaults are the base case, and a test changes one axis at a time."""

    dim: int = 12
    dstate: int = 5
    groups: int = 2  # 0: B and C are constant
    method: str = "zoh"
    states: torch.dtype = F32
    u: torch.dtype = F32  # also of delta, z, B and C; B and C are complex if states are
    pole: torch.dtype = F32  # of A, D and delta_bias; A is complex if states are
    optional: tuple[str, ...] = OPTIONAL
    delta_softplus: bool = True
    interleaved: bool = False
    bounds: tuple[int, ...] = BOUNDS
    total: int = 150
    every: int = 16
    positions: tuple[int, ...] = POSITIONS
    is_wide: bool = False  # indices are int64
    has_indices: bool = True
    layout: str = "contiguous"

    @property
    def sequences(self) -> int:
        return len(self.bounds) - 1

    @property
    def columns(self) -> int:
        lengths = (end - begin for begin, end in itertools.pairwise(self.bounds))
        ends = map(sum, zip(self.positions, lengths, strict=False))
        return max(ends, default=0) // self.every if self.every else 0

    @property
    def compute_eps(self) -> float:
        return torch.finfo(F64 if {F64, C128} & {self.states, self.u, self.pole} else F32).eps


def tensors_of(case: Case, draws: Draws) -> dict[str, torch.Tensor | None]:
    """Returns the scan's tensors. Poles are stable; without softplus steps are positive."""
    normal, uniform, is_complex = draws.normal, draws.uniform, case.states.is_complex

    A = -uniform(0.2, 2.0, case.dim, case.dstate)
    if is_complex:
        A = torch.complex(A, uniform(-3.0, 3.0, *A.shape))
    rows = (case.dim, case.total)
    delta = normal(*rows) - 1 if case.delta_softplus else uniform(0.05, 0.6, *rows)
    if case.groups == 0:
        shape, dtype = (case.dim, case.dstate), counterpart(case.u, is_complex)
    elif case.interleaved:
        shape, dtype = (case.groups, case.dstate, 2 * case.total), case.u
    else:
        shape, dtype = (case.groups, case.dstate, case.total), counterpart(case.u, is_complex)
    tensors = {
        "u": normal(*rows).to(case.u),
        "delta": delta.to(case.u),
        "A": A.to(counterpart(case.pole, is_complex)),
        "B": normal(*shape, dtype=dtype),
        "C": normal(*shape, dtype=dtype),
        "D": normal(case.dim).to(case.pole),
        "z": normal(*rows).to(case.u),
        "delta_bias": uniform(0.0, 0.3, case.dim).to(case.pole),
    }
    for name in set(OPTIONAL) - set(case.optional):
        tensors[name] = None
    if "input_delta" in case.optional:
        tensors["input_delta"] = normal(*rows).to(case.u)
    return tensors


def make(case: Case, device: str) -> dict:
    """Returns the arguments by name."""
    draws = Draws(case.with_(layout="contiguous"))
    tensors = tensors_of(case, draws)
    count, columns = case.sequences, case.columns
    index_dtype = torch.int64 if case.is_wide else torch.int32
    slots = count * (1 + columns) + 5 if case.has_indices else count
    order = torch.randperm(slots, generator=draws.generator).to(index_dtype)
    tensors["states"] = draws.normal(slots, case.dim, case.dstate, dtype=case.states)
    arguments = laid_out(tensors, case.layout, device, vectors=False, requires_grad=False)
    if case.layout == "expanded":
        arguments["states"] = tensors["states"].to(device)
    arguments |= {
        "delta_softplus": case.delta_softplus,
        "discretization_method": case.method,
        "cu_seqlens": torch.tensor(case.bounds, dtype=index_dtype),
        "has_initial_state": torch.arange(count) % 3 != 1,
    }
    if case.has_indices:
        indices = order[:count].clone()
        if count > 2:
            indices[0], indices[-2] = -3, slots + 9
        arguments |= {"cache_indices": indices, "pad_slot_id": slots + 9}
    if case.every:
        targets = torch.full((count, columns), -1, dtype=index_dtype)
        if case.has_indices:
            targets.view(-1).copy_(order[count : count * (1 + columns)])
        if columns > 1:
            targets[-1, -1], targets[1, 1] = -1, slots + 9
        arguments |= {
            "checkpoint_every": case.every,
            "first_position": torch.tensor(case.positions, dtype=index_dtype),
            "checkpoint_slots": targets,
            "pad_slot_id": slots + 9,
        }
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def check(case: Case, device: str) -> None:
    arguments = make(case, device)
    out, is_untouched = check_in_place(
        selective_scan_prefill,
        selective_scan_prefill_ref,
        arguments,
        "states",
        16 * case.compute_eps,
    )
    assert (out.shape, out.dtype) == (arguments["u"].shape, case.u)
    if case.layout in ("contiguous", "dim_first"):
        assert out.stride() == arguments["u"].stride()
    if case.has_indices:
        assert is_untouched.any()
    assert not is_untouched.all()


def case_list():
    base = Case()
    complex_base = Case(states=C64)
    cases = [
        base.with_(method=method, states=states) for method in METHODS for states in (F32, C64)
    ]
    cases += [base.with_(states=dtype) for dtype in (BF16, HALF, F64)]
    cases += [base.with_(u=dtype, states=dtype, layout="channel_last") for dtype in (BF16, HALF)]
    cases += [base.with_(u=F64), base.with_(pole=F64), complex_base.with_(states=C128)]
    cases += [base.with_(dstate=n) for n in (1, 16, 40)] + [complex_base.with_(dstate=8)]
    cases += [base.with_(groups=n) for n in (0, 1, 12)] + [complex_base.with_(groups=0)]
    cases += [complex_base.with_(interleaved=True), complex_base.with_(interleaved=True, u=BF16)]
    cases += [base.with_(dim=n, groups=1) for n in (1, 70)]
    cases += [base.with_(every=n) for n in (0, 1, 7, 32, 500)]
    cases += [base.with_(is_wide=True), base.with_(has_indices=False)]
    cases += [base.with_(has_indices=False, every=0, bounds=(0, 150), positions=(0,))]
    cases += [base.with_(optional=names) for names in ((), ("D",), ("delta_bias",), ("z",))]
    cases += [base.with_(delta_softplus=False)]
    cases += [
        base.with_(optional=EVENTS, method=method, states=states)
        for method in METHODS
        for states in (F32, C64)
    ]
    cases += [base.with_(optional=EVENTS, layout="channel_last", u=BF16, states=BF16)]
    # A long sequence, whose time a GPU, or a CPU of several threads, divides.
    long = {"bounds": (0, 2, 2200, 2500), "positions": (40, 100, 0), "total": 2500, "every": 100}
    cases += [base.with_(**long, dim=6, dstate=3, layout=where) for where in ("sliced", "offset")]
    for layout in ("dim_first", "sliced", "offset", "expanded", "channel_last"):
        cases += [base.with_(layout=layout), complex_base.with_(layout=layout)]
    return list(dict.fromkeys(cases))


@pytest.mark.parametrize("case", case_list(), ids=str)
def test_matches_reference(case, device):
    check(case, device)


# --- any chunking ---------------------------------------------------------------------------------


def scan_of(tensors: dict, steps: slice, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and the last state of these steps alone."""
    names = ("u", "delta", "z", "input_delta", *(() if case.groups == 0 else ("B", "C")))
    per_step = tensors.keys() & names
    given = {
        n: None if t is None else t[..., steps] if n in per_step else t for n, t in tensors.items()
    }
    given |= {name: given[name][None] for name in per_step if given[name] is not None}
    out, state = selective_scan_fn(
        **given, delta_softplus=True, return_last_state=True, discretization_method=case.method
    )
    return out[0], state[0]


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optional", [OPTIONAL, EVENTS], ids=["", "input_delta"])
def test_any_chunking_gives_what_the_whole_gives(optional, method, is_complex, device):
    """Compares outputs, last states and the states of checkpoints, at absolute positions."""
    lengths, every = (90, 1, 64, 37), 16
    count, total = len(lengths), sum(lengths)
    states = C64 if is_complex else F32
    case = Case(method=method, states=states, total=total, optional=optional)
    draws = Draws(case)
    tensors = {n: t.to(device) for n, t in tensors_of(case, draws).items()}
    begins = [0, *itertools.accumulate(lengths)]
    whole = [scan_of(tensors, slice(begins[i], begins[i + 1]), case) for i in range(count)]
    columns = max(lengths) // every
    targets = (count + torch.arange(count * columns)).view(count, columns)
    choose = random.Random(int(torch.randint(2**31, (), generator=draws.generator)))
    for cuts in (1, 2, 5):
        pool = torch.full((count * (1 + columns), case.dim, case.dstate), 9.0, dtype=case.states)
        pool = pool.to(device)
        marks = [sorted(choose.choices(range(length + 1), k=cuts - 1)) for length in lengths]
        outs = [[] for _ in lengths]
        done = [0] * count
        for call in range(cuts):
            ends = [(*mark, length)[call] for mark, length in zip(marks, lengths, strict=True)]
            order = choose.sample(range(count), count)
            steps = [torch.arange(begins[i] + done[i], begins[i] + ends[i]) for i in order]
            packed = torch.cat(steps).to(device)
            given = {
                n: t[..., packed] if n in ("u", "delta", "z", "B", "C", "input_delta") else t
                for n, t in tensors.items()
            }
            bounds = list(itertools.accumulate(map(len, steps), initial=0))
            out = selective_scan_prefill(
                **given,
                states=pool,
                delta_softplus=True,
                discretization_method=method,
                cu_seqlens=torch.tensor(bounds, device=device),
                cache_indices=torch.tensor(order, device=device),
                has_initial_state=torch.tensor([call > 0] * count, device=device),
                checkpoint_every=every,
                first_position=torch.tensor([done[i] for i in order], device=device),
                checkpoint_slots=targets[order].to(device),
            )
            for i, begin, end in zip(order, bounds, bounds[1:], strict=False):
                outs[i].append(out[:, begin:end])
            done = ends
        for i, (expected, last_state) in enumerate(whole):
            error = Error.of(torch.cat(outs[i], 1).cpu(), expected.cpu())
            assert error.relative_l2 < 3e-6, (cuts, i, error)
            assert Error.of(pool[i].cpu(), last_state.cpu()).relative_l2 < 3e-6, (cuts, i)
            for column in range(columns):
                kept, position = pool[targets[i, column]], (column + 1) * every
                if position > lengths[i]:
                    assert (kept == 9).all()
                    continue
                _, state = scan_of(tensors, slice(begins[i], begins[i] + position), case)
                assert Error.of(kept.cpu(), state.cpu()).relative_l2 < 3e-6, (cuts, i, column)


# --- initial states, empty calls, threads ---------------------------------------------------------


def test_what_a_sequence_begins_with(device):
    """A sequence begins with its slot's state if has_initial_state is true, and with 0 if it is
    false or absent. A sequence without steps keeps that state."""
    case = Case(bounds=(0, 30, 60, 60, 60), positions=(), every=0, total=60)
    arguments = make(case, device)
    flags = torch.tensor([True, False, True, False], device=device)
    pool = torch.randn(4, case.dim, case.dstate, device=device)
    given = {"cache_indices": torch.arange(4, device=device)}
    results = {}
    for name, states, has_state in (
        ("mixed", pool, flags),
        ("none", torch.full_like(pool, torch.nan), None),
        ("false", torch.full_like(pool, torch.nan), torch.zeros_like(flags)),
    ):
        states = states.clone()
        changes = {**given, "states": states, "has_initial_state": has_state}
        results[name] = selective_scan_prefill(**(arguments | changes)), states
    assert all(map(torch.equal, results["none"], results["false"]))
    out, states = results["mixed"]
    assert not torch.equal(out[:, :30], results["none"][0][:, :30])
    assert torch.equal(out[:, 30:], results["none"][0][:, 30:])
    assert torch.equal(states[2], pool[2])
    assert not states[3].any()
    assert not results["none"][1][2:].any()


@pytest.mark.parametrize(
    "case",
    [
        Case(dim=0, groups=1, bounds=(0, 9), positions=(0,)),
        Case(bounds=(0, 0, 0), positions=(0, 5), total=0),
        Case(bounds=(7,), positions=()),
        Case(bounds=(0, 0), positions=(0,), has_indices=False),
    ],
    ids=str,
)
def test_empty(case, device):
    for function in (selective_scan_prefill, selective_scan_prefill_ref):
        arguments = make(case, device)
        before = arguments["states"].clone()
        out = function(**arguments)
        assert out.shape == arguments["u"].shape
        assert not out.any()
        states = arguments["states"]
        for i, has_state in enumerate(arguments["has_initial_state"].tolist()):
            slot = arguments["cache_indices"][i].item() if case.has_indices else i
            assert torch.equal(states[slot], before[slot] * has_state)


# --- values that only the host can see ------------------------------------------------------------

# Bad values, the message about them, and the values that CUDA takes them for.
BAD_VALUES = {
    "first_position": ([0, 0, -1, 0, 0, 0, 0], "be at least 0, got -1", [0] * 7),
    "checkpoint_slots": (
        [[0]] * 7,
        "have checkpoints of at least 2 for the positions of sequence 1, got 1",
        [[0, *[-1] * 9]] * 7,
    ),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_that_name_nothing(name, device):
    """Bad values are refused before anything changes or, on CUDA, mean padding or 0."""
    values, sentence, good = BAD_VALUES[name]
    states = torch.randn(6, 12, 5, device=device)
    arguments = make(Case(), device)

    def arguments_with(values):
        changes = {
            "cache_indices": [0, 1, 2, 3, 4, -1, 5],
            "first_position": [0] * 7,
            "checkpoint_slots": [[-1] * 4] * 7,
            name: values,
        }
        given = {n: torch.tensor(value, device=device) for n, value in changes.items()}
        return arguments | given | {"states": states.clone()}

    refusing = [selective_scan_prefill_ref, *([selective_scan_prefill] if device == "cpu" else [])]
    for function in refusing:
        given = arguments_with(values)
        assert_refused(function, given, f"{name} must {sentence}")
        assert torch.equal(given["states"], states)
    if device == "cuda":
        given, other = arguments_with(values), arguments_with(good)
        assert torch.equal(selective_scan_prefill(**given), selective_scan_prefill(**other))
        assert torch.equal(given["states"], other["states"])


@pytest.mark.parametrize("every", [1, 3, 64])
def test_bad_values_do_no_harm(every, cuda_device):
    """The results have no meaning, but the call ends, and no other memory is touched."""
    bad = torch.tensor([0, -9, 2**40, 149, 75, 30, 2**62, -(2**62)], device=cuda_device)
    for roll in range(len(bad)):
        values = bad.roll(roll)
        arguments = make(Case(every=every), cuda_device) | {
            "cu_seqlens": values,
            "cache_indices": values[1:],
            "first_position": values[:-1],
            "checkpoint_slots": values[None].expand(7, -1),
        }
        selective_scan_prefill(**arguments)
    torch.cuda.synchronize()
