"""The schemas of an operator's ops, in which arguments and results are declared."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
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


def forward_schemas(given: str, results: Sequence[Result]) -> dict[str, str]:
    """Returns the schemas of the forward ops by their suffixes; `given` are their arguments."""
    made = ", ".join(map(declared, results))
    found = {"fwd": f"({given}) -> ({made})"}
    if "?" in made:
        found["fwd_traced"] = f"({given}) -> ({made.replace('?', '')})"
    return found


def backward_schemas(
    names: Sequence[str],
    known: Sequence[Argument],
    results: Sequence[Result],
    differentiated: Sequence[TensorArgument],
    written: Collection[str],
) -> dict[str, str]:
    """Returns the schemas of the backward ops by their suffixes.

    Args:
        names: the names of the backward op's arguments, in its order.
        known: the forward op's arguments and what is derived from them.
        results: the forward op's results.
        differentiated: the arguments whose gradients the op returns.
        written: the names of those whose gradients the other op writes into given tensors.
    """
    texts = {it.name: declared(it) for it in (*known, *results)}
    is_single = sum(result.is_differentiable for result in results) == 1
    kind = "Tensor" if is_single else "Tensor?"
    texts |= {f"d{result.name}": f"{kind} d{result.name}" for result in results}
    given = ", ".join(texts[name] for name in names)
    gradients = {argument.name: f"Tensor d{argument.name}" for argument in differentiated}
    found = {"bwd": f"({given}) -> ({', '.join(gradients.values())})"}
    if written:
        given_gradients = [
            replace(argument, name=f"d{argument.name}", is_changed=True)
            for argument in differentiated
            if argument.name in written
        ]
        made = ", ".join(text for name, text in gradients.items() if name not in written)
        found["bwd_out"] = f"({given}, *, {arguments_text(given_gradients)}) -> ({made})"
    return found


def _may_be_left_out(argument: Argument) -> bool:
    return argument.optional or not isinstance(argument, TensorArgument)
