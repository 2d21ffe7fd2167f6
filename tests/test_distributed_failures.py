"""Bad calls over several ranks are refused, and a rank that dies ends the others."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import problem
from problem import Case
from ranks import Ranks, assert_match, lose_the_last, raised_by
from selective_scan import S6, distributed

pytestmark = pytest.mark.xdist_group("distributed")  # one process starts the ranks


def lose_a_rank(group, device: str) -> str | None:
    """Returns what is raised if the last rank ends before a backward pass."""
    out = distributed.selective_scan_fn(**problem.inputs_on(Case(), device), group=group)

    def backward() -> None:
        out.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return lose_the_last(group, backward)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(tmp_path):
    ranks = Ranks(3, tmp_path)
    try:
        assert all(ranks(lose_a_rank, "cpu", answering=2))
    finally:
        ranks.close()


@pytest.mark.cuda
def test_a_rank_that_dies_ends_the_others_on_gpus(tmp_path):
    """If nothing is raised, NCCL's watchdog ends the process after the group's timeout."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2, tmp_path, "cuda", timeout=10)
    with contextlib.suppress(EOFError):  # the process has ended
        assert all(ranks(lose_a_rank, "cuda", answering=1))
    ranks.close()


def refusals(group, calls: list, device: str) -> list[str]:
    made = []
    mesh = dist.DeviceMesh(device, [list(range(dist.get_world_size()))])
    for name, changes in calls:
        arguments = dict(problem.make(Case()).tensors) if name == "selective_scan_fn" else {}
        if name == "causal_conv1d_fn":
            arguments = {"x": torch.randn(2, 6, 9), "weight": torch.randn(6, 4)}
        arguments = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in (arguments | {"group": group} | changes).items()
        }
        if arguments["group"] == "mesh":
            arguments["group"] = mesh
        elif arguments["group"] == "of others":
            arguments["group"] = dist.GroupMember.NON_GROUP_MEMBER
        made.append(functools.partial(getattr(distributed, name), **arguments))
    return raised_by(made)


BAD_CALLS = [
    ("selective_scan_fn", {"group": 3}, "TypeError: .*group must be a ProcessGroup, a DeviceMesh"),
    ("selective_scan_fn", {"group": "mesh"}, "ValueError: .*of one dimension, got a mesh of 2"),
    ("selective_scan_fn", {"group": "of others"}, "ValueError: .*must have this rank as a member"),
    ("selective_scan_fn", {"reverse": 1}, "TypeError: .*reverse must be a bool, got int"),
    ("selective_scan_fn", {"return_last_state": 1}, "TypeError: .*return_last_state must be"),
    ("selective_scan_fn", {"discretization_method": "euler"}, "RuntimeError: .*must be one of zoh"),
    ("selective_scan_fn", {"A": torch.ones(6, 3, 3)}, r"RuntimeError: .*A must be \(dim, dstate\)"),
    ("causal_conv1d_fn", {"group": 3}, "TypeError: .*group must be a ProcessGroup"),
    ("causal_conv1d_fn", {"weight": torch.ones(6, 9)}, "RuntimeError: .*width of 1 to 8, got"),
    ("causal_conv1d_fn", {"activation": "relu"}, "RuntimeError: .*activation must be None or one"),
]


def test_bad_calls_are_refused(ranks):
    calls = [(name, changes) for name, changes, _ in BAD_CALLS]
    for messages in ranks(refusals, calls, ranks.device):
        assert_match(messages, [pattern for *_, pattern in BAD_CALLS])


def calls_by_gloo(_, device: str) -> list[str]:
    """Returns what is raised if a group of gloo gets a GPU's tensors, fake ones without a GPU."""
    group = dist.new_group(backend="gloo")
    mesh = dist.DeviceMesh.from_group(group, "cuda")
    ops, name = torch.ops.selective_scan, group.group_name
    with FakeTensorMode() if device == "cpu" else contextlib.nullcontext():
        u, A, B = (torch.randn(shape, device="cuda") for shape in ((2, 6, 9), (6, 4), (2, 4, 9)))
        options = (False, "zoh", None, False, False, False, name, None, False)
        calls = [
            lambda: ops.distributed_selective_scan_fwd(u, u, A, B, B, None, None, None, *options),
            lambda: ops.distributed_causal_conv1d_fwd(
                u, A, None, None, False, None, False, name, False
            ),
            lambda: distributed.parallelize(S6(8), mesh, sequence_dim=0),
            lambda: distributed.parallelize(S6(8), mesh, tensor_dim=0),
        ]
        return raised_by(calls)


def test_gloo_is_refused_for_gpus(ranks):
    wanted = "selective_scan: {} must have a backend for tensors on cuda, such as nccl, got gloo"
    for messages in ranks(calls_by_gloo, ranks.device):
        assert messages == [
            f"ValueError: {wanted.format(name)}" for name in ("group", "group", "mesh", "mesh")
        ]


def test_a_default_group_is_needed():
    tensors = problem.make(Case()).tensors
    with pytest.raises(ValueError, match="init_process_group"):
        distributed.selective_scan_fn(**tensors, group=None)


def differentiate_twice(group, device: str) -> list[str]:
    tensors = problem.inputs_on(Case(), device)
    out = distributed.selective_scan_fn(**tensors, group=group)
    (gradient,) = torch.autograd.grad(out.sum(), tensors["u"], create_graph=True)
    messages = raised_by([gradient.sum().backward])
    with forward_ad.dual_level():
        tensors["u"] = forward_ad.make_dual(tensors["u"].detach(), torch.ones_like(tensors["u"]))
        scan = functools.partial(distributed.selective_scan_fn, **tensors, group=group)
        return messages + raised_by([scan])


def test_other_derivatives_are_refused(ranks):
    (messages,) = ranks(differentiate_twice, ranks.device, ranks=1)
    forward = "forward-mode differentiation is not supported over several ranks"
    assert_match(messages, ["RuntimeError: .*double backward is not supported", forward])
