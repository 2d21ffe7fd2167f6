"""A small call of every operator, for the tests of PyTorch's transforms, compilers and checks."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import test_causal_conv1d_pool as pool
import test_causal_conv1d_update as convolution_update
import test_s6_step as s6
import test_selective_scan_prefill as prefill
import test_selective_state_update as update
from gpu_kernels import skip_without_step
from opchecks import in_order
from problem import generator
from s6_step import s6_step, s6_step_ref
from selective_scan import (
    adaptive_unitary_scan_fn,
    causal_conv1d_fn,
    causal_conv1d_ref,
    causal_conv1d_update,
    causal_conv1d_update_ref,
    diagonal_scan_fn,
    exponential_trapezoid_fn,
    mamba_inner_fn,
    rotate_states,
    selective_scan_fn,
    selective_scan_prefill,
    selective_scan_prefill_ref,
    selective_state_update,
    selective_state_update_ref,
)
from selective_scan.compat.directions import bimamba_inner_fn, mamba_inner_fn_no_out_proj
from selective_scan.vision import cross_scan_fn

Call = tuple[Callable, list[torch.Tensor]]
BATCH, DIM, DSTATE = 2, 4, 3


class _Random:
    def __init__(self, name: str, device: str, seqlen: int) -> None:
        self._generator, self.device, self.seqlen = generator(name), device, seqlen

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, dtype=dtype).to(self.device)

    def rows(self) -> torch.Tensor:
        return self.normal(BATCH, DIM, self.seqlen)

    def bounds(self) -> torch.Tensor:
        """Returns bounds of three packed sequences, one without steps, that fit any length."""
        return torch.tensor([2, 20, 20, 31], device=self.device)

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


def _packed_scan(random: _Random) -> Call:
    function, tensors = _scan(random)
    bounds = random.bounds()

    def packed(*tensors):
        return function(*tensors, reverse=True, return_last_state=True, cu_seqlens=bounds)

    return packed, [it if it.shape[0] == DIM else it[:1] for it in tensors]


def _scan_of_turned_states(random: _Random) -> Call:
    u, delta, A = _scanned(random)
    B, C = random.normal(2, BATCH, 2 * DSTATE, random.seqlen)
    angles = random.normal(BATCH, DSTATE, random.seqlen)

    def function(u, delta, A, B, C, angles):
        B, C = rotate_states(B, C, angles)
        return selective_scan_fn(u, delta, A.repeat_interleave(2, -1), B, C)

    return function, [u, delta, A, B, C, angles]


def _trapezoid(random: _Random) -> Call:
    u, delta, A = _scanned(random)
    A = torch.complex(A, random.normal(DIM, DSTATE))
    B, C = random.normal(2, 1, 2, DSTATE, random.seqlen, dtype=torch.complex64)
    mix, D, z, bias = (
        random.uniform(*u.shape),
        random.normal(DIM),
        random.rows(),
        random.normal(DIM),
    )
    initial_state = random.normal(3, 2, DIM, DSTATE, dtype=torch.complex64)
    bounds = random.bounds()

    def function(u, delta, A, B, C, mix, D, z, bias, initial_state):
        return exponential_trapezoid_fn(
            *(u, delta, A, B, C, D, z, bias, True, True),
            mix=mix,
            initial_state=initial_state,
            reverse=True,
            cu_seqlens=bounds,
        )

    return function, [u[:1], delta[:1], A, B, C, mix[:1], D, z[:1], bias, initial_state]


def _cross_scan(random: _Random) -> Call:
    places = (5, random.seqlen // 5)
    x, delta = random.normal(BATCH, DIM, *places), random.normal(BATCH, 4, DIM, *places)
    A = -0.2 - random.uniform(4, DIM, DSTATE)
    B, C = random.normal(2, BATCH, 4, DSTATE, *places)
    D, bias = random.normal(2, 4, DIM)

    def function(*tensors):
        return cross_scan_fn(*tensors, delta_softplus=True)

    return function, [x, delta, A, B, C, D, bias]


def _diagonal_scan(random: _Random) -> Call:
    return diagonal_scan_fn, [random.uniform(DIM, 1), random.rows()]


def _packed_diagonal_scan(random: _Random) -> Call:
    bounds = random.bounds()

    def function(a, b, initial_state):
        return diagonal_scan_fn(a, b, initial_state=initial_state, cu_seqlens=bounds)

    a, b = random.uniform(1, DIM, random.seqlen), random.normal(1, DIM, random.seqlen)
    return function, [a, b, random.normal(3, DIM)]


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


def _packed_convolution(random: _Random) -> Call:
    bounds = random.bounds()

    def function(x, weight):
        return causal_conv1d_fn(x, weight, cu_seqlens=bounds, activation="silu")

    return function, [random.rows()[:1], random.normal(DIM, 4)]


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


def _layer_of_two_poles(random: _Random) -> Call:
    _, tensors = _layer(random, bidirectional=False)
    *inputs, A, D = tensors

    def function(*tensors):
        *inputs, A, A_b, D, bias = tensors
        return bimamba_inner_fn(*inputs, None, A, A_b, None, None, D, bias, delta_softplus=True)

    return function, [*inputs, A, 2 * A, D, random.uniform(DIM)]


def _layer_without_projection(random: _Random) -> Call:
    _, (*inputs, _, A, D) = _layer(random, bidirectional=False)

    def function(*tensors):
        *inputs, A, D = tensors
        return mamba_inner_fn_no_out_proj(*inputs, A, None, None, D, delta_softplus=True)

    return function, [*inputs, A, D]


# Operators with a derivative.
DIFFERENTIABLE: dict[str, Callable[[_Random], Call]] = {
    "scan": _scan,
    "scan of everything": _scan_of_everything,
    "packed scan": _packed_scan,
    "scan of turned states": _scan_of_turned_states,
    "matrix scan": _matrix_scan,
    "exponential trapezoid": _trapezoid,
    "cross scan": _cross_scan,
    "diagonal scan": _diagonal_scan,
    "packed diagonal scan": _packed_diagonal_scan,
    "unitary scan": _unitary_scan,
    "convolution": _convolution,
    "convolution with states": _convolution_with_states,
    "packed convolution": _packed_convolution,
    "layer": lambda random: _layer(random, bidirectional=False),
    "layer of two directions": lambda random: _layer(random, bidirectional=True),
    "layer of two poles": _layer_of_two_poles,
    "layer without projection": _layer_without_projection,
}


# --- in place -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InPlace:
    """An operator that changes states in place. `make` returns a call's arguments by name; `slots`
    names the arguments with indices of states, first the one that has an index for each row of
    `x`."""

    function: Callable
    reference: Callable
    op: torch._ops.OpOverloadPacket
    make: Callable[..., dict]
    x: str
    states: str
    slots: tuple[str, ...]
    small: dict  # changes of a case that make it small

    @property
    def takes_out(self) -> bool:
        return "out" in inspect.signature(self.function).parameters

    def into_a_tensor(self, arguments: dict) -> dict:
        return arguments | {"out": torch.zeros_like(arguments[self.x])}

    def op_arguments(self, arguments: dict) -> tuple:
        """Returns the op's arguments in order; a stack's op takes its lists separately."""
        stack = arguments.get("stack")
        return in_order(self.op, arguments if stack is None else arguments | stack._asdict())

    def states_of(self, arguments: dict) -> list[torch.Tensor]:
        return s6.states_of(arguments) if "stack" in arguments else [arguments[self.states]]


def _of_case(module: ModuleType) -> Callable[..., dict]:
    return lambda device, **changes: module.make(module.Case(**changes), device)


_ops = torch.ops.selective_scan
OPERATORS_IN_PLACE = {
    "update": InPlace(
        selective_state_update,
        selective_state_update_ref,
        _ops.selective_state_update,
        _of_case(update),
        *("x", "state", ("state_batch_indices", "dst_state_batch_indices")),
        {"indices": torch.int32, "dim": 6, "dstate": 3},
    ),
    "convolution's update": InPlace(
        causal_conv1d_update,
        causal_conv1d_update_ref,
        _ops.causal_conv1d_update,
        _of_case(convolution_update),
        *("x", "conv_state", ("conv_state_indices",)),
        {"slots": 7},
    ),
    "prefill": InPlace(
        selective_scan_prefill,
        selective_scan_prefill_ref,
        _ops.selective_scan_prefill,
        _of_case(prefill),
        *("u", "states", ("cache_indices", "checkpoint_slots")),
        {"every": 64},
    ),
    "convolution over a pool": InPlace(
        causal_conv1d_fn,
        causal_conv1d_ref,
        _ops.causal_conv1d_prefill,
        pool.make,
        *("x", "conv_states", ("cache_indices",)),
        {},
    ),
    "step": InPlace(
        s6_step,
        s6_step_ref,
        _ops.s6_step,
        lambda device, **changes: {"eps": 1e-5} | s6.make(s6.Case(**changes), device),
        *("hidden", "", ("state_batch_indices",)),
        {"slots": 4, "padding": 1, "vocabulary": 6},
    ),
}
INTO_A_TENSOR = " into a tensor"
IN_PLACE = [
    *OPERATORS_IN_PLACE,
    *(f"{name}{INTO_A_TENSOR}" for name, it in OPERATORS_IN_PLACE.items() if it.takes_out),
]


def in_place(name: str, device: str) -> tuple[InPlace, dict]:
    """Returns one of `IN_PLACE` and a call's arguments by name."""
    operator = OPERATORS_IN_PLACE[name.removesuffix(INTO_A_TENSOR)]
    if operator.function is s6_step:
        skip_without_step(device)
    arguments = operator.make(device, **operator.small)
    return operator, operator.into_a_tensor(arguments) if INTO_A_TENSOR in name else arguments


def _of_tensors(function: Callable, arguments: dict) -> Call:
    """Returns a call whose arguments are the tensors found anywhere among `arguments`."""
    leaves, spec = tree_flatten(arguments)
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]

    def call(*tensors):
        given = iter(tensors)
        values = [next(given) if it else leaf for it, leaf in zip(is_tensor, leaves, strict=True)]
        return function(**tree_unflatten(values, spec))

    return call, [leaf for it, leaf in zip(is_tensor, leaves, strict=True) if it]


def with_tuple(function: Callable) -> Callable[..., tuple]:
    """Returns a function that returns a single result as a tuple, too."""

    def call(*arguments, **options):
        result = function(*arguments, **options)
        return result if isinstance(result, tuple) else (result,)

    return call


def make(name: str, device: str, seqlen: int = 70) -> Call:
    """Returns a function and its arguments, all of them tensors."""
    if name in DIFFERENTIABLE:
        return DIFFERENTIABLE[name](_Random(name, device, seqlen))
    operator, arguments = in_place(name, device)
    return _of_tensors(operator.function, arguments)
