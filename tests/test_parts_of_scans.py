"""The passes of a scan that is split over ranks.

Each pass reports through a callback what all of its steps do to an entering state, h → factor·h +
offset, or backward which gradient leaves them, and gets what enters its steps in return.
"""

import functools

import pytest
import torch

import accuracy
import oracle
import problem
from problem import METHODS, Case

pytest.importorskip("torch.distributed", reason="needs torch.distributed")
between = pytest.importorskip("selective_scan.distributed._between")

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
BASE = Case()
# Segments of time, as lanes of a vector or one after another, with a slow memory.
LONG = BASE.with_(batch=1, dim=32, groups=1, seqlen=3008, dstate=4, decay=1e-2)
NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
SMALL = 1e-30
CASES = [
    *BASE.each(method=METHODS, complex=(False, True), dtype=(F32, F64)),
    *BASE.each(method=METHODS, input_delta=(F32,)),
    BASE.with_(input_delta=BF16, complex=True, reverse=True),
    BASE.with_(input_delta=F64, dtype=F64, complex=True, method="foh"),
    BASE.with_(reverse=True),
    *BASE.each(B=("constant",), C=("constant",), complex=(False, True)),
    BASE.with_(B="shared", C="constant", complex=True),
    BASE.with_(B="packed", C="packed_grouped", groups=1, complex=True, reverse=True),
    BASE.with_(D=False, z=False, delta_bias=False, delta_softplus=False),
    BASE.with_(dtype=BF16),
    *BASE.each(layout=("channel_last",), dim=(64,), seqlen=(70, 256)),
    BASE.with_(layout="channel_last", dim=64, seqlen=256, dtype=BF16),
    *BASE.each(dstate=(1,), seqlen=(70, 500)),
    BASE.with_(dstate=70, dim=2),
    BASE.with_(dstate=70, dim=32, groups=1, seqlen=1030, decay=1e-2),  # in slices of states
    *BASE.each(seqlen=(1, 2, 31, 32, 33, 64)),
    # With and without a partial chunk.
    *LONG.each(seqlen=(3001, 3008)),
    LONG.with_(reverse=True),
    LONG.with_(dstate=16, input_delta=F32),
    LONG.with_(seqlen=2049, complex=True),
    LONG.with_(seqlen=2048, dstate=16, B="constant", C="constant"),
    LONG.with_(seqlen=2048, dstate=16, dim=4, dtype=F64),
    LONG.with_(seqlen=2049, dstate=16, dim=2, groups=2),
    # States that are forgotten within the sequence.
    BASE.with_(dim=40, groups=1, seqlen=1000),
    BASE.with_(dim=40, groups=1, seqlen=1000, complex=True, method="bilinear"),
    BASE.with_(batch=1, dim=2, seqlen=9000, dstate=5),
]


def scanned(case: Case, device: str) -> tuple:
    """Returns the arguments of a pass, which gets its initial state only through the callback."""
    *others, _, reverse, _, input_delta = problem.op_arguments(
        case, problem.inputs_on(case, device)
    )
    return *others, None, reverse, input_delta


def map_of(*arguments) -> torch.Tensor:
    """Returns the map of all steps that the forward pass reports, (batch, 2, dim, dstate)."""
    told = []

    def enter(own: torch.Tensor) -> torch.Tensor:
        told.append(own.clone())
        return torch.zeros_like(own[:, 0])

    between.scan_forward(arguments, enter, is_told=True, is_saved=False)
    return told[0]


def gradient_of(dout: torch.Tensor, *arguments) -> torch.Tensor:
    """Returns the initial state's gradient that the backward pass reports for out alone."""
    told = []

    def enter(own: torch.Tensor) -> torch.Tensor:
        told.append(own.clone())
        return torch.zeros_like(own)

    between.scan_backward(dout, arguments, None, enter, is_told=True)
    return told[0]


def run(case: Case, device: str, is_told: bool = True) -> tuple[dict, list[torch.Tensor]]:
    """Returns the results of both passes, into which the initial state and the last state's
    gradient enter through callbacks, and what each pass reported."""
    arguments = problem.op_arguments(case, problem.inputs_on(case, device))
    *scanned, initial_state, reverse, _, input_delta = arguments
    last = reverse, input_delta
    cotangents = {name: t.to(device) for name, t in problem.make(case).cotangents.items()}
    told = []

    def giving(state: torch.Tensor):
        def enter(own: torch.Tensor) -> torch.Tensor:
            told.append(own.clone())
            return state

        return enter

    out, last_state, states = between.scan_forward(
        (*scanned, None, *last), giving(initial_state), is_told=is_told, is_saved=True
    )
    *gradients, dinitial_state, dinput_delta = between.scan_backward(
        cotangents.get("out"),
        (*scanned, initial_state, *last),
        states,
        giving(cotangents.get("last_state", torch.zeros_like(last_state))),
        is_told=is_told,
    )
    results = {"out": out, "last_state": last_state, "dinitial_state": dinitial_state}
    results |= {f"d{n}": g for n, g in zip(NAMES, gradients, strict=True)}
    return results | ({} if input_delta is None else {"dinput_delta": dinput_delta}), told


def solve(case: Case, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns end states of plain loops over time: from 1 without input, from 0 with the input."""
    inputs = problem.detached(inputs)
    shape = (case.batch, *inputs["A"].shape)
    options = problem.make(case).options

    def end_state(u, initial: int) -> torch.Tensor:
        initial_state = torch.full(shape, initial, dtype=inputs["A"].dtype)
        return oracle.scan(**inputs | {"u": u, "initial_state": initial_state}, **options)[1]

    return end_state(torch.zeros_like(inputs["u"]), 1), end_state(inputs["u"], 0)


def check_map(case: Case, own_map: torch.Tensor, device: str) -> None:
    tensors = problem.make(case).tensors
    exact = solve(case, problem.moved(tensors, F64))
    plain = problem.plain_solutions(functools.partial(solve, case), tensors, case.is_double)
    is_small = exact[0].abs() < SMALL

    def parts(factor: torch.Tensor, offset: torch.Tensor) -> dict[str, torch.Tensor]:
        """Sets factors that are nearly 0 to 0, as kernels may."""
        return {"factor": factor.masked_fill(is_small, 0), "offset": offset}

    exact, *plain = (parts(*solution) for solution in (exact, *plain))
    factor, offset = own_map.cpu().unbind(1)
    assert (factor[is_small].abs() < 2 * SMALL).all()
    for name, actual in parts(factor, offset).items():
        tolerance = accuracy.tolerance("last_state", actual.dtype, case.is_double, device)
        values = [solution[name] for solution in plain]
        reason = accuracy.complaint(actual, exact[name], tolerance, values)
        assert reason is None, f"{name} of {case} on {device}: {reason}"


def check(case: Case, device: str) -> None:
    """Checks the results of both passes and what they report."""
    results, (own_map, _) = run(case, device)
    problem.check_results(case, results, device)
    check_map(case, own_map, device)
    of_outputs = case.with_(cotangents=("out",))
    results, (_, own_gradient) = run(of_outputs, device)
    problem.check_results(of_outputs, results, device)
    result = {"dinitial_state": own_gradient}
    problem.check_results(of_outputs, result, device, names=result)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(device, case):
    check(case, device)


def test_what_is_forgotten_is_a_channel_s_own(device):
    """A channel that remembers all steps changes no bit of others that do not."""
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
    u, *others = scanned(BASE.with_(decay=1e-2), device)
    u = u.clone()
    u[0, 1, 3] = float("nan")
    made = map_of(u, *others)
    assert made[0, 1, 1].isnan().all()
    made[0, 1, 1] = 0
    assert made.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 6, 70), (2, 0, 70), (2, 6, 0)], ids=str)
def test_empty_sequences_and_batches(device, shape):
    u = torch.randn(shape, device=device)
    A, B = torch.randn(2, shape[1], 4, device=device).unbind()
    arguments = (u, u, A, B, B, None, None, None, False, "zoh", None, False, None)
    made = map_of(*arguments)
    assert made.shape == (shape[0], 2, shape[1], 4)
    assert (made[:, 0] == 1).all()
    assert problem.is_zero(made[:, 1])
    gradient = gradient_of(u, *arguments)
    assert gradient.shape == (*shape[:2], 4)
    assert problem.is_zero(gradient)


def test_same_bits_for_any_number_of_threads(check_threads):
    case = LONG.with_(seqlen=3001)
    check_threads(lambda: {"map": map_of(*scanned(case, "cpu"))}, (1, 2, 3))
    dout = problem.make(case).cotangents["out"]
    check_threads(lambda: {"gradient": gradient_of(dout, *scanned(case, "cpu"))}, (1, 2, 3))


def test_who_needs_nothing_told_is_told_of_no_steps(device):
    case = BASE.with_(seqlen=256)
    results, (own_map, own_gradient) = run(case, device, is_told=False)
    problem.check_results(case, results, device)
    factor, offset = own_map.unbind(1)
    assert (factor == 1).all()
    assert not offset.any()
    assert not own_gradient.any()


@pytest.mark.parametrize("sizes", [{"seqlen": 0}, {"batch": 0}, {"dim": 0, "groups": 1}], ids=str)
def test_nothing_asks_too(device, sizes):
    sizes = {"batch": 2, "dim": 3, "seqlen": 5, "groups": 1, **sizes}
    shape = (sizes["batch"], sizes["dim"], sizes["seqlen"])
    u, delta = torch.randn(2, *shape, device=device).unbind()
    A = -torch.rand(sizes["dim"], 4, device=device)
    B, C = torch.randn(2, sizes["batch"], 4, sizes["seqlen"], device=device).unbind()
    scanned = (u, delta, A, B, C, None, None, None, False, "zoh")
    state = torch.randn(sizes["batch"], sizes["dim"], 4, device=device)
    given = []

    def enter(own: torch.Tensor) -> torch.Tensor:
        given.append(own)
        return state

    _, last_state, states = between.scan_forward(
        (*scanned, None, False, None), enter, is_told=True, is_saved=True
    )
    *_, dinitial_state, _ = between.scan_backward(
        u, (*scanned, state, False, None), states, enter, is_told=True
    )
    assert len(given) == 2
    assert torch.equal(last_state, state)
    assert torch.equal(dinitial_state, state)


def test_what_is_raised_in_its_midst_comes_out(device):
    def fail(own: torch.Tensor) -> torch.Tensor:
        raise ValueError("nobody is there")

    *scanned, _, reverse = problem.op_arguments(BASE, problem.inputs_on(BASE, device))[:12]
    with pytest.raises(RuntimeError, match="nobody is there"):
        between.scan_forward((*scanned, None, reverse, None), fail, is_told=True, is_saved=False)
