"""The backward pass gives the same bits on every run, with any number of threads."""

import itertools

import pytest
import torch

import test_dstate1 as dstate1
import test_narrow as narrow
import test_own_projections as own_projections
import test_prompt as prompt
import test_slices as slices
import test_streamed_backward as streamed_backward
import test_streamed_segments as streamed_segments
from problem import Case, assert_same_bits, check_repeatable, run

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

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


# Shapes that different CUDA kernels take.
OF_PATHS = [
    *(prompt.BASE, prompt.WIDE, prompt.LONG),
    *(
        base.with_(dim=512, groups=1, seqlen=264, dtype=dtype)
        for base, dtype in itertools.product((dstate1.BASE, dstate1.COMPLEX), FLOATS)
    ),
    *(dstate1.FEW.with_(seqlen=1032, dtype=dtype) for dtype in FLOATS),
    *(own_projections.BASE.with_(dim=40, groups=40, seqlen=520, dtype=dtype) for dtype in FLOATS),
    *(
        Case(dim=40, seqlen=128, dtype=torch.bfloat16, B=B, C=C)
        for B, C in (("constant", "grouped"), ("grouped", "constant"))
    ),
]
# These in sizes that would take a CPU long.
ON_CUDA = [
    *streamed_segments.KINDS.values(),
    *(
        kind.with_(seqlen=500, dtype=dtype, layout=layout)
        for kind, dtype, layout in itertools.product(
            streamed_backward.KINDS.values(), FLOATS[::2], ("contiguous", "channel_last")
        )
    ),
    *(
        narrow.BASE.with_(dtype=torch.float16, seqlen=seqlen, dstate=dstate)
        for seqlen, dstate in itertools.product((72, 49), (1, 2, 8))
    ),
    *(slices.SLICES[1], slices.SLICES[8], *slices.COPIES[:2]),
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


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_the_deterministic_mode_changes_nothing(case, device):
    expected = run(case, device)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(expected, run(case, device))
    finally:
        torch.use_deterministic_algorithms(False)
