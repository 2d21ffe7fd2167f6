"""The diagonal scan: the recurrence alone, which is the building block of any diagonal SSM."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import COMPLEX, ELLIPSIS, REAL, SINGLE_OR_DOUBLE, Call, check_dims, fail
from ._operator import Operator
from ._packed import outside, scan_steps, zeroed
from ._result import Result
from ._table import (
    CU_SEQLENS,
    STATE_DTYPES,
    BackendName,
    BroadcastableTo,
    Case,
    Cases,
    Option,
    Table,
    TensorArgument,
)


def _dtypes_beside(other: str) -> Cases:
    """Refuses half precision if `other` is complex, since half precision has no complex dtype."""
    wide = (*SINGLE_OR_DOUBLE, *COMPLEX)
    return Cases(
        (Case(wide, f" (complex {other})", is_complex=True, is_half=True), Case((*REAL, *COMPLEX)))
    )


def _check_steps(name: str, tensor: Tensor, call: Call) -> None:
    check_dims(name, tensor, _SEQUENCE, call.sizes)
    if "cu_seqlens" in call.tensors:
        if tensor.dim() == 1:
            shape = tuple(tensor.shape)
            fail(f"{name} must be (1, ..., seqlen) where cu_seqlens is given, got {shape}")
        call.sizes["batch"] = tensor.shape[0]
        CU_SEQLENS.shape(CU_SEQLENS.name, call[CU_SEQLENS.name], call)


def _check_state(name: str, tensor: Tensor, call: Call) -> None:
    if "cu_seqlens" not in call.tensors:
        return check_dims(name, tensor, _ROWS, call.sizes)
    wanted = (call.sizes["sequences"], *call.sizes[ELLIPSIS][1:])
    if tuple(tensor.shape) != wanted:
        fail(f"{name} must be (sequences, ...) = {wanted}, got {tuple(tensor.shape)}")


_ROWS = (ELLIPSIS,)
_SEQUENCE = (ELLIPSIS, "seqlen")


def _arguments(b: str, *options: Option) -> Table:
    return Table(
        TensorArgument("a", _dtypes_beside(b), BroadcastableTo(b)),
        TensorArgument(b, _dtypes_beside("a"), _check_steps, dims=_SEQUENCE),
        TensorArgument("initial_state", STATE_DTYPES, _check_state, True, dims=_ROWS),
        *options,
        CU_SEQLENS,
        anchor=b,
        complex_by=("a", b),
    )


def _result_dtype(call: Call) -> torch.dtype:
    dtype = call["b"].dtype
    return dtype.to_complex() if call.is_complex else dtype


def _allocate_db(given: dict) -> Tensor:
    h = given["h"]
    return torch.empty_like(h, dtype=h.dtype if given["complex_b"] else h.dtype.to_real())


def _flops(call: Call) -> tuple[int, int]:
    """Counts a multiplication and an addition per step; backward also the gradient of a."""
    steps = call[call.anchor].numel() * (4 if call.is_complex else 1)
    return 2 * steps, 3 * steps


DIAGONAL_SCAN = Operator(
    "diagonal_scan",
    _arguments("b", Option("reverse")),
    results=[Result("h", _SEQUENCE, _result_dtype, like="b")],
    backward="dh a h initial_state reverse cu_seqlens complex_b",
    derived={Option("complex_b"): lambda inputs: inputs[1].is_complex()},
    backward_arguments=_arguments("h"),
    gradient_like={"b": _allocate_db},
    flops=_flops,
)


def diagonal_scan_ref(
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Runs the diagonal scan step by step in plain PyTorch.

    It has the arguments, result and errors of :func:`diagonal_scan_fn`; `backend` is checked but
    has no other effect. It runs on any device and can be differentiated any number of times.

    Example:
        >>> import torch
        >>> from selective_scan import diagonal_scan_ref
        >>> diagonal_scan_ref(torch.tensor([0.5]), torch.ones(4))
        tensor([1.0000, 1.5000, 1.7500, 1.8750])
    """
    call = DIAGONAL_SCAN.check((a, b, initial_state, reverse, cu_seqlens, backend))
    dtype, seqlen = call.state_dtype, b.shape[-1]
    are_none = outside(cu_seqlens, seqlen)
    a_steps = zeroed(are_none, a.to(dtype).broadcast_to(b.shape)).unbind(-1)
    b_steps = zeroed(are_none, b.to(dtype)).unbind(-1)
    if initial_state is None:
        rows = b.shape[:-1] if cu_seqlens is None else (call.sizes["sequences"], *b.shape[1:-1])
        h = torch.zeros(rows, dtype=dtype, device=b.device)
    else:
        h = initial_state.to(dtype)
    h_steps = []

    def take_step(t: int, h: Tensor) -> Tensor:
        h_steps.append(a_steps[t] * h + b_steps[t])
        return h_steps[-1]

    scan_steps(take_step, h, seqlen, reverse, cu_seqlens)
    if reverse:
        h_steps.reverse()
    result_dtype = _result_dtype(call)
    if not h_steps:
        return b.to(result_dtype, copy=True)
    result = torch.stack(h_steps, dim=-1).to(result_dtype)
    return zeroed(are_none, result)


def diagonal_scan_fn(
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    r"""Solves the linear recurrence of a diagonal state space model for all steps at once.

    For every row, starting from initial_state or 0::

        h[t] = a[t] · h[t-1] + b[t]

    Rows are independent systems: no value of one row affects another. The caller computes the
    inputs of the states (B[t]·u[t], a gate, a step size) and the outputs, so this function is the
    core of LRU, S5, RG-LRU and similar models.

    Tensors may have any strides. If b is dense, h has b's layout. Arithmetic is float32, or float64
    if any tensor is float64 or complex128, whatever the dtypes of a, b and h. The result can be
    differentiated once with respect to a, b and initial_state; each gradient has its input's dtype,
    and the same bits on every run. The gradient of a is computed from h as it was returned, so in
    half precision it includes h's rounding.

    Long rows, and all rows on CUDA, are scanned in parallel along time, which multiplies the values
    of a over ranges of steps. If such a product overflows, so that h could only stay finite by
    staying 0, the result is NaN rather than 0.

    Args:
        a: multipliers, broadcastable to b, float32, float16, bfloat16, float64, complex64 or
            complex128. A constant pole has size 1 in time.
        b: inputs, (..., seqlen), any of these dtypes. If one of a and b is complex, the other one
            is neither float16 nor bfloat16.
        initial_state: the state before the first step, (...), float32 or float64; complex64 or
            complex128 if a or b is complex.
        reverse: whether to scan from the last step to the first, h[t] = a[t]·h[t+1] + b[t].
        cu_seqlens: boundaries of packed sequences, (sequences + 1,), int32 or int64, on b's device,
            non-decreasing; b is then (1, ..., seqlen) and initial_state (sequences, ...). Sequence
            i has the steps from cu_seqlens[i] up to, but not including, cu_seqlens[i + 1]. Each
            sequence is scanned separately, from its own initial state. h is 0 at steps that belong
            to no sequence. On CUDA the values are not read back to the host, and values out of
            order or range are clamped to valid ones.
        backend: as in :func:`selective_scan_fn`; "reference" runs :func:`diagonal_scan_ref`.

    Returns:
        h, (..., seqlen), in b's dtype, or in its complex counterpart if a is complex.

    Raises:
        TypeError, ValueError, torch.OutOfMemoryError, ImportError: see :func:`selective_scan_fn`.
        RuntimeError: an argument has a wrong layout, device, dtype or shape, or, on a CPU,
            cu_seqlens is out of order or range; the message names the argument, the expected and
            the actual value. Also raised when the result is differentiated twice.

    References:
        Blelloch, "Prefix Sums and Their Applications", 1990, section 1.4.1, on solving recurrences
        by scans; Orvieto et al., "Resurrecting Recurrent Neural Networks for Long Sequences", 2023,
        arXiv:2303.06349, the LRU.

    Example:
        >>> import torch
        >>> from selective_scan import diagonal_scan_fn
        >>> batch, dim, seqlen = 2, 64, 100
        >>> pole = torch.polar(torch.rand(dim), 6 * torch.rand(dim)).requires_grad_()
        >>> b = torch.randn(batch, dim, seqlen)
        >>> h = diagonal_scan_fn(pole[:, None], b)
        >>> h.shape, h.dtype
        (torch.Size([2, 64, 100]), torch.complex64)
        >>> h.real.square().sum().backward()
        >>> pole.grad.shape
        torch.Size([64])
    """
    arguments = (a, b, initial_state, reverse, cu_seqlens)
    if not DIAGONAL_SCAN.has_kernels((*arguments, backend)):
        return DIAGONAL_SCAN.run_reference(diagonal_scan_ref, (*arguments, backend))
    return DIAGONAL_SCAN(*arguments)
