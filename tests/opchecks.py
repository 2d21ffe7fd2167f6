"""Helpers for tests with opcheck and gradcheck, and what records called ops and nodes of graphs."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

QUICK = ("test_schema", "test_faketensor", "test_autograd_registration")
THOROUGH = (*QUICK, "test_aot_dispatch_dynamic")  # compares results


def needs_pytorch(version: str, reason: str):
    """Skips a test of something that an older PyTorch cannot do by itself."""
    return pytest.mark.skipif(torch.__version__ < version, reason=f"PyTorch {version}: {reason}")


class Ops(TorchDispatchMode):
    """Records which of the library's ops are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "selective_scan":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


def nodes_of(out: torch.Tensor) -> Counter[str]:
    """Counts the nodes of a result's graph by the names of their types."""
    found, left = set(), [out.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [other for other, _ in node.next_functions]
    return Counter(type(node).__name__ for node in found)


def opcheck_forward(op, arguments, tests=THOROUGH):
    """Checks a forward op. Results are compared only without saved states, since the padding at the
    end of the states is never written."""
    torch.library.opcheck(op, (*arguments, False), test_utils=tests)
    torch.library.opcheck(op, (*arguments, True), test_utils=QUICK)


def in_order(op, arguments: dict) -> tuple:
    """Returns an op's named arguments in its order; a missing one has its default or is None."""
    parameters = op.default._schema.arguments
    return tuple(arguments.get(it.name, it.default_value) for it in parameters)


def gradcheck(function, tensors: dict, nondet_tol: float = 0.0, **options) -> None:
    """Asserts that the gradients of a function of named tensors, some of which may be None, match
    finite differences and are the same on every run, up to `nondet_tol`."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def call(*values: torch.Tensor):
        return function(**(tensors | dict(zip(given, values, strict=True))), **options)

    assert torch.autograd.gradcheck(call, tuple(given.values()), nondet_tol=nondet_tol)
