"""One state per channel, for which CUDA has kernels if A is real, against the reference; and a few
states of few short rows, for which it has a backward kernel."""

import pytest
import torch

from path_cases import FLOATS, one_axis, optional
from problem import LAYOUTS, METHODS, Case, check
from selective_scan import selective_scan_fn, selective_scan_ref

F32, F16, BF16 = FLOATS
# Several tiles of channels per group, the last one not full; whole vectors of 8 steps.
BASE = Case(batch=2, dim=144, groups=2, seqlen=72, dstate=1)
COMPLEX = BASE.with_(complex=True)


def cases(base):
    yield from one_axis(base)
    yield from base.each(dtype=FLOATS, seqlen=(8, 31, 64, 70, 200))
    # Whole vectors of 4 steps, including those of VMamba's maps.
    yield from base.each(dtype=FLOATS, seqlen=(4, 28, 36, 196))
    yield from base.each(dtype=FLOATS, layout=LAYOUTS)
    # Vectors of both lengths, and none, in both directions and by every method.
    yield from base.each(dtype=FLOATS, seqlen=(44, 45, 72), reverse=(True,))
    yield from base.each(dtype=FLOATS, seqlen=(36, 45, 72), method=METHODS)
    yield from base.each(dtype=(F32, BF16), reverse=(True,), layout=("channel_last",))
    kinds = ("grouped", "constant")
    yield from base.each(B=kinds, C=kinds, reverse=(False, True))
    yield base.with_(B="constant", C="constant", groups=1, method="foh")
    yield base.with_(dtype=BF16, projection_dtype=F32)
    yield base.with_(projection_dtype=F16)
    yield from base.each(dim=(1, 7, 8, 33, 65, 130, 1100), groups=(1,))
    yield from base.each(method=METHODS, decay=(30.0,), dtype=(BF16,))


def packed_cases():
    """Yields complex numbers stored as adjacent pairs of real ones, which may have 2 bytes each."""
    packed = COMPLEX.with_(B="packed_grouped", C="packed_grouped")
    yield from packed.each(dtype=FLOATS, method=("foh",))
    yield from packed.each(projection_dtype=(F16, BF16))
    yield COMPLEX.with_(B="packed", C="packed", groups=1, method="bilinear", delta_softplus=False)


# So many channels that a CUDA warp gets eight of them; with fewer channels it gets one.
MANY = BASE.with_(batch=32)


def many_channels():
    yield from MANY.each(dtype=FLOATS, seqlen=(8, 31, 36, 45, 70, 72))
    yield from MANY.each(dtype=FLOATS, seqlen=(196,), reverse=(False, True))
    yield from MANY.each(dtype=FLOATS, layout=LAYOUTS)
    yield from MANY.each(dtype=FLOATS, reverse=(True,))
    yield MANY.with_(dtype=BF16, projection_dtype=F32)
    yield from optional(MANY)
    yield from MANY.each(dim=(130, 165), groups=(1,))


def long_sequences():
    """Yields sequences of several windows, each of a single channel."""
    yield from BASE.each(dtype=FLOATS, seqlen=(256, 264, 520, 523))
    yield from BASE.each(dtype=FLOATS, seqlen=(524, 776), reverse=(True,))
    yield from BASE.each(dtype=FLOATS, seqlen=(1044,))  # vectors of 4 steps
    yield from BASE.each(dtype=FLOATS, seqlen=(520,), layout=("channel_last",))
    yield from projections(BASE.with_(seqlen=520))


def projections(base):
    """Yields B and C that are no vectors along steps, beside rows that are."""
    of = base.with_(layout_of=("B", "C"))
    yield from of.each(dtype=FLOATS, layout=("channel_last", "offset"), reverse=(False, True))


# So few channels that on CUDA four warps share each of them, if there are enough steps. One tile is
# not full.
FEW = BASE.with_(dim=26)


def few_channels():
    """Yields sequences of several rounds of windows, of which the last is not full."""
    yield from FEW.each(dtype=FLOATS, seqlen=(520, 1024, 1032, 2312))
    yield from FEW.each(dtype=FLOATS, seqlen=(1304,), reverse=(True,))
    yield from one_axis(FEW.with_(dtype=F16, seqlen=1288))
    yield from projections(FEW.with_(seqlen=1304))


def large_tiles():
    """Yields cases whose backward blocks have three or four channels of four warps, on a GPU that
    processes more channels at a time that way than with two."""
    large = FEW.with_(batch=1, dtype=F16)
    yield large.with_(dim=384, groups=4, seqlen=2312)
    yield large.with_(dim=400, groups=1, seqlen=2400, z=False, reverse=True)


# A warp has two states of a channel. On CUDA a block has several channels if there are more than
# multiprocessors.
STATES = Case(batch=2, dim=20, groups=2, seqlen=72, dstate=5)


def few_states():
    yield from one_axis(STATES)
    yield from STATES.each(dtype=FLOATS, dstate=(2, 3, 4, 8, 15, 16))
    yield from STATES.each(dtype=FLOATS, seqlen=(1, 8, 31, 196, 197, 256, 257, 512))
    yield from STATES.each(dtype=FLOATS, layout=LAYOUTS, reverse=(False, True))
    yield from STATES.each(dim=(1, 7, 130, 400, 1000), groups=(1,), dstate=(2,))
    some = STATES.with_(layout="channel_last", layout_of=("delta", "z"))
    yield from some.each(dtype=FLOATS)
    yield from projections(STATES.with_(seqlen=300))
    yield STATES.with_(projection_dtype=BF16)
    yield STATES.with_(decay=1e-3, dtype=F16, dim=100)
    yield STATES.with_(step_shift=-4.0, seqlen=300)


CASES = [
    *(*cases(BASE), *cases(COMPLEX), *packed_cases(), *long_sequences(), *few_channels()),
    *few_states(),
]


@pytest.mark.parametrize("case", list(dict.fromkeys(CASES)), ids=str)
def test_outputs_and_gradients(case, device):
    check(case, device)


@pytest.mark.parametrize("case", list(dict.fromkeys([*many_channels(), *large_tiles()])), ids=str)
def test_many_channels(case, cuda_device):
    check(case, cuda_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_what_an_unstable_system_does_to_nothing(dtype, device):
    """A growth that overflows does no harm while the state, or its gradient, is still 0."""
    shape = (1, 144, 2048)
    u = torch.zeros(shape, device=device)
    u[..., -2:] = 1
    u.requires_grad_()
    delta = torch.ones(shape, device=device)
    A = torch.full((144, 1), 6.0, device=device, dtype=dtype)
    B, C = torch.ones(2, 1, 1, 2048, device=device, dtype=dtype)
    cotangent = torch.zeros(shape, device=device)
    cotangent[..., :2] = 1
    results = []
    for function in (selective_scan_fn, selective_scan_ref):
        out = function(u, delta, A, B, C)
        results.append((out, *torch.autograd.grad(out, u, cotangent)))
    torch.testing.assert_close(*results)
