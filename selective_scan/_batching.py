"""How an op maps over one dimension more, for torch.func.vmap and for batched gradients.

The mapped dimension joins one that the op has: the batch; or the channels, and with them the groups
of B and C, where tensors without a batch are mapped too (an ensemble), or where each of the mapped
entries must have gradients of its own (per-sample gradients). Or it is one more leading dimension.
One call of the op then serves all entries. Where it can join none, there is a call for each entry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ._checks import (
    ELLIPSIS,
    REAL,
    Blocks,
    BroadcastableTo,
    Call,
    Projection,
    Table,
    TensorArgument,
    fail,
)

if TYPE_CHECKING:
    from ._result import Result

_BATCH, _DIM = "batch", "dim"
_TARGETS = (ELLIPSIS, _BATCH, _DIM)  # what the mapped dimension may join, the best first

Size = int | torch.SymInt
Kind = tuple[str | int, ...] | str | None


class Form(NamedTuple):
    """What a tensor of one entry is made to be, before the mapped dimension joins it.

    Attributes:
        shape: with some dimensions of size 1 more.
        expanded: the shape to which it is expanded.
        axis: the dimension that the mapped one joins; None: the op takes the tensor as it is.
    """

    shape: tuple[Size, ...]
    expanded: tuple[Size, ...]
    axis: int | None


@dataclass(frozen=True)
class BatchingRule:
    """The batching rule of one op.

    Attributes:
        names: the op's arguments, in its order.
        table: what checks the tensors of one entry.
        tensors: the arguments that are tensors, but for saved states.
        results: for each of its results the names of the dimensions, or the argument whose shape it
            has; None for saved states.
        states: the argument that is saved states, "" if there is none.
        num_saved: how many values saved states have, for the sizes of a call.
        written: the arguments that the op writes to.
    """

    names: Sequence[str]
    table: Table
    tensors: Sequence[TensorArgument]
    results: Sequence[Kind]
    states: str = ""
    num_saved: Callable[[Call], Size] | None = None
    written: Collection[str] = ()

    @classmethod
    def of_forward(
        cls, table: Table, results: Sequence[Result], op: torch._ops.OpOverload
    ) -> BatchingRule:
        saves_states = any(result.chunk for result in results)
        return cls(
            names=(*table.names, *["save_states"] * saves_states),
            table=table,
            tensors=table.tensors,
            results=[None if result.chunk else result.dims for result in results],
            written=[argument.name for argument in op._schema.arguments if argument.is_write],
        )

    @classmethod
    def of_backward(
        cls, names: Sequence[str], table: Table, results: Sequence[Result], forward: Table
    ) -> BatchingRule:
        """`names` and `table` are the backward op's, the others the forward op's."""
        saved = [result for result in results if result.chunk]
        cotangents = [
            TensorArgument(f"d{result.name}", REAL, result.dims, optional=True)
            for result in results
            if not result.chunk
        ]
        given = [argument.name for argument in table.tensors]
        forward_names = [argument.name for argument in forward.tensors]
        # A gradient has the shape of its argument, or of the result that is given in its place.
        instead = iter([name for name in given if name not in forward_names])
        return cls(
            names=names,
            table=table,
            tensors=[*cotangents, *table.tensors],
            results=[
                argument.name if argument.name in given else next(instead, argument.shape)
                for argument in forward.tensors
                if argument.has_gradient
            ],
            states="".join(result.name for result in saved),
            num_saved=lambda call: saved[0].sizes(call)[0],
        )

    def __call__(
        self,
        op: Callable,
        size: Size,
        in_dims: Sequence[int | None],
        values: Sequence,
        *,
        is_separate: bool,
    ) -> tuple[object, object]:
        """The results for all entries, and which of their dimensions is the mapped one.

        Args:
            op: the op, or what has its derivative.
            size: the number of entries.
            in_dims: the mapped dimension of each value.
            values: all arguments of the op.
            is_separate: whether each entry must have what depends on it alone: gradients of all
                tensors, and saved states of which such gradients can be made.
        """
        given = dict(zip(self.names, values, strict=True))
        mapped = {n: dim for n, dim in zip(self.names, in_dims, strict=True) if dim is not None}
        for name in self.written:
            if name not in mapped and given[name] is not None:
                fail(
                    f"{name} is written to, so vmap must map it where it maps {next(iter(mapped))}"
                )
        if size == 0:
            map_one = functools.partial(self, op, 1, in_dims, is_separate=is_separate)
            return _map_nothing(map_one, in_dims, values)

        one = {name: _entry(value, mapped.get(name), 0) for name, value in given.items()}
        call = self.table.check(one)
        present = [argument for argument in self.tensors if one[argument.name] is not None]
        shapes = {argument.name: tuple(one[argument.name].shape) for argument in present}
        target = _choose_target(present, shapes, mapped, is_separate)
        if target is None:
            return map_one_by_one(op, size, in_dims, values)

        forms = {
            a.name: _form(a, shapes, call, target, a.name in mapped or is_separate) for a in present
        }
        for name, form in forms.items():
            if form.axis is not None:
                given[name] = _join(given[name], mapped.get(name), form, size, target)
        sizes = call.sizes.copy()
        if self.states and given[self.states] is not None:
            # Their layout belongs to the call that saved them; other ones the op computes again.
            states = given[self.states]
            call.sizes[target] *= size
            if self.states in mapped or states.numel() != self.num_saved(call):
                given[self.states] = states.new_empty(0)
        results = op(*given.values())
        for name in self.written:
            if name in mapped:
                whole = _separate(given[name], forms[name], shapes[name], size, target)
                values[self.names.index(name)].movedim(mapped[name], 0).copy_(whole)

        def separate(result: Tensor, kind: Kind) -> tuple[Tensor | None, int | None]:
            if kind is None:  # Of states of the whole batch no separate gradients can be made.
                return (result if is_separate or target != _BATCH else None), None
            if isinstance(kind, str):
                return _separate(result, forms[kind], shapes[kind], size, target), 0
            shape = _shape(kind, sizes)
            form = Form(shape, shape, by_batch(kind).index(target))
            return _separate(result, form, shape, size, target), 0

        return _each(separate, results, self.results)


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
    """No op takes zero groups, so there is an entry of zeros for the time of the call."""

    def with_one(value: object, dim: int | None) -> object:
        if dim is None:
            return value
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
    """what() of every result that is there, as the results came: several, one, or none."""
    if isinstance(results, Tensor):
        return what(results, others[0])
    if results is None:
        return None, None
    pairs = zip(results, others, strict=True)
    pairs = [(None, None) if result is None else what(result, other) for result, other in pairs]
    return tuple(result for result, _ in pairs), tuple(dim for _, dim in pairs)


# --- which dimension the mapped one joins ---------------------------------------------------------


def _choose_target(
    present: Sequence[TensorArgument], shapes: dict, mapped: Collection[str], is_separate: bool
) -> str | None:
    """The dimension that the mapped one can join, None if there is none."""

    def is_served(argument: TensorArgument, target: str) -> bool:
        count = _count(argument, shapes[argument.name], target)
        if argument.name in mapped or (is_separate and argument.has_gradient):
            return count == 1
        # Indices may count the rows of a batch or its steps, which joining the channels leaves.
        return count < 2 and (count == 1 or target == _DIM or argument.has_gradient)

    for target in _TARGETS:
        if all(is_served(argument, target) for argument in present):
            return target
    return None


def _count(argument: TensorArgument, shape: tuple, target: str) -> int:
    """How many dimensions of the tensor the mapped one would join."""
    if isinstance(argument.shape, BroadcastableTo):
        return int(target == ELLIPSIS)
    if isinstance(argument.shape, Projection):
        is_constant = len(shape) == len(argument.shape.constant)
        return int(target == _DIM or (target == _BATCH and not is_constant))
    return _fixed_dims(argument).count(target)


def _fixed_dims(argument: TensorArgument) -> tuple[str, ...]:
    kind = argument.shape
    if isinstance(kind, Blocks):
        return kind.dims
    return by_batch(kind if isinstance(kind, tuple) else argument.dims)


def by_batch(dims: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Sequences are the batch where no indices tell them apart, and with these it is not joined."""
    return tuple(_BATCH if dim == "sequences" else dim for dim in dims)


def _form(argument: TensorArgument, shapes: dict, call: Call, target: str, is_own: bool) -> Form:
    """How the mapped dimension joins a tensor. `is_own`: entries do not share it."""
    shape, kind = shapes[argument.name], argument.shape
    if isinstance(kind, BroadcastableTo):
        padded = (1,) * (len(shapes[kind.other]) - len(shape)) + shape
        return Form(padded, padded, 0 if is_own else None)
    if not isinstance(kind, Projection):
        dims = _fixed_dims(argument)
        return Form(shape, shape, dims.index(target) if target in dims else None)
    if len(shape) != len(kind.constant):
        if target == _BATCH:
            return Form(shape, shape, 0)
        with_groups = (shape[0], *(shape[1:-2] or (1,)), *shape[-2:])
        return Form(with_groups, with_groups, 1)
    if target in kind.constant:
        return Form(shape, shape, kind.constant.index(target))
    if not is_own:
        return Form(shape, shape, None)
    groups = next(iter(call.groups.values()), 1)  # then as a variable one
    batch, dstate, seqlen = _shape((_BATCH, "dstate", "seqlen"), call.sizes)
    return Form((1, 1, dstate, 1), (batch, groups, dstate, seqlen), 1)


def _shape(dims: tuple[str | int, ...], sizes: dict) -> tuple[Size, ...]:
    shape = []
    for dim in dims:
        if isinstance(dim, int):
            shape.append(dim)
        else:
            shape += sizes[dim] if dim == ELLIPSIS else [sizes[dim]]
    return tuple(shape)


# --- one tensor -----------------------------------------------------------------------------------


def _entry(value: object, dim: int | None, index: int) -> object:
    return value if dim is None else value.select(dim, index)


def _join(tensor: Tensor, dim: int | None, form: Form, size: Size, target: str) -> Tensor:
    """The tensor of all entries, as the op takes it."""
    tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
    tensor = tensor.reshape(tensor.shape[0], *form.shape)
    tensor = tensor.expand(size, *form.expanded).movedim(0, form.axis)
    return tensor if target == ELLIPSIS else tensor.flatten(form.axis, form.axis + 1)


def _separate(
    tensor: Tensor, form: Form, shape: tuple[Size, ...], size: Size, target: str
) -> Tensor:
    """The inverse: (size, *shape), summed over what was expanded."""
    if target != ELLIPSIS:
        tensor = tensor.unflatten(form.axis, (size, form.expanded[form.axis]))
    tensor = tensor.movedim(form.axis, 0)
    return tensor.sum_to_size(size, *form.shape).reshape(size, *shape)
