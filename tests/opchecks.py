"""Calls of ops, and what torch.library.opcheck and torch.autograd.gradcheck say of calls."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

QUICK = ("test_schema", "test_faketensor", "test_autograd_registration")
THOROUGH = (*QUICK, "test_aot_dispatch_dynamic")  # compares results


def needs_pytorch(version: str, reason: str):
    """What an older PyTorch cannot do by itself."""
    return pytest.mark.skipif(torch.__version__ < version, reason=f"PyTorch {version}: {reason}")


class Ops(TorchDispatchMode):
    """Notes which of the library's ops are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "selective_scan":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


def opcheck_forward(op, arguments, tests=THOROUGH):
    """Results are compared where no states are saved: nobody writes the padding at their end."""
    torch.library.opcheck(op, (*arguments, False), test_utils=tests)
    torch.library.opcheck(op, (*arguments, True), test_utils=QUICK)


def in_order(op, arguments: dict) -> tuple:
    """Arguments of an op by name, in its order; what is not there is as by default, or None."""
    parameters = op.default._schema.arguments
    return tuple(arguments.get(it.name, it.default_value) for it in parameters)


def gradcheck(function, tensors: dict, nondet_tol: float = 0.0, **options) -> None:
    """The gradients of a function of tensors by name, some of which may be None, are those of
    finite differences; they are the same in every run but for `nondet_tol`."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def call(*values: torch.Tensor):
        return function(**(tensors | dict(zip(given, values, strict=True))), **options)

    assert torch.autograd.gradcheck(call, tuple(given.values()), nondet_tol=nondet_tol)
