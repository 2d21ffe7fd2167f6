"""Models over several ranks give their results on one device."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from changed_parts import OwnBias, hooked
from ranks import assert_match, raised_by, usable
from selective_scan import S6, distributed

pytestmark = pytest.mark.xdist_group("distributed")  # one process starts the ranks


D_MODEL = 8


def make_model(options: dict) -> S6:
    """Creates a model; `change` names a change of each of its layers."""
    torch.manual_seed(0)
    options = {"depth": 2, **options}
    change = CHANGES[options.pop("change", "none")]
    model = S6(D_MODEL, **options, dtype=torch.float64)
    for layer in model.layers:
        change(layer)
    return model


def replace(layer: torch.nn.Module) -> None:
    layer.dt_proj = OwnBias(layer.dt_proj)


def hook(layer: torch.nn.Module) -> None:
    for part in (layer, layer.conv1d, layer.x_proj, layer.dt_proj, layer.out_proj):
        hooked(part)


def set_options(layer: torch.nn.Module) -> None:
    layer.discretization_method, layer.bidirectional = "foh", True


CHANGES = {"none": lambda layer: None, "replace": replace, "hook": hook, "options": set_options}


def draw(batch: int, seqlen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns an input and the gradient of the output."""
    return tuple(torch.randn(2, batch, seqlen, D_MODEL, dtype=torch.float64).unbind())


def run_model(model, x: torch.Tensor, dout: torch.Tensor) -> dict:
    """Returns the output and all gradients; a sharded gradient is made whole."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.backward(dout)
    gradients = {
        name.removeprefix("module."): whole(parameter.grad)
        for name, parameter in model.named_parameters()
    }
    return {"out": out.detach(), "x": x.grad} | gradients


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def surround(model: S6, around: str, mesh: dist.DeviceMesh):
    """Wraps a parallel model as users do; `mesh` has the ranks of the sequence."""
    if around == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group())
    if around == "fsdp":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif around == "compile":
        model.compile(fullgraph=True, backend="aot_eager")
    return model


# --- sequences ------------------------------------------------------------------------------------


def run_own_steps(group, options: dict, data, lengths, device: str, around: str) -> dict:
    mesh = dist.DeviceMesh.from_group(group, device, mesh_dim_names=("sequence",))
    model = distributed.parallelize(make_model(options).to(device), mesh, sequence_dim="sequence")
    own = (tensor.split(lengths, dim=1)[dist.get_rank(group)].to(device) for tensor in data)
    return run_model(surround(model, around, mesh), *own)


def check(exact: dict, parts: list[dict], factor: int | None = None) -> None:
    """Compares the results of ranks, each with a part of the steps, with those of the whole. The
    gradients of a parameter are added, unless all ranks have the same one, which is multiplied by
    `factor`."""
    for name, expected in exact.items():
        values = [part[name] for part in parts]
        if name in ("out", "x"):
            actual = torch.cat(values, dim=1)
        else:
            actual = sum(values) if factor is None else factor * values[0]
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def check_sequences(ranks, options: dict, lengths: tuple[int, ...], around: str = "") -> None:
    lengths = usable(ranks, lengths)
    data = draw(2, sum(lengths))
    arguments = (options, data, lengths, ranks.device, around)
    parts = ranks(run_own_steps, *arguments, ranks=len(lengths))
    takes_mean = around in ("ddp", "fsdp")
    check(run_model(make_model(options), *data), parts, len(lengths) if takes_mean else None)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": True, "discretization_method": "bilinear"},
        {"d_conv": 1, "conv_bias": False, "bias": True, "dt_proj_bias": False},
        {"change": "replace"},
    ],
    ids=str,
)
def test_sequences(ranks, options):
    check_sequences(ranks, options, (9, 0, 2, 12))


@pytest.mark.slow
@pytest.mark.parametrize("around", ["ddp", "fsdp", "compile"])
def test_sequences_within_others(ranks, around):
    depth = 1 if around == "compile" else 2  # compilation takes time
    check_sequences(ranks, {"bidirectional": True, "depth": depth}, (11, 9), around)


def run_copies(group, data, lengths, device: str) -> list[torch.Tensor]:
    """Returns the outputs of a model's copies for a rank's steps: one in memory, one saved
    whole."""
    mesh = dist.DeviceMesh.from_group(group, device, mesh_dim_names=("sequence",))
    model = distributed.parallelize(make_model({}).to(device), mesh, sequence_dim="sequence")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = data[0].split(lengths, dim=1)[dist.get_rank(group)].to(device)
    return [it(x).detach() for it in (copy.deepcopy(model), torch.load(file, weights_only=False))]


def test_copies_of_a_model_of_sequences(ranks):
    data, lengths = draw(2, 20), (11, 9)
    parts = ranks(run_copies, data, lengths, ranks.device, ranks=2)
    expected = make_model({})(data[0]).detach()
    for outs in zip(*parts, strict=True):
        torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=1e-9, atol=1e-11)


# --- channels -------------------------------------------------------------------------------------


def shape_of(ranks, rows: int) -> tuple[int, int]:
    """Returns the shape of a mesh of all ranks: `rows` for the sequence, others for channels."""
    return rows, ranks.count // rows


def split_both(group, model: S6, device: str, shape: tuple[int, int]) -> dist.DeviceMesh:
    """Splits a model over (ranks of the sequence, ranks of the channels)."""
    mesh = dist.init_device_mesh(device, shape, mesh_dim_names=("sequence", "tensor"))
    sequence_dim = "sequence" if shape[0] > 1 else None
    distributed.parallelize(model.to(device), mesh, sequence_dim=sequence_dim, tensor_dim="tensor")
    return mesh


def run_own_channels(group, options: dict, data, device: str, shape, around: str) -> dict:
    model = make_model(options)
    mesh = split_both(group, model, device, shape)
    place = mesh.get_local_rank("sequence")
    own = (tensor.tensor_split(shape[0], dim=1)[place].to(device) for tensor in data)
    return run_model(surround(model, around, mesh["sequence"]), *own)


def check_channels(ranks, options: dict, rows: int, around: str = "") -> None:
    data, shape = draw(2, 21), shape_of(ranks, rows)
    parts = ranks(run_own_channels, options, data, ranks.device, shape, around)
    same_steps = [parts[first : first + shape[1]] for first in range(0, len(parts), shape[1])]
    for row in same_steps:  # these agree bit by bit
        assert all(torch.equal(part[name], row[0][name]) for part in row for name in ("out", "x"))
    exact = run_model(make_model(options), *data)
    check(exact, [row[0] for row in same_steps], rows if around == "fsdp" else None)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bidirectional": True, "bias": True, "discretization_method": "bilinear"},
        {"d_conv": 1, "conv_bias": False, "dt_proj_bias": False, "dt_soft_plus": False},
    ],
    ids=str,
)
def test_channels(ranks, options, rows):
    check_channels(ranks, options, rows)


def test_channels_with_a_wide_convolution(ranks):
    check_channels(ranks, {"d_conv": 9}, 1)


def test_channels_with_hooks(ranks):
    check_channels(ranks, {"change": "hook", "bias": True}, 1)


def run_channels(group, options: dict, change: str, around: str, data, device: str) -> dict:
    """Returns the results of a model of split channels whose layers are changed afterwards."""
    mesh = dist.DeviceMesh.from_group(group, device, mesh_dim_names=("tensor",))
    model = distributed.parallelize(make_model(options).to(device), mesh, tensor_dim="tensor")
    for layer in model.layers:
        CHANGES[change](layer)
    return run_model(surround(model, around, mesh), *(tensor.to(device) for tensor in data))


@pytest.mark.parametrize("change", ["hook", "options"])
def test_channels_changed_later(ranks, change):
    data = draw(2, 21)
    parts = ranks(run_channels, {}, change, "", data, ranks.device, ranks=2)
    check(run_model(make_model({"change": change}), *data), parts[:1])


def test_channels_and_sequences_within_fsdp(ranks):
    check_channels(ranks, {"bidirectional": True}, 2, "fsdp")


@pytest.mark.slow
def test_compiled_channels(ranks):
    data, options = draw(2, 21), {"depth": 1}
    parts = ranks(run_channels, options, "none", "compile", data, ranks.device, ranks=2)
    check(run_model(make_model(options), *data), parts[:1])


def take_steps(model, data: list, own=lambda tensor: tensor, scale: int = 1, optimizer=None):
    """Takes a step of gradient descent with momentum for each pair of data."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, dout in data:
        optimizer.zero_grad()
        model(own(x)).backward(scale * own(dout))
        optimizer.step()
    return optimizer


def states(model, optimizer) -> dict:
    model_state, optimizer_state = checkpoint.state_dict.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def go_on_elsewhere(group, data: list, device: str, shapes: list, folder: str) -> list[dict]:
    """Takes the first step on one layout and saves a checkpoint, then takes the second step on each
    of `shapes`, from that checkpoint. Returns the parameters. The shape None is the layout of one
    device."""
    data = [tuple(tensor.to(device) for tensor in pair) for pair in data]

    def layout(shape):
        model = make_model({}).to(device)
        if shape is None:
            return model, lambda tensor: tensor, 1
        mesh = split_both(group, model, device, shape)
        if shape[0] > 1:
            surround(model, "fsdp", mesh["sequence"])
        place = mesh.get_local_rank("sequence")
        return model, lambda tensor: tensor.tensor_split(shape[0], dim=1)[place], shape[0]

    model, *how = layout(shapes[0])
    checkpoint.save(states(model, take_steps(model, data[:1], *how)), checkpoint_id=folder)
    results = []
    for shape in shapes:
        model, *how = layout(shape)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = states(model, optimizer)
        checkpoint.load(state, checkpoint_id=folder)
        checkpoint.state_dict.set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        take_steps(model, data[1:], *how, optimizer)
        results.append({name: whole(p.detach()) for name, p in model.named_parameters()})
    return results


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_checkpoint_of_one_layout_is_one_of_all(ranks, first, tmp_path):
    data = [draw(1, 20) for _ in range(2)]
    shapes = [shape_of(ranks, 1), shape_of(ranks, 2), None]
    shapes.insert(0, shapes.pop(first))
    model = make_model({})
    take_steps(model, data)
    for results in ranks(go_on_elsewhere, data, ranks.device, shapes, str(tmp_path)):
        for result in results:
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(result[name], parameter.detach(), rtol=1e-9, atol=1e-11)


# --- refusals -------------------------------------------------------------------------------------


def with_norm(norm: nn.Module) -> S6:
    model = S6(D_MODEL)
    model.norm_f = norm
    return model


def with_groups(groups: int) -> S6:
    model = S6(D_MODEL)
    layer = model.layers[0]
    layer.conv1d = nn.Conv1d(layer.d_inner, layer.d_inner, 4, groups=groups, padding=3)
    return model


def refused_models(group, device: str) -> list[str]:
    mesh = dist.DeviceMesh.from_group(group, device, mesh_dim_names=("sequence",))
    split = distributed.parallelize
    model = S6(D_MODEL)
    parallel = split(S6(D_MODEL), mesh, sequence_dim=0)
    calls = [
        lambda: split(model.layers[0], mesh, sequence_dim=0),
        lambda: split(model, group, sequence_dim=0),
        lambda: split(model, mesh),
        lambda: split(model, mesh, sequence_dim=1),
        lambda: split(model, mesh, tensor_dim="channels"),
        lambda: split(model, mesh, sequence_dim=0, tensor_dim="sequence"),
        lambda: split(S6(D_MODEL, d_conv=9), mesh, sequence_dim=0),
        lambda: split(S6(3, expand=1), mesh, tensor_dim=0),
        lambda: split(S6(D_MODEL, rotary=True), mesh, sequence_dim=0),
        lambda: split(S6(D_MODEL, discretization_method="trapezoid"), mesh, tensor_dim=0),
        lambda: split(parallel, mesh, sequence_dim=0),
        lambda: parallel(torch.randn(1, 4, D_MODEL), cache=parallel.allocate_cache(1)),
        lambda: split(make_model({"change": "replace"}), mesh, tensor_dim=0),
        lambda: split(make_model({"change": "hook"}), mesh, sequence_dim=0)(data),
        lambda: split(with_norm(nn.LayerNorm(D_MODEL)), mesh, tensor_dim=0),
        lambda: split(with_groups(2), mesh, tensor_dim=0),
        lambda: split(with_norm(nn.Identity()), mesh, tensor_dim=0)(
            data.float().to(device)
        ),  # passes
    ]
    data = torch.randn(1, 4, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        return raised_by(calls)


def test_models_are_refused(ranks):
    (messages, _) = ranks(refused_models, ranks.device, ranks=2)
    patterns = [
        "TypeError: .*model must be of type S6, got S6Layer",
        "TypeError: .*mesh must be of type DeviceMesh, got ProcessGroup",
        "ValueError: .*sequence_dim or tensor_dim must be given, got neither",
        "ValueError: .*sequence_dim must be a dimension of the mesh, one of sequence, 0, got 1",
        "ValueError: .*tensor_dim must be a dimension of the mesh, .* got 'channels'",
        "ValueError: .*tensor_dim must be another dimension .* than sequence_dim, got 'sequence'",
        "ValueError: .*model must be one with d_conv of at most 8, got 9",
        "ValueError: .*model must be one with d_inner a multiple of 2, got 3",
        "ValueError: .*model must be one without rotary=True and the trapezoid, got .*rotary=True",
        "ValueError: .*model must be one without rotary=True and the trapezoid, got .*'trapezoid'",
        "ValueError: .*model must be of layers that are not parallel yet",
        "ValueError: .*cache must be None where a model is split over ranks",
        "ValueError: .*model must be one without adapters where channels are split, got 'dt_proj",
        "ValueError: .*conv1d must be a plain layer without hooks where sequences are split, got",
        "ValueError: .*norm_f is an nn.RMSNorm where channels are split, got 'LayerNorm'",
        "ValueError: .*one whose conv1d is depthwise where channels are split, got 'groups=2'",
    ]
    assert_match(messages, patterns)
