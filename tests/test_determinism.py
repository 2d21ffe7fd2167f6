"""The backward pass gives the same bits on every run, with any number of threads."""

import pytest
import torch

from problem import METHODS, Case, assert_same_bits, run
from selective_scan import selective_scan_fn

# Many channels to a group, so that there is something to add up in an arbitrary order.
CASES = [
    Case(
        batch=3, dim=96, groups=1, seqlen=257, dstate=16, complex=is_complex, method=method, **kind
    )
    for is_complex, method in ((False, "zoh"), (True, "foh"))
    for kind in (
        {"B": "shared", "C": "shared"},
        {"B": "constant", "C": "grouped"},
        {"B": "grouped", "C": "grouped", "dtype": torch.bfloat16, "layout": "channel_last"},
    )
]
# Few channels, whose sequences the CPU kernels divide among vectors and threads.
CASES += [
    Case(batch=1, dim=4, groups=2, seqlen=3001, complex=is_complex, B=B)
    for is_complex, B in ((False, "grouped"), (True, "constant"))
]
# Few vectors of channels, of whose sequences threads take segments if there are enough of them.
CASES += [
    Case(batch=1, dim=dim, groups=1, seqlen=2600, dstate=5, method=method, **kind)
    for dim, method, kind in (
        (16, "zoh", {}),
        (40, "foh", {"dtype": torch.float64}),
        (40, "bilinear", {"complex": True, "B": "constant"}),
        (16, "rk4", {"complex": True, "dtype": torch.bfloat16, "layout": "channel_last"}),
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs_agree_bit_by_bit(case, device):
    first = run(case, device)
    for _ in range(4):
        assert_same_bits(first, run(case, device))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(case, check_threads):
    check_threads(lambda: run(case, "cpu"), (1, 2, 3, 7, 16))


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_the_deterministic_mode_changes_nothing(case, device):
    expected = run(case, device)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(expected, run(case, device))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["float32", "float64", "complex64"])
def test_a_channel_does_not_change_its_neighbours(method, kind):
    # The CPU kernels exponentiate vectors of channels with less work where no exponent is large.
    torch.manual_seed(0)
    dtype = torch.float64 if kind == "float64" else torch.float32
    batch, dim, dstate, seqlen, wild = 2, 20, 6, 70, 5
    u, delta, dout = torch.randn(3, batch, dim, seqlen, dtype=dtype)
    delta = delta.abs()
    A = -torch.rand(dim, dstate, dtype=dtype) - 0.1
    B, C = torch.randn(2, batch, dstate, seqlen, dtype=dtype)
    if kind == "complex64":
        A, B, C = (torch.complex(x, torch.rand_like(x)) for x in (A, B, C))

    def scan(delta):
        leaves = [x.clone().requires_grad_() for x in (u, delta, A)]
        out = selective_scan_fn(*leaves, B, C, discretization_method=method)
        du, ddelta, dA = torch.autograd.grad(out, leaves, dout)
        return {"out": out, "du": du, "ddelta": ddelta, "dA": dA[None]}

    expected = scan(delta)
    delta = delta.clone()
    delta[:, wild, 40:44] = 1e4
    others = [channel for channel in range(dim) if channel != wild]
    found = scan(delta)
    assert not torch.equal(found["out"][:, wild], expected["out"][:, wild])
    assert_same_bits(
        {name: x[:, others] for name, x in expected.items()},
        {name: x[:, others] for name, x in found.items()},
    )
