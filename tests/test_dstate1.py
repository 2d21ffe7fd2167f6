"""One state a channel, for which CUDA has kernels if A is real, against the reference."""

import pytest
import torch

from problem import LAYOUTS, METHODS, Case, check
from selective_scan import selective_scan_fn, selective_scan_ref

# Several tiles of channels to a group, the last one not full; whole vectors of 8 steps.
BASE = Case(batch=2, dim=144, groups=2, seqlen=72, dstate=1)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
COMPLEX = BASE.with_(complex=True)


def cases(base):
    yield from (base.with_(method=method) for method in METHODS)
    for dtype in FLOATS:
        yield from (base.with_(dtype=dtype, seqlen=seqlen) for seqlen in (8, 31, 64, 70, 200))
        # Whole vectors of 4 steps, those of VMamba's maps among them.
        yield from (base.with_(dtype=dtype, seqlen=seqlen) for seqlen in (4, 28, 36, 196))
        yield base.with_(dtype=dtype, seqlen=44, reverse=True)
        yield from (base.with_(dtype=dtype, layout=layout) for layout in LAYOUTS)
        yield base.with_(dtype=dtype, reverse=True)
        yield base.with_(dtype=dtype, reverse=True, seqlen=45)
        # Vectors of both lengths, and none, by every method.
        for method in METHODS:
            yield from (base.with_(dtype=dtype, seqlen=n, method=method) for n in (36, 45, 72))
    for dtype in (torch.float32, torch.bfloat16):
        yield base.with_(dtype=dtype, reverse=True, layout="channel_last")
    for B, C in (("constant", "grouped"), ("grouped", "constant"), ("constant", "constant")):
        yield from (base.with_(B=B, C=C, reverse=reverse) for reverse in (False, True))
    yield base.with_(B="constant", C="constant", groups=1, method="foh")
    yield base.with_(dtype=torch.bfloat16, projection_dtype=torch.float32)
    yield base.with_(projection_dtype=torch.float16)
    yield from (base.with_(**{name: False}) for name in ("D", "z", "delta_bias", "initial_state"))
    yield base.with_(delta_softplus=False, method="bilinear")
    yield from (base.with_(cotangents=(name,)) for name in ("out", "last_state"))
    yield from (base.with_(dim=dim, groups=1) for dim in (1, 7, 8, 33, 65, 130, 1100))
    yield from (base.with_(method=name, decay=30.0, dtype=torch.bfloat16) for name in METHODS)


def packed_cases():
    """Complex numbers of two real ones side by side, which may have 2 bytes each."""
    packed = COMPLEX.with_(B="packed_grouped", C="packed_grouped")
    yield from (packed.with_(dtype=dtype, method="foh") for dtype in FLOATS)
    yield from (packed.with_(projection_dtype=dtype) for dtype in FLOATS[1:])
    yield COMPLEX.with_(B="packed", C="packed", groups=1, method="bilinear", delta_softplus=False)


# Channels enough for CUDA to give eight to a warp, where it gives it one of fewer.
MANY = BASE.with_(batch=32)


def many_channels():
    for dtype in FLOATS:
        yield from (MANY.with_(dtype=dtype, seqlen=seqlen) for seqlen in (8, 31, 36, 45, 70, 72))
        yield from (MANY.with_(dtype=dtype, seqlen=196, reverse=r) for r in (False, True))
        yield from (MANY.with_(dtype=dtype, layout=layout) for layout in LAYOUTS)
        yield MANY.with_(dtype=dtype, reverse=True)
    yield MANY.with_(dtype=torch.bfloat16, projection_dtype=torch.float32)
    yield from (MANY.with_(**{name: False}) for name in ("D", "z", "delta_bias", "initial_state"))
    yield from (MANY.with_(cotangents=(name,)) for name in ("out", "last_state"))
    yield from (MANY.with_(dim=dim, groups=1) for dim in (130, 165))


def long_sequences():
    """Several windows of one channel each."""
    for dtype in FLOATS:
        yield from (BASE.with_(dtype=dtype, seqlen=seqlen) for seqlen in (256, 264, 520, 523))
        yield from (BASE.with_(dtype=dtype, seqlen=n, reverse=True) for n in (524, 776))
        yield BASE.with_(dtype=dtype, seqlen=1044)  # of vectors of 4 steps
        yield BASE.with_(dtype=dtype, seqlen=520, layout="channel_last")


# Channels so few that CUDA has four warps share each, where they have steps for it. A tile of them
# is not full.
FEW = BASE.with_(dim=26)


def few_channels():
    """Rounds of windows, of which the last one is not full."""
    for dtype in FLOATS:
        yield from (FEW.with_(dtype=dtype, seqlen=seqlen) for seqlen in (520, 1024, 1032, 2312))
        yield FEW.with_(dtype=dtype, seqlen=1304, reverse=True)
    few = FEW.with_(dtype=torch.float16, seqlen=1288)
    yield from (few.with_(**{name: False}) for name in ("D", "z", "delta_bias", "initial_state"))
    yield from (few.with_(cotangents=(name,)) for name in ("out", "last_state"))
    yield from (few.with_(method=method) for method in METHODS)


def large_tiles():
    """Three and four channels of four warps to a block backward, on a GPU that has these do more
    at a time than two."""
    large = FEW.with_(batch=1, dtype=torch.float16)
    yield large.with_(dim=384, groups=4, seqlen=2312)
    yield large.with_(dim=400, groups=1, seqlen=2400, z=False, reverse=True)


CASES = [*cases(BASE), *cases(COMPLEX), *packed_cases(), *long_sequences(), *few_channels()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients(case, device):
    check(case, device)


@pytest.mark.parametrize("case", [*many_channels(), *large_tiles()], ids=str)
def test_many_channels(case, cuda_device):
    check(case, cuda_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_what_an_unstable_system_does_to_nothing(dtype, device):
    """Steps may grow by a factor that overflows while the state, or its gradient, is still 0."""
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
