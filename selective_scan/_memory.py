"""Carries exceptions of the allocator and of Python callbacks through the ops.

No exception passes through the stable ABI that the kernels are built on. The kernels ask this
module for the exception's message and throw a RuntimeError with it, which is the only type that a
call of torch.ops raises. The package's functions then raise the original exception instead: the
allocator's (on CUDA torch.OutOfMemoryError) or the callback's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from . import _pytorch
from ._ops import add_op_namespace_prefix

_last = threading.local()


def _allocation_error(num_bytes: int, device_index: int) -> str:
    """Returns the allocator's error message for this many bytes, "" if they can be allocated.

    A device_index of -1 is the CPU.
    """
    device = "cpu" if device_index < 0 else f"cuda:{device_index}"
    try:
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        _last.error = error.with_traceback(None)  # its frames would keep tensors alive
        return str(error)
    return ""


def _last_error() -> str:
    return str(_last.error)


def register() -> None:
    """Defines the ops by which the kernels ask for error messages."""
    define_callback(
        "_allocation_error", "(int num_bytes, int device_index) -> str", _allocation_error
    )
    define_callback("_last_error", "() -> str", _last_error)


def define_callback(name: str, schema: str, kernel: Callable[..., object]) -> None:
    """Defines an op in Python that kernels can call. Its exception is kept, and the kernels can ask
    for the message."""

    def run(*arguments):
        try:
            return kernel(*arguments)
        except (RuntimeError, TypeError, ValueError) as error:
            _last.error = error.with_traceback(None)  # its frames would keep tensors alive
            raise

    qualified = add_op_namespace_prefix(name)
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, "default", run)


def call(op: Callable[..., object], arguments: tuple) -> object:
    """Calls an op whose results need no gradient."""
    try:
        with _pytorch.below_autograd():
            return op(*arguments)
    except RuntimeError as error:
        raise_own(error)
        raise


def raise_own(error: RuntimeError) -> None:
    """Raises the kept exception if it is the origin of an op's error."""
    own = getattr(_last, "error", None)
    if own is not None and str(own) == str(error):
        _last.error = None
        try:
            raise own from None
        finally:
            # A reference cycle of the exception, its traceback and this frame would keep all
            # tensors of the frames above alive until the garbage collector runs.
            del own, error
