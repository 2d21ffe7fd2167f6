"""Every operator gives the same bits on every run, with any number of threads."""

import itertools

import pytest
import torch

import test_adaptive_unitary as unitary
import test_causal_conv1d as convolution
import test_diagonal_scan as diagonal
import test_dstate1 as dstate1
import test_matrix_scan as matrix
import test_paths as paths
import test_prompt as prompt
import test_streamed_backward as streamed_backward
from accuracy import assert_same_bits
from operator_cases import call_of, each_case
from path_cases import FLOATS
from problem import Case, check_repeatable, run

# Many channels per group, so that there are sums whose order could vary.
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
# Few vectors of channels, whose sequences threads divide into segments if there are enough threads.
CASES += [
    Case(batch=1, dim=dim, groups=1, seqlen=2600, dstate=5, method=method, **kind)
    for dim, method, kind in (
        (16, "zoh", {}),
        (40, "foh", {"dtype": torch.float64}),
        (40, "bilinear", {"complex": True, "B": "constant"}),
        (16, "rk4", {"complex": True, "dtype": torch.bfloat16, "layout": "channel_last"}),
    )
]


# Shapes for the different CUDA paths.
OF_PATHS = [
    *(prompt.BASE, prompt.WIDE, prompt.LONG),
    *dstate1.BASE.with_(dim=512, groups=1, seqlen=264).each(complex=(False, True), dtype=FLOATS),
    *dstate1.FEW.with_(seqlen=1032).each(dtype=FLOATS),
    *dstate1.STATES.with_(dim=400, seqlen=300).each(dtype=FLOATS),
    *paths.OWN.with_(dim=40, groups=40, seqlen=520).each(dtype=FLOATS),
    *(
        Case(dim=40, seqlen=128, dtype=torch.bfloat16, B=B, C=C)
        for B, C in (("constant", "grouped"), ("grouped", "constant"))
    ),
]
# Cases whose sizes would take long on a CPU.
ON_CUDA = [
    *paths.SEGMENTS.values(),
    *itertools.chain.from_iterable(
        kind.with_(seqlen=500).each(dtype=FLOATS[::2], layout=("contiguous", "channel_last"))
        for kind in streamed_backward.KINDS.values()
    ),
    *paths.NARROW.with_(dtype=torch.float16).each(seqlen=(72, 49), dstate=(1, 2, 8)),
    *(paths.SLICES[1], paths.SLICES[8], *paths.COPIES[:2]),
]


@pytest.mark.parametrize("case", [*CASES, *OF_PATHS], ids=str)
def test_runs_agree_bit_by_bit(case, device):
    check_repeatable(case, device)


@pytest.mark.parametrize("case", ON_CUDA, ids=str)
def test_runs_of_streamed_and_other_kernels_agree_bit_by_bit(case, cuda_device):
    check_repeatable(case, cuda_device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_threads_gives_the_same_bits(case, check_threads):
    check_threads(lambda: run(case, "cpu"), (1, 2, 3, 7, 16))


OTHERS = {
    "matrix scan": [*matrix.BASE.with_(dim=40, groups=2, dstate=7).each(complex=(False, True))],
    "diagonal scan": [diagonal.Case(shape=(3, 5000), a_shape=(1,))],
    "convolution": convolution.BIG,
}


@each_case(OTHERS | {"unitary scan": [unitary.Case(dim=34, seqlen=300, B="shared", groups=1)]})
def test_runs_of_other_operators_agree_bit_by_bit(operator, case, device):
    call = call_of(operator, case, device)
    assert_same_bits(*(call.solve() for _ in range(4)))


@each_case(OTHERS)
def test_any_number_of_threads_gives_the_same_bits_of_others(operator, case, check_threads):
    check_threads(call_of(operator, case, "cpu").solve, (1, 2, 3, 5))


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_the_deterministic_mode_changes_nothing(case, device):
    expected = run(case, device)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(expected, run(case, device))
    finally:
        torch.use_deterministic_algorithms(False)
