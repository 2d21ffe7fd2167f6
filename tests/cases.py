"""Helpers for the tests of every operator: test ids, refusals, fake tensors, compilation."""

import dataclasses
import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

REAL = "float32, float16, bfloat16 or float64"
COMPLEX = "complex64 or complex128"


class Axes:
    """A base of frozen dataclasses: their defaults are the base case, tests change an axis at a
    time."""

    def with_(self, **changes):
        return dataclasses.replace(self, **changes)

    def each(self, **values):
        """Yields a case for each combination of the axes' values."""
        for combination in itertools.product(*values.values()):
            yield self.with_(**dict(zip(values, combination, strict=True)))

    def __str__(self) -> str:
        """Returns the axes that differ from the base case, which pytest prints as the test's id."""
        changed = (
            f"{field.name}={self.short(value)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        )
        return ",".join(changed) or "base"

    @staticmethod
    def short(value: object) -> str:
        return str(value).replace("torch.", "").replace(" ", "")


# --- refusals -------------------------------------------------------------------------------------


def ones(*shape: int, dtype: torch.dtype = torch.float32, **options) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, **options)


def assert_refused(function, arguments: dict, message: str, error: type = RuntimeError) -> None:
    with pytest.raises(error) as caught:
        function(**arguments)
    assert str(caught.value) == f"selective_scan: {message}"


def fake(arguments: dict, mode: FakeTensorMode) -> dict:
    return tree_map_only(torch.Tensor, mode.from_tensor, arguments)


def compiled_with_graphs(function, dynamic=None):
    """Returns the compiled function and the list in which its graphs are collected."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    return torch.compile(function, fullgraph=True, backend=count, dynamic=dynamic), graphs


def assert_same_outcome(function, reference, arguments: dict, **tolerances) -> None:
    """Asserts that a call works like the reference, or that both refuse it with the same
    message."""
    outcomes = []
    for one in (reference, function):
        try:
            outcomes.append(one(**arguments))
        except RuntimeError as error:
            outcomes.append(str(error))
    expected, actual = outcomes
    if isinstance(expected, str):
        assert actual == expected
        assert expected.startswith("selective_scan: ")
    else:
        torch.testing.assert_close(actual, expected, **tolerances)
