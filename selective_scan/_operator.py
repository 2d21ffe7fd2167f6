"""How an operator is called, and what PyTorch needs to know of it beside its kernels."""

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
from torch.utils.flop_counter import register_flop_formula

from . import _library, _memory, _pytorch
from ._batching import BatchingRule
from ._checks import (
    BACKEND,
    Call,
    Option,
    Table,
    TensorList,
    check_backend,
    check_changed,
    check_dense,
    check_device,
    check_dims,
    check_dtype,
    check_shape_of,
    fail,
)
from ._function import make_function, refuse_double_backward, save_nothing
from ._result import Result
from ._sharding import are_distributed, call_sharded

_type_of = functools.cache(operator.attrgetter("type"))  # which a device makes anew every time
# Published models pass None for "no".
RETURN_LAST_STATE = Option("return_last_state", none_is_default=True)


class Operator:
    """One operator: its checks, fake kernels, derivative and refusals, and the shortest right way
    to its ops.

    What differs between operators is said in a declaration, from which all the rest follows. The
    recurrence h[t] = a[t]·h[t-1] + b[t], say, with ops ``decay_fwd`` and ``decay_bwd``, whose
    schemas and kernels are in csrc/torch::

        DECAY = Operator(
            "decay",
            Table(
                TensorArgument("a", REAL, ("batch", "dim", "seqlen")),
                TensorArgument("b", REAL, ("batch", "dim", "seqlen")),
                TensorArgument("initial_state", state_dtypes, ("batch", "dim"), optional=True),
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
            arguments = (a, b, initial_state, reverse)
            if not DECAY.has_kernels((*arguments, backend)):
                return decay_ref(a, b, initial_state=initial_state, reverse=reverse)
            return DECAY(*arguments)

    where ``decay_ref`` begins with ``call = DECAY.check((a, b, initial_state, reverse, "auto"))``.
    That is all of it: bad calls are refused with the sentences of the table, torch.compile, export,
    torch.func and opcheck work, and second derivatives and forward mode are refused.

    The names of dimensions say how the op is mapped by torch.func.vmap: one more dimension joins
    "batch" or "dim" (see ``_batching.py``), so they are to be called so.

    An op without a derivative, such as one that updates a state in place, has neither results that
    are saved nor a `backward`; its op is called as the operator is, without the suffix, and a call
    that would need a gradient is refused. Tensors of INTEGER and BOOL dtypes have no gradient. Such
    an op may have lists of tensors, and no batching rules then.

    Args:
        name: the ops are ``selective_scan::{name}_fwd`` and ``selective_scan::{name}_bwd``, or
            ``selective_scan::{name}`` without a derivative.
        arguments: those of the forward op, but for its last, ``save_states``, which it has if one
            of the results is saved states.
        results: those of the forward op, which may be named by `backward`; differentiable ones
            first.
        backward: the names of the backward op's arguments, in its order: the gradient of each
            differentiable result, ``d`` and its name, then arguments and results of the forward op
            and values of `derived`. It returns the gradient of every tensor argument, in their
            order; None for an absent one.
        derived: values that the backward op wants beside, by name, each from the forward op's
            arguments.
        function_arguments: those of the function and the reference, where not `arguments`.
        backward_arguments: the tensors that the backward op is given, where not `arguments`.
        reference: the name of the reference, where not ``{name}_ref``.
        gradient_like: for arguments that the backward op is not given, what allocates the gradient
            given the backward op's arguments.
        flops: the operations of the forward and of the backward op for a call, which
            torch.utils.flop_counter counts; None counts none.
        given_gradients: the names of arguments whose gradients the op
            ``selective_scan::{name}_bwd_out`` writes into tensors of any strides, such as slices of
            wider rows, that it is given by keyword; it returns the others. What it is given must
            share no memory with anything else.
        passed_gradients: the results whose gradients, as they are, are those of arguments, by the
            arguments' names; the backward op does not return these.
        donated: the name of a result that is kept, and that callers of the operator let go of. In
            the last pass of a graph ``selective_scan::{name}_bwd_over`` is called, which is given
            it once more, behind all others, and may write over its memory.
        has_batching_rules: whether torch.func.vmap maps the ops as said above. If not, PyTorch
            calls them for each entry.
    """

    def __init__(
        self,
        name: str,
        arguments: Table,
        results: Sequence[Result],
        backward: str = "",
        *,
        derived: Mapping[str, Callable[[Sequence], object]] | None = None,
        function_arguments: Table | None = None,
        backward_arguments: Table | None = None,
        reference: str | None = None,
        gradient_like: Mapping[str, Callable[[dict], Tensor]] | None = None,
        flops: Callable[[Call], tuple[int, int]] | None = None,
        given_gradients: str = "",
        passed_gradients: Mapping[str, str] | None = None,
        donated: str | None = None,
        has_batching_rules: bool = True,
    ) -> None:
        self.name = name
        self._reference = reference or f"{name}_ref"
        self.arguments = arguments
        self.results = results
        self._backward_names = tuple(backward.split())
        self._donated = None if donated is None else self._backward_names.index(donated)
        self._function_arguments = function_arguments or arguments
        self._backward_arguments = backward_arguments or arguments
        self._derived = derived or {}
        self._gradient_like = gradient_like or {}
        self._flops = flops
        self._given_gradients = tuple(given_gradients.split())
        self._has_batching_rules = has_batching_rules
        saved = [result for result in results if not result.is_differentiable]
        self._saves_states = bool(saved)
        self._recomputes_states = all(result.recomputed for result in saved)
        self._defaults = (*arguments.defaults, *[False] * self._saves_states)
        has_last_state = any(result.name == "last_state" for result in results)
        self._function_options = (*[RETURN_LAST_STATE] * has_last_state, BACKEND)
        self._passed_gradients = passed_gradients or {}
        differentiable = [argument for argument in arguments.tensors if argument.has_gradient]
        self._gradients = [a for a in differentiable if a.name not in self._passed_gradients]
        self._anchor = arguments.names.index(arguments.anchor)
        self._tensor_places, self._list_places = (
            [
                arguments.names.index(argument.name)
                for argument in differentiable
                if isinstance(argument, TensorList) == is_list
            ]
            for is_list in (False, True)
        )
        self._changed_places = [
            arguments.names.index(argument.name)
            for argument in arguments.tensors
            if argument.is_changed
        ]
        self._seen_types: set[tuple[type, ...]] = set()
        self._device_types: set[str] = set()
        if backward:
            self._plan_backward()
        if "cpu" in _library.devices:
            self._register()

    # --- a call -----------------------------------------------------------------------------------

    def check(self, values: tuple) -> Call:
        """Refuses what is wrong in a call of the reference.

        Args:
            values: the arguments of the function, then return_last_state, if there is a result
                last_state, and the backend.
        """
        self._check_types(values)
        check_backend(values[-1], values[self._anchor].device)
        return self._function_arguments.check_values(values)

    def has_kernels(self, values: tuple) -> bool:
        """Whether kernels serve a call; if not, the reference does, or it is refused.

        Checks what kernels do not see; `values` are as in `check`.
        """
        is_compiling = torch.compiler.is_compiling()
        types = tuple(map(type, values))
        if is_compiling:
            self._check_types(values)
        elif self._list_places or types not in self._seen_types:
            self._check_types(values)
            self._seen_types.add(types)  # takes less time than to check them again
        device, backend = values[self._anchor].device, values[-1]
        if backend != "auto":
            check_backend(backend, device)
            if backend == "reference":
                return False
        type_of_device = device.type if is_compiling else _type_of(device)
        if type_of_device in _library.devices:
            return True
        _library.handle_missing_kernels(type_of_device, backend)
        return False

    def has_kernels_for(self, device_type: str) -> bool:
        """Whether the library for devices of a type has this op."""
        return device_type in self._device_types

    def __call__(self, *arguments):
        """The results of the forward op."""
        self.refuse_tangents(arguments)
        needs_gradient = torch.is_grad_enabled() and self._requires_gradient(arguments)
        if needs_gradient and not self._backward_names:
            raise RuntimeError(
                f"selective_scan: {self.name} has no derivative; call it under torch.no_grad()"
            )
        is_compiling = torch.compiler.is_compiling()
        is_tracing = not is_compiling and _pytorch.is_tracing()
        if self._saves_states:
            # A trace serves calls with and without gradients; backward computes states again.
            is_saved = needs_gradient and not (is_tracing and self._recomputes_states)
            arguments = (*arguments, is_saved)
        if is_compiling and are_distributed(arguments):
            return call_sharded(self, arguments[: len(self.arguments.names)])
        if is_compiling or is_tracing:
            return self._forward(*arguments)
        try:
            if self._backward_names and _pytorch.are_transforms_active():
                return self._function.apply(*arguments)
            if needs_gradient:
                return self._apply(*arguments)
            with _pytorch.below_autograd():
                results = self._run_forward(*arguments)
        except NotImplementedError:  # no kernels for such tensors; the checks say why
            if are_distributed(arguments):
                return call_sharded(self, arguments[: len(self.arguments.names)])
            self.arguments.check_values(arguments)
            raise
        except RuntimeError as error:
            _memory.raise_own(error)
            raise
        for place in self._changed_places:
            if arguments[place] is not None:  # a graph that has saved it must see the change
                increment_version(arguments[place])
        return results

    def _requires_gradient(self, arguments: tuple) -> bool:
        for place in self._tensor_places:
            tensor = arguments[place]
            if tensor is not None and tensor.requires_grad:
                return True
        return any(tensor.requires_grad for it in self._list_places for tensor in arguments[it])

    def _check_types(self, values: tuple) -> None:
        self._function_arguments.check_types(values)
        options = self._function_options
        for option, value in zip(options, values[-len(options) :], strict=True):
            option.check_type(value)

    def refuse_tangents(self, arguments: tuple) -> None:
        """PyTorch drops the tangents of an operator's inputs without a word; zeros come out."""
        if not _pytorch.may_have_tangents():
            return
        lists = [argument for argument in arguments if isinstance(argument, list | tuple)]
        for tensor in itertools.chain(arguments, *lists):
            if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                self._fail_on_tangents()

    def _fail_on_tangents(self, *_) -> NoReturn:
        raise RuntimeError(
            "forward-mode differentiation is not supported by the kernels; "
            f"{self._reference}, or backend='reference', supports it"
        )

    # --- what PyTorch is told ---------------------------------------------------------------------

    def _register(self) -> None:
        """Registers fake kernels, batching rules, derivatives; the CPU library must be loaded."""
        self._forward = self._op("_fwd" if self._backward_names else "")
        self._device_types = {
            device_type
            for device_type, key in (("cpu", "CPU"), ("cuda", "CUDA"))
            if _pytorch.has_kernel(self._forward.name(), key)
        }
        torch.library.register_fake(self._forward.name(), self._forward_fake)
        if self._flops is not None:
            register_flop_formula(self._forward.overloadpacket, get_raw=True)(self._forward_flops)
        self._run_forward = _pytorch.shortest_call(self._forward)
        if self._has_batching_rules:
            self._forward_rule = BatchingRule.of_forward(
                self.arguments, self.results, self._forward
            )
            self._register_vmap(self._forward, self._map_forward)
        if not self._backward_names:
            return
        self._backward_op = self._op("_bwd")
        torch.library.register_fake(self._backward_op.name(), self._backward_fake)
        backward_ops = [self._backward_op]
        if self._given_gradients:
            backward_ops.append(self._op("_bwd_out"))
            torch.library.register_fake(backward_ops[1].name(), self._backward_out_fake)
        if self._flops is not None:
            packets = [op.overloadpacket for op in backward_ops]
            register_flop_formula(packets, get_raw=True)(self._backward_flops)
        self._run_backward = _pytorch.shortest_call(self._backward_op)
        if self._has_batching_rules:
            self._backward_rule = BatchingRule.of_backward(
                self._backward_names, self._backward_arguments, self.results, self.arguments
            )
            self._register_vmap(self._backward_op, self._map_backward)
        self._function = make_function(
            self.name,
            self._forward,
            self._save_for_backward,
            self._backward,
            map_over=self._map_forward if self._has_batching_rules else None,
            jvp=self._fail_on_tangents,
        )
        # torch.func always wants to differentiate once more.
        self._gradient = make_function(
            f"{self.name}_gradient",
            self._backward_op,
            save_nothing,
            refuse_double_backward,
            map_over=self._map_backward if self._has_batching_rules else None,
            jvp=self._fail_on_tangents,
        )
        own_function = self._function
        if self._donated is not None:  # who calls the op has what it keeps
            self._run_backward_over = _pytorch.shortest_call(self._op("_bwd_over"))
            own_function = make_function(
                self.name,
                self._forward,
                self._save_for_backward,
                self._backward_of_call,
                jvp=self._fail_on_tangents,
            )
        self._apply = _pytorch.apply_outside_transforms(own_function)
        if _pytorch.below_autograd_keys is None:
            torch.library.register_autograd(
                self._forward.name(), self._backward, setup_context=self._save_for_backward
            )
            torch.library.register_autograd(self._backward_op.name(), refuse_double_backward)
            return
        self._library = torch.library.Library("selective_scan", "FRAGMENT")
        for function in (self._function, self._gradient):
            kernel = functools.partial(
                self._call_op, function.op, _pytorch.apply_at_one_level(function)
            )
            self._library.impl(function.op.name(), kernel, "Autograd", with_keyset=True)

    def _op(self, suffix: str) -> torch._ops.OpOverload:
        return getattr(torch.ops.selective_scan, f"{self.name}{suffix}").default

    def _register_vmap(self, op: torch._ops.OpOverload, map_over: Callable) -> None:
        torch.library.register_vmap(op.name(), functools.partial(map_over, op))

    def _call_op(self, op: torch._ops.OpOverload, apply: Callable, keys, *arguments):
        """What a call of torch.ops does above the kernels."""
        self.refuse_tangents(arguments)
        if torch.is_grad_enabled() and any(
            isinstance(value, Tensor) and value.requires_grad for value in arguments
        ):
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
            # A derivative of the mapped call is of all entries together, and has its own states.
            is_separate=self._saves_states and arguments[-1] and not is_above,
        )

    def _map_backward(self, op: Callable, info, in_dims: Sequence[int | None], *arguments):
        return self._backward_rule(op, info.batch_size, in_dims, arguments, is_separate=True)

    # --- fake kernels: the results' shapes, dtypes and strides ------------------------------------

    def _forward_fake(self, *arguments):
        call = self.arguments.check_values(arguments)
        is_saved = len(arguments) == len(self._defaults) and arguments[-1] is True
        results = tuple(result.allocate(call, is_saved) for result in self.results)
        return results[0] if len(results) == 1 else results or None

    def _backward_fake(self, *arguments):
        given = self._check_backward(arguments)
        return tuple(self._allocate_gradient(argument.name, given) for argument in self._gradients)

    def _backward_out_fake(self, *arguments, **gradients):
        given = self._check_backward(arguments)
        for name in self._given_gradients:
            _check_given_gradient(name, gradients[f"d{name}"], given[name])
        return tuple(
            self._allocate_gradient(argument.name, given)
            for argument in self._gradients
            if argument.name not in self._given_gradients
        )

    def _check_backward(self, arguments: tuple) -> dict:
        """The backward op's arguments by name."""
        given = dict(zip(self._backward_names, arguments, strict=True))
        call = self._backward_arguments.check(given)
        for result in self.results:
            self._check_backward_argument(result, given, call)
        return given

    def _check_backward_argument(self, result: Result, given: dict, call: Call) -> None:
        """Checks the gradient of a result, or the saved states."""
        name = f"d{result.name}" if result.is_differentiable else result.name
        tensor = given.get(name)
        if tensor is None or (result.recomputed and tensor.numel() == 0):
            return
        check_dense(name, tensor)
        check_device(name, tensor, call.anchor, call[call.anchor])
        twin = given.get(result.name)  # a result that the backward op is given beside its gradient
        if twin is tensor or twin is None:
            check_dtype(name, tensor, result.gradient_dtypes or (result.dtype(call),))
            sizes = dict(zip(result.dims, result.sizes(call), strict=True))
            check_dims(name, tensor, result.dims, sizes)
            return
        check_dtype(name, tensor, (twin.dtype,))
        check_shape_of(name, tensor, result.name, twin)

    def _allocate_gradient(self, name: str, given: dict) -> Tensor | None:
        if name in self._gradient_like:
            return self._gradient_like[name](given)
        return None if given[name] is None else torch.empty_like(given[name])

    # --- what they cost ---------------------------------------------------------------------------

    def _forward_flops(self, *arguments, out_val: object) -> int:
        return self._flops(self.arguments.check_values(arguments))[0]

    def _backward_flops(self, *arguments, out_val: object, **_given_gradients: Tensor) -> int:
        given = dict(zip(self._backward_names, arguments, strict=True))
        return self._flops(self._backward_arguments.check(given))[1]

    # --- the derivative ---------------------------------------------------------------------------

    def _plan_backward(self) -> None:
        """Where the backward op's arguments come from, and where its results go.

        The forward op's arguments and results in a row are what it can be given.
        """
        arguments = [argument.name for argument in self.arguments.arguments]
        arguments += ["save_states"] * self._saves_states
        row = [*arguments, *(result.name for result in self.results)]
        tensors = {argument.name for argument in self.arguments.tensors}
        tensors |= {result.name for result in self.results}
        self._num_cotangents = sum(result.is_differentiable for result in self.results)
        given = self._backward_names[self._num_cotangents :]
        saved = [name for name in given if name in tensors]
        options = [name for name in given if name not in tensors and name not in self._derived]
        kept = [*saved, *options, *self._derived]
        self._pick_saved = _picker([row.index(name) for name in saved])
        self._pick_options = _picker([row.index(name) for name in options])
        self._order = _picker([kept.index(name) for name in given])
        self._stand_ins = [
            (row.index(result.stands_for), row.index(result.name))
            for result in self.results
            if result.stands_for is not None
        ]
        # The gradients that the op returns, then the cotangents that it is given, then None.
        row = [argument.name for argument in self._gradients]
        row += [result.name for result in self.results[: self._num_cotangents]]
        passed = self._passed_gradients
        self._pick_gradients = _picker(
            [row.index(it) if (it := passed.get(name, name)) in row else -1 for name in arguments]
        )

    def _save_for_backward(self, ctx, inputs: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
        """Keeps inputs and the states at chunk boundaries; all else is recomputed in backward."""
        results = (output,) if isinstance(output, Tensor) else output
        row = [*inputs, *self._defaults[len(inputs) :], *results]
        for place, stand_in in self._stand_ins:
            if row[stand_in] is not None:
                row[place] = row[stand_in]
        ctx.save_for_backward(*self._pick_saved(row))
        ctx.options = self._pick_options(row)
        if self._derived:
            ctx.options += tuple(derive(inputs) for derive in self._derived.values())
        states = results[self._num_cotangents :]
        ctx.mark_non_differentiable(*[tensor for tensor in states if tensor is not None])
        ctx.set_materialize_grads(False)

    def _backward(self, ctx, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return self._differentiate(self._run_backward, ctx, *cotangents)

    def _backward_of_call(self, ctx, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return self._differentiate(self._run_backward_of_call, ctx, *cotangents)

    def _run_backward_of_call(self, *arguments):
        kept = arguments[self._donated]
        if kept is None or not _pytorch.is_last_use(kept, arguments[0]):
            return self._run_backward(*arguments)
        increment_version(kept)  # who reads it all the same is to be told
        return self._run_backward_over(*arguments, kept)

    def _differentiate(
        self, run: Callable[..., tuple], ctx, *cotangents: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """As many gradients as PyTorch says there are inputs: those left out may not be counted."""
        num_inputs = len(ctx.needs_input_grad)
        cotangents = cotangents[: self._num_cotangents]
        for cotangent in cotangents:  # any() of a generator takes several times as long
            if cotangent is not None:
                break
        else:
            return (None,) * num_inputs
        arguments = (*cotangents, *self._order((*ctx.saved_tensors, *ctx.options)))
        # With create_graph=True the op must stay visible to autograd, so that it can refuse.
        try:
            if torch.is_grad_enabled():
                gradients = self._gradient.apply(*arguments)
            else:
                with _pytorch.below_autograd():
                    gradients = run(*arguments)
        except RuntimeError as error:
            _memory.raise_own(error)
            raise
        picked = self._pick_gradients((*gradients, *cotangents, None))[:num_inputs]
        if self._passed_gradients:  # there is a cotangent also where the argument is absent
            is_needed = zip(picked, ctx.needs_input_grad, strict=True)
            picked = tuple(gradient if needed else None for gradient, needed in is_needed)
        return picked


def _check_given_gradient(name: str, gradient: Tensor | None, tensor: Tensor | None) -> None:
    """Checks what the gradient of an argument is written into."""
    if (gradient is None) != (tensor is None):
        fail(f"d{name} must be {'None' if tensor is None else 'a Tensor'} where {name} is")
    if tensor is None:
        return
    check_dense(f"d{name}", gradient)
    check_device(f"d{name}", gradient, name, tensor)
    check_dtype(f"d{name}", gradient, (tensor.dtype,))
    check_shape_of(f"d{name}", gradient, name, tensor)
    check_changed(f"d{name}", gradient)


def _picker(indices: Sequence[int]) -> Callable[[tuple], tuple]:
    """What picks these entries of a tuple."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda row: tuple(row[i] for i in indices)
