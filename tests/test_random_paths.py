"""Random calls around every threshold of the CUDA plans: the chosen path against the floor, which
solves the same calls in a separate process. Calls may be larger than the reference's time
allows."""

import functools
import random

import pytest
import torch

import test_capabilities as capabilities
from accuracy import Error, tolerance
from plan_calls import random_call
from problem import Case, generator

COUNT = 60
# The limits for the elements of u and for all state updates; a larger call is drawn again.
MOST_ELEMENTS, MOST_UPDATES = 1 << 21, 1 << 25
# The roundings of a path and of the floor add up, over sums of any size. A gradient of few numbers
# may be the rest of terms that cancel, relative to which its error is large.
FACTOR = 20
FEW, FACTOR_OF_FEW = 16, 400


def case_of(call, choose) -> Case:
    kind = {"variable": "grouped", "constant": "constant"}
    projection = call.projection_dtype and getattr(torch, call.projection_dtype)
    bounds = None
    if call.packed:
        steps = range(call.seqlen + 1)
        bounds = tuple(sorted(choose(steps) for _ in range(min(9, call.seqlen))))
    return Case(
        *(call.batch, call.dim, call.seqlen, call.dstate, call.groups),
        method=call.method,
        complex=call.complex,
        dtype=getattr(torch, call.dtype),
        projection_dtype=projection or None,
        B=kind[call.B],
        C=kind[call.C],
        z=call.z,
        reverse=call.reverse,
        cu_seqlens=bounds,
        layout=choose(("channel_last", "sliced")) if call.channel_last else "contiguous",
    )


@functools.cache
def cases() -> list[Case]:
    """Returns the same cases in every process of a run."""
    numbers = random.Random(generator("random paths").initial_seed())
    drawn = []
    while len(drawn) < COUNT:
        case = case_of(random_call(numbers), numbers.choice)
        elements = case.batch * case.dim * case.seqlen
        projected = case.batch * case.groups * case.seqlen * case.dstate
        if max(elements, projected) <= MOST_ELEMENTS and elements * case.dstate <= MOST_UPDATES:
            drawn.append(case)
    return drawn


def solve_all(file: str) -> None:
    torch.save([capabilities.solve_on_gpu(case) for case in cases()], file)


@pytest.fixture(scope="module")
def by_the_floor(tmp_path_factory) -> list[dict[str, torch.Tensor | None]]:
    return capabilities.solved_on_path("floor", "test_random_paths", tmp_path_factory)


@pytest.mark.xdist_group("random paths")
@pytest.mark.parametrize("index", range(COUNT))
def test_a_path_gives_what_the_floor_gives(index, cuda_device, request):
    case = cases()[index]
    expected = request.getfixturevalue("by_the_floor")[index]
    actual = capabilities.solve_on_gpu(case)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert (value is None) == (expected[name] is None), name
        if value is None:
            continue
        allowed = tolerance(name, value.dtype, case.is_double, "cuda")
        wide = torch.complex128 if value.is_complex() else torch.float64
        error = Error.of(value.to(wide), expected[name].to(wide))
        factor = FACTOR_OF_FEW if value.numel() < FEW else FACTOR
        bound = factor * allowed.arithmetic + 2 * allowed.rounding
        assert error.relative_l2 <= bound, f"{case}: {name}: {error}"
