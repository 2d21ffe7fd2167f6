"""What a backward pass that asks tells of the gradient of the state before its first step."""

import pytest
import torch

import problem
from problem import METHODS, Case

pytest.importorskip("torch.distributed", reason="needs torch.distributed")
between = pytest.importorskip("selective_scan.distributed._between")

BASE = Case(cotangents=("out",))


def gradient_of(dout: torch.Tensor, *arguments) -> torch.Tensor:
    """What is told, where none comes of the last state."""
    told = []

    def enter(own: torch.Tensor) -> torch.Tensor:
        told.append(own.clone())
        return torch.zeros_like(own)

    between.scan_backward(dout, arguments, None, enter, is_told=True)
    return told[0]


def state_gradient(case: Case, device: str) -> torch.Tensor:
    dout = problem.make(case).cotangents["out"].to(device)
    *scanned, _, input_delta = problem.op_arguments(case, problem.inputs_on(case, device))
    return gradient_of(dout, *scanned, input_delta)


def check(case: Case, device: str) -> None:
    check_gradient(case, state_gradient(case, device), device)


def check_gradient(case: Case, actual: torch.Tensor, device: str) -> None:
    result = {"dinitial_state": actual}
    problem.check_results(case, result, device, names=result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("method", METHODS)
def test_methods(device, method, is_complex, dtype):
    check(BASE.with_(method=method, complex=is_complex, dtype=dtype), device)


CASES = [
    BASE.with_(reverse=True),
    BASE.with_(B="constant", C="constant"),
    BASE.with_(B="constant", C="constant", complex=True),
    BASE.with_(B="shared", C="constant", complex=True),
    BASE.with_(B="packed", C="packed_grouped", groups=1, complex=True, reverse=True),
    BASE.with_(D=False, z=False, delta_bias=False, delta_softplus=False),
    BASE.with_(dtype=torch.bfloat16),
    BASE.with_(layout="channel_last", dim=64),
    BASE.with_(dstate=1),
    BASE.with_(dstate=70, dim=2),
    BASE.with_(dstate=70, dim=32, groups=1, seqlen=1030),  # in slices of the states
    *(BASE.with_(seqlen=seqlen) for seqlen in (1, 2, 31, 33, 64)),
    # Segments of time, as the lanes of a vector or one after the other; a slow memory.
    BASE.with_(batch=1, dim=2, seqlen=2049, decay=1e-2),
    BASE.with_(batch=1, dim=32, groups=1, seqlen=3001, decay=1e-2, dstate=4),
    BASE.with_(batch=1, dim=32, groups=1, seqlen=2049, decay=1e-2, complex=True, dstate=4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(device, case):
    check(case, device)


def test_empty_sequences_and_batches(device):
    for shape in ((0, 6, 70), (2, 0, 70), (2, 6, 0)):
        u = torch.randn(shape, device=device)
        A, B = torch.randn(shape[1], 4, device=device), torch.randn(shape[1], 4, device=device)
        gradient = gradient_of(u, u, u, A, B, B, None, None, None, False, "zoh", None, False, None)
        assert gradient.shape == (*shape[:2], 4)
        assert problem.is_zero(gradient)


def test_same_bits_for_any_number_of_threads(check_threads):
    case = BASE.with_(batch=1, dim=32, groups=1, seqlen=3001, decay=1e-2, dstate=4)
    check_threads(lambda: {"dinitial_state": state_gradient(case, "cpu")}, (1, 2, 3))
