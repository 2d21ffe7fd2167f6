"""The scan over several ranks gives the results of one device for the whole sequence."""

import pytest
import torch
import torch.distributed as dist

import problem
from opchecks import opcheck_forward
from problem import METHODS, Case
from ranks import Ranks, usable
from selective_scan import distributed

pytestmark = pytest.mark.xdist_group("distributed")  # one process starts the ranks


# The number of steps of each rank; a case has 70.
LENGTHS = [(45, 25), (0, 40, 30), (33, 0, 37), (1, 62, 0, 7), (18, 17, 18, 17)]


def has_steps(name: str, tensor: torch.Tensor) -> bool:
    return name in ("u", "delta", "z", "input_delta") or (name in ("B", "C") and tensor.dim() > 2)


def own_steps(case: Case, name: str, tensor, lengths: tuple[int, ...], rank: int):
    """Returns the rank's part of an input or of the gradient of an output."""
    if tensor is None or not (name == "out" or has_steps(name, tensor)):
        return tensor
    factor = 2 if tensor.shape[-1] == 2 * case.seqlen else 1  # interleaved components
    return tensor.split([factor * length for length in lengths], dim=-1)[rank]


def shares(case: Case, count: int) -> list[float]:
    """Returns each rank's share of the last state's gradient; the shares sum to 1. A rank that has
    another gradient may have none."""
    if "out" in case.cotangents:
        return [0.0, 0.25, 0.75, 0.0] if count > 2 else [0.0, 1.0]
    return [2.0**-rank for rank in range(1, count)] + [2.0 ** (1 - count)]


def scan_own_steps(group, case: Case, lengths, device: str, compiled: bool = False, **options):
    """Returns the outputs and gradients of a rank."""
    rank = dist.get_rank(group)
    inputs = {
        name: None
        if tensor is None
        else own_steps(case, name, tensor, lengths, rank).to(device, copy=True).requires_grad_()
        for name, tensor in problem.make(case).tensors.items()
    }
    made = problem.make(case)

    def scan(inputs):
        return distributed.selective_scan_fn(
            **inputs, **made.options, return_last_state=True, group=group, **options
        )

    scan = torch.compile(scan, fullgraph=True, backend="aot_eager") if compiled else scan
    scanned = scan(inputs)
    cotangents = {}
    if "out" in made.cotangents:
        cotangents["out"] = own_steps(case, "out", made.cotangents["out"], lengths, rank)
    share = shares(case, len(lengths))[rank]
    if share and "last_state" in made.cotangents:
        cotangents["last_state"] = share * made.cotangents["last_state"]
    return problem.results_of(scanned, inputs, cotangents)


def put_together(case: Case, parts: list[dict], is_reduced: bool = False) -> dict:
    """Combines the ranks' results into those of one device."""
    whole = {}
    for name, first in parts[0].items():
        values = [part[name] for part in parts]
        source = name.removeprefix("d")
        tensor = problem.make(case).tensors.get(source)
        is_gradient = name in (f"d{key}" for key in problem.TENSORS)
        if first is None:
            whole[name] = None
        elif name == "out" or (is_gradient and has_steps(source, tensor)):
            whole[name] = torch.cat(values, dim=-1)
        elif name == "last_state" or (is_reduced and source != "initial_state"):
            assert all(torch.equal(value, first) for value in values), name
            whole[name] = first
        else:
            whole[name] = sum(values)
    return whole


def check_scan(ranks: Ranks, case: Case, lengths: tuple[int, ...], **options) -> None:
    lengths = usable(ranks, lengths)
    parts = ranks(call_scan, case, lengths, ranks.device, options, ranks=len(lengths))
    is_reduced = options.get("reduce_gradients", False)
    problem.check_results(case, put_together(case, parts, is_reduced), ranks.device)


def call_scan(group, case: Case, lengths, device: str, options: dict) -> dict:
    return scan_own_steps(group, case, lengths, device, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("method", METHODS)
def test_scan_by_every_method(ranks, method, is_complex, dtype):
    case = Case(method=method, complex=is_complex, dtype=dtype)
    check_scan(ranks, case, LENGTHS[METHODS.index(method) % len(LENGTHS)])


@pytest.mark.parametrize("method", METHODS)
def test_scan_whose_input_has_steps_of_its_own(ranks, method):
    case = Case(method=method, input_delta=torch.float32, reverse=method == "foh")
    check_scan(ranks, case, LENGTHS[METHODS.index(method) % len(LENGTHS)])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_scan_from_the_last_rank(ranks, lengths):
    check_scan(ranks, Case(reverse=True, method="bilinear"), lengths)


@pytest.mark.parametrize(
    "case",
    [
        Case(B="constant", C="constant"),
        Case(B="shared", C="constant", complex=True),
        Case(B="packed", C="packed_grouped", groups=1, complex=True, reverse=True),
        Case(D=False, z=False, delta_bias=False, delta_softplus=False, initial_state=False),
        Case(initial_state=False, reverse=True),
        Case(dtype=torch.bfloat16),
        Case(pole_dtype=torch.float64),
        Case(cotangents=("out",)),
        Case(cotangents=("last_state",)),
        Case(batch=1, dim=1, groups=1, dstate=1),
        Case(decay=1e-3),  # states that keep every rank's steps in memory
    ],
    ids=str,
)
def test_scan_of_other_arguments(ranks, case):
    check_scan(ranks, case, (33, 0, 37))


@pytest.mark.parametrize("name", ["channel_dtype", "initial_dtype"])
def test_scan_in_double_precision_for_one_argument(ranks, name):
    # All steps are on one rank, since each rank rounds the gradients of float32 tensors.
    check_scan(ranks, Case().with_(**{name: torch.float64}), (0, 70))


def test_scan_reduces_gradients_of_parameters(ranks):
    case = Case(B="constant", C="constant", complex=True)
    check_scan(ranks, case, (33, 0, 37), reduce_gradients=True)


def scan_twice(group, case: Case, lengths, device: str) -> bool:
    first, second = (scan_own_steps(group, case, lengths, device) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_scan_has_the_same_bits_every_run(ranks):
    lengths = usable(ranks, (1, 62, 0, 7))
    assert all(ranks(scan_twice, Case(), lengths, ranks.device, ranks=len(lengths)))


@pytest.mark.slow
def test_compiled_scan(ranks):
    check_scan(ranks, Case(method="foh"), (45, 25), compiled=True)


def scan_without_gradient(group, case: Case, lengths, device: str) -> torch.Tensor:
    inputs = problem.make(case).tensors
    rank = dist.get_rank(group)
    inputs = {
        name: None if tensor is None else own_steps(case, name, tensor, lengths, rank).to(device)
        for name, tensor in inputs.items()
    }
    options = problem.make(case).options
    return distributed.selective_scan_fn(**inputs, **options, group=group)


def test_scan_returns_out_alone(ranks):
    case, lengths = Case(), (45, 25)
    parts = ranks(scan_without_gradient, case, lengths, ranks.device, ranks=2)
    result = {"out": torch.cat(parts, dim=-1)}
    problem.check_results(case, result, ranks.device, names=result)


def passes_opcheck(group, case: Case, lengths, device: str) -> None:
    made = problem.make(case)
    rank = dist.get_rank(group)
    given = made.options | {"return_last_state": True, "reduce_gradients": True}
    for name, tensor in made.tensors.items():
        if tensor is not None:
            tensor = own_steps(case, name, tensor, lengths, rank).to(device, copy=True)
            tensor.requires_grad_()
        given[name] = tensor
    given = {"input_delta": None} | given | {"group": group.group_name}
    op = torch.ops.selective_scan.distributed_selective_scan_fwd.default
    names = [argument.name for argument in op._schema.arguments]
    arguments = tuple(given[name] for name in names[:-1])
    opcheck_forward(op, arguments)


@pytest.mark.slow
def test_opcheck_of_the_scan(ranks):
    ranks(passes_opcheck, Case(seqlen=12), (5, 7), ranks.device, ranks=2)
