"""What a pass that asks what enters its steps tells of them first, h → factor·h + offset."""

import functools

import pytest
import torch

import oracle
import problem
import test_state_gradient as state_gradient
from problem import METHODS, Case

pytest.importorskip("torch.distributed", reason="needs torch.distributed")
between = pytest.importorskip("selective_scan.distributed._between")

BASE = Case()
NAMES = ("factor", "offset")
SMALL = 1e-30


def scanned(case: Case, device: str) -> tuple:
    """The arguments of the pass, which is given no initial state but where it asks."""
    *others, _, reverse, _, input_delta = problem.op_arguments(
        case, problem.inputs_on(case, device)
    )
    return *others, None, reverse, input_delta


def map_of(*arguments) -> torch.Tensor:
    """What is told of the steps, (batch, 2, dim, dstate)."""
    told = []

    def enter(own: torch.Tensor) -> torch.Tensor:
        told.append(own.clone())
        return torch.zeros_like(own[:, 0])

    between.scan_forward(arguments, enter, is_told=True, is_saved=False)
    return told[0]


def segment_map(case: Case, device: str) -> dict[str, torch.Tensor]:
    return dict(zip(NAMES, map_of(*scanned(case, device)).unbind(1), strict=True))


def solve(case: Case, inputs: dict) -> dict[str, torch.Tensor]:
    """The end states of plain loops over time: of no input from 1, and of the input from 0."""
    inputs = problem.detached(inputs)
    shape = (case.batch, *inputs["A"].shape)
    options = problem.make(case).options

    def end_state(u, initial: int) -> torch.Tensor:
        initial_state = torch.full(shape, initial, dtype=inputs["A"].dtype)
        return oracle.scan(**inputs | {"u": u, "initial_state": initial_state}, **options)[1]

    values = end_state(torch.zeros_like(inputs["u"]), 1), end_state(inputs["u"], 0)
    return dict(zip(NAMES, values, strict=True))


def check(case: Case, device: str) -> None:
    check_map(case, segment_map(case, device), device)


def check_map(case: Case, made: dict[str, torch.Tensor], device: str) -> None:
    tensors = problem.make(case).tensors
    exact = solve(case, problem.moved(tensors, torch.float64))
    plain = problem.plain_solutions(functools.partial(solve, case), tensors, case.is_double)
    # What is next to nothing may be nothing.
    is_small = exact["factor"].abs() < SMALL
    assert (made["factor"].cpu()[is_small].abs() < 2 * SMALL).all()
    for solution in (made, exact, *plain):
        solution["factor"] = solution["factor"].masked_fill(
            is_small.to(solution["factor"].device), 0
        )
    for name, actual in made.items():
        tolerance = problem.tolerance("last_state", actual.dtype, case.is_double, device)
        values = [solution[name] for solution in plain]
        reason = problem.complaint(actual, exact[name], tolerance, values)
        assert reason is None, f"{name} of {case} on {device}: {reason}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("method", METHODS)
def test_methods(device, method, is_complex, dtype):
    check(BASE.with_(method=method, complex=is_complex, dtype=dtype), device)


CASES = [
    *(BASE.with_(method=method, input_delta=torch.float32) for method in METHODS),
    BASE.with_(input_delta=torch.bfloat16, complex=True, reverse=True),
    *state_gradient.CASES,
    BASE.with_(seqlen=32),
    BASE.with_(layout="channel_last", dim=64, seqlen=256),
    BASE.with_(dstate=70, dim=32, groups=1, seqlen=1030, decay=1e-2),  # in slices
    BASE.with_(batch=1, dim=32, groups=1, seqlen=2048, decay=1e-2, complex=True, dstate=4),
    # States that are forgotten on the way.
    BASE.with_(dim=40, groups=1, seqlen=1000),
    BASE.with_(dim=40, groups=1, seqlen=1000, complex=True, method="bilinear"),
    BASE.with_(batch=1, dim=2, seqlen=9000, dstate=5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(device, case):
    check(case, device)


def test_what_is_forgotten_is_a_channel_s_own(device):
    """One that remembers all steps beside others that do not changes none of their bits."""
    case = BASE.with_(batch=1, dim=40, groups=1, seqlen=2000, decay=0.5)
    u, delta, A, *others = scanned(case, device)
    alone = map_of(u, delta, A, *others)
    slow = A.clone()
    slow[7] *= 1e-3
    beside = map_of(u, delta, slow, *others)
    assert (alone[:, 0] == 0).any()
    assert not torch.equal(alone[:, :, 7], beside[:, :, 7])
    alone[:, :, 7] = beside[:, :, 7]
    assert torch.equal(alone, beside)


def test_what_is_not_finite_goes_on(device):
    case = BASE.with_(decay=1e-2)
    u, *others = scanned(case, device)
    u = u.clone()
    u[0, 1, 3] = float("nan")
    made = map_of(u, *others)
    assert made[0, 1, 1].isnan().all()
    made[0, 1, 1] = 0
    assert made.isfinite().all()


def test_empty_sequences_and_batches(device):
    for shape in ((0, 6, 70), (2, 0, 70), (2, 6, 0)):
        u = torch.randn(shape, device=device)
        A, B = torch.randn(shape[1], 4, device=device), torch.randn(shape[1], 4, device=device)
        made = map_of(u, u, A, B, B, None, None, None, False, "zoh", None, False, None)
        assert made.shape == (shape[0], 2, shape[1], 4)
        assert (made[:, 0] == 1).all()
        assert problem.is_zero(made[:, 1])


def test_same_bits_for_any_number_of_threads(check_threads):
    case = BASE.with_(batch=1, dim=32, groups=1, seqlen=3001, decay=1e-2, dstate=4)
    check_threads(lambda: segment_map(case, "cpu"), (1, 2, 3))
