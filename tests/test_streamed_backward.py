"""The CUDA library's streamed backward kernels, for up to 64 states, against the reference."""

import itertools

import pytest
import torch

from accuracy import Error
from path_cases import FLOATS
from problem import METHODS, Case, check, check_repeatable, make, run
from selective_scan import selective_scan_fn, selective_scan_ref

# Tiles of 96 channels and a partial one; the last warp of a group is not full.
REAL = Case(batch=2, dim=600, groups=1, seqlen=70)
KINDS = {
    "real": REAL,
    "constant": REAL.with_(dim=60, B="constant", C="constant"),
    "two warps a channel": REAL.with_(dim=120, groups=2, dstate=32),
    "four warps a channel": REAL.with_(dim=60, groups=2, dstate=64),
    "complex": REAL.with_(dim=108, groups=2, complex=True, B="packed_grouped", C="packed_grouped"),
}
# Runs on the floor.
COMPLEX_CONSTANT = REAL.with_(dim=46, complex=True, B="constant", C="constant")


def cases_of(base):
    yield from base.each(method=METHODS, dtype=(torch.float32, torch.bfloat16))
    # Lanes along steps, along channels, and along neither.
    yield from base.each(dtype=FLOATS, seqlen=(base.seqlen, 64))
    # Small steps, as in most models, for which softplus must keep its relative accuracy.
    yield from base.each(seqlen=(64,), step_shift=(-4.0,), dtype=FLOATS[::2])
    yield base.with_(seqlen=64, reverse=True)
    yield base.with_(reverse=True, dtype=torch.bfloat16)
    yield from base.each(layout=("channel_last",), dtype=FLOATS)
    yield base.with_(layout="sliced", dtype=torch.bfloat16)
    # Some arrays contiguous along channels, others along steps; rows aligned to one element only.
    some = base.with_(layout="channel_last", layout_of=("u", "delta"))
    yield from (*some.each(dtype=FLOATS[::2]), *base.each(layout=("offset",), dtype=FLOATS[::2]))
    yield from base.each(seqlen=(1, 8, 9, 32, 33))
    yield base.with_(z=False, D=False)
    yield base.with_(delta_softplus=False, delta_bias=False, initial_state=False)
    yield base.with_(cotangents=("out",))
    # Time in segments.
    few = base.with_(batch=1, dim=12, groups=1, seqlen=1100)
    yield from few.each(cotangents=(base.cotangents, ("out",)))
    yield few.with_(seqlen=1056, reverse=True, method="bilinear")
    yield from few.with_(dim=16, layout="channel_last").each(dtype=FLOATS[::2])


def with_states(dstate):
    """Returns a case of so many channels that lanes along time do not take it: see dstate1."""
    return REAL.with_(dstate=dstate, dim=66 * (12 // -(-dstate // 2)) + 2)


def cases():
    yield from itertools.chain.from_iterable(map(cases_of, KINDS.values()))
    yield from (case.with_(input_delta=case.dtype) for case in cases_of(REAL))
    # Numbers of states that do not fill the lanes.
    few = REAL.with_(dim=30, groups=1)
    states = [with_states(dstate) for dstate in (2, 3, 4, 5, 8, 12, 15)]
    states += few.each(dstate=(17, 20, 31, 33, 40, 48, 49, 63))
    yield from states
    yield from (case.with_(seqlen=64, dtype=torch.bfloat16) for case in states)
    yield from KINDS["complex"].each(dstate=(3, 4, 9, 14))
    yield from KINDS["constant"].each(dstate=(3, 4, 9, 14))
    yield from few.with_(batch=1, dim=12, seqlen=1100).each(dstate=(3, 8, 22, 45))
    rows = few.with_(layout="channel_last", dtype=torch.bfloat16, seqlen=33)
    yield from rows.each(dstate=(3, 8, 22, 45))


@pytest.mark.parametrize("case", list(dict.fromkeys(cases())), ids=str)
def test_outputs_and_gradients(case, cuda_device):
    check(case, cuda_device)


@pytest.mark.parametrize("dim", [64, 96, 500, 800, 1700, 3300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_tiles(dim, dtype, cuda_device):
    """One tile, whole batches of tiles and more, also divided two, four and eight ways; the last
    block of steps is partial."""
    check(REAL.with_(batch=1, dim=dim, seqlen=300, dtype=dtype), cuda_device)


@pytest.mark.parametrize("kind", ["real", "four warps a channel", "complex"])
def test_sums_of_many_sequences(kind, cuda_device):
    """There is more work than blocks are launched for, to convert B and C and to add up tiles."""
    check(KINDS[kind].with_(batch=48, dim=128, groups=64, seqlen=40), cuda_device)


def wide(dtype):
    return torch.complex128 if dtype.is_complex else torch.float64


def tensors_on(case, device):
    """Returns copies of a case's tensors, which a test may change."""
    return {
        name: None if value is None else value.detach().to(device, copy=True)
        for name, value in make(case).tensors.items()
    }


def widened(tensors):
    return {n: None if v is None else v.detach().to(wide(v.dtype)) for n, v in tensors.items()}


def check_large(case, device):
    """Asserts that results are repeatable and agree with the CPU kernels, since the reference would
    take too much time and memory."""
    first = check_repeatable(case, device)
    limit = 1e-2 if case.dtype == torch.bfloat16 else 1e-5
    for name, expected in run(case, "cpu").items():
        actual = first[name].detach().cpu()
        error = Error.of(actual.to(wide(actual.dtype)), expected.detach().to(wide(actual.dtype)))
        assert error.relative_l2 < limit, (name, error)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_in_two_parts(kind, dtype, cuda_device):
    """With more tiles than multiprocessors, but not twice as many, two blocks share a tile."""
    multiprocessors = torch.cuda.get_device_properties(cuda_device).multi_processor_count
    dims = {"two warps a channel": 48, "four warps a channel": 24, "complex": 48}
    case = KINDS[kind].with_(
        batch=multiprocessors * 5 // 4,
        dim=dims.get(kind, 56),
        groups=1,
        seqlen=301,
        dtype=dtype,
    )
    check_large(case, cuda_device)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tiles", [7, 9])
def test_tiles_that_share_partial_sums(tiles, kind, dtype, cuda_device):
    """Seven tiles per sequence run in two rounds of 4, of which one does not exist, and in parts;
    nine run in three rounds of 3."""
    multiprocessors = torch.cuda.get_device_properties(cuda_device).multi_processor_count
    tile_channels = {"two warps a channel": 48, "four warps a channel": 24, "complex": 48}
    case = KINDS[kind].with_(
        batch=multiprocessors // 3,
        dim=tiles * tile_channels.get(kind, 96),
        groups=1,
        seqlen=301,
        dtype=dtype,
    )
    check_large(case, cuda_device)


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_steps_of_length_zero(method, is_complex, cuda_device):
    """If Δ = 0 its gradient still has terms, some of them limits."""
    case = KINDS["complex" if is_complex else "real"].with_(seqlen=40)
    tensors = tensors_on(case, cuda_device) | {"delta_bias": None}
    tensors["delta"].abs_()  # states would grow by negative steps, some beyond fp32
    tensors["delta"][..., 5:20] = 0.0

    cotangent = torch.randn_like(tensors["u"])

    def gradient(scan, **others):
        delta = others.pop("delta").requires_grad_()
        out = scan(delta=delta, **others, discretization_method=method)
        return torch.autograd.grad(out, delta, cotangent.to(out.dtype))[0]

    exact = gradient(selective_scan_ref, **widened(tensors))
    actual = gradient(selective_scan_fn, **tensors)
    assert Error.of(actual.double(), exact).relative_l2 < 1e-5


@pytest.mark.parametrize("x", [-5.0, -10.0, -20.0, -40.0, -80.0])
@pytest.mark.parametrize("kind", [*KINDS, "complex constant", "few channels", "dstate 1", "floor"])
def test_ddelta_of_states_that_decay_at_once(kind, x, cuda_device):
    """By foh the gradient of Δ is as small as abar, and as accurate."""
    others = {
        "complex constant": COMPLEX_CONSTANT,
        "few channels": REAL.with_(dim=21, seqlen=64),
        "dstate 1": REAL.with_(dim=60, dstate=1),
        "floor": REAL.with_(dim=21, dstate=70),
    }
    case = (KINDS | others)[kind].with_(method="foh", batch=1, D=False, z=False)
    tensors = make(case).tensors
    u, B, C = (tensors[name].to(cuda_device) for name in ("u", "B", "C"))
    A = torch.full_like(tensors["A"], x, device=cuda_device)
    delta = (0.98 + 0.04 * torch.rand_like(u)).requires_grad_()
    y = selective_scan_fn(u, delta, A, B, C, discretization_method="foh")
    actual = torch.autograd.grad(y.sum(), delta)[0]
    exact = ddelta_by_foh(*(value.detach().to(wide(value.dtype)) for value in (u, delta, A, B, C)))
    error = Error.of(actual.double(), exact)
    # A rounding of the exponent changes abar by x times as much.
    assert error.relative_l2 < 3e-7 * (10 + abs(x)), error


def ddelta_by_foh(u, delta, A, B, C):
    """Returns the gradient of y's sum; the reference's derivative, a difference, keeps no
    digits."""
    dim, seqlen = u.shape[1:]

    def steps_of(projection):
        """Returns a projection as (dim, dstate, seqlen)."""
        if projection.dim() == 2:
            return projection[..., None].expand(*projection.shape, seqlen)
        grouped = projection.reshape(-1, A.shape[1], projection.shape[-1])
        if A.is_complex() and not grouped.is_complex():
            grouped = torch.view_as_complex(grouped.unflatten(-1, (seqlen, 2)))
        return grouped.repeat_interleave(dim // grouped.shape[0], 0)

    B, C = steps_of(B), steps_of(C)
    u, delta = u[0], delta[0]
    state = torch.zeros_like(A)  # A·h
    inputs = []
    for t in range(seqlen):
        inputs.append(state + B[..., t] * u[:, t, None])
        state = state + torch.expm1(delta[:, t, None] * A) * inputs[-1]
    carry = torch.zeros_like(A)
    result = torch.zeros_like(delta)
    for t in reversed(range(seqlen)):
        x = delta[:, t, None] * A
        carry = (carry + (2 if A.is_complex() else 1) * C[..., t].conj()) * x.exp().conj()
        result[:, t] = (carry * inputs[t].conj()).real.sum(-1)
    return result[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(KINDS))
def test_poles_of_any_size(kind, dtype, cuda_device):
    """With foh, a warp takes a careful form if a pole is too small or too large for its steps."""
    case = KINDS[kind].with_(method="foh", seqlen=64, dtype=dtype, initial_state=False)
    tensors = tensors_on(case, cuda_device)
    A = tensors["A"]
    magnitudes = torch.logspace(-6, 3, A.shape[0], device=cuda_device)
    A *= magnitudes[:, None].to(A.dtype)
    A[::7, 3] = 0
    names = ("u", "delta", "A", "B", "C", "delta_bias")
    # Not a function of y, whose rounding would matter if the parts of a gradient cancel.
    cotangent = make(case).cotangents["out"].to(cuda_device)

    def gradients(scan, inputs):
        leaves = {name: inputs[name].requires_grad_() for name in names}
        y = scan(**(inputs | leaves), delta_softplus=True, discretization_method="foh")
        return torch.autograd.grad(y, leaves.values(), cotangent.to(y.dtype))

    exact = gradients(selective_scan_ref, widened(tensors))
    actual = gradients(selective_scan_fn, tensors)
    for name, gradient, expected in zip(names, actual, exact, strict=True):
        # The gradient of A sums terms of poles that differ by nine orders of magnitude.
        of_A = 1e-4 if kind == "constant" else 1e-5
        limit = {torch.float32: of_A if name == "A" else 3e-6}.get(dtype, 1e-2)
        error = Error.of(gradient.to(expected.dtype), expected)
        assert error.relative_l2 < limit, (name, error)
        if name == "A":
            # Channels differ in size, so each is compared by itself.
            rows = (gradient - expected).norm(dim=1) / expected.norm(dim=1)
            # With constant B and C the gradients of slow poles have a common factor, the same sum
            # over steps for all states, which may be nearly 0.
            worst = rows.quantile(0.8) if kind == "constant" else rows.max()
            assert worst < (1e-3 if dtype == torch.float32 else 2e-2), rows.argmax()


@pytest.mark.parametrize("has_last_state", [False, True])
@pytest.mark.parametrize("scaled", ["B", "C"])
# In one piece, and in segments by two methods only, since the reference takes long.
@pytest.mark.parametrize(
    ("method", "seqlen"), [*((method, 70) for method in METHODS), ("zoh", 1100), ("foh", 1100)]
)
@pytest.mark.parametrize("base", [KINDS["constant"], COMPLEX_CONSTANT], ids=["real", "complex"])
def test_constant_projections_of_any_size(
    base, method, scaled, has_last_state, seqlen, cuda_device
):
    """The streamed sweeps divide states by a constant B and, with a gradient of the last state,
    gradients by a constant C, which may be 0."""
    case = base.with_(method=method, seqlen=seqlen, batch=1, dim=16)
    tensors = tensors_on(case, cuda_device)
    for state, size in enumerate((0.0, 1e-30, 1e-12, 1e-4, 1e4)):
        tensors[scaled][:, state] *= size
    names = ("A", "B", "C", "initial_state")

    def gradients(scan, inputs):
        leaves = {name: inputs[name].requires_grad_() for name in names}
        y, last_state = scan(
            **(inputs | leaves),
            delta_softplus=True,
            discretization_method=method,
            return_last_state=True,
        )
        loss = y.sum() + (last_state.real.sum() if has_last_state else 0)
        return torch.autograd.grad(loss, leaves.values())

    exact = gradients(selective_scan_ref, widened(tensors))
    actual = gradients(selective_scan_fn, tensors)
    for name, gradient, expected in zip(names, actual, exact, strict=True):
        # States differ in size, so each is compared by itself.
        along = tuple(range(expected.dim() - 1))
        errors = (gradient - expected).norm(dim=along)
        # If C is 0, the sweeps use a number that is nearly 0 instead.
        slack = 1e-13 if scaled == "C" and has_last_state else 0
        assert (errors <= 1e-5 * expected.norm(dim=along) + slack).all(), (name, errors)
