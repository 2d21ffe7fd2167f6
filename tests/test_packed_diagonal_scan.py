"""Packed sequences of the diagonal scan give the results of separate ones."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from accuracy import Error
from cases import Axes
from opchecks import gradcheck
from problem import Draws, laid_out
from selective_scan import diagonal_scan_fn, diagonal_scan_ref

F32, F64, BF16, C64 = torch.float32, torch.float64, torch.bfloat16, torch.complex64
BOUNDS = (0, 30, 30, 31, 64, 130)
LARGEST_ERROR = {F32: 3e-6, F64: 1e-13, BF16: 1e-2, C64: 3e-6}


@dataclass(frozen=True)
class Case(Axes):
    """One call. The defaults are the base case, and a test changes one axis at a time."""

    rows: tuple[int, ...] = (1, 5)
    bounds: tuple[int, ...] = BOUNDS
    seqlen: int = 130
    a_shape: tuple[int, ...] | None = None  # None: that of b
    a: torch.dtype = F32
    b: torch.dtype = F32
    initial_state: bool = True
    reverse: bool = False
    layout: str = "contiguous"


def make(case: Case, device: str) -> dict[str, torch.Tensor | None]:
    draws = Draws(case)
    is_complex = case.a.is_complex or case.b.is_complex
    state = C64 if is_complex else F64 if F64 in (case.a, case.b) else F32

    shape = (*case.rows, case.seqlen)
    a_shape = shape if case.a_shape is None else case.a_shape
    a = torch.sgn(draws.normal(*a_shape, dtype=torch.promote_types(case.a, F64)))
    a = (a * draws.uniform(0, 0.9, *a_shape)).to(case.a)
    tensors = {"a": a, "b": draws.normal(*shape, dtype=case.b)}
    if case.initial_state:
        shape = (len(case.bounds) - 1, *case.rows[1:])
        tensors["initial_state"] = draws.normal(*shape, dtype=state)
    return laid_out(tensors, case.layout, device)


def one_by_one(tensors: dict, case: Case) -> torch.Tensor:
    """Computes the sequences one by one, by the reference in fp64."""
    wide = {n: t.cpu().to(torch.complex128 if t.is_complex() else F64) for n, t in tensors.items()}
    a, b = wide["a"].broadcast_to(wide["b"].shape), wide["b"]
    dtype = torch.promote_types(a.dtype, b.dtype)
    parts = [torch.zeros_like(b[..., : case.bounds[0]], dtype=dtype)]
    for index, (begin, end) in enumerate(itertools.pairwise(case.bounds)):
        initial = wide["initial_state"][index : index + 1] if case.initial_state else None
        steps = slice(begin, end)
        parts.append(
            diagonal_scan_ref(
                a[..., steps], b[..., steps], initial_state=initial, reverse=case.reverse
            )
        )
    parts.append(torch.zeros_like(b[..., case.bounds[-1] :], dtype=dtype))
    return torch.cat(parts, -1)


CASES = [
    Case(),
    Case(reverse=True),
    Case(rows=(1, 40), layout="channel_last"),
    Case(rows=(1, 40), layout="channel_last", reverse=True, initial_state=False),
    Case(rows=(1,)),
    Case(rows=(1, 3, 7), a_shape=(7, 1)),
    Case(rows=(1, 3, 7), a_shape=(7, 1), layout="channel_last", reverse=True),
    Case(a_shape=(130,)),
    Case(a=C64, b=C64, reverse=True),
    Case(a=C64),
    Case(b=BF16, a=BF16),
    Case(b=BF16, a=BF16, reverse=True, layout="offset"),
    Case(b=F64, layout="sliced"),
    Case(bounds=(7, 40, 41, 100)),
    Case(bounds=(7, 40, 41, 100), reverse=True, a_shape=(1, 5, 1)),
    Case(bounds=(50,)),
    Case(bounds=(0, 0, 130)),
    Case(bounds=tuple(range(131))),
    Case(rows=(1, 2), bounds=(0, 5, 5000, 5010, 7000), seqlen=7000),
    Case(rows=(1, 2), bounds=(0, 5, 5000, 5010, 7000), seqlen=7000, layout="channel_last"),
]


def check(case, device, scan=diagonal_scan_fn):
    tensors = make(case, device)
    cu_seqlens = torch.tensor(case.bounds, device=device)
    expected = one_by_one(tensors, case)
    cotangent = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(
        expected, list(tensors.values()), cotangent, allow_unused=True
    ) if expected.requires_grad else [None] * len(tensors)  # fmt: skip
    h = scan(**tensors, reverse=case.reverse, cu_seqlens=cu_seqlens)
    gradients = torch.autograd.grad(
        h, list(tensors.values()), cotangent.to(device, h.dtype), allow_unused=True
    )
    allowed = LARGEST_ERROR[case.b]
    assert Error.of(h.detach().cpu().to(expected.dtype), expected.detach()).relative_l2 < allowed
    for name, actual, exact in zip(tensors, gradients, expected_gradients, strict=True):
        if exact is None or actual is None:
            assert exact is None or not exact.any(), name
            assert actual is None or not actual.any(), name
            continue
        error = Error.of(actual.cpu().to(exact.dtype), exact.cpu())
        # The gradient of a contains the rounding of h.
        assert error.relative_l2 < 10 * allowed, f"{name}: {error}"


@pytest.mark.parametrize("scan", [diagonal_scan_fn, diagonal_scan_ref])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed(case, scan, device):
    check(case, device, scan)


@pytest.mark.parametrize("rows", [(1, 2), (1, 40)])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_sequence_has_the_bits_it_has_alone(rows, reverse):
    case = Case(rows=rows, bounds=(0, 33, 3000, 3000, 3010, 6000), seqlen=6000, reverse=reverse)
    tensors = {name: tensor.detach() for name, tensor in make(case, "cpu").items()}
    h = diagonal_scan_fn(**tensors, reverse=reverse, cu_seqlens=torch.tensor(case.bounds))
    for index, (begin, end) in enumerate(itertools.pairwise(case.bounds)):
        alone = diagonal_scan_fn(
            tensors["a"][..., begin:end],
            tensors["b"][..., begin:end],
            initial_state=tensors["initial_state"][index : index + 1],
            reverse=reverse,
        )
        assert torch.equal(h[..., begin:end], alone)


def test_what_is_not_finite_stays_in_its_sequence(device):
    tensors = {name: tensor.detach() for name, tensor in make(Case(), device).items()}
    tensors["b"][..., 40] = torch.nan
    h = diagonal_scan_fn(**tensors, cu_seqlens=torch.tensor(BOUNDS, device=device))
    assert h[..., 40:64].isnan().all()
    assert h[..., :40].isfinite().all()
    assert h[..., 64:].isfinite().all()


@pytest.mark.parametrize("scan", [diagonal_scan_fn, diagonal_scan_ref])
@pytest.mark.parametrize("reverse", [False, True])
def test_what_lies_outside_of_all_sequences_is_ignored(reverse, scan, device):
    case = Case(bounds=(3, 64, 64, 120), reverse=reverse, a=F64, b=F64)
    tensors = {name: tensor.detach() for name, tensor in make(case, device).items()}
    bounds = torch.tensor(case.bounds, device=device)
    results = []
    for value in (0, torch.nan):
        for name in ("a", "b"):
            tensors[name][..., : case.bounds[0]] = value
            tensors[name][..., case.bounds[-1] :] = value
        inputs = [tensor.clone().requires_grad_() for tensor in tensors.values()]
        given = dict(zip(tensors, inputs, strict=True))
        h = scan(**given, reverse=reverse, cu_seqlens=bounds)
        results.append([h, *torch.autograd.grad(h.square().sum(), inputs)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("bounds", [(0, 50, 40, 130), (-9, 60), (0, 900), (90, -9, 90, 2**40)])
def test_boundaries_that_do_not_rise_do_no_harm(bounds, layout, cuda_device):
    """The results have no meaning, but the call ends, and no other memory is touched."""
    tensors = make(Case(bounds=bounds, layout=layout), cuda_device)
    h = diagonal_scan_fn(**tensors, cu_seqlens=torch.tensor(bounds, device=cuda_device))
    torch.autograd.grad(h.sum(), list(tensors.values()))
    torch.cuda.synchronize()


SMALL = Case(rows=(1, 3), bounds=(0, 3, 3, 6), seqlen=7, a=F64, b=F64)


def test_gradcheck(device):
    tensors = make(SMALL, device)
    tensors["initial_state"] = tensors["initial_state"].detach().double().requires_grad_()
    gradcheck(diagonal_scan_fn, tensors, cu_seqlens=torch.tensor(SMALL.bounds, device=device))


def test_opcheck(device):
    a, b, initial_state = make(SMALL, device).values()
    cu_seqlens = torch.tensor(SMALL.bounds, device=device)
    ops = torch.ops.selective_scan
    torch.library.opcheck(ops.diagonal_scan_fwd, (a, b, initial_state, True, cu_seqlens))
    values = (a.detach(), b.detach(), initial_state.detach())
    torch.library.opcheck(ops.diagonal_scan_bwd, (values[1], *values, True, cu_seqlens, False))
