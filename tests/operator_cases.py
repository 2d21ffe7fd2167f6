"""Calls of the operators with a derivative, made of the cases of each operator's own tests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import problem
import test_adaptive_unitary as unitary
import test_causal_conv1d as convolution
import test_diagonal_scan as diagonal
import test_exponential_trapezoid as trapezoid
import test_matrix_scan as matrix
from cases import Axes
from operator_calls import with_tuple
from selective_scan import (
    adaptive_unitary_scan_fn,
    adaptive_unitary_scan_ref,
    causal_conv1d_fn,
    causal_conv1d_ref,
    diagonal_scan_fn,
    diagonal_scan_ref,
    exponential_trapezoid_fn,
    exponential_trapezoid_ref,
    selective_scan_fn,
    selective_scan_ref,
)

LAST = {"return_last_state": True}


class Operator(NamedTuple):
    """`make` returns the tensors of a case, some of which may be None, and the other arguments."""

    function: Callable
    reference: Callable
    make: Callable[[Axes, str], tuple[dict, dict]]


def _convolution(case: convolution.Case, device: str) -> tuple[dict, dict]:
    made = convolution.make(case, device)
    return made.tensors, made.options


OPERATORS = {
    "scan": Operator(
        selective_scan_fn,
        selective_scan_ref,
        lambda case, device: (problem.inputs_on(case, device), problem.options_on(case, device)),
    ),
    "matrix scan": Operator(
        selective_scan_fn,
        selective_scan_ref,
        lambda case, device: (
            problem.inputs_on(case, device, matrix.tensors_of(case)),
            problem.options_on(case, device),
        ),
    ),
    "exponential trapezoid": Operator(
        exponential_trapezoid_fn, exponential_trapezoid_ref, trapezoid.make
    ),
    "unitary scan": Operator(
        adaptive_unitary_scan_fn,
        adaptive_unitary_scan_ref,
        lambda case, device: (unitary.make(case, device), {}),
    ),
    "diagonal scan": Operator(
        diagonal_scan_fn,
        diagonal_scan_ref,
        lambda case, device: (diagonal.make(case, device), diagonal.options_of(case, device)),
    ),
    "convolution": Operator(causal_conv1d_fn, causal_conv1d_ref, _convolution),
}
WITHOUT_LAST_STATE = ("diagonal scan", "convolution")


@dataclass(frozen=True)
class Call:
    """A call's tensors are leaves that require grad; those that are absent are left out."""

    case: Axes
    function: Callable
    reference: Callable
    tensors: dict[str, torch.Tensor]
    options: dict
    device: str

    def outputs(self, function: Callable | None = None) -> dict[str, torch.Tensor]:
        """Returns the results of the function, or of another one, by name."""
        results = with_tuple(function or self.function)(**self.tensors, **self.options)
        return dict(zip(("out", "last_state"), results, strict=False))

    def cotangents(self, outputs: dict) -> dict[str, torch.Tensor]:
        """Returns a cotangent of each output with a gradient, the same ones for each run."""
        draws = problem.Draws((self.case, "cotangents"))
        return {
            name: draws.normal(*outputs[name].shape, dtype=outputs[name].dtype).to(self.device)
            for name in ("out", "last_state")
            if name in outputs and outputs[name].requires_grad
        }

    def solve(
        self, function: Callable | None = None, cotangents: dict | None = None
    ) -> dict[str, torch.Tensor]:
        """Returns outputs and gradients."""
        outputs = self.outputs(function)
        given = self.cotangents(outputs) if cotangents is None else cotangents
        return outputs | problem.differentiate(outputs, self.tensors, given)


def call_of(name: str, case: Axes, device: str) -> Call:
    operator = OPERATORS[name]
    tensors, options = operator.make(case, device)
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    options = options if name in WITHOUT_LAST_STATE else options | LAST
    return Call(case, operator.function, operator.reference, tensors, options, device)


def each_case(cases: dict[str, list[Axes]]) -> pytest.MarkDecorator:
    """Parametrizes a test by an operator's name and each of its cases."""
    rows = [(name, case) for name, several in cases.items() for case in several]
    return pytest.mark.parametrize(("operator", "case"), rows, ids=str)
