"""Passes that ask what enters their steps, once they have told what these do to a state."""

import pytest
import torch

import problem
import test_segment_map as segment_map
import test_state_gradient as state_gradient
from problem import METHODS, Case

pytest.importorskip("torch.distributed", reason="needs torch.distributed")
between = pytest.importorskip("selective_scan.distributed._between")

BASE = Case()
NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")


def run(case: Case, device: str, is_told: bool = True) -> tuple[dict, list[torch.Tensor]]:
    """Results as those of one pass, whose initial state, and last state's gradient, enter in its
    midst; and what was told in both passes."""
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


def check(case: Case, device: str) -> None:
    results, (own_map, _) = run(case, device)
    problem.check_results(case, results, device)
    segment_map.check_map(
        case, dict(zip(segment_map.NAMES, own_map.unbind(1), strict=True)), device
    )
    case = case.with_(cotangents=("out",))
    results, (_, own_gradient) = run(case, device)
    problem.check_results(case, results, device)
    state_gradient.check_gradient(case, own_gradient, device)


@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("method", METHODS)
def test_methods(device, method, is_complex):
    check(BASE.with_(method=method, complex=is_complex), device)


CASES = [
    BASE.with_(reverse=True),
    BASE.with_(dtype=torch.float64),
    BASE.with_(dtype=torch.bfloat16, layout="channel_last", dim=64, seqlen=256),
    BASE.with_(B="constant", C="constant"),
    BASE.with_(B="packed", C="packed_grouped", groups=1, complex=True, reverse=True),
    BASE.with_(D=False, z=False, delta_bias=False, delta_softplus=False),
    BASE.with_(dstate=1, seqlen=500),
    BASE.with_(dstate=70, dim=32, groups=1, seqlen=1030, decay=1e-2),  # in slices
    # Segments of time, with a part of a chunk and without.
    BASE.with_(batch=1, dim=32, groups=1, seqlen=3001, decay=1e-2, dstate=4),
    BASE.with_(batch=1, dim=32, groups=1, seqlen=3008, decay=1e-2, dstate=4),
    BASE.with_(batch=1, dim=32, groups=1, seqlen=3008, decay=1e-2, dstate=4, reverse=True),
    BASE.with_(batch=1, dim=32, groups=1, seqlen=2048, decay=1e-2, complex=True, dstate=4),
    BASE.with_(batch=1, dim=32, groups=1, seqlen=2048, decay=1e-2, B="constant", C="constant"),
    BASE.with_(batch=1, dim=4, groups=1, seqlen=2048, decay=1e-2, dtype=torch.float64),
    BASE.with_(batch=1, dim=32, groups=1, seqlen=3008, decay=1e-2, input_delta=torch.float32),
    BASE.with_(input_delta=torch.float64, dtype=torch.float64, complex=True, method="foh"),
    BASE.with_(dim=40, groups=1, seqlen=1024),  # states that are forgotten on the way
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(device, case):
    check(case, device)


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
