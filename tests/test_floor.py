"""The floor of the CUDA kernels, which takes every call, against the reference.

A process reads the name of its path once, from its environment, so a separate process solves all
cases.
"""

import pytest
import torch

import test_capabilities as capabilities
import test_parts_of_scans as parts_of_scans
from path_cases import optional
from problem import (
    COMPLEX_KINDS,
    DTYPES,
    LAYOUTS,
    METHODS,
    REAL_KINDS,
    Case,
    check_repeatable,
    check_results,
)

BASE = Case()
STATES = (1, 2, 3, 5, 16, 17, 33, 64, 65, 256)
BOUNDS = (3, 30, 30, 31, 64, 130)
PACKED = BASE.with_(batch=1, cu_seqlens=BOUNDS, seqlen=140)
# More sequences than the floor has blocks, so that a block takes several.
MANY = PACKED.with_(cu_seqlens=tuple(range(0, 401, 2)), seqlen=401, dim=30, groups=30, dstate=3)


def every_kind(base: Case):
    """Yields all methods, dtypes, layouts, kinds of B and C, numbers of states, optional inputs."""
    yield from base.each(method=METHODS, dtype=DTYPES)
    kinds = COMPLEX_KINDS if base.complex else REAL_KINDS
    yield from base.each(B=kinds, C=kinds, groups=(1,), reverse=(True,))
    yield from base.each(layout=LAYOUTS, reverse=(False, True))
    yield from base.each(dstate=STATES, method=("foh",))
    yield base.with_(
        dtype=torch.bfloat16, delta_dtype=torch.float32, projection_dtype=torch.float16
    )
    yield base.with_(delta_dtype=torch.float64, z_dtype=torch.bfloat16, channel_dtype=torch.float16)
    yield from optional(base)
    yield base.with_(delta_softplus=False, z=False, method="bilinear")
    yield base.with_(B="constant", C="constant", groups=1, layout="channel_last")


def cases():
    for base in (BASE, BASE.with_(complex=True), PACKED, PACKED.with_(complex=True)):
        yield from every_kind(base)
    # Lengths around that of a chunk, tiles that a group does not fill, many rows.
    yield from BASE.each(seqlen=(0, 1, 2, 31, 32, 33, 64, 1000))
    yield from BASE.each(dim=(1, 17, 130, 1100), groups=(1,))
    yield BASE.with_(batch=70, dim=40, seqlen=33)
    yield BASE.with_(dim=30, groups=30)
    for few in (BASE, BASE.with_(complex=True), PACKED):
        for case in few.each(method=METHODS):
            yield case.with_(input_delta=torch.float32)
            yield case.with_(input_delta=torch.bfloat16, dtype=torch.bfloat16, dstate=70)
            yield case.with_(input_delta=torch.float64, reverse=True, dim=34)
    # Tiles that share a partial sum of dB and dC.
    yield BASE.with_(batch=3, dim=3000, groups=1, dstate=64, seqlen=20)
    yield BASE.with_(batch=1, dim=3000, groups=1, dstate=80, seqlen=33, cu_seqlens=(0, 33))
    # Segments of time.
    for few in BASE.each(complex=(False, True), dtype=(torch.float32, torch.float64), dstate=(9,)):
        yield few.with_(seqlen=2049)
        yield few.with_(seqlen=2049, input_delta=few.dtype, method="foh", layout="channel_last")
        yield few.with_(seqlen=3001, reverse=True, layout="channel_last", B="constant", groups=1)
    yield PACKED.with_(cu_seqlens=(0, 700, 701, 2500), seqlen=2510, dstate=70, dim=2)
    yield from (MANY, MANY.with_(reverse=True, complex=True))
    yield PACKED.with_(cu_seqlens=(0, 0, 0), seqlen=5)


CASES = list(dict.fromkeys(cases()))


def solve(case: Case) -> dict | str:
    """Returns outputs and gradients on the CPU, or the message of an error."""
    try:
        return capabilities.solve_on_gpu(case)
    except RuntimeError as error:
        return str(error)


def solve_all(file: str) -> None:
    torch.save({str(case): solve(case) for case in CASES}, file)


def check_parts() -> None:
    """Checks calls that want only the initial state's gradient or only the map of all steps."""
    for case in parts_of_scans.CASES:
        parts_of_scans.check(case, "cuda")


def check_all_repeatable() -> None:
    for case in (BASE, PACKED, MANY, BASE.with_(seqlen=2049), BASE.with_(dim=1100, complex=True)):
        check_repeatable(case, "cuda")


@pytest.fixture(scope="module")
def solved(tmp_path_factory) -> dict:
    """The results of the floor, by case."""
    return capabilities.solved_on_path("floor", "test_floor", tmp_path_factory)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case, cuda_device, request):
    results = request.getfixturevalue("solved")[str(case)]
    assert not isinstance(results, str), results
    check_results(case, results, "cuda", "the floor")


def test_what_is_wanted_alone(cuda_device):
    capabilities.run_on_path("floor", "import test_floor; test_floor.check_parts()")


def test_runs_agree_bit_by_bit(cuda_device):
    capabilities.run_on_path("floor", "import test_floor; test_floor.check_all_repeatable()")
