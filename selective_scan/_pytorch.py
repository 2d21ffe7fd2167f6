"""The names of PyTorch's own that are used here, each of which a later PyTorch may lack.

Nothing depends on them: where one is missing, calls take a way that is as right, but slower.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def _optional(path: str) -> object | None:
    """What lies at this path below torch, None if nothing does."""
    return functools.reduce(lambda value, name: getattr(value, name, None), path.split("."), torch)


def _not_known() -> bool:
    return True


def _no_kernel(op: str, key: str) -> bool:
    return False


# Whether calls must suit the transforms of torch.func.
are_transforms_active = _optional("_C._are_functorch_transforms_active") or _not_known
# Whether an op, by its name, has a kernel of its own for a dispatch key.
has_kernel = _optional("_C._dispatch_has_kernel_for_dispatch_key") or _no_kernel
# How many modes see what is dispatched; where that is not known, there may be some.
num_modes = _optional("_C._len_torch_dispatch_stack") or _not_known
# Whether torch.jit.trace runs.
is_tracing = _optional("_C._is_tracing") or torch.jit.is_tracing
# A context in which ops are called whose results need no gradient; torch.library does the same.
below_autograd = _optional("_C._AutoDispatchBelowAutograd") or contextlib.nullcontext
# The dispatch keys below autograd's.
below_autograd_keys = _optional("_C._after_autograd_keyset")
# A context in which no mode sees what is called.
no_modes = _optional("utils._python_dispatch._disable_current_modes") or contextlib.nullcontext
# The group of ranks that has this name.
resolve_process_group = _optional("distributed.distributed_c10d._resolve_process_group")
# Gathers tensors of all ranks into one, which it is given.
all_gather = _optional("distributed.all_gather_single") or _optional(
    "distributed.all_gather_into_tensor"
)
# Collectives that return their result, which the others have no fake kernels for.
functional_all_gather = _optional("ops._c10d_functional.all_gather_into_tensor")
functional_all_reduce = _optional("ops._c10d_functional.all_reduce")
functional_wait = _optional("ops._c10d_functional.wait_tensor")
# The tensors by which a compiler traces, each in the place of a plain one.
_FakeTensor = _optional("_subclasses.fake_tensor.FakeTensor")
_FunctionalTensor = _optional("_subclasses.functional_tensor.FunctionalTensor")
TRACED = tuple(kind for kind in (_FakeTensor, _FunctionalTensor) if kind is not None)
# What register_module_forward_hook and its siblings have registered for all modules.
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
    """Whether a cotangent stands for several for which a pass is run at once."""
    return cotangent is not None and _is_legacy_batched(cotangent)


def may_have_process_wide_hooks() -> bool:
    """Whether a call of any module may be seen by hooks that are not its own.

    Those of torch.utils.flop_counter aside, which tell it where it is: it is to count what is run
    without it.
    """
    if not (_pre_hooks or _hooks or _backward_pre_hooks or _backward_hooks):
        return not _are_hooks_known
    tracker = _optional("utils.module_tracker.ModuleTracker")
    return tracker is None or not all(
        isinstance(getattr(hook, "__self__", None), tracker)
        for hooks in _all_hooks
        for hook in hooks.values()
    )


def process_wide_forward_hooks() -> list[Callable[..., object]]:
    """Those that every call of a module runs, as far as they are known."""
    return [*(_pre_hooks or {}).values(), *(_hooks or {}).values()]


def is_plain_call() -> bool:
    """Whether a call is an eager one that nothing but the ops themselves sees."""
    return not (
        torch.compiler.is_compiling()
        or is_tracing()
        or num_modes()
        or are_transforms_active()
        or may_have_tangents()
    )


def constant_in_graphs(function: Callable[..., object]) -> Callable[..., object]:
    """Has torch.compile call a function of constants as it traces, and take the result for one.

    torch.compiler.assume_constant_result does the same, and imports the compiler for it.
    """
    function._dynamo_marked_constant = True
    return function


def may_have_tangents() -> bool:
    """Whether this is in forward_ad.dual_level or torch.func.jvp."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def shortest_call(op: torch._ops.OpOverload) -> Callable[..., object]:
    """The op without the function around it, which repacks its arguments."""
    return getattr(op, "_op", op)


def apply_outside_transforms(function: type[torch.autograd.Function]) -> Callable[..., object]:
    """function.apply without its preparations for transforms of torch.func, which cost more than
    the rest of it."""
    if _unwrap_if_dead is None:
        return function.apply
    return _applied_to_unwrapped(super(torch.autograd.Function, function).apply)


def _applied_to_unwrapped(apply: Callable[..., object]) -> Callable[..., object]:
    """Tensors that outlive a transform are wrapped still; autograd does not see through that."""

    def apply_to_unwrapped(*arguments):
        return apply(*[_unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in arguments])

    return apply_to_unwrapped


def apply_at_one_level(function: type[torch.autograd.Function]) -> Callable[..., object]:
    """function.apply for where PyTorch has come to the innermost transform by itself."""
    if _SingleLevelFunction is None or _unwrap_if_dead is None:
        return function.apply
    # From PyTorch 2.15 on it is the class by which apply knows whether to look for transforms.
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
