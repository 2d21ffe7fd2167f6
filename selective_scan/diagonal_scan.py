"""The general diagonal scan: the recurrence alone, the building block of any diagonal SSM."""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import COMPLEX, ELLIPSIS, REAL, SINGLE_OR_DOUBLE, Call, check_dims, fail
from ._operator import Operator
from ._packed import scan_steps
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
    """Half precision has no complex counterpart that a complex `other` could turn it into."""
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
        CU_SEQLENS.check_shape(CU_SEQLENS.name, call[CU_SEQLENS.name], call)


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
    """Multiplication and addition for each step; backward the same and the gradient of a."""
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
    """The diagonal scan, step by step in plain PyTorch.

    Arguments, result and errors are those of :func:`diagonal_scan_fn`; `backend` is checked as
    there, but chooses nothing here. It runs on any device and can be differentiated any number of
    times.

    Example:
        >>> import torch
        >>> from selective_scan import diagonal_scan_ref
        >>> diagonal_scan_ref(torch.tensor([0.5]), torch.ones(4))
        tensor([1.0000, 1.5000, 1.7500, 1.8750])
    """
    call = DIAGONAL_SCAN.check((a, b, initial_state, reverse, cu_seqlens, backend))
    dtype, seqlen = call.state_dtype, b.shape[-1]
    a_steps = a.to(dtype).broadcast_to(b.shape).unbind(-1)
    b_steps = b.to(dtype).unbind(-1)
    if initial_state is None:
        rows = b.shape[:-1] if cu_seqlens is None else (call.sizes["sequences"], *b.shape[1:-1])
        h = torch.zeros(rows, dtype=dtype, device=b.device)
    else:
        h = initial_state.to(dtype)
    h_steps = []

    def take_step(t: int, h: Tensor) -> Tensor:
        h_steps.append(a_steps[t] * h + b_steps[t])
        return h_steps[-1]

    _, are_none = scan_steps(take_step, h, seqlen, reverse, cu_seqlens)
    if reverse:
        h_steps.reverse()
    result_dtype = b.dtype.to_complex() if dtype.is_complex else b.dtype
    if not h_steps:
        return b.to(result_dtype, copy=True)
    result = torch.stack(h_steps, dim=-1).to(result_dtype)
    return result if are_none is None else torch.where(are_none, 0, result)


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

    Rows are independent systems: nothing that one of them holds reaches another. What goes into
    the state (B[t]·u[t], a gate, a step size) and what is read out of it is the caller's, so this
    is the core of LRU, S5, RG-LRU and their kin.

    Any strides will do, and where b is dense, h is laid out as b is. Arithmetic is float32, or
    float64 if any tensor is float64 or complex128, whatever the dtypes of a, b and h. The result
    can be differentiated once with respect to a, b and initial_state; each gradient has its input's
    dtype, and the same bits on every run. The gradient of a is computed from h as it was returned,
    so in half precision it carries h's rounding.

    Long rows, and on CUDA all of them, are scanned in parallel along time: the product of a over a
    stretch of steps is formed. Where it exceeds the range of the arithmetic, so that h could only
    stay finite by staying 0, the result is NaN rather than 0.

    Args:
        a: multipliers, broadcastable to b (size 1 in time included: a constant pole), float32,
            float16, bfloat16, float64, complex64 or complex128.
        b: inputs, (..., seqlen), any of these dtypes; not float16 or bfloat16 where a is complex,
            nor may a be where b is complex.
        initial_state: the state before the first step, (...), float32 or float64; complex64 or
            complex128 where a or b is complex.
        reverse: scan from the last step to the first, h[t] = a[t]·h[t+1] + b[t].
        cu_seqlens: (sequences + 1,), int32 or int64, on b's device, rising: b is (1, ..., seqlen),
            and sequence i has the steps from cu_seqlens[i] to before cu_seqlens[i + 1], scanned by
            itself from a state of its own, so that initial_state is (sequences, ...). h is 0 at
            steps of no sequence. On CUDA the values are not read back to the host, and those out of
            order or of range are moved to where they do no harm.
        backend: "auto" takes the kernels for the tensors' device; "cpu" and "cuda" do the same and
            insist on that device; "reference" takes :func:`diagonal_scan_ref`, on any device.

    Returns:
        h, (..., seqlen), in b's dtype, its complex counterpart where a is complex.

    Raises:
        TypeError: an argument is not of the type above.
        ValueError: the backend is unknown, or does not match the tensors' device.
        RuntimeError: a wrong layout, device, dtype or shape, or, on a CPU, boundaries that do not
            rise; the message names the argument, what was expected and what came. Also a second
            differentiation.
        torch.OutOfMemoryError: there is no memory on the GPU; on a CPU, and from code that
            torch.compile made, it is a RuntimeError with the allocator's message.
        ImportError: the library for the tensors' device is missing.

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
