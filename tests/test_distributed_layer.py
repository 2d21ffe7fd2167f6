"""The layer over several ranks, as one operator, gives its results on one device."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from layers import error
from opchecks import opcheck_forward
from ranks import Ranks, lose_the_last, usable
from selective_scan import S6, distributed
from selective_scan._mamba_operators import MAMBA_INNER

pytestmark = pytest.mark.xdist_group("distributed")  # one process starts the ranks

D_MODEL, DIM, DSTATE, RANK = 6, 8, 5, 3
NAMES = (
    *("in_proj_weight", "in_proj_bias", "conv1d_weight", "conv1d_bias", "x_proj_weight"),
    *("delta_proj_weight", "out_proj_weight", "out_proj_bias", "A_log", "D", "delta_bias"),
)
DOUBLE = {"rtol": 1e-9, "atol": 1e-11}
SINGLE = {"rtol": 1e-3, "atol": 1e-4}


def draw(batch: int, seqlen: int, width: int, dtype: torch.dtype, has_biases: bool) -> dict:
    """Returns a layer's named inputs and the gradient of its output."""
    shapes = {
        "hidden": (batch, seqlen, D_MODEL),
        "in_proj_weight": (2 * DIM, D_MODEL),
        "in_proj_bias": (2 * DIM,),
        "conv1d_weight": (DIM, 1, width),
        "conv1d_bias": (DIM,),
        "x_proj_weight": (RANK + 2 * DSTATE, DIM),
        "delta_proj_weight": (DIM, RANK),
        "out_proj_weight": (D_MODEL, DIM),
        "out_proj_bias": (D_MODEL,),
        "A_log": (DIM, DSTATE),
        "D": (DIM,),
        "delta_bias": (DIM,),
        "residual": (batch, seqlen, D_MODEL),
        "dout": (batch, seqlen, D_MODEL),
    }
    made = {name: 0.5 * torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    optional = ("in_proj_bias", "conv1d_bias", "out_proj_bias", "D", "delta_bias", "residual")
    if not has_biases:
        made |= dict.fromkeys(optional)
    return made


def arguments_of(tensors: dict, options: dict) -> tuple:
    """Returns the operator's arguments up to the residual."""
    *others, D, delta_bias = (tensors[name] for name in NAMES)
    return (
        *(tensors["hidden"], *others, None, D, delta_bias, True),
        *(options.get("checkpoint_lvl", 1), options.get("method", "zoh")),
        *(options.get("bidirectional", False), False, None, options.get("autocast_dtype")),
        tensors["residual"],
    )


def run(operator, tensors: dict, options: dict, *own: object, passes: int = 1) -> dict:
    """Returns the output and the gradients of all inputs; more passes must give the same bits."""
    tensors = {name: t if t is None else t.clone() for name, t in tensors.items()}
    dout = tensors.pop("dout")
    inputs = {name: t.requires_grad_() for name, t in tensors.items() if t is not None}
    out = operator(*arguments_of(tensors, options), *own)[0]
    results = {"out": out.detach()}
    for number in range(passes):
        gradients = torch.autograd.grad(
            out, list(inputs.values()), dout.to(out.dtype), retain_graph=number < passes - 1
        )
        found = dict(zip(inputs, gradients, strict=True))
        assert number == 0 or all(torch.equal(g, results[f"d{n}"]) for n, g in found.items())
        results |= {f"d{name}": gradient for name, gradient in found.items()}
    return results


def is_row(name: str) -> bool:
    return name in ("hidden", "residual", "out", "dout", "dhidden", "dresidual")


def run_own_steps(group, tensors: dict, options: dict, lengths, device: str, passes: int) -> dict:
    from selective_scan.distributed._mamba_inner import MAMBA_INNER_OF_RANKS

    def own(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if is_row(name):
            tensor = tensor.split(lengths, dim=1)[dist.get_rank(group)]
        return tensor.to(device, copy=True)

    tensors = {name: own(name, tensor) for name, tensor in tensors.items()}
    return run(MAMBA_INNER_OF_RANKS, tensors, options, group.group_name, passes=passes)


def run_ranks(ranks, lengths, tensors: dict, options: dict, passes: int = 1) -> dict:
    """Returns the results over several ranks, put together."""
    arguments = (tensors, options, lengths, ranks.device, passes)
    parts = ranks(run_own_steps, *arguments, ranks=len(lengths))
    whole = {}
    for name, value in parts[0].items():
        values = [part[name] for part in parts]
        assert all(it.dtype == value.dtype for it in values)
        whole[name] = torch.cat(values, dim=1) if is_row(name) else sum(values)
    return whole


def run_alone(tensors: dict, options: dict, device: str) -> dict:
    tensors = {name: t if t is None else t.to(device) for name, t in tensors.items()}
    return {name: t.cpu() for name, t in run(MAMBA_INNER, tensors, options).items()}


def check(ranks, lengths, options: dict, *, width=4, dtype=torch.float64, passes=1, **close):
    lengths = usable(ranks, lengths)
    tensors = draw(2, sum(lengths), width, dtype, options.get("has_biases", True))
    expected = run_alone(tensors, options, ranks.device)
    actual = run_ranks(ranks, lengths, tensors, options, passes)
    torch.testing.assert_close(actual, expected, **(close or DOUBLE))


@pytest.mark.parametrize("lengths", [(11, 9), (0, 14, 6), (5, 1, 1, 13), (2, 0, 18)], ids=str)
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one way", "both ways"])
def test_steps(ranks, bidirectional, lengths):
    check(ranks, lengths, {"bidirectional": bidirectional})


@pytest.mark.parametrize("width", [1, 2, 8])
def test_widths(ranks, width):
    check(ranks, (6, 3, 12), {}, width=width)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_lvl": 0, "bidirectional": True},
        {"has_biases": False},
        {"method": "bilinear", "has_biases": False, "bidirectional": True},
    ],
    ids=str,
)
def test_options(ranks, options):
    check(ranks, (6, 3, 12), options)


def test_single_precision(ranks):
    check(ranks, (70, 0, 61), {}, dtype=torch.float32, **SINGLE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(ranks, dtype):
    """Ranks add up products that each of them has rounded, so that their results are little farther
    from those in fp64 than the results of one device are."""
    tensors, options = draw(2, 64, 4, torch.float32, True), {"bidirectional": True}
    doubles = {name: t.double() for name, t in tensors.items()}
    exact = run_alone(doubles, options, "cpu")
    options |= {"autocast_dtype": dtype}
    expected = run_alone(tensors, options, ranks.device)
    actual = run_ranks(ranks, usable(ranks, (40, 24)), tensors, options)
    for name, value in exact.items():
        assert actual[name].dtype == expected[name].dtype
        usual = error(expected[name], value)
        assert error(actual[name], value) < 1.5 * usual + torch.finfo(dtype).eps, name


def test_a_graph_that_is_kept(ranks):
    check(ranks, (11, 9), {"bidirectional": True}, passes=2)


def node_of_a_layer(group, device: str, is_hooked: bool) -> str:
    mesh = dist.DeviceMesh.from_group(group, device, mesh_dim_names=("sequence",))
    model = distributed.parallelize(S6(D_MODEL, device=device), mesh, sequence_dim="sequence")
    with contextlib.ExitStack() as stack:
        if is_hooked:
            hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
            stack.callback(hook.remove)
        out = model.layers[0](torch.randn(1, 7, D_MODEL, device=device))
        return type(out.grad_fn).__name__


def test_a_layer_is_one_node(ranks):
    for name in ranks(node_of_a_layer, ranks.device, False):
        assert "mamba_inner_of_ranks" in name
    for name in ranks(node_of_a_layer, ranks.device, True):  # parts are called for hooks to see
        assert "mamba_inner_of_ranks" not in name


def lose_a_rank(group, tensors: dict) -> str | None:
    """Returns what is raised in a layer if the last rank no longer exists."""
    from selective_scan.distributed._mamba_inner import MAMBA_INNER_OF_RANKS

    arguments = (*arguments_of(tensors, {}), group.group_name)
    return lose_the_last(group, lambda: MAMBA_INNER_OF_RANKS(*arguments))


@pytest.mark.slow
def test_a_collective_that_fails_is_told(tmp_path):
    ranks = Ranks(2, tmp_path)
    try:
        (message,) = ranks(lose_a_rank, draw(1, 9, 4, torch.float32, True), answering=1)
        assert message
        assert "torch_call_dispatcher" not in message
    finally:
        ranks.close()


def passes_opcheck(group, tensors: dict, device: str) -> None:
    tensors = {n: t if t is None else t.to(device).requires_grad_() for n, t in tensors.items()}
    op = torch.ops.selective_scan.mamba_inner_of_ranks_fwd.default
    opcheck_forward(op, (*arguments_of(tensors, {"bidirectional": True}), group.group_name))


@pytest.mark.slow
def test_opcheck(ranks):
    ranks(passes_opcheck, draw(2, 9, 4, torch.float32, True), ranks.device, ranks=2)
