"""Calls of an operator, and its registrations with PyTorch other than the kernels."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from . import _flops, _library, _memory, _pytorch
from ._batching import BatchingRule, map_one_by_one
from ._checks import (
    Call,
    Dtypes,
    check_dense,
    check_device,
    check_dims,
    check_dtype,
    check_given_gradient,
    check_shape_of,
    check_written,
)
from ._derivative import Derivative
from ._function import make_function, save_nothing
from ._ops import ops
from ._result import Result
from ._schemas import arguments_text, backward_schemas, forward_schemas
from ._sharding import are_distributed, call_sharded
from ._table import BACKEND, RETURN_LAST_STATE, Option, Table, TensorList, check_backend

type_of = functools.cache(operator.attrgetter("type"))  # a device builds this string on each access


class Operator:
    """One operator: its checks, fake kernels, derivative and refusals, and the shortest correct way
    to call its ops.

    An operator is a declaration, from which everything else follows, such as this one of
    h[t] = a[t]·h[t-1] + b[t] with ops ``decay_fwd`` and ``decay_bwd``, defined in csrc/torch::

        DECAY = Operator(
            "decay",
            Table(
                TensorArgument("a", REAL, ("batch", "dim", "seqlen")),
                TensorArgument("b", REAL, ("batch", "dim", "seqlen")),
                TensorArgument("initial_state", STATE_DTYPES, ("batch", "dim"), optional=True),
                Option("reverse"),
                anchor="a",
            ),
            results=[
                Result("h", ("batch", "dim", "seqlen"), lambda call: call["b"].dtype, like="b"),
            ],
            backward="dh a h initial_state reverse",
            flops=lambda call: (2 * call["b"].numel(), 3 * call["b"].numel()),
        )

        def decay_fn(a, b, *, initial_state=None, reverse=False, backend="auto"):
            values = (a, b, initial_state, reverse, backend)
            if not DECAY.has_kernels(values):
                return DECAY.run_reference(decay_ref, values)
            return DECAY(*values[:-1])

    ``decay_ref`` begins with ``call = DECAY.check((a, b, initial_state, reverse, "auto"))``.
    Nothing else is needed: bad calls are refused with the table's messages, torch.compile, export,
    torch.func and opcheck work, and second derivatives and forward mode are refused.

    If some results of a forward op may be None, there is a second one, ``decay_fwd_traced``;
    csrc/torch/optional_results.h explains why.

    torch.func.vmap goes by the names of dimensions: the mapped dimension joins the dimension called
    "batch" if it can (see ``_batching.py``), so a batch must have this name.

    An op without a derivative, such as one that updates a state in place, has neither saved results
    nor a `backward`. Its op has the operator's name without a suffix, and a call that would need a
    gradient is refused. Tensors of INTEGER and BOOL dtypes have no gradient. Only an op without a
    derivative may have lists of tensors, and then it has no batching rules.

    Args:
        name: the ops are ``selective_scan::{name}_fwd`` and ``selective_scan::{name}_bwd``, or
            ``selective_scan::{name}`` without a derivative.
        arguments: the forward op's arguments without the last one, ``save_states``, which the op
            has if one of its results is saved states.
        results: the forward op's results, differentiable ones first; `backward` may name them.
        backward: the names of the backward op's arguments, in its order: the gradient of each
            differentiable result, ``d`` and its name, then arguments and results of the forward op
            and values of `derived`. It returns the gradient of every tensor argument that is in
            `backward_arguments` or `gradient_like`, in their order; None for an absent one.
        derived: additional values for the backward op, computed from the forward op's arguments.
        function_arguments: the arguments of the function and the reference, if not `arguments`.
        backward_arguments: the tensors that the backward op is given, if not `arguments`.
        reference: the name of the reference, if not ``{name}_ref``; "" if there is none.
        gradient_like: for arguments that the backward op is not given, a function that allocates
            the gradient from the backward op's arguments.
        flops: the operations of the forward and of the backward op for a call, which
            torch.utils.flop_counter counts; None counts none.
        given_gradients: the names of arguments whose gradients the op
            ``selective_scan::{name}_bwd_out`` writes into tensors given by keyword; it returns the
            others. These tensors may have any strides (such as slices of wider rows), but must
            share no memory with any other tensor.
    """

    _derivative_type = Derivative
    _has_defaults = True  # whether calls of the forward op may omit arguments
    _has_batching_rules = True  # whether vmap maps the ops as described above, or calls each entry

    def __init__(
        self,
        name: str,
        arguments: Table,
        results: Sequence[Result],
        backward: str = "",
        *,
        derived: Mapping[Option, Callable[[Sequence], object]] | None = None,
        function_arguments: Table | None = None,
        backward_arguments: Table | None = None,
        reference: str | None = None,
        gradient_like: Mapping[str, Callable[[dict], Tensor]] | None = None,
        flops: Callable[[Call], tuple[int, int]] | None = None,
        given_gradients: str = "",
    ) -> None:
        self.name = name
        self._reference = f"{name}_ref" if reference is None else reference
        self.arguments = arguments
        self.results = results
        self._backward_names = tuple(backward.split())
        self._derived = derived or {}
        self._function_arguments = function_arguments or arguments
        self.backward_arguments = backward_arguments or arguments
        self._gradient_like = gradient_like or {}
        self._flops = flops
        self._given_gradients = tuple(given_gradients.split())
        self._saves_states = not all(result.is_differentiable for result in results)
        self._defaults = (*arguments.defaults, *[False] * self._saves_states)
        has_last_state = any(result.name == "last_state" for result in results)
        self._function_options = (*[RETURN_LAST_STATE] * has_last_state, BACKEND)
        differentiable = [argument for argument in arguments.tensors if argument.has_gradient]
        found = {*self.backward_arguments.names, *self._gradient_like}
        self._gradients = [argument for argument in differentiable if argument.name in found]
        place_of = arguments.names.index
        self._anchor = place_of(arguments.anchor)
        lists = [argument for argument in differentiable if isinstance(argument, TensorList)]
        self._list_places = [place_of(argument.name) for argument in lists]
        self._tensor_places = [place_of(it.name) for it in differentiable if it not in lists]
        self._changed_places = [place_of(it.name) for it in arguments.tensors if it.is_changed]
        given_results = {result.name for result in results} & set(arguments.names)
        self._out = place_of("out") if "out" in given_results else None
        self._seen_types: set[tuple[type, ...]] = set()
        self._device_types: set[str] = set()
        if backward:
            self._derivative = self._derivative_type(
                arguments,
                self._defaults,
                results,
                self._backward_names,
                {option.name: derive for option, derive in self._derived.items()},
                [argument.name for argument in self._gradients],
            )
        if "cpu" in _library.devices:
            self._register()

    # --- a call -----------------------------------------------------------------------------------

    def check(self, values: tuple) -> Call:
        """Checks the arguments of a call of the reference.

        Args:
            values: the function's arguments, return_last_state if there is a result last_state, and
                the backend.
        """
        self._check_types(values)
        check_backend(values[-1], values[self._anchor].device)
        if not self._backward_names and _pytorch.is_gradient_needed(values):
            self._fail_on_gradient()
        return self._function_arguments.check_values(values)

    def has_kernels(self, values: tuple) -> bool:
        """Returns whether kernels serve a call. If not, the reference serves it, or it is refused.

        Checks the properties that kernels cannot see; `values` are as in `check`.
        """
        is_compiling = torch.compiler.is_compiling()
        types = tuple(map(type, values))
        if is_compiling:
            self._check_types(values)
        elif self._list_places or types not in self._seen_types:
            self._check_types(values)
            self._seen_types.add(types)  # a lookup is faster than checking them again
        device, backend = values[self._anchor].device, values[-1]
        if backend != "auto":
            check_backend(backend, device)
            if backend == "reference":
                return False
        type_of_device = device.type if is_compiling else type_of(device)
        if type_of_device in _library.devices:
            return True
        _library.handle_missing_kernels(type_of_device, backend)
        return False

    def run_reference(self, reference: Callable, values: tuple):
        """Runs the reference for a call of the function; `values` are as in `check`."""
        table = self._function_arguments
        arguments, options = values[: len(table.names)], values[len(table.names) : -1]
        names = (*table.names, *(option.name for option in self._function_options[:-1]))

        def run(*arguments):
            return reference(**dict(zip(names, (*arguments, *options), strict=True)))

        if are_distributed(arguments):
            return call_sharded(run, self.name, table, self.results, arguments)
        return run(*arguments)

    def has_kernels_for(self, device_type: str) -> bool:
        """Returns whether the library for devices of this type has the op."""
        return device_type in self._device_types

    def __call__(self, *arguments):
        """Runs the forward op."""
        self.refuse_tangents(arguments)
        needs_gradient = torch.is_grad_enabled() and self._requires_gradient(arguments)
        if needs_gradient and not self._backward_names:
            self._fail_on_gradient()
        is_compiling = torch.compiler.is_compiling()
        is_tracing = not is_compiling and _pytorch.is_tracing()
        if self._saves_states:
            # A trace serves calls with and without gradients, so backward recomputes the states.
            arguments = (*arguments, needs_gradient and not is_tracing)
        if is_compiling and are_distributed(arguments):
            return self._call_sharded(arguments)
        if is_compiling:
            return self._call_in_graph(*arguments)
        if is_tracing:
            return self._traced_forward(*arguments)
        try:
            if self._backward_names and _pytorch.are_transforms_active():
                return self._function.apply(*arguments)
            if needs_gradient:
                return self._apply(*arguments)
            with _pytorch.below_autograd():
                results = self._run_forward(*arguments)
        except NotImplementedError:  # no kernels for such tensors; the checks explain why
            if are_distributed(arguments):
                return self._call_sharded(arguments)
            self.arguments.check_values(arguments)
            raise
        except RuntimeError as error:
            _memory.raise_own(error)
            # PyTorch fails on some tensors before the op sees them.
            for place in self._changed_places:
                if isinstance(arguments[place], Tensor):
                    check_written(self.arguments.names[place], arguments[place])
            raise
        for place in self._changed_places:
            if arguments[place] is not None:  # a graph that saved the tensor must see the change
                increment_version(arguments[place])
        return results

    def _call_sharded(self, arguments: tuple):
        given = arguments[: len(self.arguments.names)]
        return call_sharded(self, self.name, self.arguments, self.results, given)

    def _call_in_graph(self, *arguments):
        """Calls the op as torch.compile and torch.export see it. If out is given, the op's result
        is copied there: AOTInductor does not accept None for a result, and compilers know when the
        copy can be omitted."""
        if self._out is None or arguments[self._out] is None:
            return self._forward(*arguments)
        self.arguments.check_values(arguments)
        made = self._forward(*arguments[: self._out], None, *arguments[self._out + 1 :])
        return arguments[self._out].copy_(made)

    def _requires_gradient(self, arguments: tuple) -> bool:
        for place in self._tensor_places:
            tensor = arguments[place]
            if tensor is not None and tensor.requires_grad:
                return True
        lists = [arguments[place] or () for place in self._list_places]
        return any(tensor.requires_grad for tensors in lists for tensor in tensors)

    def _fail_on_gradient(self) -> NoReturn:
        raise RuntimeError(
            f"selective_scan: {self.name} has no derivative; call it under torch.no_grad()"
        )

    def _check_types(self, values: tuple) -> None:
        self._function_arguments.check_types(values)
        options = self._function_options
        for option, value in zip(options, values[-len(options) :], strict=True):
            option.check_type(value)

    def refuse_tangents(self, arguments: tuple) -> None:
        """Refuses tangents, which PyTorch would silently drop; the outputs would have zeros."""
        if not _pytorch.may_have_tangents():
            return
        lists = [argument for argument in arguments if isinstance(argument, list | tuple)]
        for tensor in itertools.chain(arguments, *lists):
            if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                self._fail_on_tangents()

    def _fail_on_tangents(self, *_) -> NoReturn:
        self._fail_on_derivative("forward-mode differentiation")

    def _fail_on_derivative(self, kind: str) -> NoReturn:
        by_others = self._reference and (
            f", but by the reference, {self._reference}, which functions run with "
            "backend='reference'"
        )
        raise RuntimeError(f"selective_scan: {kind} is not supported by the kernels{by_others}")

    # --- registrations with PyTorch ---------------------------------------------------------------

    def schemas(self) -> dict[str, str]:
        """Returns the ops' schemas by name. csrc/torch/argument_tables.py passes them to C++."""
        arguments = [*self.arguments.arguments, *[Option("save_states")] * self._saves_states]
        given = arguments_text(arguments, self._defaults if self._has_defaults else ())
        if not self._backward_names:  # the op returns an undefined tensor if out is given
            return {self.name: f"({given}) -> Tensor"}
        known = (*arguments, *self._derived)
        found = forward_schemas(given, self.results) | backward_schemas(
            self._backward_names, known, self.results, self._gradients, self._given_gradients
        )
        return {f"{self.name}_{suffix}": schema for suffix, schema in found.items()}

    def _register(self) -> None:
        """Registers fake kernels, batching rules, derivatives; the CPU library must be loaded."""
        self._forward = self._op("_fwd" if self._backward_names else "")
        name = self._forward.name()
        self._device_types = {it for it in ("cpu", "cuda") if _pytorch.has_kernel(name, it.upper())}
        has_traced = hasattr(ops, f"{self.name}_fwd_traced")
        self._traced_forward = self._op("_fwd_traced") if has_traced else self._forward
        torch.library.register_fake(name, self._forward_fake)
        if self._flops is not None:
            counted = dict.fromkeys((self._forward, self._traced_forward))
            _flops.register(self._forward_flops, counted)
        self._run_forward = _pytorch.shortest_call(self._forward)
        self._map_over = self._map_forward if self._has_batching_rules else None
        self._forward_rule = BatchingRule(self.arguments, self.results)
        self._register_vmap(self._forward, self._map_over or self._map_each)
        if self._backward_names:
            self._register_backward()

    def _register_backward(self) -> None:
        self._backward_op = self._op("_bwd")
        torch.library.register_fake(self._backward_op.name(), self._backward_fake)
        counted = [self._backward_op]
        if self._given_gradients:
            counted.append(self._op("_bwd_out"))
            torch.library.register_fake(counted[1].name(), self._backward_fake)
        if self._flops is not None:
            _flops.register(self._backward_flops, counted)
        self._register_vmap(self._backward_op, self._map_each)
        # torch.func always prepares to differentiate once more.
        gradient = make_function(
            f"{self.name}_gradient",
            self._backward_op,
            save_nothing,
            lambda *_: self._fail_on_derivative("double backward"),
            map_over=self._map_over and self._map_each,
            jvp=self._fail_on_tangents,
        )
        self._run_backward = _pytorch.shortest_call(self._backward_op)
        self._derivative.op = self._backward_op
        self._derivative.differentiable_op = gradient
        self._function = self._make_function(self._forward, self._run_backward, self._map_over)
        self._apply = _pytorch.apply_outside_transforms(self._function)
        functions = [self._function, gradient]
        if self._traced_forward is not self._forward:
            functions.append(self._make_function(self._traced_forward, self._run_backward))
        self._register_autograd(functions)

    def _make_function(
        self, forward: Callable, run_backward: Callable, map_over: Callable | None = None
    ) -> type[torch.autograd.Function]:
        return make_function(
            self.name,
            forward,
            self._derivative.save,
            self._derivative.found_by(run_backward),
            jvp=self._fail_on_tangents,
            map_over=map_over,
        )

    def _register_autograd(self, functions: Sequence[type[torch.autograd.Function]]) -> None:
        can_redispatch = hasattr(self._forward, "redispatch")
        if _pytorch.below_autograd_keys is None or not can_redispatch:
            for function in functions:
                torch.library.register_autograd(
                    function.op.name(), function.backward, setup_context=function.setup_context
                )
            return
        self._library = torch.library.Library(ops.name, "FRAGMENT")
        for function in functions:
            apply = _pytorch.apply_at_one_level(function)
            kernel = functools.partial(self._call_op, function.op, apply)
            self._library.impl(function.op.name(), kernel, "Autograd", with_keyset=True)

    def _op(self, suffix: str) -> torch._ops.OpOverload:
        return getattr(ops, f"{self.name}{suffix}").default

    def _register_vmap(self, op: torch._ops.OpOverload, map_over: Callable) -> None:
        torch.library.register_vmap(op.name(), functools.partial(map_over, op))

    def _call_op(self, op: torch._ops.OpOverload, apply: Callable, keys, *arguments):
        """Runs a direct call of torch.ops at the Autograd dispatch key, above the kernels."""
        self.refuse_tangents(arguments)
        if _pytorch.is_gradient_needed(arguments):
            return apply(*arguments)
        return op.redispatch(keys & _pytorch.below_autograd_keys, *arguments)

    # --- batching rules ---------------------------------------------------------------------------

    def _map_forward(self, op: Callable, info, in_dims: Sequence[int | None], *arguments):
        arguments = (*arguments, *self._defaults[len(arguments) :])
        in_dims = (*in_dims, *[None] * (len(arguments) - len(in_dims)))
        is_above = torch.is_grad_enabled() and self._requires_gradient(arguments)
        return self._forward_rule(
            op,
            info.batch_size,
            in_dims,
            arguments,
            # A derivative above the mapped call covers all entries and has its own saved states.
            is_separate=self._saves_states and arguments[-1] and not is_above,
        )

    def _map_each(self, op: Callable, info, in_dims: Sequence[int | None], *arguments):
        return map_one_by_one(op, info.batch_size, in_dims, arguments)

    # --- fake kernels: the results' shapes, dtypes and strides ------------------------------------

    def _forward_fake(self, *arguments):
        call = self.arguments.check_values(arguments)
        is_saved = len(arguments) == len(self._defaults) and arguments[-1] is True
        results = tuple(result.allocate(call, is_saved) for result in self.results)
        return results[0] if len(results) == 1 else results or None

    def _backward_fake(self, *arguments, **gradients):
        """Serves the backward op, and the one that writes `gradients` into given tensors."""
        given = self._check_backward(arguments)
        written = self._given_gradients if gradients else ()
        for name in written:
            check_given_gradient(name, gradients[f"d{name}"], given[name])
        names = [argument.name for argument in self._gradients if argument.name not in written]
        return tuple([self._allocate_gradient(name, given) for name in names])

    def _check_backward(self, arguments: tuple) -> dict:
        """Checks the backward op's arguments and returns them by name."""
        given = dict(zip(self._backward_names, arguments, strict=True))
        call = self.backward_arguments.check(given)
        for result in self.results:
            self._check_backward_argument(result, given, call)
        return given

    def _check_backward_argument(self, result: Result, given: dict, call: Call) -> None:
        """Checks the gradient of a result, or the saved states."""
        name = f"d{result.name}" if result.is_differentiable else result.name
        tensor = given.get(name)
        if tensor is None or (not result.is_differentiable and tensor.numel() == 0):
            return
        check_dense(name, tensor)
        check_device(name, tensor, call.anchor, call[call.anchor])
        twin = given.get(result.name)  # the result itself, if it is given along with its gradient
        if twin is tensor or twin is None:
            check_dtype(name, tensor, self._gradient_dtypes(result, call))
            sizes = dict(zip(result.dims, result.sizes(call), strict=True))
            check_dims(name, tensor, result.dims, sizes)
            return
        check_dtype(name, tensor, (twin.dtype,))
        check_shape_of(name, tensor, result.name, twin)

    def _gradient_dtypes(self, result: Result, call: Call) -> Dtypes:
        """Returns the dtypes allowed for a result's gradient, or for a saved result."""
        return (result.dtype(call),)

    def _allocate_gradient(self, name: str, given: dict) -> Tensor | None:
        if name in self._gradient_like:
            return self._gradient_like[name](given)
        return None if given[name] is None else torch.empty_like(given[name])

    # --- FLOPs of the ops -------------------------------------------------------------------------

    def _forward_flops(self, *arguments, out_val: object) -> int:
        return self._flops(self.arguments.check_values(arguments))[0]

    def _backward_flops(self, *arguments, out_val: object, **_given_gradients: Tensor) -> int:
        given = dict(zip(self._backward_names, arguments, strict=True))
        return self._flops(self.backward_arguments.check(given))[1]
