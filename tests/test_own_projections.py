"""Channels of which each has B and C of its own, against the reference."""

import pytest
import torch

from problem import METHODS, Case, check

# No number of channels or steps that fills warps or chunks.
BASE = Case(batch=2, dim=13, groups=13, seqlen=72)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def cases():
    yield from (BASE.with_(method=method) for method in METHODS)
    for dtype in FLOATS:
        yield from (BASE.with_(dtype=dtype, seqlen=seqlen) for seqlen in (8, 16, 32, 64, 104))
        yield BASE.with_(dtype=dtype, layout="channel_last", layout_of=("u", "delta", "z"))
        yield BASE.with_(dtype=dtype, layout="dim_first")
        for seqlen in (1, 7, 35, 99):
            yield BASE.with_(dtype=dtype, seqlen=seqlen, layout="padded_rows")
        # Time in segments.
        yield BASE.with_(dtype=dtype, batch=1, seqlen=1128)
        yield BASE.with_(dtype=dtype, method="foh", dstate=9)
    yield from (BASE.with_(dstate=dstate) for dstate in (2, 3, 4, 8, 12, 15))
    yield from (BASE.with_(dim=dim, groups=dim) for dim in (2, 8, 100))
    yield BASE.with_(dtype=torch.bfloat16, projection_dtype=torch.float32)
    yield BASE.with_(projection_dtype=torch.bfloat16)
    yield from (BASE.with_(**{name: False}) for name in ("D", "z", "delta_bias", "initial_state"))
    yield BASE.with_(delta_softplus=False, method="bilinear")
    yield from (BASE.with_(cotangents=(name,)) for name in ("out", "last_state"))
    yield BASE.with_(batch=1, seqlen=1128, cotangents=("last_state",), method="rk4")
    yield BASE.with_(reverse=True)
    yield BASE.with_(seqlen=71)
    yield BASE.with_(dstate=17)
    yield BASE.with_(complex=True)
    yield BASE.with_(dtype=torch.float64)
    yield BASE.with_(layout="channel_last")


@pytest.mark.parametrize("case", list(dict.fromkeys(cases())), ids=str)
def test_outputs_and_gradients(case, device):
    check(case, device)


# Gradients of 4 MiB and more, which the CPU kernels store past the caches where rows are aligned.
LARGE = (
    BASE.with_(batch=1, dim=64, groups=64, dstate=16, seqlen=1040),
    BASE.with_(batch=1, dim=70, groups=70, dstate=16, seqlen=1029, reverse=True),
    BASE.with_(dim=64, groups=64, dstate=16, seqlen=1088, dtype=torch.bfloat16),
    BASE.with_(batch=1, dim=40, groups=40, dstate=16, seqlen=840, dtype=torch.float64),
)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_gradients(case, device):
    check(case, device)
