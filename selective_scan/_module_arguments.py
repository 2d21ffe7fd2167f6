"""Checks of the arguments of a module's constructor. Each raises a ValueError."""

from __future__ import annotations

import math
import numbers
from typing import NoReturn

import torch

from ._checks import HALF


def refuse(name: str, wanted: str, value: object) -> NoReturn:
    """Raises the ValueError. A tensor is described by its shape, since its values may be many and
    on a GPU."""
    is_tensor = isinstance(value, torch.Tensor)
    got = f"a Tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
    raise ValueError(f"selective_scan: {name} must be {wanted}, got {got}")


def check_count(name: str, value: object, alternative: str = "", *, minimum: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        refuse(name, f"an integer of at least {minimum}{alternative}", value)


def check_positive(name: str, value: object, *, or_zero: bool = False) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not (0 < value < math.inf or (or_zero and value == 0)):
        refuse(name, "a positive finite number" + " or 0" * or_zero, value)


def check_finite(name: str, value: object) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        refuse(name, "a finite number", value)


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        refuse(name, "a bool", value)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        refuse(name, f"one of {', '.join(choices)}", value)


def check_dtype(dtype: object) -> None:
    if dtype not in (None, torch.float32, torch.float64, *HALF):
        refuse("dtype", "float32, float16, bfloat16, float64 or None", dtype)
