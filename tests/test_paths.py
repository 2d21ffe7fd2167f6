"""Shapes for which the CUDA library has specialized kernels or several ways, against the reference.
test_dstate1.py, test_prompt.py and test_streamed_backward.py have more of them."""

import itertools

import pytest
import torch

from path_cases import FLOATS, one_axis
from problem import METHODS, Case, check

F32, F16, BF16 = FLOATS

# --- few states of many channels, with one lane per channel ---------------------------------------

# Enough warps for the plan to choose these kernels: one for each group of a batch entry.
NARROW = Case(batch=66, dim=48, groups=6, dstate=1, seqlen=72)


def narrow_cases():
    yield from NARROW.each(dtype=FLOATS, dstate=(1, 2, 3, 5, 8))
    # Rows aligned to 16, 8, 4 and 2 bytes, around multiples of a chunk. If they are aligned to 2
    # bytes, all rows of a warp are loaded at once.
    lengths = (1, 8, 31, 32, 33, 49, 64, 65, 68, 70, 197)
    yield from NARROW.each(dtype=FLOATS, dstate=(1, 2, 8), seqlen=lengths)
    # Warps that are not full, one or two per group.
    yield from NARROW.with_(dstate=2).each(dim=(6, 6 * 5, 6 * 31, 6 * 33))
    yield from NARROW.each(dim=(6 * 40,), dtype=FLOATS, seqlen=(49,))
    for base in NARROW.each(dtype=FLOATS):
        yield from (base.with_(**{name: False}) for name in ("D", "z", "delta_bias"))
        yield from (base.with_(seqlen=49, **{name: False}) for name in ("z", "initial_state"))
        yield base.with_(delta_softplus=False, delta_bias=False, seqlen=96)
        yield from base.each(cotangents=(("out",), ("last_state",)), seqlen=(100,))
        # Rows that are parts of wider ones, or not aligned.
        yield from base.each(layout=("sliced", "offset"))
        yield base.with_(step_shift=-4.0, dstate=8)
        # With so many steps, calls of one state no longer go to lanes along time.
        yield from base.each(dim=(6,), seqlen=(2048, 2056))
    yield NARROW.with_(channel_dtype=BF16)
    yield NARROW.with_(decay=1e-3, dstate=8, seqlen=200)


# One case for every kernel.
FEW_NARROW = [*NARROW.each(dtype=FLOATS, dstate=(1, 2, 8), seqlen=(49, 100))]


@pytest.mark.parametrize("case", list(dict.fromkeys(narrow_cases())), ids=str)
def test_narrow(case, cuda_device):
    check(case, cuda_device)


# --- more states than a kernel holds, which run in slices -----------------------------------------

# So many elements that slices pay off, in few steps, since steps are what the reference takes.
SLICED = Case(batch=4, dim=256, seqlen=72, dstate=65, groups=2)

SLICES = [
    SLICED,
    SLICED.with_(dstate=130, dtype=BF16, D=False),
    SLICED.with_(dstate=66, dtype=F16, reverse=True, method="foh", delta_softplus=False),
    SLICED.with_(dstate=80, z=False, delta_bias=False, layout="expanded"),
    SLICED.with_(dim=249, groups=1, dstate=72, dtype=BF16, layout="channel_last"),
    SLICED.with_(seqlen=73, dstate=67, dtype=BF16, reverse=True, cotangents=("out",)),
    SLICED.with_(seqlen=71, dtype=BF16, projection_dtype=F32, layout="sliced"),
    SLICED.with_(complex=True, dstate=17),
    SLICED.with_(complex=True, dstate=40, dtype=BF16, B="packed", C="packed", groups=1),
    SLICED.with_(complex=True, dstate=18, B="constant", C="constant", cotangents=("last_state",)),
    SLICED.with_(dstate=33, B="constant", C="constant", reverse=True),
    SLICED.with_(input_delta=F32),  # runs unsliced
]

# --- rows of several dtypes or layouts, and odd ones, large enough to be copied first -------------

COPIED = Case(batch=16, dim=1024, seqlen=64, dstate=4, groups=1, initial_state=False)
MIXED = COPIED.with_(dtype=BF16, delta_dtype=F32)
COPIES = [
    COPIED.with_(dtype=BF16, projection_dtype=F32),
    MIXED,
    COPIED.with_(delta_dtype=BF16, z_dtype=F16, dstate=16, method="foh"),
    COPIED.with_(dtype=F16, delta_dtype=BF16, seqlen=72, reverse=True, D=False),
    COPIED.with_(dtype=BF16, z_dtype=F32, groups=2, initial_state=True, method="rk4"),
    MIXED.with_(seqlen=63),
    MIXED.with_(layout="channel_last"),
    MIXED.with_(layout="channel_last", layout_of=("z",)),
    MIXED.with_(dstate=1),
    COPIED.with_(dtype=BF16, layout="channel_last", dim=1025),
    COPIED.with_(dtype=BF16, seqlen=65, reverse=True),
    COPIED.with_(dim=1032, seqlen=65, complex=True),
    COPIED.with_(layout="channel_last", layout_of=("delta", "z")),
]


@pytest.mark.parametrize("case", [*SLICES, *COPIES], ids=str)
def test_slices_and_copies(case, cuda_device):
    check(case, cuda_device)


# --- few channels and long sequences, whose streamed forward pass is cut into segments ------------

# The last segment, the last chunk and the last tile of a group are not full.
LONG = Case(batch=2, dim=36, groups=2, seqlen=3109)
SEGMENTS = {
    "real": LONG,
    "few states": LONG.with_(dim=70, groups=1, seqlen=3200, dstate=3),
    "more states": LONG.with_(dim=10, dstate=24),
    "many states": LONG.with_(dim=6, seqlen=1664, dstate=61),
    # A block has the channels of two or of four groups.
    "small groups": LONG.with_(dim=48, groups=4),
    "smaller groups": LONG.with_(dim=40, groups=8, seqlen=2048),
    "complex": LONG.with_(dim=10, seqlen=1528, complex=True, B="packed_grouped", C="grouped"),
}


def long_cases(base):
    yield from base.each(method=METHODS)
    yield from base.each(dtype=FLOATS)
    yield base.with_(reverse=True)
    yield base.with_(reverse=True, dtype=BF16, initial_state=False)
    yield base.with_(layout="channel_last", dtype=BF16)
    yield base.with_(decay=1e-3)  # nothing is forgotten
    yield base.with_(decay=20.0, method="bilinear")  # nearly everything is forgotten
    yield base.with_(cotangents=("last_state",), z=False, D=False, decay=0.01)


def segment_cases():
    yield from itertools.chain.from_iterable(map(long_cases, SEGMENTS.values()))
    yield from (case.with_(input_delta=case.dtype) for case in long_cases(LONG))
    small = SEGMENTS["small groups"]
    yield from (small.with_(dtype=dtype, input_delta=dtype) for dtype in FLOATS)
    yield from LONG.with_(groups=1, batch=1).each(dim=(1, 33, 600))
    yield from (LONG.with_(seqlen=seqlen, reverse=seqlen % 2 == 0) for seqlen in (1025, 2048, 4100))
    yield LONG.with_(seqlen=20000, dim=8, dtype=BF16)
    yield LONG.with_(delta_softplus=False, delta_bias=False, projection_dtype=BF16)
    yield LONG.with_(seqlen=4500, dstate=1, dtype=BF16)
    yield from LONG.each(dstate=(2,), seqlen=(33, 2560))
    yield from LONG.each(dstate=(1,), seqlen=(33, 2560), complex=(True,))


@pytest.mark.parametrize("case", list(dict.fromkeys(segment_cases())), ids=str)
def test_segments(case, cuda_device):
    check(case, cuda_device)


# --- channels with separate B and C ---------------------------------------------------------------

# Numbers of channels and steps that fill neither warps nor chunks.
OWN = Case(batch=2, dim=13, groups=13, seqlen=72)


def own_cases():
    yield from one_axis(OWN)
    yield from OWN.each(dtype=FLOATS, seqlen=(8, 16, 32, 64, 104))
    yield from OWN.each(dtype=FLOATS, seqlen=(1, 7, 35, 99), layout=("padded_rows",))
    for base in OWN.each(dtype=FLOATS):
        yield base.with_(layout="channel_last", layout_of=("u", "delta", "z"))
        yield base.with_(layout="dim_first")
        yield base.with_(batch=1, seqlen=1128)  # time in segments
        yield base.with_(method="foh", dstate=9)
    yield from OWN.each(dstate=(2, 3, 4, 8, 12, 15, 17))
    yield from (OWN.with_(dim=dim, groups=dim) for dim in (2, 8, 100))
    yield OWN.with_(dtype=BF16, projection_dtype=F32)
    yield OWN.with_(projection_dtype=BF16)
    yield OWN.with_(batch=1, seqlen=1128, cotangents=("last_state",), method="rk4")
    yield OWN.with_(reverse=True)
    yield OWN.with_(seqlen=71)
    yield OWN.with_(complex=True)
    yield OWN.with_(dtype=torch.float64)
    yield OWN.with_(layout="channel_last")


# Gradients of 4 MiB and more, which the CPU kernels store past the caches if rows are aligned.
LARGE = [
    OWN.with_(batch=1, dim=64, groups=64, seqlen=1040),
    OWN.with_(batch=1, dim=70, groups=70, seqlen=1029, reverse=True),
    OWN.with_(dim=64, groups=64, seqlen=1088, dtype=BF16),
    OWN.with_(batch=1, dim=40, groups=40, seqlen=840, dtype=torch.float64),
]


@pytest.mark.parametrize("case", [*dict.fromkeys(own_cases()), *LARGE], ids=str)
def test_own_projections(case, device):
    check(case, device)
