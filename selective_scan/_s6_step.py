"""A few steps through a stack of plain layers as one operator, for decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import INTEGER, REAL, Call, fail
from ._discretization import METHODS, Method, poles
from ._operator import Operator
from ._result import Result
from ._state_slots import pool_of
from ._table import DtypeOf, Number, Option, Shape, Table, TensorArgument, TensorList
from .mamba_inner import rms_norm

MAX_STATES = 64  # the states of a channel that the kernels can hold


class StackTensors(NamedTuple):
    """The tensors of a stack's layers.

    Each list has an entry for each layer. It is None or empty if no layer has such a tensor. All
    matrices have one dtype, and so have the tensors of each other list.

    Attributes:
        norm: weights of the RMSNorm before the mixer, (d_model,). Without a norm there is no
            residual either.
        in_proj: (2·d_inner, d_model): the rows of x, then those of z.
        in_proj_bias: (2·d_inner,).
        conv1d: taps of the causal convolution, (d_inner, 1, width), width 1 to 8.
        conv1d_bias: (d_inner,).
        x_proj: (dt_rank + 2·dstate, d_inner): the rows of dt, of B and of C.
        dt_proj: (d_inner, dt_rank).
        dt_proj_bias: (d_inner,).
        A_log: A = −exp(A_log), (d_inner, dstate), dstate 1 to 64.
        D: (d_inner,).
        out_proj: (d_model, d_inner).
        out_proj_bias: (d_model,).
        conv_state: the convolution's inputs at the last steps, (slots, d_inner, width - 1), with
            the same strides in all layers. Changed in place.
        state: the scan's states, (slots, d_inner, dstate), likewise.
    """

    norm: list[Tensor] | None
    in_proj: list[Tensor]
    in_proj_bias: list[Tensor] | None
    conv1d: list[Tensor]
    conv1d_bias: list[Tensor] | None
    x_proj: list[Tensor]
    dt_proj: list[Tensor]
    dt_proj_bias: list[Tensor] | None
    A_log: list[Tensor]
    D: list[Tensor]
    out_proj: list[Tensor]
    out_proj_bias: list[Tensor] | None
    conv_state: list[Tensor]
    state: list[Tensor]


_states_of = functools.partial(pool_of, indices="state_batch_indices", rows="batch")


def _check_relations(call: Call) -> None:
    for name, tensor in call.tensors.items():
        if not name.startswith(("conv_state", "state[")):
            continue
        first = name.partition("[")[0] + "[0]"
        # The stride of a dimension of size 1 does not matter.
        pairs = zip(tensor.shape, call[first].stride(), tensor.stride(), strict=True)
        if any(size > 1 and wanted != stride for size, wanted, stride in pairs):
            wanted = f"the strides of {first}, {call[first].stride()}"
            fail(f"{name} must have {wanted}, got {tensor.stride()}")
    call.sizes["outputs"] = call.sizes["vocabulary" if "head" in call.tensors else "d_model"]


def _flops(call: Call) -> tuple[int, int]:
    """Returns the FLOPs: for each row, 2 for a weight of a product and 7 for a state."""
    rows = call.sizes["batch"] * call.sizes["steps"]
    matrices = [name.partition("[")[0] for name in call.tensors]
    weights = sum(
        tensor.numel()
        for matrix, tensor in zip(matrices, call.tensors.values(), strict=True)
        if matrix in ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj", "head")
    )
    states = matrices.count("A_log") * call.sizes["d_inner"] * call.sizes["dstate"]
    return rows * (2 * weights + 7 * states), 0


class _StepOperator(Operator):
    """The operator of a step. The op ``s6_step_prepare``, of the same arguments, prepares calls."""

    _has_defaults = False
    _has_batching_rules = False

    def schemas(self) -> dict[str, str]:
        schema = super().schemas()[self.name]
        return {self.name: schema, f"{self.name}_prepare": schema.replace("-> Tensor", "-> int")}


# Absent lists are None rather than empty, since AOTInductor does not support empty lists.
S6_STEP = _StepOperator(
    "s6_step",
    Table(
        TensorArgument("hidden", REAL, ("batch", "steps", "d_model")),
        TensorList("norm", REAL, ("d_model",), optional=True),
        TensorList("in_proj", REAL, ("2*d_inner", "d_model")),
        TensorList("in_proj_bias", REAL, ("2*d_inner",), optional=True),
        TensorList("conv1d", REAL, ("d_inner", "1", "width"), same_dtype="in_proj"),
        TensorList("conv1d_bias", REAL, ("d_inner",), optional=True),
        TensorList("x_proj", REAL, ("dt_rank+2*dstate", "d_inner"), same_dtype="in_proj"),
        TensorList("dt_proj", REAL, ("d_inner", "dt_rank"), same_dtype="in_proj"),
        TensorList("dt_proj_bias", REAL, ("d_inner",), optional=True),
        TensorList("A_log", REAL, Shape((("d_inner", "dstate"),), most=MAX_STATES)),
        TensorList("D", REAL, ("d_inner",)),
        TensorList("out_proj", REAL, ("d_model", "d_inner"), same_dtype="in_proj"),
        TensorList("out_proj_bias", REAL, ("d_model",), optional=True),
        TensorList("conv_state", REAL, _states_of("d_inner", "width-1"), is_changed=True),
        TensorList("state", REAL, _states_of("d_inner", "dstate"), is_changed=True),
        TensorArgument("norm_f", REAL, ("d_model",), optional=True),
        TensorArgument(
            "head",
            DtypeOf("in_proj[0]", " (as in_proj[0])"),
            ("vocabulary", "d_model"),
            optional=True,
        ),
        TensorArgument("state_batch_indices", INTEGER, ("batch",), optional=True),
        TensorArgument("workspace", (torch.uint8,), ("bytes",), optional=True, is_changed=True),
        Number("eps", 1e-5),
        Option("delta_softplus"),
        Option("discretization_method", METHODS),
        # Of RMS norms without weights, by which dt, B and C are normed; negative: of none.
        Number("inner_eps", -1.0),
        anchor="hidden",
        counted_by="in_proj",
        measured_by=("hidden", "conv1d", "dt_proj", "A_log"),
        relations=_check_relations,
    ),
    results=[
        Result(
            "out",
            ("batch", "steps", "outputs"),
            lambda call: call["head" if "head" in call.tensors else "hidden"].dtype,
        )
    ],
    reference="",
    flops=_flops,
)


def compose_step(
    convolve: Callable[..., Tensor],
    update: Callable[..., Tensor],
    hidden: Tensor,
    stack: StackTensors,
    norm_f: Tensor | None,
    head: Tensor | None,
    state_batch_indices: Tensor | None,
    eps: float,
    delta_softplus: bool,
    discretization_method: Method,
    inner_eps: float,
) -> Tensor:
    """Computes s6_step in hidden's dtype from PyTorch ops, a step of the convolution, `convolve`,
    and a step of the scan, `update`."""
    dtype = hidden.dtype

    def of(tensors: list[Tensor] | None, layer: int) -> Tensor | None:
        return tensors[layer].to(dtype) if tensors else None

    residual = hidden
    for layer in range(len(stack.in_proj)):
        rows = rms_norm(residual, of(stack.norm, layer), eps) if stack.norm else residual
        xz = F.linear(rows, of(stack.in_proj, layer), of(stack.in_proj_bias, layer))
        x, z = xz.chunk(2, dim=-1)
        x = convolve(
            x.transpose(1, 2),
            stack.conv_state[layer],
            of(stack.conv1d, layer).squeeze(1),
            of(stack.conv1d_bias, layer),
            "silu",
            conv_state_indices=state_batch_indices,
        ).transpose(1, 2)
        rank, dstate = stack.dt_proj[layer].shape[1], stack.A_log[layer].shape[1]
        parts = F.linear(x, of(stack.x_proj, layer)).split([rank, dstate, dstate], dim=-1)
        dt, B, C = parts if inner_eps < 0 else [rms_norm(part, None, inner_eps) for part in parts]
        y = update(
            stack.state[layer],
            x,
            F.linear(dt, of(stack.dt_proj, layer)),
            poles(of(stack.A_log, layer)),
            B,
            C,
            of(stack.D, layer),
            z,
            of(stack.dt_proj_bias, layer),
            delta_softplus,
            state_batch_indices,
            discretization_method=discretization_method,
        )
        out = F.linear(y, of(stack.out_proj, layer), of(stack.out_proj_bias, layer))
        residual = residual + out if stack.norm else out
    if norm_f is not None:
        residual = rms_norm(residual, norm_f.to(dtype), eps)
    if head is not None:
        residual = F.linear(residual, head.to(dtype))
    return residual
