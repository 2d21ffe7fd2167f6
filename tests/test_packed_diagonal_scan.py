"""Packed sequences of the diagonal scan give the results of separate ones."""

import itertools

import pytest
import torch

from opchecks import gradcheck
from selective_scan import diagonal_scan_fn, diagonal_scan_ref
from test_diagonal_scan import Case, check, make, with_dtypes

F64, BF16, C64 = torch.float64, torch.bfloat16, torch.complex64
BOUNDS = (0, 30, 30, 31, 64, 130)
EDGED = (7, 40, 41, 100)  # has steps outside of all sequences
BASE = Case((1, 5, 130), cu_seqlens=BOUNDS)
WIDE = BASE.with_(shape=(1, 40, 130), layout="channel_last")
ROWS = BASE.with_(shape=(1, 3, 7, 130), a_shape=(7, 1))
LONG = Case((1, 2, 7000), cu_seqlens=(0, 5, 5000, 5010, 7000))
CASES = [
    *BASE.each(reverse=(False, True)),
    WIDE,
    WIDE.with_(reverse=True, initial_state=None),
    BASE.with_(shape=(1, 130)),
    ROWS,
    ROWS.with_(layout="channel_last", reverse=True),
    BASE.with_(a_shape=(130,)),
    with_dtypes(BASE.with_(reverse=True), C64, C64),
    with_dtypes(BASE, C64, torch.float32),
    with_dtypes(BASE, BF16, BF16),
    with_dtypes(BASE.with_(reverse=True, layout="offset"), BF16, BF16),
    BASE.with_(b=F64, initial_state=F64, layout="sliced"),
    BASE.with_(cu_seqlens=EDGED),
    BASE.with_(cu_seqlens=EDGED, reverse=True, a_shape=(1, 5, 1)),
    *BASE.each(cu_seqlens=((50,), (0, 0, 130), tuple(range(131)))),
    *LONG.each(layout=("contiguous", "channel_last")),
]


@pytest.mark.parametrize("scan", [diagonal_scan_fn, diagonal_scan_ref])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed(case, scan, device):
    check(case, device, scan)


@pytest.mark.parametrize("rows", [(1, 2), (1, 40)])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_sequence_has_the_bits_it_has_alone(rows, reverse):
    bounds = (0, 33, 3000, 3000, 3010, 6000)
    case = Case((*rows, 6000), cu_seqlens=bounds, reverse=reverse)
    tensors = {name: tensor.detach() for name, tensor in make(case, "cpu").items()}
    h = diagonal_scan_fn(**tensors, reverse=reverse, cu_seqlens=torch.tensor(bounds))
    for index, (begin, end) in enumerate(itertools.pairwise(bounds)):
        alone = diagonal_scan_fn(
            tensors["a"][..., begin:end],
            tensors["b"][..., begin:end],
            initial_state=tensors["initial_state"][index : index + 1],
            reverse=reverse,
        )
        assert torch.equal(h[..., begin:end], alone)


def test_what_is_not_finite_stays_in_its_sequence(device):
    tensors = {name: tensor.detach() for name, tensor in make(BASE, device).items()}
    tensors["b"][..., 40] = torch.nan
    h = diagonal_scan_fn(**tensors, cu_seqlens=torch.tensor(BOUNDS, device=device))
    assert h[..., 40:64].isnan().all()
    assert h[..., :40].isfinite().all()
    assert h[..., 64:].isfinite().all()


@pytest.mark.parametrize("scan", [diagonal_scan_fn, diagonal_scan_ref])
@pytest.mark.parametrize("reverse", [False, True])
def test_what_lies_outside_of_all_sequences_is_ignored(reverse, scan, device):
    bounds = (3, 64, 64, 120)
    case = BASE.with_(cu_seqlens=bounds, reverse=reverse, a=F64, b=F64, initial_state=F64)
    tensors = {name: tensor.detach() for name, tensor in make(case, device).items()}
    cu_seqlens = torch.tensor(bounds, device=device)
    results = []
    for value in (0, torch.nan):
        for name in ("a", "b"):
            tensors[name][..., : bounds[0]] = value
            tensors[name][..., bounds[-1] :] = value
        inputs = [tensor.clone().requires_grad_() for tensor in tensors.values()]
        given = dict(zip(tensors, inputs, strict=True))
        h = scan(**given, reverse=reverse, cu_seqlens=cu_seqlens)
        results.append([h, *torch.autograd.grad(h.square().sum(), inputs)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("bounds", [(0, 50, 40, 130), (-9, 60), (0, 900), (90, -9, 90, 2**40)])
def test_boundaries_that_do_not_rise_do_no_harm(bounds, layout, cuda_device):
    """The results have no meaning, but the call ends, and no other memory is touched."""
    tensors = make(BASE.with_(cu_seqlens=bounds, layout=layout), cuda_device)
    h = diagonal_scan_fn(**tensors, cu_seqlens=torch.tensor(bounds, device=cuda_device))
    torch.autograd.grad(h.sum(), list(tensors.values()))
    torch.cuda.synchronize()


SMALL = Case((1, 3, 7), None, F64, F64, F64, cu_seqlens=(0, 3, 3, 6))


def test_gradcheck(device):
    cu_seqlens = torch.tensor(SMALL.cu_seqlens, device=device)
    gradcheck(diagonal_scan_fn, make(SMALL, device), cu_seqlens=cu_seqlens)


def test_opcheck(device):
    a, b, initial_state = make(SMALL, device).values()
    cu_seqlens = torch.tensor(SMALL.cu_seqlens, device=device)
    ops = torch.ops.selective_scan
    torch.library.opcheck(ops.diagonal_scan_fwd, (a, b, initial_state, True, cu_seqlens))
    values = (a.detach(), b.detach(), initial_state.detach())
    torch.library.opcheck(ops.diagonal_scan_bwd, (values[1], *values, True, cu_seqlens, False))
