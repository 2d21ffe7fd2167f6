"""One of B and C constant, the other variable, against the reference."""

import pytest
import torch

from problem import METHODS, Case, check, check_repeatable

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BASE = Case(batch=2, dim=40, groups=2, seqlen=128, dtype=BF16, B="constant")
KINDS = {"B": BASE, "C": BASE.with_(B="grouped", C="constant")}


def cases():
    for base in KINDS.values():
        yield from (base.with_(method=method) for method in METHODS)
        yield from (base.with_(dtype=dtype) for dtype in (F16, F32))
        yield base.with_(projection_dtype=F32)
        yield base.with_(reverse=True)
        yield base.with_(dstate=5, z=False)
        yield base.with_(dim=37, groups=1, seqlen=96, initial_state=False)
        yield from (base.with_(seqlen=seqlen) for seqlen in (8, 24, 127))
        yield base.with_(layout="channel_last")
        yield base.with_(layout="channel_last", layout_of=("B", "C"))
        yield base.with_(batch=1, dim=6, seqlen=2048)
        yield base.with_(dstate=20)
        yield base.with_(complex=True)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_outputs_and_gradients(case, device):
    check(case, device)


@pytest.mark.parametrize("kind", list(KINDS))
def test_runs_agree_bit_by_bit(kind, device):
    check_repeatable(KINDS[kind], device)
