"""The convolution over several ranks gives the results of one device for the whole sequence."""

import inspect

import pytest
import torch
import torch.distributed as dist

import accuracy
import problem
import selective_scan
from ranks import usable
from selective_scan import causal_conv1d_ref, distributed

pytestmark = pytest.mark.xdist_group("distributed")  # one process starts the ranks


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "selective_scan_fn"])
def test_arguments_by_position_are_those_of_one_device(name):
    both = (getattr(package, name) for package in (distributed, selective_scan))
    split, whole = ([*inspect.signature(function).parameters.values()] for function in both)
    positional = [it.name for it in split if it.kind is not it.KEYWORD_ONLY]
    assert positional == [it.name for it in whole][: len(positional)]


def convolution(width: int, dtype: torch.dtype, has_states: bool = True) -> dict:
    """Returns inputs and the gradients of the outputs."""
    random = problem.generator(f"convolution {width} {dtype}")

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    return {
        "x": normal(2, 5, 70),
        "weight": normal(5, width),
        "bias": normal(5),
        "initial_states": normal(2, 5, width - 1) if has_states else None,
        "dout": normal(2, 5, 70),
        "dfinal_states": normal(2, 5, width - 1),
    }


def convolve(values: dict, share: float, call) -> dict:
    """Returns outputs and gradients; `share` scales the final states' gradient."""
    names = ("x", "weight", "bias", "initial_states")
    inputs = {
        name: values[name] if values[name] is None else values[name].clone().requires_grad_()
        for name in names
    }
    out, final_states = call(**inputs, return_final_states=True, activation="silu")
    results = {"out": out, "final_states": final_states}
    cotangents = {"out": values["dout"]}
    if share:
        cotangents["final_states"] = share * values["dfinal_states"]
    return results | problem.differentiate(results, inputs, cotangents)


def convolve_own_steps(group, values: dict, lengths, device: str, compiled: bool, options) -> dict:
    rank = dist.get_rank(group)
    values = {
        name: tensor.split(lengths, dim=-1)[rank] if name in ("x", "dout") else tensor
        for name, tensor in values.items()
    }
    values = {name: None if t is None else t.to(device) for name, t in values.items()}

    def call(**inputs):
        return distributed.causal_conv1d_fn(**inputs, group=group, **options)

    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    return convolve(values, [0.25, 0.75, 0, 0][rank], call)


def check_convolution(ranks, values: dict, lengths, *, compiled=False, **options) -> None:
    lengths = usable(ranks, lengths)
    arguments = (values, lengths, ranks.device, compiled, options)
    parts = ranks(convolve_own_steps, *arguments, ranks=len(lengths))

    def solve(values):
        return convolve(values, 1.0, causal_conv1d_ref)

    exact = solve(problem.moved(values, torch.float64))
    is_double = values["x"].dtype == torch.float64
    plain = problem.plain_solutions(solve, values, is_double)
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
    check_convolution(
        ranks, convolution(4, torch.float32, False), (1, 2, 67), reduce_gradients=True
    )


def reduced_gradient(group, values: dict, lengths, device: str) -> torch.Tensor:
    x = values["x"].split(lengths, dim=-1)[dist.get_rank(group)].to(device)
    weight = values["weight"].to(device, torch.float64, copy=True).requires_grad_()
    out = distributed.causal_conv1d_fn(x, weight, group=group, reduce_gradients=True)
    return torch.autograd.grad(out.sum(), weight)[0]


def test_convolution_adds_gradients_of_doubles_as_such(ranks):
    values = convolution(4, torch.float32)
    x, weight = values["x"].double(), values["weight"].double().requires_grad_()
    (expected,) = torch.autograd.grad(causal_conv1d_ref(x, weight).sum(), weight)
    for actual in ranks(reduced_gradient, values, (45, 25), ranks.device, ranks=2):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_compiled_convolution(ranks):
    check_convolution(ranks, convolution(4, torch.float32), (45, 25), compiled=True)


def convolution_passes_opcheck(group, values: dict, lengths, device: str) -> None:
    x = values["x"].split(lengths, dim=-1)[dist.get_rank(group)]
    tensors = (x, *(values[name] for name in ("weight", "bias", "initial_states")))
    tensors = (tensor.to(device, copy=True).requires_grad_() for tensor in tensors)
    op = torch.ops.selective_scan.distributed_causal_conv1d_fwd.default
    torch.library.opcheck(op, (*tensors, True, "silu", True, group.group_name, True))


def test_opcheck_of_the_convolution(ranks):
    values = convolution(4, torch.float32)
    ranks(convolution_passes_opcheck, values, (2, 68), ranks.device, ranks=2)
