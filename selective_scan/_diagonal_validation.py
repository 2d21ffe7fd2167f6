"""The checks of the diagonal scan; csrc/torch/diagonal_arguments.cpp says the same sentences."""

from __future__ import annotations

import torch
from torch import Tensor

from ._dtypes import HALF, compute_dtype
from ._validation import _check_dense, _check_dtype, _type_message, fail

_COMPLEX = (torch.complex64, torch.complex128)
_BESIDE_COMPLEX = (torch.float32, torch.float64, *_COMPLEX)
_ANY = (torch.float32, torch.float16, torch.bfloat16, torch.float64, *_COMPLEX)


def state_dtype(a: Tensor, b: Tensor, initial_state: Tensor | None) -> torch.dtype:
    """The dtype of arithmetic and of the state between steps."""
    dtype = compute_dtype((a, b, initial_state))
    return dtype.to_complex() if a.is_complex() or b.is_complex() else dtype


def check_diagonal_types(a: object, b: object, initial_state: object, **options: object) -> None:
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, Tensor):
            raise TypeError(_type_message(name, "a Tensor", value))
    if initial_state is not None and not isinstance(initial_state, Tensor):
        raise TypeError(_type_message("initial_state", "a Tensor or None", initial_state))
    for name, value in options.items():
        expected = str if name == "backend" else bool
        if not isinstance(value, expected):
            raise TypeError(_type_message(name, f"a {expected.__name__}", value))


def check_diagonal_layouts_and_devices(
    a: Tensor, b: Tensor, initial_state: Tensor | None, b_name: str = "b"
) -> None:
    given = [("a", a), (b_name, b)]
    if initial_state is not None:
        given.append(("initial_state", initial_state))
    for name, tensor in given:
        _check_dense(name, tensor)
    for name, tensor in given:
        if tensor.device != b.device:
            fail(f"{name} must be on the device of {b_name}, {b.device}, got {tensor.device}")


def check_diagonal_inputs(
    a: Tensor, b: Tensor, initial_state: Tensor | None, b_name: str = "b"
) -> None:
    """`b_name` is h in the backward op, which takes h in the place of b."""
    check_diagonal_layouts_and_devices(a, b, initial_state, b_name)
    _check_dtype("a", a, _ANY)
    _check_dtype(b_name, b, _ANY)
    if b.is_complex() and a.dtype in HALF:
        _check_dtype("a", a, _BESIDE_COMPLEX, f" (complex {b_name})")
    if a.is_complex() and b.dtype in HALF:
        _check_dtype(b_name, b, _BESIDE_COMPLEX, " (complex a)")
    if initial_state is not None:
        is_complex = a.is_complex() or b.is_complex()
        allowed = _COMPLEX if is_complex else (torch.float32, torch.float64)
        _check_dtype("initial_state", initial_state, allowed)

    if b.dim() == 0:
        fail(f"{b_name} must be (..., seqlen), got {tuple(b.shape)}")
    fits = a.dim() <= b.dim() and all(
        size in (1, wanted)
        for size, wanted in zip(reversed(a.shape), reversed(b.shape), strict=False)
    )
    if not fits:
        fail(f"a must be broadcastable to {b_name}, {tuple(b.shape)}, got {tuple(a.shape)}")
    if initial_state is not None and initial_state.shape != b.shape[:-1]:
        fail(
            f"initial_state must be (...) = {tuple(b.shape[:-1])}, got {tuple(initial_state.shape)}"
        )


def check_dh(dh: Tensor, h: Tensor) -> None:
    _check_dense("dh", dh)
    if dh.device != h.device:
        fail(f"dh must be on the device of h, {h.device}, got {dh.device}")
    _check_dtype("dh", dh, (h.dtype,))
    if dh.shape != h.shape:
        fail(f"dh must have the shape of h, {tuple(h.shape)}, got {tuple(dh.shape)}")
