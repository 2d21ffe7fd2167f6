"""Every streamed kernel of the CUDA library, against the reference: all methods that have kernels
for a kind of states, by dtypes and layouts, for sequences that are cut into segments.

A process reads the name of its path once, from its environment, so a separate process solves all
cases.
"""

import pytest
import torch

import test_capabilities as capabilities
from gpu_kernels import skip_without_path
from path_cases import FLOATS
from problem import Case, check_results

# Few channels, so that time is cut into segments; the last tile is not full. Vectors begin
# anywhere.
BASE = Case(batch=1, dim=24, groups=2, seqlen=1760)
KINDS = {
    "16 states": BASE,
    "32 states": BASE.with_(dstate=24),
    "64 states": BASE.with_(dim=8, dstate=61),
    "constant": BASE.with_(B="constant", C="constant", groups=1),
    "complex": BASE.with_(dim=8, complex=True, B="packed_grouped", C="packed_grouped"),
}
LAYOUTS = ("contiguous", "channel_last")
# The other methods run by kernels of one of these.
FEW_METHODS = ("zoh", "foh", "bilinear", "poly")


def cases():
    for kind in KINDS.values():
        methods = FEW_METHODS if kind == BASE else ("zoh",)
        dtypes = FLOATS if kind == BASE else FLOATS[::2]  # others have no gradients in float16
        yield from kind.each(method=methods, dtype=dtypes, seqlen=(kind.seqlen, 33), layout=LAYOUTS)
    # So many warps that kernels of few registers run more of them at a time.
    many = BASE.with_(batch=16, dim=1024, groups=1, seqlen=40, dtype=torch.bfloat16)
    yield from (many.with_(B=kind, C=kind) for kind in ("constant", "grouped"))
    for case in BASE.each(dtype=FLOATS, layout=LAYOUTS):
        yield case.with_(input_delta=case.dtype)


CASES = list(cases())


def solve_all(file: str) -> None:
    torch.save({str(case): capabilities.solve_on_gpu(case) for case in CASES}, file)


@pytest.fixture(scope="module")
def solved(tmp_path_factory) -> dict:
    skip_without_path("streamed")
    return capabilities.solved_on_path("streamed", "test_streamed_kernels", tmp_path_factory)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case, cuda_device, request):
    check_results(case, request.getfixturevalue("solved")[str(case)], "cuda", "streamed")
