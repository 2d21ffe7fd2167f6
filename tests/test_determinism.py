"""The backward pass gives the same bits on every run, with any number of threads."""

import pytest
import torch

from problem import Case, assert_same_bits, run

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
