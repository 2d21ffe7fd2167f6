"""The convolution over several ranks gives the results of one device for the whole sequence."""

import inspect
from functools import partial

import pytest
import torch
import torch.distributed as dist

import accuracy
import problem
import selective_scan
import test_causal_conv1d as conv
from ranks import usable
from selective_scan import causal_conv1d_ref, distributed

pytestmark = pytest.mark.xdist_group("distributed")  # one process starts the ranks


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "selective_scan_fn"])
def test_arguments_by_position_are_those_of_one_device(name):
    both = (getattr(package, name) for package in (distributed, selective_scan))
    split, whole = ([*inspect.signature(function).parameters.values()] for function in both)
    positional = [it.name for it in split if it.kind is not it.KEYWORD_ONLY]
    assert positional == [it.name for it in whole][: len(positional)]


def convolution(width: int, dtype: torch.dtype) -> conv.Problem:
    case = conv.Case(dim=5, width=width, dtype=dtype, weight_dtype=dtype, state_dtype=dtype)
    return conv.make(case, "cpu")


def convolve_own_steps(group, made: conv.Problem, lengths, device, compiled: bool, options) -> dict:
    """Returns outputs and gradients; each rank has a share of the final states' gradient."""
    rank = dist.get_rank(group)
    tensors = own_steps(group, made.tensors, lengths, device)
    cotangents = own_steps(group, made.cotangents, lengths, device)
    if share := [0.25, 0.75, 0, 0][rank]:
        cotangents["final_states"] *= share
    else:
        del cotangents["final_states"]

    def call(**inputs):
        return distributed.causal_conv1d_fn(**inputs, group=group, **options)

    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    return conv.run(call, tensors, made.options, cotangents)


def own_steps(group, tensors: dict, lengths, device: str) -> dict:
    """Returns a rank's steps of sequences, and copies of other tensors."""
    own = {name: tensor.detach() for name, tensor in tensors.items()}
    for name in own.keys() & {"x", "out"}:
        own[name] = own[name].split(lengths, dim=-1)[dist.get_rank(group)]
    return {name: tensor.to(device, copy=True) for name, tensor in own.items()}


def check_convolution(ranks, made: conv.Problem, lengths, *, compiled=False, **options) -> None:
    lengths = usable(ranks, lengths)
    arguments = (made, lengths, ranks.device, compiled, options)
    parts = ranks(convolve_own_steps, *arguments, ranks=len(lengths))
    exact = conv.solve(made, problem.moved(made.tensors, torch.float64))
    is_double = made.tensors["x"].dtype == torch.float64
    plain = problem.plain_solutions(partial(conv.solve, made), made.tensors, is_double)
    for name, expected in exact.items():
        rows = [part[name] for part in parts]
        if name in ("out", "dx"):
            actual = torch.cat(rows, dim=-1)
        elif name == "final_states" or (options and name in ("dweight", "dbias")):
            assert all(torch.equal(row, rows[0]) for row in rows), name
            actual = rows[0]
        else:
            actual = sum(rows)
        tolerance = accuracy.tolerance(name, actual.dtype, is_double)
        plain_values = [solution[name] for solution in plain]
        reason = accuracy.complaint(actual, expected, tolerance, plain_values)
        assert reason is None, f"{name}: {reason}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_convolution(ranks, width, dtype):
    lengths = [(69, 1), (0, 70), (35, 2, 33), (1, 2, 67, 0), (65, 2, 0, 3), (67, 0, 1, 2)]
    for of_ranks in lengths:
        check_convolution(ranks, convolution(width, dtype), of_ranks)


def test_convolution_without_initial_states(ranks):
    made = convolution(4, torch.float32)
    del made.tensors["initial_states"]
    check_convolution(ranks, made, (1, 2, 67), reduce_gradients=True)


def reduced_gradient(group, tensors: dict, lengths, device: str) -> torch.Tensor:
    own = own_steps(group, tensors, lengths, device)
    weight = own["weight"].double().requires_grad_()
    out = distributed.causal_conv1d_fn(own["x"], weight, group=group, reduce_gradients=True)
    return torch.autograd.grad(out.sum(), weight)[0]


def test_convolution_adds_gradients_of_doubles_as_such(ranks):
    tensors = convolution(4, torch.float32).tensors
    x, weight = tensors["x"].double(), tensors["weight"].double()
    (expected,) = torch.autograd.grad(causal_conv1d_ref(x, weight).sum(), weight)
    for actual in ranks(reduced_gradient, tensors, (45, 25), ranks.device, ranks=2):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_compiled_convolution(ranks):
    check_convolution(ranks, convolution(4, torch.float32), (45, 25), compiled=True)


def convolution_passes_opcheck(group, tensors: dict, lengths, device: str) -> None:
    own = own_steps(group, tensors, lengths, device)
    names = ("x", "weight", "bias", "initial_states")
    arguments = (own[name].requires_grad_() for name in names)
    op = torch.ops.selective_scan.distributed_causal_conv1d_fwd.default
    torch.library.opcheck(op, (*arguments, True, "silu", True, group.group_name, True))


@pytest.mark.slow
def test_opcheck_of_the_convolution(ranks):
    tensors = convolution(4, torch.float32).tensors
    ranks(convolution_passes_opcheck, tensors, (2, 68), ranks.device, ranks=2)
