"""Few channels: vectors of the CPU kernels hold segments of the sequences instead, or channels of
several groups, or threads take segments of the sequences."""

import pytest
import torch

from problem import COMPLEX_KINDS, LAYOUTS, METHODS, REAL_KINDS, Case, check, generator
from selective_scan import selective_scan_fn, selective_scan_ref

# One channel per group does not fill a vector; the last segment is partial.
BASE = Case(dim=2, groups=2, seqlen=333)


# Two vectors of channels, whose steps threads take in five segments, the last of them short.
CHANNELS = Case(batch=1, dim=20, groups=1, dstate=3, seqlen=2100, step_shift=-3.0)
# A vector has channels of at most 16 groups, the last vector of those that are left.
GROUPS = Case(dim=24, groups=24, dstate=5)


def cases():
    for method in METHODS:
        for is_complex in (False, True):
            yield CHANNELS.with_(method=method, complex=is_complex)
            yield GROUPS.with_(method=method, complex=is_complex)
            events = {"method": method, "complex": is_complex, "input_delta": torch.float32}
            yield from (few.with_(**events) for few in (CHANNELS, GROUPS, BASE))
    yield CHANNELS.with_(B="constant", C="constant")
    yield CHANNELS.with_(layout="channel_last", reverse=True, initial_state=False)
    yield CHANNELS.with_(seqlen=2048, dtype=torch.bfloat16)
    yield CHANNELS.with_(groups=20, B="constant")
    yield CHANNELS.with_(decay=20.0)
    for cotangents in (("out",), ("last_state",)):
        yield CHANNELS.with_(cotangents=cotangents)
    for dim, groups in ((36, 18), (64, 16), (128, 16), (40, 20)):
        yield GROUPS.with_(dim=dim, groups=groups)
    for B, C in (("constant", "grouped"), ("grouped", "constant")):
        yield GROUPS.with_(B=B, C=C, dtype=torch.float64)
    for layout in LAYOUTS:
        yield GROUPS.with_(layout=layout, dtype=torch.bfloat16)
    yield GROUPS.with_(complex=True, B="packed_grouped", C="packed_grouped", reverse=True)
    for method in METHODS:
        for is_complex in (False, True):
            yield BASE.with_(method=method, complex=is_complex)
    for seqlen in (64, 65, 128, 500, 512, 513, 1024, 1025, 2049):
        yield BASE.with_(seqlen=seqlen)
    for B, C in ((B, C) for B in REAL_KINDS for C in REAL_KINDS if B != C):
        yield BASE.with_(groups=1, B=B, C=C)
    for kind in COMPLEX_KINDS:
        yield BASE.with_(complex=True, B=kind, C=kind, groups=1, dstate=5)
    for layout in LAYOUTS:
        yield BASE.with_(layout=layout, groups=1)
        yield BASE.with_(layout=layout, reverse=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield BASE.with_(dtype=dtype, dstate=7)
    for absent in ("D", "z", "delta_bias", "delta_softplus", "initial_state"):
        yield BASE.with_(**{absent: False})
    for cotangents in (("out",), ("last_state",)):
        yield BASE.with_(cotangents=cotangents)
    yield BASE.with_(decay=0.01, seqlen=1000)  # the segments' maps hardly decay
    yield BASE.with_(decay=20.0, seqlen=1000)  # they decay to nothing


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_matches_the_reference(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_angles_add_up_without_loss(method):
    """Over many steps a segment rotates a state by angles whose sum no float32 holds."""
    random = generator(method)
    # So many states that a few of them, accurate by chance, do not determine the error.
    dim, dstate, seqlen = 2, 16, 5000
    u, delta = torch.rand(2, 1, dim, seqlen, generator=random).bfloat16()
    A = torch.complex(
        -0.1 * torch.rand(dim, dstate, generator=random),
        100 * torch.randn(dim, dstate, generator=random),
    )
    B, C = torch.randn(2, 1, dstate, 2 * seqlen, generator=random).bfloat16()

    def last_state(scan, convert):
        inputs = [convert(tensor) for tensor in (u, 0.1 * delta, A, B, C)]
        return scan(*inputs, discretization_method=method, return_last_state=True)[1]

    def double(tensor):
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)

    exact = last_state(selective_scan_fn, double)
    step_by_step = last_state(selective_scan_ref, lambda tensor: tensor)
    actual = last_state(selective_scan_fn, lambda tensor: tensor)
    # The ratio of the errors varies from draw to draw, up to 5. Sums in float32 make it over 100.
    assert (actual - exact).norm() <= 20 * (step_by_step - exact).norm()
