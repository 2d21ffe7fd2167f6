"""What type checkers are told beside the annotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., object])


def typed_as(_twin: Callable[[], Function]) -> Callable[[Callable[..., object]], Function]:
    """For a function that has the overloads of another one, its twin, and is left as it is."""
    return lambda function: cast(Function, function)
