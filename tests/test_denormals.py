"""Denormal numbers on the CPU: tasks treat them as 0, the calling thread's mode stays as it was,
and float16 keeps its denormals, which are normal numbers in float32."""

import multiprocessing
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from selective_scan import (
    adaptive_unitary_scan_fn,
    causal_conv1d_fn,
    causal_conv1d_update,
    diagonal_scan_fn,
    selective_scan_fn,
    selective_scan_prefill,
    selective_state_update,
)

F32, F64, HALF, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16

has_no_mode = not torch.set_flush_denormal(True)
torch.set_flush_denormal(False)
pytestmark = pytest.mark.skipif(has_no_mode, reason="this processor has no mode for denormals")


# --- the operators, each with work for several threads --------------------------------------------


def wide(x: Tensor) -> torch.dtype:
    return F64 if x.dtype == F64 else F32


def scan(x: Tensor, *, dstate=16, is_complex=False, matrix=False, **options) -> tuple[Tensor, ...]:
    batch, dim, seqlen = x.shape
    dtype = wide(x).to_complex() if is_complex else wide(x)
    delta = 0.1 + torch.rand(x.shape, dtype=wide(x))
    A = -0.1 - torch.rand(dim, dstate, dtype=wide(x)).to(dtype)
    B, C = torch.randn(2, batch, dstate, seqlen, dtype=dtype)
    A = A.diag_embed() if matrix else A
    return selective_scan_fn(x, delta, A, B, C, torch.ones(dim), return_last_state=True, **options)


def packed(x: Tensor, **options) -> tuple[Tensor, ...]:
    """Packs long and short sequences."""
    seqlen = x.shape[-1]
    bounds = torch.tensor([0, 5, 9, seqlen // 2, seqlen - 7, seqlen])
    return scan(x, cu_seqlens=bounds, **options)


def prefill(x: Tensor) -> tuple[Tensor, ...]:
    dim, seqlen = x.shape
    A = -0.1 - torch.rand(dim, 16, dtype=wide(x))
    B, C = torch.randn(2, 1, 16, seqlen, dtype=wide(x))
    pool = torch.zeros(4, dim, 16, dtype=wide(x))
    bounds = torch.tensor([0, 5, seqlen - 6, seqlen])
    slots = torch.tensor([2, 0, 3])
    delta = 0.1 + torch.rand(x.shape, dtype=wide(x))
    options = {"cu_seqlens": bounds, "cache_indices": slots}
    return selective_scan_prefill(x, pool, delta, A, B, C, torch.ones(dim), **options), pool


def update(x: Tensor) -> tuple[Tensor, ...]:
    batch, dim = x.shape
    state = torch.zeros(batch, dim, 16, dtype=wide(x))
    A = -0.1 - torch.rand(dim, 16, dtype=wide(x))
    B, C = torch.randn(2, batch, 16, dtype=wide(x))
    dt = 0.1 + torch.rand(x.shape, dtype=wide(x))
    return selective_state_update(state, x, dt, A, B, C, torch.ones(dim)), state


def diagonal(x: Tensor, is_complex=False) -> tuple[Tensor, ...]:
    a = torch.rand(x.shape, dtype=wide(x))
    if is_complex:  # there is no complex half precision
        a, x = a.to(a.dtype.to_complex()), x.to(a.dtype)
    return (diagonal_scan_fn(a, x),)


def unitary(x: Tensor) -> tuple[Tensor, ...]:
    _, dim, _ = x.shape
    B, C = torch.randn(2, 4, dtype=wide(x).to_complex())
    weights = torch.randn(dim, 4, dim, dtype=wide(x)), torch.randn(dim, 4, dtype=wide(x))
    dt, D = torch.rand(x.shape, dtype=wide(x)), torch.ones(dim, dtype=wide(x))
    return adaptive_unitary_scan_fn(x, dt, *weights, B, C, D, return_last_state=True)


def conv(x: Tensor) -> tuple[Tensor, ...]:
    return (causal_conv1d_fn(x, torch.randn(x.shape[1], 4), activation="silu"),)


def conv_update(x: Tensor) -> tuple[Tensor, ...]:
    state = torch.zeros(*x.shape[:2], 3, dtype=x.dtype)
    return (causal_conv1d_update(x, state, torch.randn(x.shape[1], 4)),)


@dataclass(frozen=True)
class Operator:
    """A function of x, which has this shape; its results are proportional to x."""

    call: Callable[[Tensor], tuple[Tensor, ...]]
    shape: tuple[int, ...]
    differentiates: bool = True


OPERATORS = {
    **{
        f"selective scan, {method}{', complex' * is_complex}": Operator(
            lambda x, method=method, is_complex=is_complex: scan(
                x, is_complex=is_complex, discretization_method=method
            ),
            (2, 20, 130),
        )
        for method in ("zoh", "foh", "bilinear", "rk4")
        for is_complex in (False, True)
    },
    "selective scan, lanes are segments": Operator(scan, (1, 2, 3000)),
    "selective scan, few channels": Operator(scan, (1, 32, 9000)),
    "selective scan, one state": Operator(lambda x: scan(x, dstate=1), (2, 64, 700)),
    "selective scan, reverse": Operator(lambda x: scan(x, reverse=True), (2, 20, 130)),
    "selective scan, packed": Operator(packed, (1, 20, 3000)),
    "selective scan, full matrices": Operator(
        lambda x: scan(x, dstate=5, matrix=True, discretization_method="bilinear"), (2, 20, 130)
    ),
    "prefill": Operator(prefill, (20, 3000), differentiates=False),
    "state update": Operator(update, (5, 520), differentiates=False),
    "diagonal scan": Operator(diagonal, (3, 40, 300)),
    "diagonal scan, complex": Operator(lambda x: diagonal(x, is_complex=True), (3, 40, 300)),
    "diagonal scan, segments": Operator(diagonal, (2, 5000)),
    "unitary scan": Operator(unitary, (2, 20, 130)),
    "convolution": Operator(conv, (2, 40, 700)),
    "convolution update": Operator(conv_update, (5, 520, 7), differentiates=False),
}
of_operators = pytest.mark.parametrize("name", OPERATORS)


# --- effects of a call ----------------------------------------------------------------------------


def normal(operator: Operator, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Returns numbers of about this size, of either sign."""
    sign = torch.randn(operator.shape, dtype=F64).sign()
    return (scale * (1 + torch.rand(operator.shape, dtype=F64)) * sign).to(dtype)


def denormal_like(x: Tensor) -> Tensor:
    """Returns random denormals, made as integers because arithmetic might flush them."""
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]
    size = int(torch.tensor(torch.finfo(x.dtype).tiny, dtype=x.dtype).view(bits))
    return torch.randint(1, size, x.shape, dtype=bits).view(x.dtype)


def gradient(operator: Operator, x: Tensor, cotangents: Callable[[Tensor], Tensor]) -> Tensor:
    x = x.requires_grad_()
    results = operator.call(x)
    flat = [torch.view_as_real(r) if r.is_complex() else r for r in results]
    return torch.autograd.grad(flat, x, [cotangents(each) for each in flat])[0]


def check_zeros(name: str, dtype: torch.dtype) -> None:
    """Asserts that denormal inputs and cotangents give zeros throughout, and normal ones do not."""
    operator = OPERATORS[name]
    x = normal(operator, dtype)
    assert all(result.any() for result in operator.call(x))
    for result in operator.call(denormal_like(x)):
        assert not result.any(), name
    if operator.differentiates:
        assert gradient(operator, x, torch.ones_like).any()
        assert not gradient(operator, x, denormal_like).any(), name


def flushes() -> bool:
    """Returns whether this thread's arithmetic flushes results and operands."""
    tiny = torch.finfo(F32).tiny
    result = torch.tensor(tiny).mul(0.5).view(torch.int32).item() == 0
    operand = torch.tensor(1, dtype=torch.int32).view(F32).mul(2.0**100).item() == 0
    assert result == operand
    return result


def any_thread_flushes() -> bool:
    count = torch.get_num_threads() << 18
    halves = torch.full((count,), torch.finfo(F32).tiny) * 0.5
    return not halves.view(torch.int32).all()


@contextmanager
def flush_mode(on: bool):
    torch.set_flush_denormal(on)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def check_mode(name: str) -> None:
    """Asserts that the calling thread's mode is unchanged, on or off, and others' stays off."""
    operator = OPERATORS[name]
    assert not any_thread_flushes()
    for on in (False, True):
        with flush_mode(on):
            for result in operator.call(denormal_like(normal(operator, F32))):
                assert not result.any(), name
            if operator.differentiates:
                gradient(operator, normal(operator, F32), denormal_like)
            assert flushes() is on, name
        assert not any_thread_flushes(), name


def check_all() -> None:
    """Checks all operators on three threads, by the kernels that the environment selects."""
    torch.set_num_threads(3)
    for name in OPERATORS:
        for dtype in (F32, F64, BF16):
            check_zeros(name, dtype)
        check_mode(name)
        check_float16(name)


@of_operators
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_denormals_are_zero(name, dtype, threads, set_threads):
    set_threads(threads)
    check_zeros(name, dtype)


@of_operators
@pytest.mark.parametrize("threads", [1, 3])
def test_the_callers_mode_stays(name, threads, set_threads):
    set_threads(threads)
    check_mode(name)


def start_threads() -> None:
    """Makes a call start the threads."""
    torch.set_num_threads(3)
    update(torch.ones(5, 520))
    assert not any_thread_flushes()


@pytest.mark.slow
def test_threads_that_a_call_starts_keep_denormals():
    """Threads that a call starts do not flush, although they inherit their creator's mode."""
    process = multiprocessing.get_context("spawn").Process(target=start_threads)
    process.start()
    process.join()
    assert process.exitcode == 0


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("shape", [(40, 1200), (2, 1200), (1, 5000)])
def test_what_decays_is_zero_below_the_normal_numbers(dtype, shape):
    """An impulse that halves at each step becomes 0 below the normal numbers, and so does the
    gradient of the last step on its way back."""
    b = torch.zeros(shape, dtype=dtype)
    b[:, 0] = 1
    b.requires_grad_()
    h = diagonal_scan_fn(torch.full(shape, 0.5, dtype=dtype), b)
    (db,) = torch.autograd.grad(h[:, -1].sum(), b)
    powers = 0.5 ** torch.arange(shape[-1], dtype=F64)
    expected = powers.where(powers >= torch.finfo(dtype).tiny, 0).to(dtype).expand(shape)
    assert torch.equal(h, expected)
    assert torch.equal(db, expected.flip(-1))


def check_float16(name: str) -> None:
    operator = OPERATORS[name]
    x = denormal_like(normal(operator, HALF)).copysign(normal(operator, HALF))
    seed = torch.initial_seed()
    results = []
    for argument in (x, x.float()):
        torch.manual_seed(seed)  # for the same other inputs
        results.append(operator.call(argument))
    for actual, expected in zip(*results, strict=True):
        assert actual.any(), name
        # Little is left of a sum that cancels, so the tolerance follows the largest result.
        size = float(expected.abs().max())
        spacing = 2.0**-24 if actual.dtype == HALF else 0
        torch.testing.assert_close(
            actual, expected.to(actual.dtype), rtol=2e-3, atol=spacing + 1e-6 * size
        )


@of_operators
def test_float16_keeps_its_denormals(name):
    check_float16(name)
