"""The library's operators, composed of ONNX's.

Each has the arguments of the function that it replaces, so that compositions of a scan and a
convolution, such as a layer, can be built from the operators here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import fail
from .._discretization import DISCRETIZATIONS, EXPONENTIAL, Method, poles, steps_of_sequences
from .._mamba_operators import Layer
from .._s6_step import S6_STEP, StackTensors, compose_step
from .._selective_scan import SELECTIVE_SCAN
from ..causal_conv1d import CAUSAL_CONV1D, Activation
from ..diagonal_scan import DIAGONAL_SCAN
from ..mamba_inner import add, compose
from ._pair import Pair
from ._recurrence import (
    NEWEST_OPSET,
    Inputs,
    State,
    convolve_plainly,
    convolve_statefully,
    parts_of,
    take_chunks,
    take_step,
    whole_of,
)


def refuse(name: str, value: Tensor | None) -> None:
    """Raises a RuntimeError if an argument is given that has no form in ONNX."""
    if value is not None:
        fail(f"{name} must be None for ONNX, got a tensor {tuple(value.shape)}")


def state_of(tensor: Tensor, dtype: torch.dtype) -> State:
    if tensor.is_complex():
        parts = torch.view_as_real(tensor).to(dtype)
        return Pair(parts[..., 0], parts[..., 1])
    return tensor.to(dtype)


def tensor_of(state: State) -> Tensor:
    return torch.complex(state.re, state.im) if isinstance(state, Pair) else state


def _projection(given: Tensor, dim: int, dtype: torch.dtype, is_complex: bool) -> State:
    """Returns constant B or C as (dim, dstate), variable as (batch, seqlen, dim or 1, dstate)."""
    if given.dim() == 2:
        return state_of(given, dtype)
    if is_complex and not given.is_complex():  # (re, im) interleaved along time
        pairs = given.to(dtype).unflatten(-1, (-1, 2))
        projection = Pair(pairs[..., 0], pairs[..., 1])
    else:
        projection = state_of(given, dtype)

    def spread(part: Tensor) -> Tensor:
        part = part[:, None] if part.dim() == 3 else part
        part = part.permute(0, 3, 1, 2)
        groups = part.shape[2]
        if groups in (1, dim):
            return part
        sizes = (*part.shape[:3], dim // groups, part.shape[3])
        return part[:, :, :, None].expand(sizes).flatten(2, 3)

    return whole_of([spread(part) for part in parts_of(projection)])


def _with_step_of_one(
    discretize: Callable[[Tensor, State], tuple[State, State]], delta: Tensor, x: State
) -> tuple[State, State]:
    """Discretizes where the input, and not bbar, has been multiplied by the input's step."""
    return discretize(torch.ones_like(delta), x)


class Slot:
    """The slot of a pool that belongs to the single sequence of a call.

    Args:
        pool: (slots, ...), changed in place.
        cu_seqlens: (2,), the sequence's boundaries.
        cache_indices, has_initial_state, pad_slot_id: see selective_scan_prefill.
    """

    def __init__(
        self,
        pool: Tensor,
        cu_seqlens: Tensor,
        cache_indices: Tensor | None,
        has_initial_state: Tensor | None,
        pad_slot_id: int,
    ) -> None:
        if cu_seqlens.shape[0] != 2:
            shape = tuple(cu_seqlens.shape)
            fail(f"cu_seqlens must be of one sequence, (2,), for ONNX, got {shape}")
        self._pool, self._bounds, self._has_state = pool, cu_seqlens.long(), has_initial_state
        zero = cu_seqlens.new_zeros(1, dtype=torch.long)
        index = zero if cache_indices is None else cache_indices.long()
        self.is_live = (index >= 0) & (index != pad_slot_id)
        self._index = torch.where(self.is_live, index, zero)
        self._old = pool.index_select(0, self._index)

    def bounds(self, total: int | torch.SymInt) -> tuple[Tensor, Tensor]:
        """Returns the begin and end of the sequence."""
        begin, end = self._bounds.clamp(0, total).split(1)
        return begin, torch.maximum(begin, end)

    def first_state(self) -> Tensor:
        """Returns the initial state, (1, ...)."""
        zeros = torch.zeros_like(self._old)
        if self._has_state is None:
            return zeros
        return torch.where(_like(self._has_state, zeros), self._old, zeros)

    def keep(self, state: Tensor) -> None:
        new = torch.where(_like(self.is_live, state), state.to(self._old.dtype), self._old)
        self._pool.index_copy_(0, self._index, new)


def _like(flags: Tensor, tensor: Tensor) -> Tensor:
    return flags.view(-1, *(1,) * (tensor.dim() - 1))


@dataclass(frozen=True)
class Operators:
    """The operators for an opset."""

    opset: int

    def _is_served(self, dtype: torch.dtype) -> bool:
        """Returns whether the newest opset's operators apply, which runtimes have in float32."""
        return self.opset >= NEWEST_OPSET and dtype == torch.float32

    def scan(
        self,
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        *,
        discretization_method: Method = "zoh",
        initial_state: Tensor | None = None,
        reverse: bool = False,
        cu_seqlens: Tensor | None = None,
        input_delta: Tensor | None = None,
        is_inside: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes selective_scan_fn over the steps of the mask is_inside, (seqlen,). At the other
        steps Δ is 0, which leaves the state unchanged."""
        refuse("cu_seqlens", cu_seqlens)
        options = (delta_softplus, discretization_method, initial_state, reverse, None)
        call = SELECTIVE_SCAN.arguments.check_values(
            (u, delta, A, B, C, D, z, delta_bias, *options, input_delta)
        )
        dtype, (batch, dim, _) = call.compute_dtype, u.shape
        discretize = DISCRETIZATIONS[discretization_method]
        x = u.to(dtype)
        if initial_state is None:
            zeros = x.new_zeros(batch, *A.shape)
            h = Pair(zeros, zeros) if call.is_complex else zeros
        else:
            h = state_of(initial_state, dtype)
        steps = steps_of_sequences(delta, delta_bias, delta_softplus, dtype)
        if is_inside is not None:
            steps = torch.where(is_inside, steps, 0)
        scanned = x
        if input_delta is not None:  # bbar is a multiple of it, so it may as well multiply u
            scanned = x * input_delta.to(dtype)
            discretize = partial(_with_step_of_one, discretize)
            if is_inside is not None:
                scanned = torch.where(is_inside, scanned, 0)
        inputs = Inputs(
            scanned.transpose(1, 2),
            steps.transpose(1, 2),
            *(_projection(given, dim, dtype, call.is_complex) for given in (B, C)),
            state_of(A, dtype),
            discretize,
            discretization_method in EXPONENTIAL,
        )
        y, h = self._run(inputs, h, reverse)
        y = y.transpose(1, 2)
        if D is not None:
            y = y + D.to(dtype)[:, None] * x
        if z is not None:
            y = y * F.silu(z.to(dtype))
        out = y.to(u.dtype)
        return (out, tensor_of(h)) if return_last_state else out

    def _run(self, inputs: Inputs, h: State, reverse: bool) -> tuple[Tensor, State]:
        """Returns y, (batch, seqlen, dim), and the state after the last step."""
        seqlen = inputs.u.shape[1]
        if isinstance(seqlen, int) and seqlen == 1:
            h, y = take_step(h, inputs.of_steps(lambda steps: steps[:, 0]))
            return y[:, None], h
        if reverse:
            inputs = inputs.of_steps(lambda steps: steps.flip(1))
        if self._is_served(inputs.u.dtype) and isinstance(h, Tensor):
            h, y = take_chunks(h, inputs)
        else:
            h, y = inputs.of_steps(lambda steps: steps.transpose(0, 1)).walk(take_step, h)
            y = y.transpose(0, 1)
        return (y.flip(1) if reverse else y), h

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        seq_idx: Tensor | None = None,
        initial_states: Tensor | None = None,
        return_final_states: bool = False,
        activation: Activation | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes causal_conv1d_fn."""
        refuse("seq_idx", seq_idx)
        refuse("cu_seqlens", cu_seqlens)
        arguments = (x, weight, bias, None, None, initial_states, return_final_states, activation)
        dtype = CAUSAL_CONV1D.arguments.check_values(arguments).compute_dtype
        tensors = (x, weight, bias, initial_states)
        tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
        is_served = self._is_served(dtype) and weight.shape[1] > 1
        convolve = convolve_statefully if is_served else convolve_plainly
        out, last = (result.to(x.dtype) for result in convolve(*tensors, activation))
        return (out, last) if return_final_states else out

    def scan_diagonally(
        self,
        a: Tensor,
        b: Tensor,
        initial_state: Tensor | None = None,
        reverse: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Computes diagonal_scan_fn as the scan of b with C = B = 1 and abar = a."""
        refuse("cu_seqlens", cu_seqlens)
        for name, tensor in (("a", a), ("b", b)):
            if tensor.is_complex():
                fail(f"{name} must be real for ONNX, got {tensor.dtype}")
        call = DIAGONAL_SCAN.arguments.check_values((a, b, initial_state, reverse, None))
        dtype, (*rows, seqlen) = call.compute_dtype, b.shape
        shape = (rows[0] if rows else 1, math.prod(rows[1:]))
        one = b.new_ones(shape[1], 1, dtype=dtype)
        state = b.new_zeros(rows) if initial_state is None else initial_state
        inputs = Inputs(
            *(t.to(dtype).expand(b.shape).reshape(*shape, seqlen).transpose(1, 2) for t in (b, a)),
            *(one, one, one),
            lambda a, _: (a, 1.0),
            has_exponential_decay=False,
            still=1.0,
        )
        h, _ = self._run(inputs, state.to(dtype).reshape(*shape, 1), reverse)
        return h.transpose(1, 2).reshape(b.shape).to(b.dtype)

    def convolve_on(
        self,
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: Activation | None = None,
        cache_seqlens: Tensor | None = None,
        conv_state_indices: Tensor | None = None,
        pad_slot_id: int = -1,
        out: Tensor | None = None,
    ) -> Tensor:
        """Computes causal_conv1d_update for rows that use the states of their own number, which
        pad_slot_id does not affect."""
        refuse("cache_seqlens", cache_seqlens)
        refuse("conv_state_indices", conv_state_indices)
        refuse("out", out)
        new = x if x.dim() == 3 else x[..., None]
        history = conv_state[..., conv_state.shape[2] - (weight.shape[1] - 1) :]
        result = self.convolve(new, weight, bias, None, history, activation=activation)
        seen = torch.cat([conv_state, new.to(conv_state.dtype)], -1)
        conv_state.copy_(seen[..., new.shape[2] :])
        return result.view(x.shape)

    def update(
        self,
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        state_batch_indices: Tensor | None = None,
        dst_state_batch_indices: Tensor | None = None,
        pad_slot_id: int = -1,
        out: Tensor | None = None,
        discretization_method: Method = "zoh",
        A_is_log: bool = False,
        input_delta: Tensor | None = None,
    ) -> Tensor:
        """Computes selective_state_update for rows that use the states of their own number, as a
        scan of their steps in which the channels of all heads are channels."""
        refuse("state_batch_indices", state_batch_indices)
        refuse("dst_state_batch_indices", dst_state_batch_indices)
        refuse("out", out)
        has_heads, has_steps = state.dim() == 4, x.dim() == state.dim()

        def sequence(tensor: Tensor) -> Tensor:
            """Returns the tensor as (batch, channels, steps)."""
            tensor = tensor if has_steps else tensor[:, None]
            return tensor.flatten(2).transpose(1, 2)

        def of_channels(tensor: Tensor | None) -> Tensor | None:
            return tensor if tensor is None or not has_heads else tensor.flatten(0, 1)

        def projection(tensor: Tensor) -> Tensor:
            """Returns the tensor as (batch, groups, dstate, steps)."""
            tensor = tensor if has_steps else tensor[:, None]
            return (tensor[:, :, None] if tensor.dim() == 3 else tensor).movedim(1, -1)

        y, last = self.scan(
            *(sequence(tensor) for tensor in (x, dt)),
            of_channels(poles(A) if A_is_log else A),
            *(projection(tensor) for tensor in (B, C)),
            of_channels(D),
            None if z is None else sequence(z),
            of_channels(dt_bias),
            dt_softplus,
            True,
            discretization_method=discretization_method,
            initial_state=state.flatten(1, -2).to(torch.promote_types(state.dtype, torch.float32)),
            input_delta=None if input_delta is None else sequence(input_delta),
        )
        state.copy_(last.view(state.shape))
        return y.transpose(1, 2).reshape(x.shape)

    # --- the ops that a program calls, with the arguments of their schemas ------------------------

    def forms(self) -> dict[str, Callable]:
        """Returns the replacement of each op, by the op's name."""
        return {
            "selective_scan_fwd": self._scan_op,
            "selective_scan_prefill": self._prefill_op,
            "matrix_scan_fwd": self._refuse_matrix,
            "diagonal_scan_fwd": self.scan_diagonally,
            "causal_conv1d_fwd": self._convolution_op,
            "causal_conv1d_update": self.convolve_on,
            "causal_conv1d_prefill": self._convolution_prefill_op,
            "selective_state_update": self.update,
            "mamba_inner_fwd": self._layer_op,
            "s6_step": self._step_op,
        }

    def _scan_op(self, save_states: bool, **given) -> tuple[Tensor, Tensor]:
        return self.scan(**given, return_last_state=True)

    def _refuse_matrix(self, A: Tensor, **given) -> NoReturn:
        fail(f"A must be (dim, dstate) for ONNX, got {tuple(A.shape)}")

    def _convolution_op(self, return_final_states: bool, **given) -> tuple[Tensor, Tensor]:
        return self.convolve(**given, return_final_states=True)

    def _prefill_op(
        self,
        u: Tensor,
        states: Tensor,
        delta: Tensor,
        B: Tensor,
        C: Tensor,
        z: Tensor | None,
        cu_seqlens: Tensor,
        cache_indices: Tensor | None,
        has_initial_state: Tensor | None,
        pad_slot_id: int,
        checkpoint_every: int,
        first_position: Tensor | None,
        checkpoint_slots: Tensor | None,
        out: Tensor | None,
        input_delta: Tensor | None,
        **given,
    ) -> Tensor:
        """Computes selective_scan_prefill for one sequence."""
        refuse("checkpoint_slots", checkpoint_slots)
        refuse("out", out)
        slot = Slot(states, cu_seqlens, cache_indices, has_initial_state, pad_slot_id)
        begin, end = slot.bounds(u.shape[1])
        step = torch.arange(u.shape[1], device=u.device)
        is_inside = (step >= begin) & (step < end)
        first = slot.first_state()
        y, last = self.scan(
            u[None],
            delta[None],
            B=B if B.dim() == 2 else B[None],
            C=C if C.dim() == 2 else C[None],
            z=None if z is None else z[None],
            return_last_state=True,
            initial_state=first.to(torch.promote_types(first.dtype, torch.float32)),
            is_inside=is_inside,
            input_delta=None if input_delta is None else input_delta[None],
            **given,
        )
        slot.keep(last)
        return torch.where(is_inside & slot.is_live, y[0], 0)

    def _convolution_prefill_op(
        self,
        x: Tensor,
        weight: Tensor,
        conv_states: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        **where,
    ) -> Tensor:
        """Computes causal_conv1d_prefill for one sequence, which is moved to the row's begin."""
        slot = Slot(conv_states, **where)
        total = x.shape[2]
        begin, end = slot.bounds(total)
        step = torch.arange(total, device=x.device)
        moved = x.index_select(2, (step + begin).clamp(max=total - 1))
        first = slot.first_state().to(x.dtype)
        out = self.convolve(moved, weight, bias, None, first, activation=activation)
        seen = torch.cat([first, moved], -1)
        history = torch.arange(first.shape[2], device=x.device)
        slot.keep(seen.index_select(2, end - begin + history))
        is_inside = (step >= begin) & (step < end)
        out = out.index_select(2, (step - begin).clamp(min=0))
        return torch.where(is_inside & slot.is_live, out, 0)

    def _layer_op(
        self,
        xz: Tensor,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        A: Tensor,
        autocast_dtype: torch.dtype | None,
        residual: Tensor | None,
        save_states: bool,
        **given,
    ) -> tuple[Tensor]:
        xz = _cast(xz, autocast_dtype)
        if in_proj_weight is not None:  # then xz is the layer's input, and A is A_log
            bias = None if in_proj_bias is None else in_proj_bias.to(xz.dtype)
            xz, A = F.linear(xz, in_proj_weight.to(xz.dtype), bias).transpose(1, 2), poles(A)
        layer = Layer(xz=xz, A=A, **given)
        return (add(residual, compose(self.scan, self.convolve, layer)),)

    def _step_op(self, hidden: Tensor, workspace: Tensor | None, **given) -> Tensor:
        refuse("state_batch_indices", given["state_batch_indices"])
        dtype = S6_STEP.arguments.check({"hidden": hidden, "workspace": None} | given).compute_dtype
        stack = StackTensors(*(given.pop(name) for name in StackTensors._fields))
        out = compose_step(self.convolve_on, self.update, hidden.to(dtype), stack, **given)
        return out.to(hidden.dtype if given["head"] is None else given["head"].dtype)


def _cast(xz: Tensor, autocast_dtype: torch.dtype | None) -> Tensor:
    """Casts to the dtype of a layer's products."""
    return xz if autocast_dtype is None or xz.dtype == torch.float64 else xz.to(autocast_dtype)
