"""What type checkers are told beside the annotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., object])


def typed_as(_twin: Callable[[], Function]) -> Callable[[Callable[..., object]], Function]:
    """Gives a function, which is left as it is, the overloads of another one, its twin."""
    return lambda function: cast(Function, function)
