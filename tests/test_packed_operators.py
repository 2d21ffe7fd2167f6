"""Packed sequences of every operator that takes them: none sees another one, or other steps."""

import dataclasses
import itertools

import pytest
import torch

import test_causal_conv1d as convolution
import test_diagonal_scan as diagonal
import test_exponential_trapezoid as trapezoid
import test_packed as scan
from operator_cases import Call, call_of, each_case

F64 = torch.float64
# The tensors with numbers of each step, of all operators.
PER_STEP = ("u", "delta", "B", "C", "z", "input_delta", "mix", "a", "b", "x")
RESULTS_PER_STEP = ("out", *(f"d{name}" for name in PER_STEP))


def part_of(name: str, value: torch.Tensor, index: int, steps: slice) -> torch.Tensor:
    """Returns what a tensor, or a result, has of one of the sequences."""
    if name.endswith(("_state", "_states")):
        return value[index : index + 1]
    return value[..., steps] if name in PER_STEP + RESULTS_PER_STEP else value


def check_each_alone(call: Call, compare) -> None:
    """Compares the results of each sequence with those of a call of it alone; those of steps
    outside of all sequences are exactly 0."""
    bounds, packed = call.case.cu_seqlens, call.solve()
    cotangents = call.cotangents(packed)
    options = {name: it for name, it in call.options.items() if name != "cu_seqlens"}
    for index, (begin, end) in enumerate(itertools.pairwise(bounds)):

        def parts_of(named, index=index, steps=slice(begin, end)):
            return {name: part_of(name, it, index, steps) for name, it in named.items()}

        tensors = {n: it.detach().requires_grad_() for n, it in parts_of(call.tensors).items()}
        alone = dataclasses.replace(call, tensors=tensors, options=options)
        expected, actual = alone.solve(cotangents=parts_of(cotangents)), parts_of(packed)
        for name, value in expected.items():
            if name in RESULTS_PER_STEP or "_state" in name:
                compare(actual[name], value, f"{name} of {index}")
    for name, value in packed.items():
        if name in RESULTS_PER_STEP:
            assert not value[..., : bounds[0]].any(), name
            assert not value[..., bounds[-1] :].any(), name


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.equal(actual, expected), what


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, msg=lambda it: f"{what}: {it}")


CONVOLUTION = convolution.Case(batch=1, seqlen=200, cu_seqlens=(0, 1, 3, 3, 40, 200))
DIAGONAL = diagonal.Case(cu_seqlens=(0, 33, 3000, 3000, 3010, 6000))
SCAN = scan.Case(batch=1, dstate=4, seqlen=1932, cu_seqlens=(0, 33, 40, 40, 500, 1900, 1932))


@each_case({"convolution": [*CONVOLUTION.each(layout=("contiguous", "channel_last"))]})
def test_a_sequence_has_the_bits_it_has_alone(operator, case, device):
    check_each_alone(call_of(operator, case, device), assert_equal)


@each_case(
    {
        "scan": [
            SCAN.with_(dim=dim, groups=groups, reverse=reverse)
            for reverse in (False, True)
            for dim, groups in ((70, 1), (3, 1), (20, 20))
        ],
        "diagonal scan": [
            *DIAGONAL.each(shape=((1, 2, 6000), (1, 40, 6000)), reverse=(False, True))
        ],
    }
)
def test_a_sequence_has_the_bits_it_has_alone_on_a_cpu(operator, case):
    """On a CPU the same kernel runs for any length, so packing changes no bits."""
    check_each_alone(call_of(operator, case, "cpu"), assert_equal)


@pytest.mark.parametrize("reverse", [False, True])
def test_separate_calls_of_an_exponential_trapezoid(reverse, device):
    case = trapezoid.PACKED.with_(dtype=F64, reverse=reverse)
    check_each_alone(call_of("exponential trapezoid", case, device), assert_close)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_cut_sequence_goes_on_behind_segments_without_steps(reverse, cuda_device):
    """A sequence that is longer than the uncut limit keeps an uncut part, where other segments
    would begin. The reference would take too long for so many steps, so the results are compared
    with those of the kernels for one sequence."""
    bounds = (0, 700, 5900, 6000, 9000, 9000, 9020, 9700, 15000, 16000, 17000, 26000)
    case = scan.LONG.with_(
        dim=768, dstate=16, seqlen=26000, cu_seqlens=bounds, layout="channel_last", reverse=reverse
    )

    def compare(actual, expected, what):
        assert (actual - expected).norm() <= 3e-5 * expected.norm(), what

    check_each_alone(call_of("scan", case, cuda_device), compare)


@pytest.mark.parametrize("by", ["function", "reference"])
@each_case(
    {
        "scan": [
            *scan.BASE.with_(
                seqlen=40, cu_seqlens=(3, 20, 20, 37), input_delta=F64, dtype=F64
            ).each(reverse=(False, True))
        ],
        "exponential trapezoid": [
            trapezoid.PACKED.with_(dtype=F64, complex=it, reverse=it) for it in (False, True)
        ],
        "diagonal scan": [
            *diagonal.Case((1, 5, 130), None, F64, F64, F64, cu_seqlens=(3, 64, 64, 120)).each(
                reverse=(False, True)
            )
        ],
        "convolution": [
            convolution.Case(
                batch=1, dtype=F64, cu_seqlens=(3, 20, 20, 60), states=not it, seq_idx=it
            )
            for it in (False, True)
        ],
    }
)
def test_what_lies_outside_of_all_sequences_is_ignored(operator, case, by, device):
    call, results = call_of(operator, case, device), []
    for value in (0, torch.nan):
        with torch.no_grad():
            for name in call.tensors.keys() & PER_STEP:
                call.tensors[name][..., : case.cu_seqlens[0]] = value
                call.tensors[name][..., case.cu_seqlens[-1] :] = value
        results.append(call.solve(getattr(call, by)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


BAD_BOUNDS = (
    (0, 50, 40, 130),
    (-9, 60),
    (0, 900),
    (90, -9, 90, 2**40),
    (130, 100, 60, 30, 0),
)
BAD_CASES = {
    "scan": [
        scan.BASE.with_(dim=dim, cu_seqlens=bounds, reverse=reverse)
        for dim in (scan.BASE.dim, 8200)  # few and many channels
        for bounds in BAD_BOUNDS
        for reverse in (False, True)
    ],
    "diagonal scan": [
        *diagonal.PACKED.each(cu_seqlens=BAD_BOUNDS, layout=("contiguous", "channel_last"))
    ],
}


@each_case(BAD_CASES)
def test_boundaries_that_do_not_rise_do_no_harm(operator, case, cuda_device):
    """The results have no meaning, but the call ends, and no other memory is touched."""
    call_of(operator, case, cuda_device).solve()
    torch.cuda.synchronize()
