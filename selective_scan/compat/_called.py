"""What determines a call of a model, in a form that can be compared: CUDA graphs of the call are
captured again once it differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import _pytorch
from .._layer_stack import KNOWN_ATTRIBUTE


def what_is_called(model: nn.Module) -> Iterator[object]:
    """Yields everything comparable that determines what a call of the model does."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield (*addresses(tensor), tensor.dtype, tensor.device)
    for name, module in model.named_modules():
        yield name, type(module)
        for attribute, value in vars(module).items():
            if attribute not in _COMPARED_OTHERWISE:
                yield attribute, _comparable(value)
    yield _comparable(_pytorch.process_wide_forward_hooks())


# Attributes of modules that are not compared here: parts, which are visited themselves, graphs, and
# what was found about the parts.
_COMPARED_OTHERWISE = {"_parameters", "_buffers", "_modules", "_decoding_cache", KNOWN_ATTRIBUTE}
_PLAIN_KINDS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_MOST_LEVELS = 4  # of nested lists


@dataclass(frozen=True, eq=False)
class _Itself:
    """A value compared by identity; the reference keeps it alive, so its identity is not reused."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    __hash__ = None


def _comparable(value: object, level: int = 0) -> object:
    if isinstance(value, _PLAIN_KINDS):
        return type(value), value
    if level < _MOST_LEVELS:
        if isinstance(value, dict):
            pairs = value.items()
            return [(_comparable(k, level + 1), _comparable(it, level + 1)) for k, it in pairs]
        if isinstance(value, list | tuple):
            return [_comparable(it, level + 1) for it in value]
        if isinstance(value, set | frozenset):
            return frozenset(value)  # its elements are hashable, and so comparable
    return _Itself(value)


def addresses(tensor: Tensor) -> Iterator[int]:
    """Yields the addresses where a graph reads a tensor; a quantized one has several parts."""
    if _pytorch.has_inner_tensors(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from addresses(getattr(tensor, name))
    else:
        yield tensor.data_ptr()
