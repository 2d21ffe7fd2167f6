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


# Whether calls must suit the transforms of torch.func.
are_transforms_active = _optional("_C._are_functorch_transforms_active") or _not_known
# A context in which ops are called whose results need no gradient; torch.library does the same.
below_autograd = _optional("_C._AutoDispatchBelowAutograd") or contextlib.nullcontext
_unwrap_if_dead = _optional("_C._functorch.unwrap_if_dead")


def may_have_tangents() -> bool:
    """Whether this is in forward_ad.dual_level or torch.func.jvp."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def apply_outside_transforms(function: type[torch.autograd.Function]) -> Callable[..., object]:
    """function.apply without its preparations for transforms of torch.func, which cost more than
    the rest of it."""
    if _unwrap_if_dead is None:
        return function.apply
    apply = super(torch.autograd.Function, function).apply

    def apply_to_unwrapped(*arguments):
        # Tensors that outlive a transform are wrapped still; autograd does not see through that.
        return apply(*[_unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in arguments])

    return apply_to_unwrapped
