"""Arguments and results in the notation of an op's schema."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile
from string import ascii_lowercase

import torch

from ._result import Result
from ._table import Number, Option, TensorArgument, TensorList

Argument = TensorArgument | Option | Number
_TYPES = {bool: "bool", int: "int", float: "float", str: "str", torch.dtype: "ScalarType"}


def declared(value: Argument | Result, mark: str = "") -> str:
    """Returns the type and the name of an argument or a result."""
    kind = _TYPES.get(getattr(value, "type", None), f"Tensor{mark}")
    kind += "[]" * isinstance(value, TensorList)
    return f"{kind}{'?' * value.optional} {value.name}"


def arguments_text(arguments: Sequence[Argument], defaults: Sequence[object] = ()) -> str:
    """Returns the list of arguments; those after the last required one have their defaults."""
    marks = iter(ascii_lowercase)
    texts = [
        declared(it, f"({next(marks)}!)" if getattr(it, "is_changed", False) else "")
        for it in arguments
    ]
    num_required = len([*dropwhile(_may_be_left_out, reversed(arguments))])
    for place in range(num_required, len(defaults)):
        default = defaults[place]
        texts[place] += f'="{default}"' if isinstance(default, str) else f"={default}"
    return ", ".join(texts)


def _may_be_left_out(argument: Argument) -> bool:
    return argument.optional or not isinstance(argument, TensorArgument)
