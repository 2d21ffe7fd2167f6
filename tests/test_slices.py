"""Calls of more states than a kernel holds, which run in slices of them, and calls whose rows are
of several dtypes or layouts, which are copied first."""

import pytest
import torch

from problem import Case, check

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# As many elements as slices are worth, in few steps, since steps are what the reference takes.
BASE = Case(batch=4, dim=256, seqlen=72, dstate=65, groups=2)

SLICES = [
    BASE,
    BASE.with_(dstate=130, dtype=BF16, D=False),
    BASE.with_(dstate=66, dtype=F16, reverse=True, method="foh", delta_softplus=False),
    BASE.with_(dstate=80, z=False, delta_bias=False, layout="expanded"),
    BASE.with_(dim=249, groups=1, dstate=72, dtype=BF16, layout="channel_last"),
    BASE.with_(seqlen=73, dstate=67, dtype=BF16, reverse=True, cotangents=("out",)),
    BASE.with_(seqlen=71, dtype=BF16, projection_dtype=F32, layout="sliced"),
    BASE.with_(complex=True, dstate=17),
    BASE.with_(complex=True, dstate=40, dtype=BF16, B="packed", C="packed", groups=1),
    BASE.with_(complex=True, dstate=18, B="constant", C="constant", cotangents=("last_state",)),
    BASE.with_(dstate=33, B="constant", C="constant", reverse=True),
    BASE.with_(input_delta=F32),  # which runs whole
]


@pytest.mark.parametrize("case", SLICES, ids=str)
def test_slices(case, cuda_device):
    check(case, cuda_device)


MANY = Case(batch=16, dim=1024, seqlen=64, dstate=4, groups=1, initial_state=False)

# Rows of several dtypes or layouts, and odd ones, so many that some of them are copied first.
COPIES = [
    MANY.with_(dtype=BF16, projection_dtype=F32),
    MANY.with_(dtype=BF16, delta_dtype=F32),
    MANY.with_(dtype=F32, delta_dtype=BF16, z_dtype=F16, dstate=16, method="foh"),
    MANY.with_(dtype=F16, delta_dtype=BF16, seqlen=72, reverse=True, D=False),
    MANY.with_(dtype=BF16, z_dtype=F32, groups=2, initial_state=True, method="rk4"),
    MANY.with_(dtype=BF16, delta_dtype=F32, seqlen=63),
    MANY.with_(dtype=BF16, delta_dtype=F32, layout="channel_last"),
    MANY.with_(dtype=BF16, delta_dtype=F32, layout="channel_last", layout_of=("z",)),
    MANY.with_(dtype=BF16, delta_dtype=F32, dstate=1),
    MANY.with_(dtype=BF16, layout="channel_last", dim=1025),
    MANY.with_(dtype=BF16, seqlen=65, reverse=True),
    MANY.with_(dim=1032, seqlen=65, complex=True),
    MANY.with_(layout="channel_last", layout_of=("delta", "z")),
]


@pytest.mark.parametrize("case", COPIES, ids=str)
def test_copies(case, cuda_device):
    check(case, cuda_device)
