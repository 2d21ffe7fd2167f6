"""The derivative of an operator: which tensors are saved for its backward op, and to which inputs
its gradients belong."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from . import _memory, _pytorch
from ._result import Result
from ._table import Table

Gradients = tuple[Tensor | None, ...]


class Derivative:
    """The work of autograd around the backward op of an operator.

    Args:
        table: the forward op's arguments, without save_states.
        defaults: their defaults, and that of save_states if the op has it.
        results: the forward op's results.
        backward: the names of the backward op's arguments, in its order.
        derived: see Operator.
        gradients: the arguments whose gradients the backward op returns.

    Attributes:
        op: the backward op.
        differentiable_op: an autograd function that runs the backward op.
    """

    op: torch._ops.OpOverload
    differentiable_op: type[torch.autograd.Function]

    def __init__(
        self,
        table: Table,
        defaults: Sequence[object],
        results: Sequence[Result],
        backward: Sequence[str],
        derived: Mapping[str, Callable[[Sequence], object]],
        gradients: Sequence[str],
    ) -> None:
        self._defaults = defaults
        self._derived = derived
        # The backward op's arguments are picked from the row of the forward op's arguments and
        # results.
        arguments = [*table.names, *["save_states"] * (len(defaults) - len(table.names))]
        row = [*arguments, *(result.name for result in results)]
        tensors = {argument.name for argument in table.tensors}
        tensors |= {result.name for result in results}
        self.num_cotangents = sum(result.is_differentiable for result in results)
        given = backward[self.num_cotangents :]
        saved = [name for name in given if name in tensors]
        options = [name for name in given if name not in tensors and name not in derived]
        kept = [*saved, *options, *derived]
        self._pick_saved = _picker([row.index(name) for name in saved])
        self._pick_options = _picker([row.index(name) for name in options])
        order = [kept.index(name) for name in given]
        # For each forward argument, the index of its gradient. Index -1 picks the None that is
        # appended to the gradients.
        places = [gradients.index(name) if name in gradients else -1 for name in arguments]
        self._pickers = _picker(order), _picker(places)
        self._traced_pickers = _traced_picker(order), _traced_picker(places)

    def save(self, ctx, inputs: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
        """Saves inputs and the states at chunk boundaries; backward recomputes everything else."""
        results = (output,) if isinstance(output, Tensor) else output
        row = self._arguments_and_results(inputs, results)
        ctx.save_for_backward(*self._pick_saved(row))
        ctx.options = self._pick_options(row)
        if self._derived:
            ctx.options += tuple(derive(inputs) for derive in self._derived.values())
        states = results[self.num_cotangents :]
        ctx.mark_non_differentiable(*[tensor for tensor in states if tensor is not None])
        ctx.set_materialize_grads(False)

    def _arguments_and_results(self, inputs: tuple, results: tuple) -> list:
        """Returns the forward op's arguments and results in the form that the backward op takes."""
        return [*inputs, *self._defaults[len(inputs) :], *results]

    def found_by(self, run: Callable[..., Gradients]) -> Callable[..., Gradients]:
        """Returns the function that autograd calls for the gradients; `run` is the backward op.

        It is a plain function because compiled autograd does not accept methods.
        """

        def backward(ctx, *cotangents: Tensor | None) -> Gradients:
            return self._differentiate(run, ctx, *cotangents)

        return backward

    def _differentiate(
        self, run: Callable[..., Gradients], ctx, *cotangents: Tensor | None
    ) -> Gradients:
        """Returns one gradient for each input that PyTorch counts, which may omit the last ones."""
        num_inputs = len(ctx.needs_input_grad)
        cotangents = cotangents[: self.num_cotangents]
        for cotangent in cotangents:  # any() of a generator takes several times as long
            if cotangent is not None:
                break
        else:
            return (None,) * num_inputs
        is_compiling = torch.compiler.is_compiling()  # compiled autograd traces this
        order, pick_gradients = self._traced_pickers if is_compiling else self._pickers
        arguments = (*cotangents, *order((*ctx.saved_tensors, *ctx.options)))
        # With create_graph=True the op must stay visible to autograd, so that it can refuse a
        # second derivative.
        try:
            if torch.is_grad_enabled():
                gradients = self.differentiable_op.apply(*arguments)
            elif is_compiling:
                gradients = self.op(*arguments)
            else:
                with _pytorch.below_autograd():
                    gradients = run(*arguments)
        except RuntimeError as error:
            _memory.raise_own(error)
            raise
        return pick_gradients((*gradients, None))[:num_inputs]


def _picker(indices: Sequence[int]) -> Callable[[Sequence], tuple]:
    """Returns a function that picks these entries of a row."""
    return operator.itemgetter(*indices) if len(indices) > 1 else _traced_picker(indices)


def _traced_picker(indices: Sequence[int]) -> Callable[[Sequence], tuple]:
    """Returns a picker for compilers, which cannot trace through an itemgetter."""
    return lambda row: tuple([row[i] for i in indices])
