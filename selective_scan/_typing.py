"""Hints for type checkers beyond the annotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., object])


def typed_as(_twin: Callable[[], Function]) -> Callable[[Callable[..., object]], Function]:
    """Returns a decorator that gives a function, itself unchanged, the overloads of its twin."""
    return lambda function: cast(Function, function)
