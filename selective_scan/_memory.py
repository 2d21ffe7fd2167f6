"""What an op raises for whose tensors there is no memory, or one that calls Python, which fails.

No exception passes through the stable ABI that the kernels are built on. They ask for its message
here and throw it as a RuntimeError, which is all that a call of torch.ops raises; the functions
raise the own exception of the allocator instead, on CUDA torch.OutOfMemoryError, or of Python.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from . import _pytorch
from ._ops import add_op_namespace_prefix

_last = threading.local()


def _allocation_error(num_bytes: int, device_index: int) -> str:
    """What the allocator says of so many bytes; nothing if it has them. A CPU's index is -1."""
    device = "cpu" if device_index < 0 else f"cuda:{device_index}"
    try:
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        _last.error = error.with_traceback(None)  # whose frames would keep tensors alive
        return str(error)
    return ""


def _last_error() -> str:
    return str(_last.error)


def register() -> None:
    """Lets the kernels ask."""
    define_callback(
        "_allocation_error", "(int num_bytes, int device_index) -> str", _allocation_error
    )
    define_callback("_last_error", "() -> str", _last_error)


def define_callback(name: str, schema: str, kernel: Callable[..., object]) -> None:
    """Makes an op of Python that kernels call, for whatever they want. What it raises they can ask
    for."""

    def run(*arguments):
        try:
            return kernel(*arguments)
        except (RuntimeError, TypeError, ValueError) as error:
            _last.error = error.with_traceback(None)  # whose frames would keep tensors alive
            raise

    qualified = add_op_namespace_prefix(name)
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, "default", run)


def call(op: Callable[..., object], arguments: tuple) -> object:
    """An op's results, of which none needs a gradient."""
    try:
        with _pytorch.below_autograd():
            return op(*arguments)
    except RuntimeError as error:
        raise_own(error)
        raise


def raise_own(error: RuntimeError) -> None:
    """Raises the allocator's exception if that is where an op's error is from."""
    own = getattr(_last, "error", None)
    if own is not None and str(own) == str(error):
        _last.error = None
        try:
            raise own from None
        finally:
            # An exception whose traceback leads to a frame that leads back to it would keep all
            # tensors of the frames above alive until the garbage collector runs.
            del own, error
