"""The checks of the adaptive unitary scan; csrc/torch/unitary_arguments.cpp says the same sentences
of the ops, whose b and c are the polar forms of B and C."""

from __future__ import annotations

import torch
from torch import Tensor

from ._dtypes import compute_dtype
from ._validation import (
    _check_dense,
    _check_device,
    _check_dtype,
    _check_shape,
    _type_message,
    check_common_groups,
    check_projection_shape,
    fail,
)

_REAL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_OPTIONAL = ("z", "initial_state")

# The arguments u, dt, x, x_bias, B, C, D, z, initial_state, in this order.
Inputs = tuple[Tensor | None, ...]


def _names(weights: tuple[str, str]) -> tuple[str, ...]:
    return ("u", "dt", "x", "x_bias", *weights, "D", *_OPTIONAL)


NAMES = _names(("B", "C"))


def state_dtype(inputs: Inputs) -> torch.dtype:
    # dtype.to_complex() is more than torch.compile can trace.
    return torch.complex128 if compute_dtype(inputs) == torch.float64 else torch.complex64


def check_unitary_types(inputs: tuple[object, ...], **options: object) -> None:
    for name, value in zip(NAMES, inputs, strict=True):
        if isinstance(value, Tensor) or (value is None and name in _OPTIONAL):
            continue
        wanted = "a Tensor or None" if name in _OPTIONAL else "a Tensor"
        raise TypeError(_type_message(name, wanted, value))
    for name, value in options.items():
        expected = str if name == "backend" else bool
        if not isinstance(value, expected):
            raise TypeError(_type_message(name, f"a {expected.__name__}", value))


def check_unitary_inputs(inputs: Inputs, weights: tuple[str, str] = ("B", "C")) -> None:
    """`weights` are the names under which the caller knows B and C."""
    named = dict(zip(_names(weights), inputs, strict=True))
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    u = named["u"]
    for name, tensor in given.items():
        _check_dense(name, tensor)
    for name, tensor in given.items():
        _check_device(name, tensor, u)
    for name, tensor in given.items():
        is_complex = name in (*weights, "initial_state")
        _check_dtype(name, tensor, _COMPLEX if is_complex else _REAL)
    _check_shapes(named, weights)


def _check_shapes(named: dict[str, Tensor | None], weights: tuple[str, str]) -> None:
    u, x = named["u"], named["x"]
    _check_shape("u", u, (("batch", None), ("dim", None), ("seqlen", None)))
    batch, dim, seqlen = zip(("batch", "dim", "seqlen"), u.shape, strict=True)
    _check_shape("dt", named["dt"], (batch, dim, seqlen))
    _check_shape("x", x, (dim, ("dstate", None), dim))
    dstate = ("dstate", x.shape[1])
    if x.shape[1] == 0:
        fail(f"x must have dstate of at least 1, got {tuple(x.shape)}")
    _check_shape("x_bias", named["x_bias"], (dim, dstate))
    check_common_groups(
        {
            name: check_projection_shape(name, named[name], (dstate,), batch, dim, dstate, seqlen)
            for name in weights
        }
    )
    _check_shape("D", named["D"], (dim,))
    if named["z"] is not None:
        _check_shape("z", named["z"], (batch, dim, seqlen))
    if named["initial_state"] is not None:
        _check_shape("initial_state", named["initial_state"], (batch, dim, dstate))


def check_unitary_gradients(
    inputs: Inputs, dout: Tensor | None, dlast_state: Tensor | None, states: Tensor, values: int
) -> None:
    """What the backward op is given beside the inputs; `values` is how many are saved."""
    u, x = inputs[0], inputs[2]
    batch, dim, seqlen = zip(("batch", "dim", "seqlen"), u.shape, strict=True)

    def check(name, tensor, dtype, *dims):
        _check_dense(name, tensor)
        _check_device(name, tensor, u)
        _check_dtype(name, tensor, (dtype,))
        _check_shape(name, tensor, dims)

    dtype = state_dtype(inputs)
    if dout is not None:
        check("dout", dout, u.dtype, batch, dim, seqlen)
    if dlast_state is not None:
        check("dlast_state", dlast_state, dtype, batch, dim, ("dstate", x.shape[1]))
    check("states", states, dtype, ("saved values", values))
