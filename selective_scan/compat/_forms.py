"""How functions of a binding module are called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

Result = TypeVar("Result")


def by_position(name: str, *forms: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Has a function called by position alone, as those of C++ are.

    Args:
        name: of the function, for the error.
        forms: the names of its parameters in the order of a call, one form for each number of
            arguments; without forms there is one, of all parameters in their own order.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        accepted = [form.split() for form in forms] or [[*inspect.signature(function).parameters]]
        by_count = {len(form): form for form in accepted}

        @functools.wraps(function)
        def call(*arguments: object) -> Result:
            if len(arguments) not in by_count:
                # The names of C++ end with _ where a tensor may be absent.
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
