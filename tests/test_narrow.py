"""Few states of many channels, for which the CUDA library has a lane a channel, against the
reference."""

import pytest
import torch

from problem import Case, check

# As many warps as it takes for the plan to choose these kernels: one for each group of an entry.
BASE = Case(batch=66, dim=48, groups=6, dstate=1, seqlen=72)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def cases():
    for dtype in FLOATS:
        base = BASE.with_(dtype=dtype)
        yield from (base.with_(dstate=dstate) for dstate in (1, 2, 3, 5, 8))
        # Rows aligned to 16, 8, 4 and 2 bytes, about the chunks' ends; the latter all at once.
        for dstate in (1, 2, 8):
            yield from (
                base.with_(dstate=dstate, seqlen=seqlen)
                for seqlen in (1, 8, 31, 32, 33, 49, 64, 65, 68, 70, 197)
            )
        yield from (base.with_(**{name: False}) for name in ("D", "z", "delta_bias"))
        yield from (base.with_(seqlen=49, **{name: False}) for name in ("z", "initial_state"))
        yield base.with_(delta_softplus=False, delta_bias=False, seqlen=96)
        yield from (base.with_(cotangents=(name,), seqlen=100) for name in ("out", "last_state"))
        # Rows that are parts of wider ones, or are not aligned.
        yield from (base.with_(layout=layout) for layout in ("sliced", "offset"))
        yield base.with_(step_shift=-4.0, dstate=8)
        # So many steps of one state are no longer left to lanes along time.
        yield from (base.with_(dim=6, seqlen=seqlen) for seqlen in (2048, 2056))
    # Warps that are not full, of one and of two.
    yield from (BASE.with_(dim=6 * channels, dstate=2) for channels in (1, 5, 31, 33))
    yield from (BASE.with_(dim=6 * 40, dtype=dtype, seqlen=49) for dtype in FLOATS)
    yield BASE.with_(channel_dtype=torch.bfloat16)
    yield BASE.with_(decay=1e-3, dstate=8, seqlen=200)


CASES = list(dict.fromkeys(cases()))
# Of every kernel one.
FEW = [
    BASE.with_(dtype=dtype, dstate=dstate, seqlen=seqlen)
    for dtype in FLOATS
    for dstate in (1, 2, 8)
    for seqlen in (49, 100)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients(case, cuda_device):
    check(case, cuda_device)
