"""A call of every operator, small, for tests of what PyTorch does with all of them."""

from collections.abc import Callable

import torch

from problem import generator
from s6_step import s6_step
from selective_scan import (
    adaptive_unitary_scan_fn,
    causal_conv1d_fn,
    causal_conv1d_update,
    diagonal_scan_fn,
    mamba_inner_fn,
    selective_scan_fn,
    selective_scan_prefill,
    selective_state_update,
)
from selective_scan._s6_step import StackTensors

Call = tuple[Callable, list[torch.Tensor]]
BATCH, DIM, DSTATE = 2, 4, 3


class _Random:
    def __init__(self, name: str, device: str, seqlen: int) -> None:
        self._generator, self.device, self.seqlen = generator(name), device, seqlen

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, dtype=dtype).to(self.device)

    def rows(self) -> torch.Tensor:
        return self.normal(BATCH, DIM, self.seqlen)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator).to(self.device)


def _scan(random: _Random) -> Call:
    u, delta, A = _scanned(random)
    B, C = random.normal(2, BATCH, DSTATE, random.seqlen)
    return selective_scan_fn, [u, delta, A, B, C]


def _scan_of_everything(random: _Random) -> Call:
    u, delta, A = _scanned(random)
    A = torch.complex(A, random.normal(DIM, DSTATE))
    B, C = random.normal(2, BATCH, 2, DSTATE, 2 * random.seqlen)
    D, z, bias = random.normal(DIM), random.rows(), random.uniform(DIM)
    initial_state = random.normal(BATCH, DIM, DSTATE, dtype=torch.complex64)

    def function(u, delta, A, B, C, D, z, bias, initial_state):
        return selective_scan_fn(
            *(u, delta, A, B, C, D, z, bias, True, True),
            discretization_method="foh",
            initial_state=initial_state,
            reverse=True,
        )

    return function, [u, delta, A, B, C, D, z, bias, initial_state]


def _matrix_scan(random: _Random) -> Call:
    u, delta, _ = _scanned(random)
    A = random.normal(DIM, DSTATE, DSTATE) - 2 * torch.eye(DSTATE, device=u.device)
    B, C = random.normal(2, DIM, DSTATE)

    def function(u, delta, A, B, C):
        return selective_scan_fn(u, delta, A, B, C, discretization_method="bilinear")

    return function, [u, delta, A, B, C]


def _scanned(random: _Random) -> list[torch.Tensor]:
    u, delta = random.rows(), 0.5 * random.uniform(BATCH, DIM, random.seqlen)
    return [u, delta, -0.2 - random.uniform(DIM, DSTATE)]


def _diagonal_scan(random: _Random) -> Call:
    return diagonal_scan_fn, [random.uniform(DIM, 1), random.rows()]


def _unitary_scan(random: _Random) -> Call:
    u, dt, _ = _scanned(random)
    x, x_bias = random.normal(DIM, DSTATE, DIM), random.normal(DIM, DSTATE)
    B, C = random.normal(2, DSTATE, dtype=torch.complex64)
    return adaptive_unitary_scan_fn, [u, dt, x, x_bias, B, C, random.normal(DIM)]


def _convolution(random: _Random) -> Call:
    return causal_conv1d_fn, [random.rows(), random.normal(DIM, 4)]


def _convolution_with_states(random: _Random) -> Call:
    x, weight, bias = random.rows(), random.normal(DIM, 4), random.normal(DIM)

    def function(x, weight, bias, states):
        return causal_conv1d_fn(x, weight, bias, None, states, True, activation="silu")

    return function, [x, weight, bias, random.normal(BATCH, DIM, 3)]


def _layer(random: _Random, bidirectional: bool) -> Call:
    rank, d_model = 2, 6
    tensors = [
        random.normal(BATCH, random.seqlen, 2 * DIM).transpose(1, 2),
        random.normal(DIM, 1, 4),
        random.normal(DIM),
        random.normal(rank + 2 * DSTATE, DIM),
        random.normal(DIM, rank),
        random.normal(d_model, DIM),
        -0.2 - random.uniform(DIM, DSTATE),
        random.normal(DIM),
    ]

    def function(xz, conv_weight, conv_bias, x_proj, delta_proj, out_proj, A, D):
        return mamba_inner_fn(
            *(xz, conv_weight, conv_bias, x_proj, delta_proj, out_proj, None, A),
            D=D,
            bidirectional=bidirectional,
        )

    return function, tensors


# With a derivative.
DIFFERENTIABLE: dict[str, Callable[[_Random], Call]] = {
    "scan": _scan,
    "scan of everything": _scan_of_everything,
    "matrix scan": _matrix_scan,
    "diagonal scan": _diagonal_scan,
    "unitary scan": _unitary_scan,
    "convolution": _convolution,
    "convolution with states": _convolution_with_states,
    "layer": lambda random: _layer(random, bidirectional=False),
    "layer of two directions": lambda random: _layer(random, bidirectional=True),
}


def _update(random: _Random, out: list[torch.Tensor]) -> Call:
    x, B, C = random.normal(BATCH, DIM), *random.normal(2, BATCH, DSTATE)
    state, dt, A = (
        random.normal(BATCH, DIM, DSTATE),
        random.uniform(BATCH, DIM),
        _scanned(random)[2],
    )

    def function(state, x, dt, A, B, C, out=None):
        return selective_state_update(state, x, dt, A, B, C, out=out)

    return function, [state, x, dt, A, B, C, *out]


def _convolution_update(random: _Random, out: list[torch.Tensor]) -> Call:
    def function(x, state, weight, out=None):
        return causal_conv1d_update(x, state, weight, out=out)

    tensors = [random.normal(BATCH, DIM), random.normal(BATCH, DIM, 3), random.normal(DIM, 4)]
    return function, [*tensors, *out]


def _prefill(random: _Random, out: list[torch.Tensor]) -> Call:
    u, delta, A = _scanned(random)
    B, C = random.normal(2, 1, DSTATE, random.seqlen)

    def function(u, states, delta, A, B, C, bounds, slots, out=None):
        return selective_scan_prefill(
            *(u, states, delta, A, B, C), cu_seqlens=bounds, cache_indices=slots, out=out
        )

    states = random.normal(5, DIM, DSTATE)
    return function, [u[0], states, delta[0], A, B, C, *_packed(random), *out]


def _convolution_over_pool(random: _Random) -> Call:
    x, weight = random.normal(DIM, random.seqlen), random.normal(DIM, 4)
    states = random.normal(5, DIM, 3)

    def function(x, weight, states, bounds, slots):
        pool = {"conv_states": states, "cache_indices": slots}
        return causal_conv1d_fn(x, weight, cu_seqlens=bounds, **pool)

    return function, [x[None], weight, states, *_packed(random)]


def _step(random: _Random) -> Call:
    d_model, d_inner, rank, layers = 16, 32, 2, 2

    def of_layers(*shape: int) -> list[torch.Tensor]:
        return [random.normal(*shape) for _ in range(layers)]

    lists = [
        of_layers(d_model),
        of_layers(2 * d_inner, d_model),
        of_layers(d_inner, 1, 4),
        of_layers(rank + 2 * DSTATE, d_inner),
        of_layers(d_inner, rank),
        of_layers(d_inner, DSTATE),
        of_layers(d_inner),
        of_layers(d_model, d_inner),
        of_layers(BATCH, d_inner, 3),
        of_layers(BATCH, d_inner, DSTATE),
    ]

    def function(hidden, *tensors):
        norm, in_proj, conv1d, x_proj, dt_proj, A_log, D, out_proj, conv_state, state = (
            list(tensors[i : i + layers]) for i in range(0, len(tensors), layers)
        )
        matrices = (norm, in_proj, None, conv1d, None, x_proj, dt_proj, None)
        return s6_step(hidden, StackTensors(*matrices, A_log, D, out_proj, None, conv_state, state))

    return function, [random.normal(BATCH, 1, d_model), *(x for entry in lists for x in entry)]


def _packed(random: _Random) -> list[torch.Tensor]:
    """The boundaries of two sequences, and their slots."""
    numbers = ([0, 30, random.seqlen], [3, 1])
    return [torch.tensor(it, dtype=torch.int32, device=random.device) for it in numbers]


# That change states in place.
IN_PLACE: dict[str, Callable[[_Random], Call]] = {
    "update": lambda random: _update(random, []),
    "update into a tensor": lambda random: _update(random, [random.normal(BATCH, DIM)]),
    "convolution's update": lambda random: _convolution_update(random, []),
    "convolution's update into a tensor": lambda random: _convolution_update(
        random, [random.normal(BATCH, DIM)]
    ),
    "prefill": lambda random: _prefill(random, []),
    "prefill into a tensor": lambda random: _prefill(random, [random.normal(DIM, random.seqlen)]),
    "convolution over a pool": _convolution_over_pool,
    "step": _step,
}


def make(name: str, device: str, seqlen: int = 70) -> Call:
    """A function and its arguments, all of them tensors."""
    return (DIFFERENTIABLE | IN_PLACE)[name](_Random(name, device, seqlen))
