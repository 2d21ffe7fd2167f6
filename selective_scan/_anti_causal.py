"""The convolution of a sequence that runs from its last step to its first, by the causal one's ops.

Each output is one of x and the width-1 steps behind it. A causal convolution with the taps in
reverse gives the same width-1 steps later. So it begins there, with the first steps of x as its
states, and goes on past the end of x over as many zeros: x is read where it lies, and not turned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._ops import ops


def _ends(x: Tensor, width: int) -> tuple[int, Tensor, Tensor]:
    """The number of outputs before those past the end, and these' input and states."""
    seqlen, history = x.shape[2], width - 1
    num_last = min(seqlen, history)
    first_of_last = seqlen - num_last
    zeros = x.new_zeros(x.shape[0], num_last, x.shape[1]).transpose(1, 2)
    states = torch.nn.functional.pad(x[..., first_of_last:], (0, history - num_last))
    return first_of_last, zeros, states


def anti_causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu of the convolution of x, (batch, dim, seqlen), as rows, (batch, seqlen, dim)."""
    width, weight = weight.shape[1], weight.flip(1)
    first_of_last, zeros, states = _ends(x, width)
    calls = [(zeros, states)]
    if first_of_last > 0:
        calls.insert(0, (x[..., width - 1 :], x[..., : width - 1]))
    rows = [
        ops.causal_conv1d_fwd(steps, weight, bias, None, None, initial, False, "silu")[0]
        for steps, initial in calls
    ]
    return torch.cat([part.transpose(1, 2) for part in rows], dim=1)


def anti_causal_conv1d_backward(
    dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, dx: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of weight and bias; fills dx. dout is laid out as x."""
    width, weight = weight.shape[1], weight.flip(1)
    history = width - 1
    first_of_last, zeros, states = _ends(x, width)
    others = (weight, bias, None, None)
    _, dweight, dbias, dstates = ops.causal_conv1d_bwd(
        dout[..., first_of_last:], None, zeros, *others, states, "silu"
    )
    if first_of_last > 0:
        first_dweight, first_dbias, dx[..., :history] = ops.causal_conv1d_bwd_out(
            *(dout[..., :first_of_last], None, x[..., history:], *others, x[..., :history]),
            "silu",
            dx=dx[..., history:],
        )
        dweight = dweight + first_dweight
        dbias = None if bias is None else dbias + first_dbias
        dx[..., first_of_last:] += dstates
    else:
        dx.copy_(dstates[..., : x.shape[2]])
    return dweight.flip(1), dbias
