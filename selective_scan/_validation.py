"""The checks of a call, and the sentences they fail with.

The C++ dispatcher checks dtypes and shapes in the same order with the same sentences
(csrc/torch/scan_arguments.cpp). These serve where it does not run, in the reference and in the fake
kernels of torch.compile, and for what only Python can see: types, layouts, devices, the backend.

Sizes may be symbolic: they are compared, and turned into text only for an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from ._discretization import DISCRETIZATIONS
from ._dtypes import num_saved_values, state_dtype

METHODS = tuple(DISCRETIZATIONS)  # in the order of kMethodNames in csrc/core/discretization.h
BACKENDS = ("auto", "cpu", "cuda", "reference")

_REQUIRED = ("u", "delta", "A", "B", "C")
_NAMES = (*_REQUIRED, "D", "z", "delta_bias", "initial_state")

_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_OPTIONAL_TENSORS = _TENSORS | {type(None)}
_FLAGS = frozenset((bool,))
_REAL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_POLES = (torch.float32, torch.float64, *_COMPLEX)
_VARIABLE_OF_COMPLEX = (*_COMPLEX, torch.float32, torch.float16, torch.bfloat16, torch.float64)

# The arguments u, delta, A, B, C, D, z, delta_bias, initial_state, in this order.
Inputs = tuple[Tensor | None, ...]
# Name and size of each dimension; None where any size will do.
Dim = tuple[str, "int | torch.SymInt | None"]
Shape = tuple[Dim, ...]


def fail(message: str) -> NoReturn:
    raise RuntimeError(f"selective_scan: {message}")


# --- what is looked at in Python ------------------------------------------------------------------


def are_plain_tensors(tensors: Iterable[object]) -> bool:
    """Whether each is None or a tensor of no subclass."""
    return _OPTIONAL_TENSORS.issuperset(map(type, tensors))


def are_plain(required: tuple, optional: tuple, flags: tuple, method: object) -> bool:
    """Whether the types are right and the method is known, found out in a microsecond, and no
    tensor is of a subclass."""
    return (
        _TENSORS.issuperset(map(type, required))
        and are_plain_tensors(optional)
        and _FLAGS.issuperset(map(type, flags))
        and type(method) is str
        and method in METHODS
    )


def check_types(inputs: tuple[object, ...], **options: object) -> None:
    """TypeError unless every input is a tensor and every option what its name asks for."""
    for name, value in zip(_NAMES, inputs, strict=True):
        if isinstance(value, Tensor):
            continue
        if name in _REQUIRED:
            raise TypeError(_type_message(name, "a Tensor", value))
        if value is not None:
            raise TypeError(_type_message(name, "a Tensor or None", value))
    for name, value in options.items():
        if name in ("discretization_method", "backend"):
            if not isinstance(value, str):
                raise TypeError(_type_message(name, "a str", value))
        elif not isinstance(value, bool):
            raise TypeError(_type_message(name, "a bool", value))


def _type_message(name: str, wanted: str, value: object) -> str:
    return f"selective_scan: {name} must be {wanted}, got {type(value).__name__}"


def check_backend(backend: str, device: torch.device) -> None:
    if backend not in BACKENDS:
        names = ", ".join(BACKENDS)
        raise ValueError(f"selective_scan: backend must be one of {names}, got '{backend}'")
    if backend in ("cpu", "cuda") and backend != device.type:
        raise ValueError(
            f"selective_scan: backend '{backend}' needs tensors on {backend}, got {device}"
        )


def check_method(method: str) -> None:
    if method not in METHODS:
        fail(f"discretization_method must be one of {', '.join(METHODS)}, got '{method}'")


def check_layouts_and_devices(inputs: Inputs) -> None:
    named = [(name, tensor) for name, tensor in zip(_NAMES, inputs, strict=True)]
    for name, tensor in named:
        if tensor is not None:
            _check_dense(name, tensor)
    for name, tensor in named:
        if tensor is not None:
            _check_device(name, tensor, inputs[0])


# --- what C++ looks at as well --------------------------------------------------------------------


def check_inputs(inputs: Inputs, method: str) -> None:
    check_method(method)
    check_layouts_and_devices(inputs)
    _check_dtypes(*inputs)
    _check_shapes(*inputs)


def check_gradients(
    inputs: Inputs, dout: Tensor | None, dlast_state: Tensor | None, states: Tensor | None
) -> None:
    """What the backward op is given beside the inputs, which have been checked."""
    u, A = inputs[0], inputs[2]
    size = {"batch": u.shape[0], "dim": u.shape[1], "seqlen": u.shape[2], "dstate": A.shape[1]}
    size["saved values"] = num_saved_values(u, A)
    dtype = state_dtype(inputs, A)

    def check(name: str, tensor: Tensor, dtype: torch.dtype, *dims: str) -> None:
        _check_dense(name, tensor)
        _check_device(name, tensor, u)
        _check_dtype(name, tensor, (dtype,))
        _check_shape(name, tensor, tuple((dim, size[dim]) for dim in dims))

    if dout is not None:
        check("dout", dout, u.dtype, "batch", "dim", "seqlen")
    if dlast_state is not None:
        check("dlast_state", dlast_state, dtype, "batch", "dim", "dstate")
    if states is not None and states.numel() > 0:
        check("states", states, dtype, "saved values")


def _check_dtypes(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
) -> None:
    _check_dtype("u", u, _REAL)
    _check_dtype("delta", delta, _REAL)
    _check_dtype("A", A, _POLES)
    is_complex = A.is_complex()
    for name, projection in (("B", B), ("C", C)):
        if not is_complex:
            _check_dtype(name, projection, _REAL)
        elif projection.dim() == 2:
            _check_dtype(name, projection, _COMPLEX, " (complex A, constant B and C)")
        else:
            _check_dtype(name, projection, _VARIABLE_OF_COMPLEX)
    for name, tensor in (("D", D), ("z", z), ("delta_bias", delta_bias)):
        if tensor is not None:
            _check_dtype(name, tensor, _REAL)
    if initial_state is not None:
        _check_dtype("initial_state", initial_state, _COMPLEX if is_complex else _POLES[:2])


def _check_shapes(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
) -> None:
    _check_shape("u", u, (("batch", None), ("dim", None), ("seqlen", None)))
    batch, dim, seqlen = (("batch", u.shape[0]), ("dim", u.shape[1]), ("seqlen", u.shape[2]))
    _check_shape("delta", delta, (batch, dim, seqlen))
    _check_shape("A", A, (dim, ("dstate", None)))
    dstate = ("dstate", A.shape[1])
    if A.shape[1] == 0:
        fail(f"A must have dstate of at least 1, got {tuple(A.shape)}")
    groups = {}
    for name, projection in (("B", B), ("C", C)):
        packed = A.is_complex() and not projection.is_complex()
        steps = ("2*seqlen", 2 * u.shape[2]) if packed else seqlen
        groups[name] = check_projection_shape(
            name, projection, (dim, dstate), batch, dim, dstate, steps
        )
    check_common_groups(groups)
    if D is not None:
        _check_shape("D", D, (dim,))
    if z is not None:
        _check_shape("z", z, (batch, dim, seqlen))
    if delta_bias is not None:
        _check_shape("delta_bias", delta_bias, (dim,))
    if initial_state is not None:
        _check_shape("initial_state", initial_state, (batch, dim, dstate))


# --- one tensor -----------------------------------------------------------------------------------


def check_projection_shape(
    name: str, tensor: Tensor, constant: Shape, batch: Dim, dim: Dim, dstate: Dim, steps: Dim
) -> int:
    """Checks B or C: constant of shape `constant`, or with `steps`, (batch, dstate, steps) for all
    of dim or (batch, groups, dstate, steps). Returns the number of groups, 0 for a constant one."""
    if tensor.dim() == len(constant):
        _check_shape(name, tensor, constant)
        return 0
    if tensor.dim() == 3:
        _check_shape(name, tensor, (batch, dstate, steps))
        return 1
    if tensor.dim() != 4:
        fail(
            f"{name} must be {_tuple_text(size for size, _ in constant)}, "
            f"(batch, dstate, seqlen) or (batch, groups, dstate, seqlen), got {tuple(tensor.shape)}"
        )
    _check_shape(name, tensor, (batch, ("groups", None), dstate, steps))
    groups = tensor.shape[1]
    if groups == 0 or dim[1] % groups != 0:
        fail(f"{name} must have a number of groups that divides dim = {dim[1]}, got {groups}")
    return groups


def check_common_groups(groups: dict[str, int]) -> None:
    """Two projections with steps have the same number of groups."""
    (first, of_first), (second, of_second) = groups.items()
    if of_first and of_second and of_first != of_second:
        fail(f"{second} must have as many groups as {first}, {of_first}, got {of_second}")


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        fail(f"{name} must be a dense (strided) tensor, got layout {layout}")
    if tensor.is_nested:
        fail(f"{name} must be a dense (strided) tensor, got a nested one")


def _check_device(name: str, tensor: Tensor, u: Tensor) -> None:
    if tensor.device != u.device:
        fail(f"{name} must be on the device of u, {u.device}, got {tensor.device}")


def _check_dtype(
    name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...], remark: str = ""
) -> None:
    if tensor.dtype not in allowed:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in allowed)
        wanted = f"{', '.join(others)} or {last}" if others else last
        got = str(tensor.dtype).removeprefix("torch.")
        fail(f"{name} must have dtype {wanted}{remark}, got {got}")


def _check_shape(name: str, tensor: Tensor, expected: Shape) -> None:
    if tensor.dim() == len(expected) and all(
        size is None or size == actual
        for (_, size), actual in zip(expected, tensor.shape, strict=True)
    ):
        return
    text = f"{name} must be {_tuple_text(name for name, _ in expected)}"
    if any(size is not None for _, size in expected):
        text += f" = {_tuple_text('*' if size is None else size for _, size in expected)}"
    fail(f"{text}, got {tuple(tensor.shape)}")


def _tuple_text(entries) -> str:
    texts = [str(entry) for entry in entries]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"
