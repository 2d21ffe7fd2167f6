"""Models over several ranks give what they give on one device."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ranks import usable
from selective_scan import S6, distributed

pytestmark = pytest.mark.xdist_group("distributed")  # one process starts the ranks


D_MODEL = 8


def make_model(options: dict) -> S6:
    torch.manual_seed(0)
    return S6(D_MODEL, depth=2, **options, dtype=torch.float64)


def run_model(model, x: torch.Tensor) -> dict:
    """The output, and the gradients of its squares' sum."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"out": out.detach(), "x": x.grad} | gradients


def run_own_steps(group, options: dict, x: torch.Tensor, lengths, device: str, around: str) -> dict:
    rank = dist.get_rank(group)
    mesh = dist.DeviceMesh.from_group(group, device, mesh_dim_names=("sequence",))
    model = distributed.parallelize(make_model(options).to(device), mesh, sequence_dim="sequence")
    x = x.split(lengths, dim=1)[rank].to(device)
    if around == "ddp":
        model = DistributedDataParallel(model, process_group=group)
    elif around == "fsdp":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif around == "compile":
        model.compile(fullgraph=True, backend="aot_eager")
    results = run_model(model, x)
    return {
        name.removeprefix("module."): value.full_tensor()
        if hasattr(value, "full_tensor")
        else value
        for name, value in results.items()
    }


def check_model(ranks, options: dict, lengths: tuple[int, ...], around: str = "") -> None:
    lengths = usable(ranks, lengths)
    x = torch.randn(2, sum(lengths), D_MODEL, dtype=torch.float64)
    exact = run_model(make_model(options), x)
    arguments = (options, x, lengths, ranks.device, around)
    parts = ranks(run_own_steps, *arguments, ranks=len(lengths))
    for name, expected in exact.items():
        values = [part[name].cpu() for part in parts]
        if name in ("out", "x"):
            actual = torch.cat(values, dim=1)
        elif around in ("ddp", "fsdp"):  # take the mean
            actual = len(lengths) * values[0]
        else:
            actual = sum(values)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": True, "discretization_method": "bilinear"},
        {"d_conv": 1, "conv_bias": False, "bias": True, "dt_proj_bias": False},
    ],
    ids=str,
)
def test_model(ranks, options):
    check_model(ranks, options, (9, 0, 2, 12))


@pytest.mark.parametrize("around", ["ddp", "fsdp", "compile"])
def test_model_within_others(ranks, around):
    check_model(ranks, {"bidirectional": True}, (11, 9), around)


def refused_models(group) -> list[str]:
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("sequence",))
    model = S6(D_MODEL)
    parallel = distributed.parallelize(S6(D_MODEL), mesh, sequence_dim=0)
    calls = [
        lambda: distributed.parallelize(model.layers[0], mesh, sequence_dim=0),
        lambda: distributed.parallelize(model, group, sequence_dim=0),
        lambda: distributed.parallelize(model, mesh, sequence_dim=1),
        lambda: distributed.parallelize(model, mesh, sequence_dim="time"),
        lambda: distributed.parallelize(S6(D_MODEL, d_conv=9), mesh, sequence_dim=0),
        lambda: distributed.parallelize(parallel, mesh, sequence_dim=0),
        lambda: parallel(torch.randn(1, 4, D_MODEL), cache=parallel.allocate_cache(1)),
    ]
    messages = []
    for call in calls:
        try:
            with torch.no_grad():
                call()
        except (TypeError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_models_are_refused(ranks):
    (messages,) = ranks(refused_models, ranks=1)
    patterns = [
        "TypeError: .*model must be of type S6, got S6Layer",
        "TypeError: .*mesh must be of type DeviceMesh, got ProcessGroup",
        "ValueError: .*sequence_dim must be a dimension of the mesh, one of sequence, 0, got 1",
        "ValueError: .*sequence_dim must be .* got 'time'",
        "ValueError: .*model must be one with d_conv of at most 8, got 9",
        "ValueError: .*model must be of layers that are not parallel yet",
        "ValueError: .*cache must be None where a sequence is split over ranks",
    ]
    assert len(messages) == len(patterns)
    for message, pattern in zip(messages, patterns, strict=True):
        assert re.search(pattern, message), message
