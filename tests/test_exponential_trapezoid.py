"""The exponential trapezoid: against its reference, the differential equation, and its parts."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.integrate
import torch

from accuracy import Tolerance, assert_same_bits, complaint
from cases import Axes
from problem import Draws, counterpart, detached, is_zero, laid_out, moved, part_of
from selective_scan import exponential_trapezoid_fn, exponential_trapezoid_ref, selective_scan_fn

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
BOUNDS = (3, 20, 20, 21, 64, 68)  # an empty sequence, one of one step; steps outside of any


@dataclass(frozen=True)
class Case(Axes):
    batch: int = 2
    dim: int = 6
    seqlen: int = 70
    dstate: int = 5
    groups: int = 2
    dtype: torch.dtype = F32
    complex: bool = False
    B: str = "variable"
    C: str = "variable"
    optional: bool = True  # has D, z, delta_bias, softplus and an initial state
    reverse: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    layout: str = "contiguous"


BASE = Case()
PACKED = Case(batch=1, cu_seqlens=BOUNDS)


def make(case: Case, device: str = "cpu") -> tuple[dict, dict]:
    """Returns tensors as leaves that require grad, and options."""
    draws = Draws(case.with_(layout="contiguous"))
    normal, uniform = draws.normal, draws.uniform

    def projection(kind):
        if kind == "constant":
            return normal(*poles, dtype=of_states)
        rows = (case.batch, *([] if kind == "shared" else [case.groups]), case.dstate)
        if kind == "interleaved":
            return normal(*rows, 2 * case.seqlen, dtype=case.dtype)
        return normal(*rows, case.seqlen, dtype=of_states if case.complex else case.dtype)

    real = F64 if case.dtype == F64 else F32
    of_states = counterpart(real, case.complex)
    sequence, poles = (case.batch, case.dim, case.seqlen), (case.dim, case.dstate)
    A, delta = -uniform(0.1, 1.1, *poles).to(real), normal(*sequence, dtype=case.dtype)
    tensors = {
        "u": normal(*sequence, dtype=case.dtype),
        "delta": delta if case.optional else delta.abs(),
        "A": torch.complex(A, normal(*poles, dtype=real)) if case.complex else A,
        "B": projection(case.B),
        "C": projection(case.C),
        "mix": uniform(0, 1, *sequence).to(case.dtype),
    }
    options = {"reverse": case.reverse}
    if case.cu_seqlens is not None:
        options["cu_seqlens"] = torch.tensor(case.cu_seqlens, device=device)
    if case.optional:
        options["delta_softplus"] = True
        count = case.batch if case.cu_seqlens is None else len(case.cu_seqlens) - 1
        tensors["D"] = normal(case.dim, dtype=real)
        tensors["delta_bias"] = normal(case.dim, dtype=case.dtype)
        tensors["z"] = normal(*sequence, dtype=case.dtype)
        tensors["initial_state"] = normal(count, 2, *poles, dtype=of_states)
    return laid_out(tensors, case.layout, device), options


def solve(scan, tensors: dict, options: dict, dtype: torch.dtype | None = None) -> dict:
    """Returns out, the last state and gradients; computed in `dtype`, if given."""
    if dtype is not None:
        tensors = moved(tensors, dtype)
        options = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    out, last_state = scan(**tensors, **options, return_last_state=True)
    weights = (torch.arange(out.numel(), device=out.device) % 13 - 6).view(out.shape)
    loss = (out * weights).sum() + last_state.abs().square().sum()
    gradients = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    return {"out": out, "last_state": last_state} | dict(zip(tensors, gradients, strict=True))


def cases():
    for base, is_complex in itertools.product((BASE, PACKED), (False, True)):
        few = base.with_(complex=is_complex)
        for reverse, dtype in itertools.product((False, True), (F32, F64, BF16, F16)):
            yield few.with_(reverse=reverse, dtype=dtype)
        kinds = ("constant", "variable", *["interleaved"] * is_complex)
        yield from (few.with_(B=B, C=C) for B, C in itertools.product(kinds, kinds))
        yield few.with_(B="shared", C="constant", groups=1)
        yield few.with_(optional=False)
        yield few.with_(layout="channel_last", dtype=BF16, reverse=True)
        yield few.with_(layout="sliced")
        yield few.with_(groups=1, dim=33)
    yield from (BASE.with_(seqlen=seqlen) for seqlen in (0, 1, 2, 33, 1000))
    yield BASE.with_(batch=0)
    yield PACKED.with_(seqlen=0, cu_seqlens=(0, 0, 0))


@pytest.mark.parametrize("case", [*dict.fromkeys(cases())], ids=str)
def test_it_is_what_the_reference_says(case, device):
    tensors, options = make(case, device)
    actual = solve(exponential_trapezoid_fn, tensors, options)
    exact = solve(exponential_trapezoid_ref, tensors, options, F64)
    assert actual["out"].dtype == case.dtype
    if case.seqlen and case.batch:
        assert actual["out"].stride() == tensors["u"].stride() or case.layout == "sliced"
    for name, expected in exact.items():
        value = actual[name]
        if value is None or expected is None:
            assert is_zero(value)
            assert is_zero(expected)
            continue
        info = torch.finfo(value.dtype.to_real() if value.is_complex() else value.dtype)
        arithmetic = 1e-12 if case.dtype == F64 else 5e-6
        rounding = info.eps / 2 if info.bits == 16 else 0.0
        tol = Tolerance(arithmetic, rounding, info.smallest_normal * info.eps + 1e-35)
        assert value.dtype == (tensors[name].dtype if name in tensors else value.dtype)
        if complaint(value, expected, tol) is not None:
            # The terms of the gradient of delta_bias may cancel in any implementation.
            plain = solve(exponential_trapezoid_ref, tensors, options)[name]
            assert complaint(value, expected, tol, [plain]) is None, name


def test_a_mix_of_one_is_zoh(device):
    tensors, options = make(BASE.with_(dtype=F64, optional=False), device)
    tensors["mix"] = torch.ones_like(tensors["mix"])
    out = exponential_trapezoid_fn(**tensors, **options)
    del tensors["mix"]
    torch.testing.assert_close(out, selective_scan_fn(**tensors, **options))


# --- the differential equation --------------------------------------------------------------------


@pytest.mark.parametrize(("mix", "order"), [(0.5, 2), (1.0, 1), (0.0, 1)])
@pytest.mark.parametrize("A", [-1.5, -0.8 + 3j], ids=["real", "complex"])
def test_its_order(A, mix, order, device):
    """The order of the error for h' = A·h + B·u(t), u(t) = cos(2t), by steps of half the size."""
    B = 0.7 - 0.4j if isinstance(A, complex) else 0.7
    solution = scipy.integrate.solve_ivp(
        lambda t, h: A * h + B * np.cos(2 * t), (0, 2), [0.3 * B], "DOP853", rtol=1e-13, atol=1e-13
    )
    dtype = torch.complex128 if isinstance(A, complex) else F64
    errors = []
    for steps in (64, 128, 256):
        time = torch.linspace(0, 2, steps + 1, dtype=F64, device=device)[1:].view(1, 1, -1)
        pole, projection = (torch.tensor([[it]], dtype=dtype, device=device) for it in (A, B))
        _, state = exponential_trapezoid_fn(
            *((2 * time).cos(), torch.full_like(time, 2 / steps), pole, projection, projection),
            mix=torch.full_like(time, mix),
            initial_state=torch.stack([0.3 * projection, projection], 1)[None, 0, :, :, None],
            return_last_state=True,
        )
        errors.append(abs(state[0, 0, 0, 0].item() - solution.y[0, -1]))
    for coarse, fine in itertools.pairwise(errors):
        assert abs(math.log2(coarse / fine) - order) < 0.1, errors


# --- in parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_steps_go_on_from_call_to_call(reverse, is_complex, device):
    """A prompt and then single tokens give the results of one call."""
    case = BASE.with_(seqlen=20, complex=is_complex, reverse=reverse, dtype=F64)
    tensors, options = make(case, device)
    whole = exponential_trapezoid_fn(**tensors, **options, return_last_state=True)
    bounds = [0, 12, *range(13, 21)]
    if reverse:
        bounds = [20 - it for it in bounds]
    outs, state = [], tensors["initial_state"].detach()
    for ends in itertools.pairwise(bounds):
        given = detached(part_of(tensors, min(ends), max(ends))) | {"initial_state": state}
        out, state = exponential_trapezoid_fn(**given, **options, return_last_state=True)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs[::-1] if reverse else outs, -1), whole[0].detach())
    torch.testing.assert_close(state, whole[1].detach())


def test_the_reference_may_be_asked_for():
    tensors, options = make(BASE)
    expected = exponential_trapezoid_ref(**tensors, **options, return_last_state=True)
    options |= {"return_last_state": True, "backend": "reference"}
    for scan in (exponential_trapezoid_fn, exponential_trapezoid_ref):
        assert_same_bits(scan(**tensors, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, F64])
def test_compiled_with_interleaved_projections(dtype, device):
    case = BASE.with_(complex=True, B="interleaved", C="interleaved", dtype=dtype)
    compiled = torch.compile(exponential_trapezoid_fn, fullgraph=True, backend="aot_eager")
    for seqlen in (1, 70, 33):
        tensors, options = make(case.with_(seqlen=seqlen), device)
        expected = solve(exponential_trapezoid_fn, tensors, options)
        torch.testing.assert_close(solve(compiled, tensors, options), expected)
