"""The backward pass gives the same bits on every run, with any number of threads."""

import pytest
import torch

from problem import Case, run

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


def assert_same_bits(one, other):
    for name, expected in one.items():
        assert torch.equal(expected, other[name]), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs_agree_bit_by_bit(case, device):
    first = run(case, device)
    for _ in range(4):
        assert_same_bits(first, run(case, device))


@pytest.fixture
def threads():
    count = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(count)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(case, threads):
    results = []
    for count in (1, 2, 3, 7):
        threads(count)
        results.append(run(case, "cpu"))
    for other in results[1:]:
        assert_same_bits(results[0], other)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_the_deterministic_mode_changes_nothing(case, device):
    expected = run(case, device)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(expected, run(case, device))
    finally:
        torch.use_deterministic_algorithms(False)
