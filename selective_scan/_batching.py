"""How an op maps over an additional dimension, for torch.func.vmap and for batched gradients.

If the sequences are mapped and the tensors that they share are not, the mapped dimension joins the
op's batch, and one call serves all entries. Otherwise the op is called for each entry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._checks import fail
from ._table import Table, TensorArgument

if TYPE_CHECKING:
    from ._result import Result

_BATCH = "batch"

Size = int | torch.SymInt
Dims = tuple[str, ...]


class BatchingRule:
    """The batching rule of a forward op.

    Args:
        table: the checks for the tensors of one entry.
        results: the declarations of the op's results.
    """

    def __init__(self, table: Table, results: Sequence[Result]) -> None:
        saves_states = not all(result.is_differentiable for result in results)
        self._names = (*table.names, *["save_states"] * saves_states)
        self._table = table
        # The names of each result's dimensions; None for saved states.
        self._results = [
            by_batch(result.dims) if result.is_differentiable else None for result in results
        ]
        self._written = [argument.name for argument in table.tensors if argument.is_changed]

    def __call__(
        self,
        op: Callable,
        size: Size,
        in_dims: Sequence[int | None],
        values: Sequence,
        *,
        is_separate: bool,
    ) -> tuple[object, object]:
        """Returns the results for all entries, and the mapped dimension of each result.

        Args:
            op: the op, or an autograd function that calls it.
            size: the number of entries.
            in_dims: the mapped dimension of each value.
            values: all arguments of the op.
            is_separate: whether each entry must have its own saved states.
        """
        given = dict(zip(self._names, values, strict=True))
        mapped = {n: dim for n, dim in zip(self._names, in_dims, strict=True) if dim is not None}
        written = [name for name in self._written if given[name] is not None]
        for name in written:
            if name not in mapped:
                fail(
                    f"{name} is written to, so vmap must map it where it maps {next(iter(mapped))}"
                )
        if size == 0:
            map_one = functools.partial(self, op, 1, in_dims, is_separate=is_separate)
            return _map_nothing(map_one, in_dims, values)

        one = {name: _entry(value, mapped.get(name), 0) for name, value in given.items()}
        present = [argument for argument in self._table.tensors if one[argument.name] is not None]
        axes = {argument.name: _batch_axis(argument, one[argument.name]) for argument in present}

        def is_served(argument: TensorArgument) -> bool:
            if axes[argument.name] is not None:
                return True
            # Indices that have no batch dimension may count the rows of a batch.
            return argument.name not in mapped and argument.has_gradient

        if is_separate or written or not all(map(is_served, present)):
            return map_one_by_one(op, size, in_dims, values)

        self._table.check(one)
        for name, axis in axes.items():
            if axis is not None:
                given[name] = _join(given[name], mapped.get(name), axis, size)

        def separate(result: Tensor, dims: Dims | None) -> tuple[Tensor | None, int | None]:
            if dims is None:  # Saved states of the whole batch cannot serve separate gradients.
                return None, None
            axis = dims.index(_BATCH)
            return result.unflatten(axis, (size, result.shape[axis] // size)), axis

        return _each(separate, op(*given.values()), self._results)


def map_one_by_one(
    op: Callable, size: Size, in_dims: Sequence[int | None], values: Sequence
) -> tuple[object, object]:
    if size == 0:
        return _map_nothing(functools.partial(map_one_by_one, op, 1, in_dims), in_dims, values)
    rows = [
        op(*[_entry(value, dim, i) for value, dim in zip(values, in_dims, strict=True)])
        for i in range(size)
    ]
    if not isinstance(rows[0], tuple):
        return (None, None) if rows[0] is None else (torch.stack(rows), 0)
    columns = list(zip(*rows, strict=True))
    return _each(lambda _, column: (torch.stack(column), 0), rows[0], columns)


def _map_nothing(
    map_over: Callable[[Sequence], tuple], in_dims: Sequence[int | None], values: Sequence
) -> tuple[object, object]:
    """Maps over zero entries by calling the op on one entry of zeros and dropping its results."""

    def with_one(value: object, dim: int | list | None) -> object:
        if dim is None:
            return value
        if isinstance(dim, list | tuple):
            return [with_one(*pair) for pair in zip(value, dim, strict=True)]
        shape = list(value.shape)
        shape[dim] = 1
        return torch.cat((value, value.new_zeros(shape)), dim)

    results, dims = map_over(
        [with_one(value, dim) for value, dim in zip(values, in_dims, strict=True)]
    )

    def without_one(result: Tensor, dim: int | None) -> tuple[Tensor, int | None]:
        return (result, None) if dim is None else (result.narrow(dim, 0, 0), dim)

    return _each(without_one, results, dims if isinstance(dims, tuple) else (dims,))


def _each(
    what: Callable[[Tensor, object], tuple], results: object, others: Sequence
) -> tuple[object, object]:
    """Applies what() to every result that is not None and keeps the structure of the results: a
    tuple, one tensor, or None."""
    if isinstance(results, Tensor):
        return what(results, others[0])
    if results is None:
        return None, None
    pairs = zip(results, others, strict=True)
    pairs = [(None, None) if result is None else what(result, other) for result, other in pairs]
    return tuple(result for result, _ in pairs), tuple(dim for _, dim in pairs)


def _batch_axis(argument: TensorArgument, tensor: Tensor) -> int | None:
    """Returns the batch dimension of one entry's tensor, None if it has none."""
    dims = by_batch(argument.dims_of(tensor))
    return dims.index(_BATCH) if _BATCH in dims else None


def by_batch(dims: Dims) -> Dims:
    """Renames "sequences" to "batch". They are the same unless indices such as cu_seqlens are
    given, and calls with indices are not joined."""
    return tuple(_BATCH if dim == "sequences" else dim for dim in dims)


def _entry(value: object, dim: int | list | None, index: int) -> object:
    """Selects an entry of a tensor, or of each tensor of a list."""
    if isinstance(dim, list | tuple):
        return [_entry(*pair, index) for pair in zip(value, dim, strict=True)]
    return value if dim is None else value.select(dim, index)


def _join(tensor: Tensor, dim: int | None, axis: int, size: Size) -> Tensor:
    """Concatenates all entries of a tensor along the batch."""
    if dim is None:
        tensor = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], size, *tensor.shape[axis:])
    else:
        tensor = tensor.movedim(dim, axis)
    return tensor.flatten(axis, axis + 1)
