"""Operators on DTensors, sharded by batch or by channels, give the results of whole tensors."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import problem
from problem import Case
from ranks import assert_match, raised_by
from selective_scan import (
    causal_conv1d_fn,
    causal_conv1d_ref,
    causal_conv1d_update,
    diagonal_scan_fn,
    selective_scan_fn,
    selective_scan_ref,
)

pytestmark = pytest.mark.xdist_group("distributed")  # one process starts the ranks

WIDE = Case(batch=4, dim=8, groups=1, seqlen=20)


def mesh_of(group, device: str, where: tuple) -> dist.DeviceMesh:
    """Returns a mesh whose dimensions split what `where` says: "batch", "dim" or None."""
    if len(where) == 1:
        return dist.DeviceMesh.from_group(group, device)
    return dist.init_device_mesh(device, (2, dist.get_world_size(group) // 2))


def placements(where: tuple) -> list:
    dims = {"batch": Shard(0), "dim": Shard(1), "seqlen": Shard(2), None: Replicate()}
    return [dims[dim] for dim in where]


def whole(results: dict) -> dict:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in results.items()
    }


def scan(group, case: Case, where: tuple, device: str, compiled: bool, function) -> dict:
    mesh = mesh_of(group, device, where)

    def distribute(name: str, tensor: torch.Tensor) -> DTensor:
        is_split = name in ("u", "delta", "z")
        places = placements(where) if is_split else [Replicate()] * len(where)
        return distribute_tensor(tensor.to(device), mesh, places)

    made = problem.make(case)
    inputs = {
        name: None if tensor is None else distribute(name, tensor).requires_grad_()
        for name, tensor in made.tensors.items()
    }

    def call(inputs):
        return function(**inputs, **made.options, return_last_state=True)

    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    results = dict(zip(("out", "last_state"), call(inputs), strict=True))
    for result in results.values():
        assert list(result.placements) == placements(where)
    cotangents = {name: distribute(name, tensor) for name, tensor in made.cotangents.items()}
    return whole(results | problem.differentiate(results, inputs, cotangents))


def check_scan(
    ranks, case: Case, where: tuple, compiled: bool = False, function=selective_scan_fn
) -> None:
    options = (ranks.device, compiled, function)
    of_ranks = ranks(scan, case, where, *options, ranks=2 if compiled else None)
    for results in of_ranks:
        problem.check_results(case, results, ranks.device)


@pytest.mark.parametrize("where", [("batch",), ("dim",), (None, "dim"), ("batch", "dim")], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        WIDE,
        WIDE.with_(groups=4, B="constant", dtype=torch.float64),
        WIDE.with_(B="constant", C="shared", method="foh", reverse=True),
        WIDE.with_(D=False, z=False, delta_bias=False, initial_state=False, dtype=torch.float64),
    ],
    ids=str,
)
def test_scan(ranks, case, where):
    check_scan(ranks, case, where)


@pytest.mark.slow
def test_compiled_scan(ranks):
    check_scan(ranks, WIDE, ("dim",), compiled=True)


BY_REFERENCE = {"backend": "reference"}


@pytest.mark.parametrize(
    "function",
    [functools.partial(selective_scan_fn, **BY_REFERENCE), selective_scan_ref],
    ids=["backend", "itself"],
)
@pytest.mark.parametrize("has_state", [False, True])
def test_the_reference(ranks, has_state, function):
    case = WIDE.with_(C="shared", initial_state=has_state, dtype=torch.float64)
    check_scan(ranks, case, ("batch", "dim"), function=function)


def convolve(group, values: dict, where: tuple, device: str, function) -> dict:
    mesh = mesh_of(group, device, where)
    none = [Replicate()] * len(where)
    inputs = {
        name: distribute_tensor(tensor.to(device), mesh, placements(where) if name == "x" else none)
        for name, tensor in values.items()
    }
    dout = inputs.pop("dout")
    return whole(differentiate(function, inputs, dout))


def differentiate(function, inputs: dict, dout) -> dict:
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = function(**inputs, activation="silu")
    out.backward(dout)
    return {"out": out.detach()} | {name: tensor.grad for name, tensor in inputs.items()}


@pytest.mark.parametrize(
    "function",
    [causal_conv1d_fn, functools.partial(causal_conv1d_fn, **BY_REFERENCE), causal_conv1d_ref],
    ids=["kernels", "backend", "itself"],
)
@pytest.mark.parametrize("where", [("batch",), ("dim",)], ids=str)
def test_convolution(ranks, where, function):
    shapes = {"x": (4, 8, 9), "weight": (8, 4), "bias": (8,), "initial_states": (4, 8, 3)}
    values = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    dout = torch.randn(4, 8, 9, dtype=torch.float64)
    exact = differentiate(causal_conv1d_ref, values, dout)
    for results in ranks(convolve, values | {"dout": dout}, where, ranks.device, function):
        for name, expected in exact.items():
            torch.testing.assert_close(results[name], expected, rtol=1e-9, atol=1e-11)


def refusals(group, device: str) -> list[str]:
    mesh = dist.DeviceMesh.from_group(group, device)

    def call(case: Case, place, function=selective_scan_fn) -> None:
        inputs = {
            name: distribute_tensor(
                tensor.to(device), mesh, [place if tensor.dim() > 2 else Replicate()]
            )
            for name, tensor in problem.make(case).tensors.items()
            if tensor is not None
        }
        function(**inputs)

    case = WIDE.with_(B="constant", C="constant", initial_state=False)

    def call_another(**inputs) -> None:
        diagonal_scan_fn(inputs["u"], inputs["delta"])

    def call_reference(**inputs) -> None:
        diagonal_scan_fn(inputs["u"], inputs["delta"], backend="reference")

    def update(**inputs) -> None:
        state = distribute_tensor(torch.zeros(4, 8, 3, device=device), mesh, [Replicate()])
        weight = distribute_tensor(torch.ones(8, 4, device=device), mesh, [Replicate()])
        causal_conv1d_update(inputs["u"], state, weight)

    calls = [
        (case, Shard(2)),
        (case.with_(batch=3), Shard(0)),
        (case.with_(dim=7), Shard(1)),
        (case.with_(dim=12, C="grouped", groups=3), Shard(1)),
        (case, Shard(0), call_another),
        (case, Shard(0), call_reference),
        (case, Shard(1), update),
    ]
    return raised_by([functools.partial(call, *given) for given in calls])


def test_what_is_refused(ranks):
    patterns = [
        r"ValueError: .*u must be .* or by channels, got Shard.*2\); selective_scan.distributed",
        f"ValueError: .*u must be sharded over ranks .* divides batch = 3, got {ranks.count}",
        f"ValueError: .*u must be sharded over ranks .* divides dim = 7, got {ranks.count}",
        f"ValueError: .*u must be sharded over ranks .* groups of C = 3, got {ranks.count}",
        *["NotImplementedError: .*diagonal_scan takes no DTensors"] * 2,
        r"ValueError: .*conv_state must be placed as \[Shard.*, got \(Replicate",
    ]
    for messages in ranks(refusals, ranks.device):
        assert_match(messages, patterns)
