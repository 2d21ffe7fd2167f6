"""Few channels and long sequences, which the CUDA library's streamed forward pass cuts into
segments of time, against the reference."""

import pytest
import torch

from problem import METHODS, Case, check

# The last segment, the last chunk and the last tile of a group are not full.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
REAL = Case(batch=2, dim=36, groups=2, seqlen=3109)
KINDS = {
    "real": REAL,
    "few states": REAL.with_(dim=70, groups=1, seqlen=3200, dstate=3),
    "more states": REAL.with_(dim=10, dstate=24),
    "many states": REAL.with_(dim=6, seqlen=1664, dstate=61),
    # The channels of two groups, or of four, are a block's.
    "small groups": REAL.with_(dim=48, groups=4),
    "smaller groups": REAL.with_(dim=40, groups=8, seqlen=2048),
    "complex": REAL.with_(dim=10, seqlen=1528, complex=True, B="packed_grouped", C="grouped"),
}


def cases_of(base):
    yield from (base.with_(method=method) for method in METHODS)
    yield from (base.with_(dtype=dtype) for dtype in (torch.float16, torch.bfloat16))
    yield base.with_(reverse=True)
    yield base.with_(reverse=True, dtype=torch.bfloat16, initial_state=False)
    yield base.with_(layout="channel_last", dtype=torch.bfloat16)
    yield base.with_(decay=1e-3)  # nothing is forgotten
    yield base.with_(decay=20.0, method="bilinear")  # nearly everything is
    yield base.with_(cotangents=("last_state",), z=False, D=False, decay=0.01)


def cases():
    for base in KINDS.values():
        yield from cases_of(base)
    yield from (case.with_(input_delta=case.dtype) for case in cases_of(REAL))
    small = KINDS["small groups"]
    yield from (small.with_(dtype=dtype, input_delta=dtype) for dtype in FLOATS)
    yield from (REAL.with_(dim=dim, groups=1, batch=1) for dim in (1, 33, 600))
    yield from (REAL.with_(seqlen=seqlen, reverse=seqlen % 2 == 0) for seqlen in (1025, 2048, 4100))
    yield REAL.with_(seqlen=20000, dim=8, dtype=torch.bfloat16)
    yield REAL.with_(delta_softplus=False, delta_bias=False, projection_dtype=torch.bfloat16)
    yield REAL.with_(seqlen=4500, dstate=1, dtype=torch.bfloat16)
    yield from (REAL.with_(dstate=2, seqlen=seqlen) for seqlen in (33, 2560))
    yield from (REAL.with_(dstate=1, seqlen=seqlen, complex=True) for seqlen in (33, 2560))


@pytest.mark.parametrize("case", list(dict.fromkeys(cases())), ids=str)
def test_outputs_and_gradients(case, cuda_device):
    check(case, cuda_device)
