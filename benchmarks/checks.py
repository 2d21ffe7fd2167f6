"""Correctness before speed: the kernels on the measured inputs against fp64.

The reference walks through time step by step, which is too slow for long sequences on many
channels. So a sample of (batch, channel) pairs is compared, over the whole sequence, with the same
recurrence scanned in parallel in fp64, whose agreement with selective_scan_ref is itself checked at
the start of a run. The kernels still run on the full problem: dout is zero outside the sample, so
every gradient, sums over channels and batch included, is that of the sample.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from problems import METHODS, VARIANTS, Inputs, Problem, Shape, make_inputs
from selective_scan import selective_scan_ref
from selective_scan._discretization import DISCRETIZATIONS

# Relative L2 error by the result's dtype: its rounding, with room for the recurrence.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.complex128: 1e-11,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}
# Gradients summed over the whole sequence: terms of either sign cancel.
_SUM_SLACK = 25
_CHANNELS_PER_GROUP = 2
_ORACLE_TOLERANCE = 1e-12


def prefix_scan(a: Tensor, b: Tensor) -> Tensor:
    """h[t] = a[t]·h[t-1] + b[t] along the last dimension, by doubling."""
    shift = 1
    while shift < a.shape[-1]:
        b = torch.cat([b[..., :shift], a[..., shift:] * b[..., :-shift] + b[..., shift:]], dim=-1)
        a = torch.cat([a[..., :shift], a[..., shift:] * a[..., :-shift]], dim=-1)
        shift *= 2
    return b


def _to_channels(x: Tensor, dim: int, seqlen: int, is_complex: bool) -> Tensor:
    """B or C as (batch or 1, dim, dstate, seqlen or 1)."""
    if x.dim() == 2:
        return x[None, :, :, None]
    if is_complex and not x.is_complex():
        x = torch.view_as_complex(x.unflatten(-1, (seqlen, 2)).contiguous())
    return x.repeat_interleave(dim // x.shape[1], dim=1)


def parallel_scan(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, last_state) as selective_scan_ref gives them, with time scanned in parallel."""
    x = inputs
    _, dim, seqlen = x.u.shape
    delta = torch.nn.functional.softplus(x.delta + x.delta_bias[:, None])
    B = _to_channels(x.B, dim, seqlen, x.A.is_complex())
    C = _to_channels(x.C, dim, seqlen, x.A.is_complex())
    step = delta[:, :, None, :]
    abar, bbar = DISCRETIZATIONS[x.method](step, step * x.A[None, :, :, None])
    drive = bbar * B * x.u[:, :, None, :]
    if x.reverse:
        abar, drive = abar.flip(-1), drive.flip(-1)
    if x.initial_state is not None:
        first = drive[..., :1] + abar[..., :1] * x.initial_state[..., None]
        drive = torch.cat([first, drive[..., 1:]], dim=-1)
    states = prefix_scan(abar.expand_as(drive), drive)
    last_state = states[..., -1]
    if x.reverse:
        states = states.flip(-1)
    y = (C * states).sum(dim=2)
    y = 2 * y.real if y.is_complex() else y
    out = y + x.D[:, None] * x.u
    return (out if x.z is None else out * torch.nn.functional.silu(x.z)), last_state


def check_oracle(device: torch.device) -> None:
    """Compares the parallel scan with selective_scan_ref on small problems of every kind.

    Raises:
        RuntimeError: they differ.
    """
    for number, variant in enumerate(VARIANTS.values()):
        method = METHODS[number % len(METHODS)]
        problem = Problem(Shape("oracle", 2, 4, 19, 3, 2), "float64", variant, method)
        inputs = make_inputs(problem, device, seed=number)
        expected, expected_state = selective_scan_ref(**inputs.keywords(), return_last_state=True)
        out, last_state = parallel_scan(inputs)
        error = max(relative_l2(out, expected), relative_l2(last_state, expected_state))
        if error > _ORACLE_TOLERANCE:
            raise RuntimeError(f"the oracle differs from the reference by {error:.1e} ({problem})")


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    expected = expected.to(torch.complex128 if expected.is_complex() else torch.float64)
    scale = expected.norm().item()
    difference = (actual.to(expected.dtype) - expected).norm().item()
    return difference / scale if scale else difference


def _sample_channels(dim: int, groups: int, device: torch.device) -> Tensor:
    """As many channels of each group: its last one and others drawn at random."""
    per_group = dim // groups
    take = min(_CHANNELS_PER_GROUP, per_group)
    chosen = []
    for group in range(groups):
        drawn = torch.randperm(per_group - 1)[: take - 1] if take > 1 else torch.empty(0).long()
        chosen.append(group * per_group + torch.cat([drawn, torch.tensor([per_group - 1])]))
    return torch.cat(chosen).to(device)


def _cut(inputs: Inputs, batch: int, channels: Tensor) -> Inputs:
    """The sampled problem in fp64, its tensors fresh leaves."""

    def wide(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        dtype = torch.complex128 if x.is_complex() else torch.float64
        return x.detach().to(dtype, copy=True)

    def projection(x: Tensor) -> Tensor:
        return wide(x[channels] if x.dim() == 2 else x[batch : batch + 1])

    def sequence(x: Tensor | None) -> Tensor | None:
        return None if x is None else wide(x[batch : batch + 1, channels])

    x = inputs
    return dataclasses.replace(
        x, u=sequence(x.u), delta=sequence(x.delta), A=wide(x.A[channels]), B=projection(x.B),
        C=projection(x.C), D=wide(x.D[channels]), z=sequence(x.z),
        delta_bias=wide(x.delta_bias[channels]), initial_state=sequence(x.initial_state),
        dout=sequence(x.dout),
    )  # fmt: skip


def check_problem(problem: Problem, inputs: Inputs, backward: bool) -> dict[str, float]:
    """Relative L2 error of the output, the last state and each gradient, over the sample.

    Raises:
        RuntimeError: an error is above its tolerance, or not a number.
    """
    batch = int(torch.randint(problem.shape.batch, ()))
    channels = _sample_channels(problem.shape.dim, problem.shape.groups, inputs.u.device)
    sample = _cut(inputs, batch, channels)
    tensors = sample.tensors()
    for tensor in tensors.values():
        tensor.requires_grad_(backward)
    expected, expected_state = parallel_scan(sample)

    out, last_state, states = inputs.forward_op(save_states=backward)
    errors, wrong = {}, []

    def compare(name: str, actual: Tensor, expected: Tensor, slack: float = 1) -> None:
        errors[name] = error = relative_l2(actual, expected.detach())
        tolerance = slack * TOLERANCE[actual.dtype]
        if not error <= tolerance:
            wrong.append(f"{name} {error:.1e} (tolerance {tolerance:.0e})")

    compare("out", out[batch, channels], expected[0])
    compare("last_state", last_state[batch, channels], expected_state[0])
    if backward:
        gradients = torch.autograd.grad(expected, list(tensors.values()), sample.dout)
        masked = torch.zeros_like(inputs.dout)
        masked[batch, channels] = inputs.dout[batch, channels]
        actual = inputs.backward_op(states, masked)
        for name, gradient in zip(tensors, gradients, strict=True):
            cut = actual[name]
            is_parameter = name in ("A", "D", "delta_bias") or (name in "BC" and cut.dim() == 2)
            if is_parameter:
                compare(f"d{name}", cut[channels], gradient, _SUM_SLACK)
            elif name in "BC":
                compare(f"d{name}", cut[batch], gradient[0])
            else:
                compare(f"d{name}", cut[batch, channels], gradient[0])
    if wrong:
        raise RuntimeError(f"relative error of {', '.join(wrong)}")
    return errors
