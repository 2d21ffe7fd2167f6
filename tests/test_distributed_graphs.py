"""CUDA graphs of passes over several ranks give the results of eager passes."""

import pytest
import torch
import torch.distributed as dist

from graphs import capture
from selective_scan import S6, distributed

pytestmark = pytest.mark.xdist_group("distributed")  # one process starts the ranks

BATCH, SEQLEN, D_MODEL, DSTATE = 2, 600, 32, 4


def make_layer(group, device: str, options: dict):
    """Returns a forward and backward pass of a model, and its inputs."""
    mesh = dist.DeviceMesh.from_group(group, device, mesh_dim_names=("sequence",))
    model = S6(D_MODEL, DSTATE, device=device, **options)
    model = distributed.parallelize(model, mesh, sequence_dim="sequence")
    x, dout = torch.randn(2, BATCH, SEQLEN, D_MODEL, device=device).unbind()
    x.requires_grad_()

    def step() -> tuple[torch.Tensor, ...]:
        out = model(x)
        return out.detach(), *torch.autograd.grad(out, [x, *model.parameters()], dout)

    return step, (x, dout)


def make_scan(group, device: str, options: dict):
    """Returns a pass of a scan from an initial to a last state, and its inputs."""
    u, delta, dout = torch.randn(3, BATCH, D_MODEL, SEQLEN, device=device).unbind()
    A = -torch.rand(D_MODEL, DSTATE, device=device)
    B, C = torch.randn(2, BATCH, DSTATE, SEQLEN, device=device).unbind()
    initial_state = torch.randn(BATCH, D_MODEL, DSTATE, device=device)
    leaves = [t.requires_grad_() for t in (u, delta, A, B, C, initial_state)]

    def step() -> tuple[torch.Tensor, ...]:
        out, last_state = distributed.selective_scan_fn(
            *leaves[:5],
            delta_softplus=True,
            initial_state=initial_state,
            return_last_state=True,
            group=group,
            **options,
        )
        gradients = torch.autograd.grad((out, last_state), leaves, (dout, last_state.detach()))
        return out.detach(), last_state.detach(), *gradients

    return step, (u, dout)


def replay(group, make, device: str, options: dict) -> None:
    torch.manual_seed(0)
    step, inputs = make(group, device, options)
    # NCCL's own thread may query earlier work during the capture.
    graph, captured = capture(step, capture_error_mode="thread_local")
    for scale in (1.0, 0.5, -2.0):
        with torch.no_grad():
            for tensor in inputs:
                tensor.mul_(scale).add_(0.125)
        graph.replay()
        torch.testing.assert_close(captured, step())


@pytest.mark.parametrize("ranks", [pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make_layer, {}),
        (make_layer, {"bidirectional": True, "depth": 2}),
        (make_scan, {}),
        (make_scan, {"reverse": True}),
    ],
    ids=["layer", "layers both ways", "scan", "scan from the last rank"],
)
def test_replay_with_new_inputs(ranks, make, options):
    ranks(replay, make, ranks.device, options)
