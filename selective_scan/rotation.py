"""Rotations of states by input-dependent angles, expressed as rotations of B and C."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._checks import REAL, Call, check_dims, fail
from ._table import PROJECTIONS, Shape, Table, TensorArgument


def rotate_states(B: Tensor, C: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates B and C such that a scan of real states rotates pairs of states.

    The states 2p and 2p + 1 are the real and imaginary part of a complex state h; B and C are
    paired likewise. If both states of a pair have the same pole, a scan with the returned real
    B' = exp(−i·angles)·B and C' = exp(−i·angles)·C computes ::

        h[t] = abar·exp(i·(angles[t] − angles[t-1]))·h[t-1] + bbar·B[t]·u[t]
        y[t] = Σ Re(conj(C[t])·h[t])

    because the states do not rotate in a frame that rotates with them. Mamba-3 implements its
    data-dependent rotary embedding this way. A one-layer model of real states that only decay
    cannot count modulo k; a model whose states rotate by 2π/k at each event can.

    The initial and last states of the scan are those of the rotating frame, exp(−i·angles[t])·h[t].
    A call can therefore continue from a last state only if its angles continue as well, rather than
    restart from 0. All operations are elementwise and can be differentiated any number of times.

    Args:
        B: input projection, (batch, dstate, seqlen) or (batch, groups, dstate, seqlen), of a real
            dtype; dstate is even.
        C: output projection, shaped like B.
        angles: cumulative angles up to each step, in radians, (batch, dstate/2, seqlen) or, if B
            has groups, (batch, groups, dstate/2, seqlen), of any real dtype. Float32 resolves 1e-4
            of a radian up to 1,000; take larger sums modulo 2π, or in float64.

    Returns:
        B' and C', with the shapes and dtypes of B and C. Arithmetic is float32, or float64 if any
        tensor is float64.

    Raises:
        TypeError: an argument is not a tensor.
        RuntimeError: an argument has a wrong layout, device, dtype or shape; the message names the
            argument, the expected and the actual value.

    References:
        Mamba-3, 2026, arXiv:2603.15569: complex states as rotary embeddings of B and C.

    Example:
        >>> import torch
        >>> from selective_scan import rotate_states, selective_scan_fn
        >>> bits = torch.tensor([0.0, 1, 1, 0, 1]).view(1, 1, 5)
        >>> B = torch.tensor([1.0, 0]).view(1, 2, 1) * torch.tensor([1.0, 0, 0, 0, 0])
        >>> C = torch.tensor([1.0, 0]).view(1, 2, 1).expand(1, 2, 5)
        >>> B, C = rotate_states(B, C, torch.pi * bits.cumsum(-1))
        >>> one = torch.ones(1, 1, 5)
        >>> out = selective_scan_fn(one, one, torch.zeros(1, 2), B, C)  # a state that stays 1
        >>> out.round().flatten().tolist()  # turned by pi at each bit: their parity
        [1.0, -1.0, 1.0, 1.0, -1.0]
    """
    _ARGUMENTS.check_types((B, C, angles))
    call = _ARGUMENTS.check_values((B, C, angles))
    dtype = call.compute_dtype
    cos, sin = angles.to(dtype).cos(), angles.to(dtype).sin()

    def turn(projection: Tensor) -> Tensor:
        even, odd = projection.to(dtype).unflatten(-2, (-1, 2)).unbind(-2)
        pairs = torch.stack([even * cos + odd * sin, odd * cos - even * sin], -2)
        return pairs.flatten(-3, -2).to(projection.dtype)

    return turn(B), turn(C)


def _check_beside(states: str) -> Callable[[str, Tensor, Call], None]:
    """Returns a check that a tensor has B's dimensions, with `states` in place of dstate."""

    def check(name: str, tensor: Tensor, call: Call) -> None:
        batch, *groups, dstate, seqlen = call["B"].shape
        if dstate % 2:
            fail(f"B must have an even dstate, got {tuple(call['B'].shape)}")
        sizes = {"batch": batch, "dstate": dstate, "dstate/2": dstate // 2, "seqlen": seqlen}
        dims = ("batch", *("groups" for _ in groups), states, "seqlen")
        check_dims(name, tensor, dims, sizes | dict(zip(("groups",), groups, strict=False)))

    return check


_ARGUMENTS = Table(
    TensorArgument("B", REAL, Shape(PROJECTIONS)),
    TensorArgument("C", REAL, _check_beside("dstate")),
    TensorArgument("angles", REAL, _check_beside("dstate/2")),
    anchor="B",
)
