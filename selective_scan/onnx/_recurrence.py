"""The recurrence in ONNX's operators, written in PyTorch: LinearAttention of opset 27, or Scan,
which every opset has, with one step as its body."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from ._pair import Pair

try:
    from torch._higher_order_ops.scan import scan_op
except ImportError as error:
    raise ImportError(
        "selective_scan: selective_scan.onnx needs torch._higher_order_ops.scan.scan_op, which "
        f"torch {torch.__version__} lacks"
    ) from error

# Operators of the newest opset are kept in this domain until the program has that opset: the
# exporter begins with an older one, and the converter refuses operators that are not in it.
DOMAIN = "selective_scan"
OLDEST_OPSET, NEWEST_OPSET = 18, 27
CHUNK = 256  # steps

State = Tensor | Pair


@dataclass(frozen=True)
class Inputs:
    """The inputs of a scan: h[t] = abar·h[t-1] + bbar·B·u, y[t] = Σ_n C h[t].

    Attributes:
        u, delta: (batch, seqlen, dim), or (batch, dim) for one step.
        B, C: (batch, seqlen, dim or 1, dstate), without seqlen for one step; (dim, dstate) if
            constant.
        A: (dim, dstate).
        discretize: maps Δ and Δ·A to abar and bbar.
        has_exponential_decay: whether abar = exp(Δ·A).
        still: the Δ with which a step leaves the state unchanged if u is 0.
    """

    u: Tensor
    delta: Tensor
    B: State
    C: State
    A: State
    discretize: Callable[[Tensor, State], tuple[State, State]]
    has_exponential_decay: bool
    still: float = 0.0

    def _names(self) -> tuple[list[str], list[str]]:
        """Returns the names of the inputs that vary from step to step, and of the shared ones."""
        shared = [name for name in "BC" if parts_of(getattr(self, name))[0].dim() == 2]
        return [name for name in ("u", "delta", "B", "C") if name not in shared], [*shared, "A"]

    def of_steps(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Returns the inputs with a change applied to those that vary from step to step."""
        varying, _ = self._names()
        return replace(self, **{name: _changed(getattr(self, name), change) for name in varying})

    def walk(
        self, step: Callable[[State, Inputs], tuple[State, Tensor]], h: State
    ) -> tuple[State, Tensor]:
        """Runs ONNX's Scan along the first dimension of the inputs that vary from step to step.

        Args:
            step: maps h and the inputs of one entry to the h after it, and y.
            h: the state before the first step.

        Returns:
            h after the last step, and y of all entries.
        """
        varying, shared = self._names()
        alone = replace(self, **{name: _changed(getattr(self, name), _alone) for name in shared})
        alone = alone.of_steps(_alone)
        given = {name: parts_of(getattr(alone, name)) for name in (*varying, *shared)}
        counts = {name: len(parts) for name, parts in given.items()}
        states = [*map(_alone, parts_of(h))]

        def body(*values: Tensor) -> list[Tensor]:
            remaining = iter(values)
            h = whole_of([*islice(remaining, len(states))])
            own = {name: whole_of([*islice(remaining, count)]) for name, count in counts.items()}
            h, y = step(h, replace(self, **own))
            return [*parts_of(h), y]

        xs, rest = (tuple(p for name in names for p in given[name]) for names in (varying, shared))
        *last, y = scan_op(body, tuple(states), xs, rest)
        return whole_of(last), y


def parts_of(value: State) -> list[Tensor]:
    return [value.re, value.im] if isinstance(value, Pair) else [value]


def whole_of(parts: list[Tensor]) -> State:
    return parts[0] if len(parts) == 1 else Pair(*parts)


def _changed(value: State, change: Callable[[Tensor], Tensor]) -> State:
    return whole_of([change(part) for part in parts_of(value)])


def _alone(tensor: Tensor) -> Tensor:
    """Copies an input of a loop, whose inputs must not share memory and need no gradient."""
    return tensor.detach().clone()


def take_step(h: State, inputs: Inputs) -> tuple[State, Tensor]:
    """Takes one step; returns h and y, (batch, dim)."""
    delta, u = inputs.delta[..., None], inputs.u[..., None]
    abar, bbar = inputs.discretize(delta, delta * inputs.A)
    h = abar * h + bbar * inputs.B * u
    y = (inputs.C * h).sum(-1)
    return h, 2 * y.re if isinstance(y, Pair) else y


def take_steps(h: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Takes all steps by one LinearAttention; returns h and y, (batch, seqlen, dim)."""
    delta = inputs.delta[..., None]
    x = delta * inputs.A
    abar, bbar = inputs.discretize(delta, x)
    if inputs.has_exponential_decay:
        log_decay, flips = x, None
    else:
        size = abar.abs().clamp(min=torch.finfo(abar.dtype).tiny)  # keeps the logarithm finite
        log_decay, flips = size.log(), abar < 0
    return attend(log_decay, flips, bbar * inputs.B, inputs.u, inputs.C.expand(x.shape), h)


def take_chunks(h: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Takes all steps by a Scan over chunks, so that LinearAttention's inputs, which are dstate
    times as large as the scan's, exist for only one chunk at a time."""
    seqlen = inputs.u.shape[1]
    if isinstance(seqlen, int) and seqlen <= CHUNK:
        return take_steps(h, inputs)
    chunk = torch.sym_min(seqlen, CHUNK)
    count = (seqlen + chunk - 1) // chunk

    def pad(steps: Tensor, value: float = 0.0) -> Tensor:
        sides = (0, 0) * (steps.dim() - 2) + (0, count * chunk - seqlen)
        return F.pad(steps, sides, value=value)

    padded = replace(inputs.of_steps(pad), delta=pad(inputs.delta, inputs.still))
    chunks = padded.of_steps(lambda steps: steps.unflatten(1, (count, chunk)).transpose(0, 1))
    h, y = chunks.walk(take_steps, h)
    return h, y.transpose(0, 1).flatten(1, 2)[:, :seqlen]


def attend(
    log_decay: Tensor, flips: Tensor | None, k: Tensor, v: Tensor, q: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes h[t] = ±exp(log_decay[t])·h[t-1] + k[t]·v[t] and y[t] = Σ_n q[t,n] h[t,n] by one
    operator, in which every channel is a head.

    Args:
        log_decay, k, q: (batch, seqlen, dim, dstate).
        flips: the mask of the signs that are −1, of the same shape; None if there are none.
        v: (batch, seqlen, dim).
        state: h before the first step, (batch, dim, dstate).

    Returns:
        h after the last step, and y, (batch, seqlen, dim).
    """
    if flips is not None:
        # With s[t] the product of all signs up to t, the decays of s·h have no sign.
        signs = _sign(flips.long().cumsum(1), k.dtype)
        k, q = k * signs, q * signs
    dim = v.shape[2]
    y, last = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::LinearAttention",
        (q.flatten(2), k.flatten(2), v, state[..., None], log_decay.flatten(2)),
        {"q_num_heads": dim, "kv_num_heads": dim, "scale": 1.0, "update_rule": "gated"},
        dtypes=(v.dtype, v.dtype),
        shapes=(v.shape, (*state.shape, 1)),
        version=1,
    )
    last = last[..., 0]
    if flips is not None:
        last = last * _sign(flips.long().sum(1), k.dtype)
    return last, y


def _sign(count: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sign of a product of `count` negative numbers."""
    return (1 - 2 * (count % 2)).to(dtype)


def convolve_statefully(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Computes the causal convolution and its last states by one operator of the newest opset."""
    batch, dim, _ = x.shape
    out, last = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::CausalConvWithState",
        (x, weight[:, None], bias, states),
        {"activation": "none" if activation is None else "silu"},
        dtypes=(x.dtype, x.dtype),
        shapes=(x.shape, (batch, dim, weight.shape[1] - 1)),
        version=1,
    )
    return out, last


def convolve_plainly(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Computes the causal convolution and its last states by operators that every opset has."""
    (batch, dim, seqlen), history = x.shape, weight.shape[1] - 1
    if states is None:
        states = x.new_zeros(batch, dim, history)
    seen = torch.cat([states, x], -1)
    if x.dtype == torch.float64:  # runtimes have no Conv in float64
        parts = (w[:, None] * seen[..., i : i + seqlen] for i, w in enumerate(weight.unbind(1)))
        out = sum(parts, 0 if bias is None else bias[:, None])
    else:
        out = F.conv1d(seen, weight[:, None], bias, groups=dim)
    return (out if activation is None else F.silu(out)), seen[..., seqlen:]
