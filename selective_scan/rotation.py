"""States that rotate by angles which depend on the input, as rotations of B and C."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._checks import REAL, Call, check_dims, fail
from ._table import PROJECTIONS, Shape, Table, TensorArgument


def rotate_states(B: Tensor, C: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Turns B and C so that the scan of real states rotates pairs of them.

    The states 2p and 2p + 1 are the parts of a complex number h, and of B and C likewise. With
    the same pole for both, and C's pair conjugated in the sum, ::

        h[t] = abar·exp(i·(angles[t] − angles[t-1]))·h[t-1] + bbar·B[t]·u[t]
        y[t] = Σ Re(conj(C[t])·h[t])

    is what a scan computes of the real B' and C' that this returns, B' = exp(−i·angles)·B and
    C' = exp(−i·angles)·C: in a frame that turns along, states do not rotate. Mamba-3 has its
    data-dependent rotary embedding so. A one-layer model of real states that only decay cannot
    count modulo k; one whose states rotate by 2π/k for each event does.

    States of the scan, which it returns or starts from, are those of the turned frame:
    exp(−i·angles[t])·h[t]. They fit where angles go on from call to call, and are not begun anew.
    All is elementwise and can be differentiated any number of times.

    Args:
        B: input projection, (batch, dstate, seqlen) or (batch, groups, dstate, seqlen), of a real
            dtype; dstate is even.
        C: output projection, of the dimensions of B.
        angles: sums of the angles up to each step, in radians, (batch, dstate/2, seqlen) or
            (batch, groups, dstate/2, seqlen), as B has groups, of any real dtype. Float32 keeps
            1e-4 of a radian up to 1,000; longer sums are to be taken modulo 2π, or in float64.

    Returns:
        B' and C', shaped like B and C and of their dtypes. Arithmetic is float32, or float64 if any
        tensor is.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: a wrong layout, device, dtype or shape; the message names the argument, what
            was expected and what came.

    References:
        Mamba-3, 2026, arXiv:2603.15569: complex states by rotary embeddings of B and C.

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
    """Checks a tensor that has the dimensions of B, but this one for its states."""

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
