"""In float16 the gradients of B and C, sums over channels, have no error beyond rounding."""

import pytest
import torch

from accuracy import Error
from problem import METHODS, Case, reference, run

BASE = Case(batch=2, dim=600, groups=1, dtype=torch.float16)
FEW = BASE.with_(dim=12, batch=1)

# For the streamed kernels on CUDA: whole tiles of 96 channels and a part of one; rows that lanes
# read along steps, along channels, and element by element.
STREAMED = {
    "vectors of steps": BASE.with_(seqlen=64),
    "steps against the scan": BASE.with_(seqlen=64, reverse=True, z=False),
    "vectors of channels": BASE.with_(layout="channel_last"),
    "single elements": BASE,
    "either": BASE.with_(seqlen=64, layout="channel_last", layout_of=("u", "delta")),
    "segments": FEW.with_(seqlen=1100),
}
OTHERS = {
    "few channels": FEW.with_(seqlen=64),
    "one state": BASE.with_(dim=60, dstate=1),
    "two warps a channel": BASE.with_(dim=60, dstate=32),
    "four warps a channel": BASE.with_(dim=60, dstate=64),
    "complex": BASE.with_(dim=60, complex=True, B="packed_grouped", C="packed_grouped"),
    "constant": BASE.with_(dim=60, B="constant", C="constant"),
    "beside bfloat16": BASE.with_(dtype=torch.bfloat16, projection_dtype=torch.float16),
    "beside float32": BASE.with_(dtype=torch.float32, projection_dtype=torch.float16),
}
CASES = STREAMED | OTHERS

PACKED = BASE.with_(batch=1, dim=520, seqlen=2048, cu_seqlens=(3, 30, 30, 1500, 2040))
LARGE = {
    "packed along channels": PACKED.with_(layout="channel_last"),
    "packed along steps": PACKED,
    # Calls whose types have no kernels that keep all digits; they run on copies of their rows.
    **{
        name: CASES[name].with_(batch=8, dim=1024, seqlen=128, dstate=dstate, initial_state=False)
        for name, dstate in (("two warps a channel", 17), ("complex", 3), ("beside bfloat16", 5))
    },
}


def assert_as_good_as_rounded(case: Case, device: str) -> None:
    exact = reference(case)
    actual = run(case, device)
    for name in ("dB", "dC"):
        assert actual[name].dtype == torch.float16
        rounded = exact[name].to(actual[name].dtype).to(exact[name].dtype)
        rounding = Error.of(rounded, exact[name])
        error = Error.of(actual[name].cpu().to(exact[name].dtype), exact[name])
        # Arithmetic in fp32 gives a ratio of 1.00 to 1.01.
        assert error.relative_l2 <= 1.1 * rounding.relative_l2, (name, error, rounding)


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_of_projections(name, device):
    assert_as_good_as_rounded(CASES[name], device)


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("name", ["vectors of steps", "vectors of channels"])
def test_methods(name, method, device):
    assert_as_good_as_rounded(CASES[name].with_(method=method), device)


@pytest.mark.parametrize("name", list(LARGE))
def test_large_calls(name, cuda_device):
    assert_as_good_as_rounded(LARGE[name], cuda_device)
