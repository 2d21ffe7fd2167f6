"""Names of PyTorch, mostly private ones, that this package uses and a later PyTorch may lack.

They only save time: if one is missing, calls take a slower way that gives the same results. Only
the check of `assert_async` is left out then.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def _optional(path: str) -> object | None:
    """Returns the attribute at this path below torch, None if it does not exist."""
    return functools.reduce(lambda value, name: getattr(value, name, None), path.split("."), torch)


def _not_known() -> bool:
    return True


def _no_kernel(op: str, key: str) -> bool:
    return False


def _has_flatten(tensor: Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__")


def _no_check(condition: Tensor, message: str) -> None:
    pass


def _copy_one_by_one(to: Iterable[Tensor], of: Iterable[Tensor]) -> None:
    for tensor, value in zip(to, of, strict=True):
        tensor.copy_(value)


# Returns whether transforms of torch.func are active.
are_transforms_active = _optional("_C._are_functorch_transforms_active") or _not_known
# Returns whether the op of a name has its own kernel for a dispatch key.
has_kernel = _optional("_C._dispatch_has_kernel_for_dispatch_key") or _no_kernel
# The number of active dispatch modes; if unknown, there may be some.
num_modes = _optional("_C._len_torch_dispatch_stack") or _not_known
# Returns whether torch.jit.trace is running.
is_tracing = _optional("_C._is_tracing") or torch.jit.is_tracing
# A context for calls of ops whose results need no gradient; torch.library uses it, too.
below_autograd = _optional("_C._AutoDispatchBelowAutograd") or contextlib.nullcontext
# The dispatch keys below autograd's.
below_autograd_keys = _optional("_C._after_autograd_keyset")
# A context without dispatch modes.
no_modes = _optional("utils._python_dispatch._disable_current_modes") or contextlib.nullcontext
# Returns whether a tensor is a wrapper whose __tensor_flatten__ names the tensors in it.
has_inner_tensors = (
    _optional("utils._python_dispatch.is_traceable_wrapper_subclass") or _has_flatten
)
# Checks a condition in a graph, which fails where it is run.
assert_async = _optional("_assert_async") or _no_check
# Copies a list of tensors into another one.
copy_each = _optional("_foreach_copy_") or _copy_one_by_one
# Returns the process group of a name.
resolve_process_group = _optional("distributed.distributed_c10d._resolve_process_group")
# Gathers the tensors of all ranks into a given one.
all_gather = _optional("distributed.all_gather_single") or _optional(
    "distributed.all_gather_into_tensor"
)
# Functional collectives, which unlike the others have fake kernels.
functional_all_gather = _optional("ops._c10d_functional.all_gather_into_tensor")
functional_all_reduce = _optional("ops._c10d_functional.all_reduce")
functional_wait = _optional("ops._c10d_functional.wait_tensor")
# The tensors that stand in for plain ones while a compiler traces.
_FakeTensor = _optional("_subclasses.fake_tensor.FakeTensor")
_FunctionalTensor = _optional("_subclasses.functional_tensor.FunctionalTensor")
TRACED = tuple(kind for kind in (_FakeTensor, _FunctionalTensor) if kind is not None)
# The hooks that register_module_forward_hook and its siblings registered for all modules.
_pre_hooks = _optional("nn.modules.module._global_forward_pre_hooks")
_hooks = _optional("nn.modules.module._global_forward_hooks")
_backward_pre_hooks = _optional("nn.modules.module._global_backward_pre_hooks")
_backward_hooks = _optional("nn.modules.module._global_backward_hooks")
_all_hooks = (_pre_hooks, _hooks, _backward_pre_hooks, _backward_hooks)
_are_hooks_known = None not in _all_hooks
_unwrap_if_dead = _optional("_C._functorch.unwrap_if_dead")
_SingleLevelFunction = _optional("autograd.function._SingleLevelFunction")


_is_legacy_batched = _optional("_C._functorch.is_legacy_batchedtensor") or (lambda tensor: True)


def is_one_of_several(cotangent: Tensor | None) -> bool:
    """Returns whether a cotangent is a batch of cotangents that one pass maps over
    (is_grads_batched)."""
    return cotangent is not None and _is_legacy_batched(cotangent)


def is_gradient_needed(values: Iterable[object]) -> bool:
    """Returns whether, in grad mode, a tensor among these values requires a gradient."""
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in values
    )


def needs_composition(*cotangents: Tensor | None) -> bool:
    """Returns whether a backward pass is differentiated again or maps over several cotangents, so
    that it must be composed of operations that support this."""
    return (
        torch.is_grad_enabled()
        or are_transforms_active()
        or any(map(is_one_of_several, cotangents))
    )


def may_have_process_wide_hooks() -> bool:
    """Returns whether a call of any module may be seen by hooks registered for all modules.

    The hooks of torch.utils.flop_counter, which only track the current module, do not count: the
    counter should measure the calls that run without it.
    """
    if not (_pre_hooks or _hooks or _backward_pre_hooks or _backward_hooks):
        return not _are_hooks_known
    tracker = _optional("utils.module_tracker.ModuleTracker")
    # The lists are copies, since another thread may register or remove hooks meanwhile.
    return tracker is None or not all(
        isinstance(getattr(hook, "__self__", None), tracker)
        for hooks in _all_hooks
        for hook in list(hooks.values())
    )


def process_wide_forward_hooks() -> list[Callable[..., object]]:
    """Returns the forward hooks registered for all modules, as far as they are known."""
    return [*(_pre_hooks or {}).values(), *(_hooks or {}).values()]


def is_plain_call() -> bool:
    """Returns whether a call is an eager one that no compiler, trace, mode, transform or forward
    differentiation observes."""
    return not (
        torch.compiler.is_compiling()
        or is_tracing()
        or num_modes()
        or are_transforms_active()
        or may_have_tangents()
    )


def constant_in_graphs(function: Callable[..., object]) -> Callable[..., object]:
    """Makes torch.compile call a function of constants while tracing and treat its result as one.

    torch.compiler.assume_constant_result does the same, but imports the compiler.
    """
    function._dynamo_marked_constant = True
    return function


def may_have_tangents() -> bool:
    """Returns whether the caller is inside forward_ad.dual_level or torch.func.jvp."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def shortest_call(op: torch._ops.OpOverload) -> Callable[..., object]:
    """Returns the op without its Python wrapper, which repacks the arguments."""
    return getattr(op, "_op", op)


def apply_outside_transforms(function: type[torch.autograd.Function]) -> Callable[..., object]:
    """Returns function.apply without its preparations for transforms of torch.func, which cost more
    than the rest of it."""
    if _unwrap_if_dead is None:
        return function.apply
    return _applied_to_unwrapped(super(torch.autograd.Function, function).apply)


def _applied_to_unwrapped(apply: Callable[..., object]) -> Callable[..., object]:
    """Unwraps tensors that have outlived their transform, since autograd does not see through the
    wrapper."""

    def apply_to_unwrapped(*arguments):
        return apply(*[_unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in arguments])

    return apply_to_unwrapped


def apply_at_one_level(function: type[torch.autograd.Function]) -> Callable[..., object]:
    """Returns function.apply for calls that PyTorch has brought to the innermost transform."""
    if _SingleLevelFunction is None or _unwrap_if_dead is None:
        return function.apply
    # From PyTorch 2.15 on, apply decides by the class whether to look for transforms.
    members = vars(torch.autograd.Function) | vars(function)
    methods = {name: it for name, it in members.items() if isinstance(it, staticmethod)}
    at_one_level = type(function.__name__, (_SingleLevelFunction,), methods)
    apply = _applied_to_unwrapped(at_one_level.apply)
    allow = _optional("_C._functorch.set_single_level_autograd_function_allowed")
    is_allowed = _optional("_C._functorch.get_single_level_autograd_function_allowed")
    if allow is None or is_allowed is None:
        return apply

    def apply_if_allowed(*arguments):
        before = is_allowed()
        allow(True)
        try:
            return apply(*arguments)
        finally:
            allow(before)

    return apply_if_allowed
