"""Operators whose kernels are composed of other ops and of collectives, in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from .. import _pytorch
from .._checks import check_dims
from .._operator import Operator
from .._ops import add_op_namespace_prefix
from .._result import Result
from .._table import Table


class DistributedOperator(Operator):
    """An operator whose ops call other ops and exchange data between ranks. The kernels of its ops
    also serve as their fake kernels.

    The ops are opaque to torch.compile, torch.export and the transforms of torch.func. Eager calls
    bypass the dispatcher, since the kernels are Python.

    Args:
        name, arguments, backward: see Operator. Schemas follow from them, and have no defaults.
        results: the forward op's results: the differentiable ones, then the kept ones. If several
            are differentiable, the backward op may be given None for a gradient.
        forward_kernel: maps the forward op's arguments to its results.
        backward_kernel: maps the backward op's arguments to the gradients.
        is_checked_by_kernel: returns whether the ops that the forward kernel calls check all of its
            arguments before ranks exchange anything. Eager calls, which host time bounds, then skip
            the checks in Python.
    """

    _has_defaults = False
    _has_batching_rules = False

    def __init__(
        self,
        name: str,
        arguments: Table,
        results: Sequence[Result],
        backward: str,
        *,
        forward_kernel: Callable[..., tuple[Tensor | None, ...]],
        backward_kernel: Callable[..., tuple[Tensor | None, ...]],
        is_checked_by_kernel: Callable[[tuple], bool] = lambda arguments: False,
    ) -> None:
        self._forward_kernel = forward_kernel
        self._backward_kernel = backward_kernel
        self._is_checked_by_kernel = is_checked_by_kernel
        super().__init__(name, arguments, results, backward)

    def require_kernels(self, values: tuple) -> None:
        """Raises an error if no kernels serve these arguments of the function, since the references
        do not support groups."""
        if not self.has_kernels((*values, "auto")):
            raise NotImplementedError(
                f"selective_scan: {self.name} needs kernels for tensors on "
                f"{values[self._anchor].device}, and has no reference"
            )

    def _fail_on_derivative(self, kind: str) -> NoReturn:
        raise RuntimeError(f"selective_scan: {kind} is not supported over several ranks")

    def _register(self) -> None:
        self._define()
        super()._register()
        # For eager calls.
        self._run_forward = self._forward_of_eager_calls
        function = self._make_function(self._run_forward, self._backward_of_eager_calls)
        self._apply = _pytorch.apply_outside_transforms(function)

    def _forward_of_eager_calls(self, *arguments):
        is_checked = self._is_checked_by_kernel(arguments)
        return (self._forward_kernel if is_checked else self._forward_fake)(*arguments)

    def _backward_of_eager_calls(self, *arguments):
        """Runs the backward kernel, or the op if cotangents are batched, which is called for each
        of them: PyTorch cannot map the kernel, which calls ops that write to their arguments."""
        cotangents = arguments[: self._derivative.num_cotangents]
        if _pytorch.are_transforms_active() or any(map(_pytorch.is_one_of_several, cotangents)):
            return self._backward_op(*arguments)
        return self._backward_kernel(*arguments)

    # The fake kernels are the ops' kernels.

    def _forward_fake(self, *arguments):
        self.arguments.check_values(arguments)
        return self._forward_kernel(*arguments)

    def _backward_fake(self, *arguments):
        given = dict(zip(self._backward_names, arguments, strict=True))
        call = self.backward_arguments.check(given)
        for result in self.results:
            if result.is_differentiable and given[f"d{result.name}"] is not None:
                check_dims(f"d{result.name}", given[f"d{result.name}"], result.dims, call.sizes)
        return self._backward_kernel(*arguments)

    def _define(self) -> None:
        for name, schema in self.schemas().items():
            kernel = self._backward_fake if name.endswith("_bwd") else self._forward_fake
            op = add_op_namespace_prefix(name)
            torch.library.define(op, schema)
            torch.library.impl(op, "default", kernel)
