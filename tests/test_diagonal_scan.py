"""The general diagonal scan: kernels against the reference in fp64 and against scipy."""

import itertools
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import scipy.signal
import torch

from accuracy import assert_accurate
from cases import Axes
from graphs import capture
from oracle import Recurrence
from problem import Draws, differentiate, laid_out, lay_out, moved, plain_solutions
from selective_scan import diagonal_scan_fn, diagonal_scan_ref

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128
HALF, BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case(Axes):
    """One call. The defaults are the base case, and a test changes one axis at a time."""

    shape: tuple[int, ...] = (2, 5, 67)
    a_shape: tuple[int, ...] | None = None  # None: that of b
    a: torch.dtype = F32
    b: torch.dtype = F32
    initial_state: torch.dtype | None = F32
    reverse: bool = False
    layout: str = "contiguous"
    cu_seqlens: tuple[int, ...] | None = None  # needs a shape of (1, ...)

    @property
    def result_dtype(self) -> torch.dtype:
        return self.b.to_complex() if self.a.is_complex else self.b


def make(case: Case, device: str) -> dict[str, torch.Tensor | None]:
    draws = Draws(case)
    shape = case.shape if case.a_shape is None else case.a_shape
    modulus = draws.uniform(0, 0.9, *shape)  # memory of at most ten steps
    a = draws.normal(*shape, dtype=case.a.to_complex() if case.a.is_complex else F64)
    a = (modulus * torch.sgn(a)).to(case.a)
    tensors = {"a": a, "b": draws.normal(*case.shape, dtype=case.b), "initial_state": None}
    if case.initial_state is not None:
        rows = case.shape[:-1]
        rows = rows if case.cu_seqlens is None else (len(case.cu_seqlens) - 1, *rows[1:])
        tensors["initial_state"] = draws.normal(*rows, dtype=case.initial_state)
    return laid_out(tensors, case.layout, device, vectors=False)


def options_of(case: Case, device: str) -> dict:
    options = {"reverse": case.reverse}
    if case.cu_seqlens is not None:
        options["cu_seqlens"] = torch.tensor(case.cu_seqlens, device=device)
    return options


def solve(scan, inputs, cotangent, **options):
    """Returns h and the gradients of the inputs that are not None."""
    h = scan(**inputs, **options)
    gradients = differentiate({"h": h}, inputs, {"h": cotangent.to(h.dtype)})
    return {"h": h} | {
        name: torch.zeros_like(inputs[name[1:]]) if value is None else value
        for name, value in gradients.items()
    }


def scan_by_adjoint(a, b, initial_state=None, reverse=False):
    """Computes diagonal_scan_ref with a separate loop as backward pass, in a tenth of its time."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    steps = [tensor.to(dtype).broadcast_to(b.shape).movedim(-1, 0) for tensor in (a, b)]
    a, b = (tensor.flip(0) for tensor in steps) if reverse else steps
    initial = b.new_zeros(b.shape[1:]) if initial_state is None else initial_state.to(dtype)
    h = Recurrence.apply(a, b, initial)[1:]
    return (h.flip(0) if reverse else h).movedim(0, -1)


def scan_one_by_one(a, b, initial_state=None, reverse=False, cu_seqlens=None):
    """Applies scan_by_adjoint to packed sequences one by one; h is 0 outside of them."""
    if cu_seqlens is None:
        return scan_by_adjoint(a, b, initial_state, reverse)
    a, bounds = a.broadcast_to(b.shape), cu_seqlens.tolist()
    parts = [0 * b[..., : bounds[0]]]
    for index, (begin, end) in enumerate(itertools.pairwise(bounds)):
        initial = None if initial_state is None else initial_state[index : index + 1]
        steps = slice(begin, end)
        parts.append(scan_by_adjoint(a[..., steps], b[..., steps], initial, reverse))
    return torch.cat([*parts, 0 * b[..., bounds[-1] :]], -1)


def exact_results(case: Case, inputs, cotangent):
    def reference(wide, dh):
        return solve(scan_one_by_one, wide, dh.cpu(), **options_of(case, "cpu"))

    wide = moved(inputs, F64)
    exact = reference(wide, cotangent)
    # If a is broadcast, its gradient is a sum whose terms have independent rounding errors.
    wide |= moved({"a": wide["a"].broadcast_to(case.shape)}, F64)
    cancellation = {"da": reference(wide, cotangent)["da"]}
    if case.initial_state is not None:
        # The sum over all steps is a single number per channel.
        sizes = moved({name: tensor.abs() for name, tensor in wide.items()}, F64)
        sums = reference(sizes, cotangent.abs())
        cancellation["dinitial_state"] = sums["dinitial_state"]
    for name, value in cancellation.items():
        ratio = value.norm() / exact[name].norm().clamp_min(1e-300)
        cancellation[name] = max(1.0, ratio.item())
    return exact, cancellation


def roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype.to_real() if dtype.is_complex else dtype).eps


def check(case: Case, device: str, scan=diagonal_scan_fn) -> None:
    inputs = make(case, device)
    cotangent = Draws((case, "dh")).normal(*case.shape, dtype=case.result_dtype).to(device)
    if case.layout == "channel_last":  # as the next operation produces it
        cotangent = lay_out(cotangent, case.layout)
    exact, cancellation = exact_results(case, inputs, cotangent)
    actual = solve(scan, inputs, cotangent, **options_of(case, device))
    if case.layout in ("channel_last", "dim_first") and scan is diagonal_scan_fn:
        assert actual["h"].stride() == inputs["b"].stride()
    compute = roundoff(F64 if F64 in (case.a, case.b) or C128 in (case.a, case.b) else F32)

    def solve_plainly(plain_inputs):
        options = options_of(case, "cpu")
        return solve(diagonal_scan_ref, plain_inputs, cotangent.cpu(), **options)

    plain = partial(plain_solutions, solve_plainly, inputs, compute == roundoff(F64))
    for name, value in actual.items():
        source = inputs.get(name[1:])
        assert value.dtype == (case.result_dtype if source is None else source.dtype), name
        assert value.shape == exact[name].shape, name
        # da is computed from the rounded h; everything else is rounded once, at the end.
        rounded = max(roundoff(value.dtype), roundoff(case.result_dtype) * (name == "da"))
        factor = cancellation.get(name, 1.0)
        assert_accurate(name, value, exact, 8 * compute * factor, rounded * factor, plain)
        if case.cu_seqlens is not None and value.shape == case.shape:  # outside of all sequences
            assert not value[..., : case.cu_seqlens[0]].any(), name
            assert not value[..., case.cu_seqlens[-1] :].any(), name


SHAPES = [(1,), (2,), (67,), (3, 1), (4, 3, 33), (2, 1, 3, 129), (1, 2, 2049), (70, 1000)]
DTYPES = [
    *((dtype, dtype) for dtype in (F64, BF16, HALF, C64, C128)),
    *((F32, other) for other in (BF16, F64, C64)),
    *((other, F32) for other in (BF16, F64, C64, C128)),
    (F64, C64),
]


def with_dtypes(case: Case, a: torch.dtype, b: torch.dtype) -> Case:
    initial = C64 if a.is_complex or b.is_complex else F32
    return case.with_(a=a, b=b, initial_state=initial)


def case_list():
    base = Case()
    cases = [base, base.with_(initial_state=None)]
    cases += [base.with_(shape=shape) for shape in SHAPES]
    cases += [with_dtypes(base, a, b) for a, b in DTYPES]
    broadcast = [(2, 5, 1), (5, 67), (5, 1), (2, 1, 1), (1, 67), (1,), (67,), ()]
    for a_shape in broadcast:
        changed = base.with_(a_shape=a_shape)
        cases += [changed, with_dtypes(changed, BF16, BF16), with_dtypes(changed, C64, F32)]
    for layout in ("channel_last", "dim_first", "sliced", "offset", "expanded"):
        changed = base.with_(layout=layout)
        cases += [changed, with_dtypes(changed, HALF, HALF), with_dtypes(changed, C64, C64)]
        cases.append(changed.with_(reverse=True, shape=(3, 2, 1500)))
    # Rows in several segments: few and long, with a whole and with a broken last segment.
    for shape in ((1, 8192), (3, 5000), (2, 2, 4099)):
        for a_shape in (None, (1,)):
            changed = base.with_(shape=shape, a_shape=a_shape)
            cases += [changed, with_dtypes(changed, C64, C64), with_dtypes(changed, BF16, F32)]
    # Each dtype, alone and with another one, along time and across it, with and without segments.
    alone = [(dtype, dtype) for dtype in (F32, BF16, HALF, F64, C64, C128)]
    for a, b in (*alone, (F32, BF16), (C64, F32)):
        kind = with_dtypes(base, a, b)
        cases += [kind.with_(shape=shape) for shape in ((5, 131), (3, 5000))]
        cases += [kind.with_(shape=(2, 3, seqlen), layout="channel_last") for seqlen in (40, 4099)]
    cases.append(base.with_(shape=(2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 9)))
    cases += [case.with_(reverse=True) for case in cases if not case.reverse]
    return list(dict.fromkeys(cases))


@pytest.mark.parametrize("case", case_list(), ids=str)
def test_matches_reference(case, device):
    check(case, device)


BOUNDS = (0, 30, 30, 31, 64, 130)
EDGED = (7, 40, 41, 100)  # has steps outside of all sequences
PACKED = Case((1, 5, 130), cu_seqlens=BOUNDS)
WIDE = PACKED.with_(shape=(1, 40, 130), layout="channel_last")
ROWS = PACKED.with_(shape=(1, 3, 7, 130), a_shape=(7, 1))
LONG = Case((1, 2, 7000), cu_seqlens=(0, 5, 5000, 5010, 7000))
PACKED_CASES = [
    *PACKED.each(reverse=(False, True)),
    WIDE,
    WIDE.with_(reverse=True, initial_state=None),
    PACKED.with_(shape=(1, 130)),
    ROWS,
    ROWS.with_(layout="channel_last", reverse=True),
    PACKED.with_(a_shape=(130,)),
    with_dtypes(PACKED.with_(reverse=True), C64, C64),
    with_dtypes(PACKED, C64, F32),
    with_dtypes(PACKED, BF16, BF16),
    with_dtypes(PACKED.with_(reverse=True, layout="offset"), BF16, BF16),
    PACKED.with_(b=F64, initial_state=F64, layout="sliced"),
    PACKED.with_(cu_seqlens=EDGED),
    PACKED.with_(cu_seqlens=EDGED, reverse=True, a_shape=(1, 5, 1)),
    *PACKED.each(cu_seqlens=((50,), (0, 0, 130), tuple(range(131)))),
    *LONG.each(layout=("contiguous", "channel_last")),
]


@pytest.mark.parametrize("scan", [diagonal_scan_fn, diagonal_scan_ref])
@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_packed(case, scan, device):
    """Packed sequences give the results of separate ones."""
    check(case, device, scan)


def test_what_is_not_finite_stays_in_its_sequence(device):
    tensors = {name: tensor.detach() for name, tensor in make(PACKED, device).items()}
    tensors["b"][..., 40] = torch.nan
    h = diagonal_scan_fn(**tensors, **options_of(PACKED, device))
    assert h[..., 40:64].isnan().all()
    assert h[..., :40].isfinite().all()
    assert h[..., 64:].isfinite().all()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtypes", [(F64, F64), (C128, F64), (F64, C128)], ids=str)
def test_the_adjoint_gives_what_the_reference_gives(dtypes, reverse):
    case = with_dtypes(Case(a_shape=(5, 1), reverse=reverse), *dtypes)
    inputs = moved(make(case, "cpu"), F64)
    cotangent = Draws((case, "dh")).normal(*case.shape, dtype=case.result_dtype)
    results = [
        solve(scan, inputs, cotangent, reverse=reverse)
        for scan in (scan_by_adjoint, diagonal_scan_ref)
    ]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("leading", [(), (None,)], ids=["same rank", "a lacks a dim of b"])
def test_many_row_dimensions(leading, device):
    """More dimensions than a kernel takes, none of which can be merged with its neighbor."""
    shape = (2,) * 11 + (5,)
    order = [*range(0, 11, 2), *range(1, 11, 2), 11]
    inverse = sorted(range(12), key=order.__getitem__)
    a, b = (torch.rand(shape, device=device).permute(order) for _ in range(2))
    a = a.contiguous().permute(inverse).requires_grad_()
    b = b.detach()[leading].requires_grad_()
    h = diagonal_scan_fn(a, b)
    expected = diagonal_scan_ref(a, b)
    assert h.stride() == torch.empty_like(b).stride()
    torch.testing.assert_close(h, expected)
    cotangent = torch.rand_like(h)
    actual = torch.autograd.grad(h, (a, b), cotangent)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, (a, b), cotangent))


@pytest.mark.parametrize("pole", [2.0, 1e5, -1.9])
@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("rows", [3, 700])
def test_what_an_unstable_system_does_to_nothing(rows, layout, pole, device):
    """A growth that overflows does no harm while the state, or its gradient, is still 0."""
    shape = (1, rows, 5000)
    a = lay_out(torch.full(shape, pole), layout).to(device).requires_grad_()
    b = torch.zeros(shape)
    b[..., -2:] = 1
    b = lay_out(b, layout).to(device).requires_grad_()
    cotangent = torch.zeros(shape, device=device)
    cotangent[..., :2] = 1
    results = []
    for function in (diagonal_scan_fn, diagonal_scan_ref):
        h = function(a, b)
        results.append((h, *torch.autograd.grad(h, (a, b), cotangent)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("seqlen", [65536, 2**20 + 3])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_long_rows_against_scipy(seqlen, dtype, device):
    pole = torch.tensor([0.999, -0.9], dtype=dtype)
    b = torch.randn(2, seqlen, dtype=dtype)
    h = diagonal_scan_fn(pole[:, None].to(device), b.to(device)).cpu()
    for row in range(2):
        exact = scipy.signal.lfilter([1.0], [1.0, -pole[row].item()], b[row].double().numpy())
        error = np.linalg.norm(h[row].double().numpy() - exact) / np.linalg.norm(exact)
        # Every rounding error decays like the state, within 1/(1 - 0.999) steps.
        assert error < 100 * roundoff(dtype)


@pytest.mark.slow
def test_longest_row(device):
    seqlen = 2**24
    b = torch.randn(seqlen)
    h = diagonal_scan_fn(torch.tensor([0.99], device=device), b.to(device)).cpu()
    exact = scipy.signal.lfilter([1.0], [1.0, -float(np.float32(0.99))], b.double().numpy())
    assert np.linalg.norm(h.double().numpy() - exact) < 1e-6 * np.linalg.norm(exact)


def test_rows_are_independent(device):
    """NaN and infinity stay in their row, forward and backward."""
    a = torch.rand(6, 2500, device=device)
    b = torch.randn(6, 2500, device=device)
    clean = diagonal_scan_fn(a, b)
    a[1, 7], b[4, 2000] = torch.nan, torch.inf
    a.requires_grad_()
    b.requires_grad_()
    h = diagonal_scan_fn(a, b)
    others = [0, 2, 3, 5]
    assert torch.equal(h[others], clean[others])
    assert h[1, 7:].isnan().all()
    assert h[1, :7].isfinite().all()
    for gradient in torch.autograd.grad(h.sum(), (a, b)):
        assert gradient[others].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(a_shape=(5, 1), layout="channel_last"),
        Case(a=C64, initial_state=None, reverse=True),
        Case((1, 3, 7), None, F64, F64, F64, reverse=True, cu_seqlens=(0, 3, 3, 6)),
    ],
    ids=str,
)
def test_opcheck(case, device):
    a, b, initial_state = make(case, device).values()
    ops, options = torch.ops.selective_scan, options_of(case, device)
    shared = (case.reverse, options.get("cu_seqlens"))
    torch.library.opcheck(ops.diagonal_scan_fwd, (a, b, initial_state, *shared))
    h = diagonal_scan_fn(a, b, initial_state=initial_state, **options).detach()
    arguments = (torch.randn_like(h), a.detach(), h)
    initial = None if initial_state is None else initial_state.detach()
    torch.library.opcheck(ops.diagonal_scan_bwd, (*arguments, initial, *shared, b.is_complex()))


# --- CUDA only ------------------------------------------------------------------------------------


def test_side_stream_and_graph(cuda_device):
    a = torch.rand(4, 3000, device=cuda_device)
    b = torch.randn(4, 3000, device=cuda_device)
    expected = diagonal_scan_fn(a, b)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = diagonal_scan_fn(a, b)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(actual, expected)

    graph, captured = capture(lambda: diagonal_scan_fn(a, b))
    b.mul_(2)
    graph.replay()
    assert torch.equal(captured, diagonal_scan_fn(a, b))
