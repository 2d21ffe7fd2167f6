"""What the ops of all operators need to be differentiated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

try:
    from torch._C import _are_functorch_transforms_active as are_transforms_active
except ImportError:  # a name of PyTorch's own, which a later one may lack

    def are_transforms_active() -> bool:
        """Whether calls must suit the transforms of torch.func: slower, but right without them."""
        return True


def below_autograd(op: torch._ops.OpOverload, arguments: tuple) -> tuple[Tensor, ...]:
    """Calls an op whose results need no gradient; torch.library does the same."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def refuse_double_backward(ctx, *gradients: Tensor | None):
    raise RuntimeError(
        "selective_scan: the gradient is once differentiable; double backward is not supported"
    )


def transformable(
    name: str, setup_context: Callable[..., None], backward: Callable[..., object]
) -> type[torch.autograd.Function]:
    """The op of this name for the transforms of torch.func, which neither register_autograd nor a
    Function whose forward takes a ctx supports."""

    class Transformable(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments):
            return getattr(torch.ops.selective_scan, name).default(*arguments)

    Transformable.setup_context = staticmethod(setup_context)
    Transformable.backward = staticmethod(backward)
    return Transformable


def transformable_gradient(name: str) -> type[torch.autograd.Function]:
    """Likewise of a backward op: torch.func always wants to differentiate once more."""
    return transformable(name, lambda ctx, inputs, output: None, refuse_double_backward)


def call_backward(
    op: torch._ops.OpOverload, for_transforms: type[torch.autograd.Function], arguments: tuple
) -> tuple[Tensor, ...]:
    """Calls a backward op. With create_graph=True it must stay visible to autograd, so that it can
    refuse."""
    if not torch.is_grad_enabled():
        return below_autograd(op, arguments)
    if are_transforms_active():
        return for_transforms.apply(*arguments)
    return op(*arguments)
