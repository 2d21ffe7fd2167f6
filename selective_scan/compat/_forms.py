"""Calls of a binding module's functions, whose arguments are positional."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

Result = TypeVar("Result")


def by_position(name: str, *forms: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Makes a function accept positional arguments only, like the C++ functions of a binding.

    Args:
        name: the function's name in error messages.
        forms: the supported signatures, each with the names of the parameters in the order of the
            call; the number of arguments selects one. Without forms, the only signature is that of
            the function itself.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        accepted = [form.split() for form in forms] or [[*inspect.signature(function).parameters]]
        by_count = {len(form): form for form in accepted}

        @functools.wraps(function)
        def call(*arguments: object) -> Result:
            if len(arguments) not in by_count:
                # As in C++, the names of optional tensors end with _.
                names = [", ".join(name.rstrip("_") for name in form) for form in accepted]
                expected = " or ".join(f"({form})" for form in names)
                got = ", ".join(map(_describe, arguments))
                raise TypeError(
                    f"selective_scan: {name} must be called with {expected}, "
                    f"got {len(arguments)} arguments: ({got})"
                )
            return function(**dict(zip(by_count[len(arguments)], arguments, strict=True)))

        return call

    return decorate


def _describe(value: object) -> str:
    return f"Tensor{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
