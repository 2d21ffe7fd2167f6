"""The general diagonal scan: the recurrence alone, the building block of any diagonal SSM."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._checks import (
    COMPLEX,
    HALF,
    REAL,
    SINGLE_OR_DOUBLE,
    BackendName,
    BroadcastableTo,
    Call,
    Dtypes,
    Option,
    Table,
    TensorArgument,
    state_dtypes,
)
from ._operator import Operator, Result


def _dtypes_beside(other: str) -> Callable[[Tensor, Call], tuple[Dtypes, str]]:
    """Half precision has no complex counterpart that a complex `other` could turn it into."""

    def dtypes(tensor: Tensor, call: Call) -> tuple[Dtypes, str]:
        if tensor.dtype in HALF and call[other].is_complex():
            return (*SINGLE_OR_DOUBLE, *COMPLEX), f" (complex {other})"
        return (*REAL, *COMPLEX), ""

    return dtypes


def _arguments(b: str, *options: Option) -> Table:
    return Table(
        TensorArgument("a", _dtypes_beside(b), BroadcastableTo(b)),
        TensorArgument(b, _dtypes_beside("a"), ("...", "seqlen")),
        TensorArgument("initial_state", state_dtypes, ("...",), optional=True),
        *options,
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


_DIAGONAL_SCAN = Operator(
    "diagonal_scan",
    _arguments("b", Option("reverse")),
    results=[Result("h", ("...", "seqlen"), _result_dtype, like="b")],
    backward="dh a h initial_state reverse complex_b",
    derived={"complex_b": lambda inputs: inputs[1].is_complex()},
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
) -> Tensor:
    """The diagonal scan, step by step in plain PyTorch.

    Arguments but for `backend`, result and errors are those of :func:`diagonal_scan_fn`. It runs on
    any device and can be differentiated any number of times.

    Example:
        >>> import torch
        >>> from selective_scan import diagonal_scan_ref
        >>> diagonal_scan_ref(torch.tensor([0.5]), torch.ones(4))
        tensor([1.0000, 1.5000, 1.7500, 1.8750])
    """
    dtype = _DIAGONAL_SCAN.check((a, b, initial_state, reverse, "auto")).state_dtype
    seqlen = b.shape[-1]
    a_steps = a.to(dtype).broadcast_to(b.shape).unbind(-1)
    b_steps = b.to(dtype).unbind(-1)
    if initial_state is None:
        h = torch.zeros(b.shape[:-1], dtype=dtype, device=b.device)
    else:
        h = initial_state.to(dtype)
    h_steps = []
    for t in reversed(range(seqlen)) if reverse else range(seqlen):
        h = a_steps[t] * h + b_steps[t]
        h_steps.append(h)
    if reverse:
        h_steps.reverse()
    result_dtype = b.dtype.to_complex() if dtype.is_complex else b.dtype
    if not h_steps:
        return b.to(result_dtype, copy=True)
    return torch.stack(h_steps, dim=-1).to(result_dtype)


def diagonal_scan_fn(
    a: Tensor,
    b: Tensor,
    *,
    initial_state: Tensor | None = None,
    reverse: bool = False,
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
        backend: "auto" takes the kernels for the tensors' device; "cpu" and "cuda" do the same and
            insist on that device; "reference" takes :func:`diagonal_scan_ref`, on any device.

    Returns:
        h, (..., seqlen), in b's dtype, its complex counterpart where a is complex.

    Raises:
        TypeError: an argument is not of the type above.
        ValueError: the backend is unknown, or does not match the tensors' device.
        RuntimeError: a wrong layout, device, dtype or shape; the message names the argument, what
            was expected and what came. Also a second differentiation.
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
    arguments = (a, b, initial_state, reverse)
    if not _DIAGONAL_SCAN.has_kernels((*arguments, backend)):
        return diagonal_scan_ref(a, b, initial_state=initial_state, reverse=reverse)
    return _DIAGONAL_SCAN(*arguments)
