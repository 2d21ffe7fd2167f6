"""Checks the kernels' results on the measured inputs against fp64 before timing them.

The reference goes through time step by step, which is too slow for long sequences on many channels.
Therefore a sample of (batch, channel) pairs is compared, over the whole sequence, with the same
recurrence scanned in parallel in fp64 (`Scan.exact`; a test compares it with the reference). The
kernels still run on the full problem: dout is zero outside the sample, so every gradient, including
sums over channels and batch, is that of the sample.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.operators import Scan

# The allowed relative L2 error by the result's dtype: its rounding, with a margin for the
# recurrence.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.complex128: 1e-11,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}
# The factor by which errors may be larger if terms cancel: in gradients that are summed over the
# whole sequence, or over rotations that never decay.
_SUM_SLACK = 50
_CHANNELS_PER_GROUP = 2


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """Returns the relative L2 error; infinity in place of NaN, which max() may pass over."""
    expected = expected.to(torch.complex128 if expected.is_complex() else torch.float64)
    scale = expected.norm().item()
    difference = (actual.to(expected.dtype) - expected).norm().item()
    error = difference / scale if scale else difference
    return math.inf if math.isnan(error) else error


def _sample_channels(dim: int, groups: int, device: torch.device) -> Tensor:
    """Returns the same number of channels of each group: its last one, and others at random."""
    per_group = dim // groups
    drawn = min(_CHANNELS_PER_GROUP, per_group) - 1
    last = torch.tensor([per_group - 1])
    chosen = [torch.cat([torch.randperm(per_group - 1)[:drawn], last]) for _ in range(groups)]
    return torch.cat([group * per_group + each for group, each in enumerate(chosen)]).to(device)


def check(scan: Scan, backward: bool) -> dict[str, float]:
    """Returns the relative L2 error of the output, the last state and each gradient, over the
    sample.

    Raises:
        RuntimeError: an error is above its tolerance, or not a number.
    """
    shape = scan.problem.shape
    entry = int(torch.randint(shape.batch, ()))
    channels = _sample_channels(shape.dim, shape.groups, scan.dout.device)

    def cut(x: Tensor, axes: str = "bd") -> Tensor:
        x = x[entry : entry + 1] if "b" in axes else x
        if "d" not in axes:
            return x
        return x[:, channels] if "b" in axes else x[channels]

    def leaf(x: Tensor) -> Tensor:
        wide = torch.complex128 if x.is_complex() else torch.float64
        return x.detach().to(wide, copy=True).requires_grad_(backward)

    sample = {name: leaf(cut(x, scan.axes[name])) for name, x in scan.tensors.items()}
    expected, expected_state = scan.exact(sample, channels)
    out, last_state, saved = scan.forward(backward)
    results = {"out": (cut(out), expected, 1)}
    if last_state is not None:
        results["last_state"] = (cut(last_state), expected_state, 1)
    if backward:
        dout = torch.zeros_like(scan.dout)
        dout[entry, channels] = scan.dout[entry, channels]
        # For a single step without an initial state the output does not depend on A.
        gradients = torch.autograd.grad(
            expected, list(sample.values()), cut(dout).to(expected), materialize_grads=True
        )
        actual = scan.backward(saved, dout)
        for (name, gradient), wanted in zip(actual.items(), gradients, strict=True):
            axes = scan.axes[name]
            slack = 1 if axes == "bd" or (name in "BC" and axes == "b") else _SUM_SLACK
            results[f"d{name}"] = (cut(gradient, axes), wanted, slack)

    errors = {name: relative_l2(got, wanted.detach()) for name, (got, wanted, _) in results.items()}
    allowed = {name: slack * TOLERANCE[got.dtype] for name, (got, _, slack) in results.items()}
    wrong = [
        f"{name} {error:.1e} (tolerance {allowed[name]:.0e})"
        for name, error in errors.items()
        if not error <= allowed[name]
    ]
    if wrong:
        raise RuntimeError(f"relative error of {', '.join(wrong)}")
    return errors
