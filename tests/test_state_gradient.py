"""The op that finds the gradient of the state before the first step, and no other."""

import pytest
import torch

import problem
from problem import METHODS, Case

BASE = Case(cotangents=("out",))


def state_gradient(case: Case, device: str) -> torch.Tensor:
    dout = problem.make(case).cotangents["out"].to(device)
    arguments = problem.op_arguments(case, problem.inputs_on(case, device))[:12]
    return torch.ops.selective_scan.selective_scan_state_gradient(*arguments, dout)


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
        gradient = torch.ops.selective_scan.selective_scan_state_gradient(
            u, u, A, B, B, None, None, None, False, "zoh", None, False, u
        )
        assert gradient.shape == (*shape[:2], 4)
        assert problem.is_zero(gradient)


def test_same_bits_for_any_number_of_threads(check_threads):
    case = BASE.with_(batch=1, dim=32, groups=1, seqlen=3001, decay=1e-2, dstate=4)
    check_threads(lambda: {"dinitial_state": state_gradient(case, "cpu")}, (1, 2, 3))


def test_opcheck(device):
    case = BASE.with_(seqlen=40)
    dout = problem.make(case).cotangents["out"].to(device)
    arguments = problem.op_arguments(case, problem.inputs_on(case, device))[:12]
    op = torch.ops.selective_scan.selective_scan_state_gradient.default
    torch.library.opcheck(op, (*arguments, dout))
