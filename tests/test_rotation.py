"""Rotations that depend on the input, against a loop over complex states."""

import pytest
import torch

from layers import recurrence
from problem import METHODS
from selective_scan import rotate_states, selective_scan_fn, selective_state_update

BATCH, DIM, DSTATE, SEQLEN = 2, 6, 8, 23
F64 = torch.float64


def make(groups=None, dtype=F64, seqlen=SEQLEN):
    """Returns u, delta, A with one pole per pair of states, B, C, and the angles of every step."""
    shape = (BATCH, *(() if groups is None else (groups,)))
    A = -torch.rand(DIM, DSTATE // 2, dtype=F64).repeat_interleave(2, -1) - 0.1
    return (
        torch.randn(BATCH, DIM, seqlen, dtype=F64),
        torch.rand(BATCH, DIM, seqlen, dtype=F64),
        A,
        torch.randn(*shape, DSTATE, seqlen, dtype=dtype),
        torch.randn(*shape, DSTATE, seqlen, dtype=dtype),
        torch.randn(*shape, DSTATE // 2, seqlen, dtype=dtype),
    )


def walk(u, delta, A, B, C, steps, groups, method):
    """Computes the recurrence of complex states step by step, group by group."""
    if groups is None:
        B, C, steps = (value[:, None] for value in (B, C, steps))
    of_channels = (value.mT.chunk(B.shape[1], 2) for value in (u, delta))
    of_groups = (value.mT.unbind(1) for value in (B, C, steps))
    x, delta, B, C, turns = map(list, (*of_channels, *of_groups))
    poles = A[:, ::2].chunk(len(B))
    rows = zip(x, delta, poles, B, C, [None] * len(B), turns, strict=True)
    return torch.cat([recurrence(*row, method) for row in rows], 2).mT


@pytest.mark.parametrize("groups", [None, 1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_states_rotate(method, groups, device):
    u, delta, A, B, C, steps = make(groups)
    given = rotate_states(*(value.to(device) for value in (B, C, steps.cumsum(-1))))
    u_, delta_, A_ = (value.to(device) for value in (u, delta, A))
    out = selective_scan_fn(u_, delta_, A_, *given, discretization_method=method)
    torch.testing.assert_close(out.cpu(), walk(u, delta, A, B, C, steps, groups, method))


def test_steps_go_on_in_the_turned_frame():
    """Single steps can follow a scan if their angles continue."""
    u, delta, A, B, C, steps = make()
    angles = steps.cumsum(-1)
    expected = walk(u, delta, A, B, C, steps, None, "zoh")
    B, C = rotate_states(B, C, angles)
    first, state = selective_scan_fn(
        *(u[..., :9], delta[..., :9], A, B[..., :9], C[..., :9]), return_last_state=True
    )
    outs = [first]
    for t in range(9, SEQLEN):
        now = (u[..., t], delta[..., t], A, B[..., t], C[..., t])
        outs.append(selective_state_update(state, *now)[..., None])
    torch.testing.assert_close(torch.cat(outs, -1), expected)


def test_angles_of_whole_turns_do_nothing():
    _, _, _, B, C, steps = make(2)
    turned = rotate_states(B, C, 2 * torch.pi * steps.round())
    torch.testing.assert_close(turned, (B, C))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_have_their_inputs_dtypes(dtype):
    _, _, _, B, C, steps = make(dtype=dtype)
    turned = rotate_states(B, C.float(), steps)
    exact = rotate_states(B.double(), C.double(), steps.double())
    assert [value.dtype for value in turned] == [dtype, torch.float32]
    for value, expected, bound in zip(turned, exact, (torch.finfo(dtype).eps, 1e-6), strict=True):
        assert (value.double() - expected).abs().max() <= bound * expected.abs().max()


def test_gradcheck():
    tensors = [value.requires_grad_() for value in make(2, seqlen=3)[3:]]
    torch.autograd.gradcheck(rotate_states, tensors)
    torch.autograd.gradgradcheck(rotate_states, tensors)
