"""The checks of a single tensor, and the properties that follow from all tensors of a call.

csrc/torch runs the same checks in the same order with the same messages: tensor_checks.cpp those of
one tensor, checked_call.cpp those of tables. The functions here serve calls that do not reach C++
(the references, and the fake kernels of torch.compile) and properties that only Python can see.

Sizes may be symbolic: they are only compared, and converted to text only for an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
SINGLE_OR_DOUBLE = (torch.float32, torch.float64)
REAL = (torch.float32, *HALF, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGER = (torch.int32, torch.int64)
BOOL = (torch.bool,)
_DOUBLE = (torch.float64, torch.complex128)
MAX_WIDTH = 8  # the widest convolution, as in csrc/core/conv_params.h
# The smallest and the largest size of a dimension; None means no limit.
LIMITS = {
    "dstate": (1, None),
    "width": (1, MAX_WIDTH),
    "sequences+1": (1, None),
    "d_model": (1, None),
    "d_inner": (1, None),
}
ELLIPSIS = "..."

Dtypes = tuple[torch.dtype, ...]


class Expression(NamedTuple):
    """The size that a dimension's name stands for, such as "seqlen", "2*seqlen", "sequences+1" or
    "width-1": a sum of sizes, each times a factor, plus a constant."""

    terms: dict[str, int]
    constant: int

    @classmethod
    def of(cls, name: str) -> Expression:
        terms, constant = {}, 0
        for sign, text in re.findall(r"([+-]?)([^+-]+)", name):
            factor, _, size = text.rpartition("*")
            if size.isdigit():
                constant += int(sign + size)
            else:
                terms[size] = terms.get(size, 0) + int(sign + (factor or "1"))
        return cls(terms, constant)


EXPRESSIONS: dict[str, Expression] = {}  # by dimension name, for all tables


def fail(message: str) -> NoReturn:
    raise RuntimeError(f"selective_scan: {message}")


class Call:
    """The tensors of a call by name, and the properties that follow from them.

    Attributes:
        tensors: the tensors that are given (not None).
        options: the other arguments, by name.
        anchor: the name of the tensor whose device all others must share.
        sizes: the sizes of the dimensions found so far, by name; "..." maps to a tuple of sizes.
        equal_sizes: pairs of dimensions of equal size.
        is_complex: whether the state is complex.
        compute_dtype: the dtype of all arithmetic: float32, or float64 if any tensor is float64 or
            complex128.
        state_dtype: the compute dtype, or its complex counterpart if the state is complex.
    """

    def __init__(self, tensors: dict[str, Tensor], anchor: str, complex_by: Sequence[str]) -> None:
        self.tensors = tensors
        self.anchor = anchor
        self.sizes: dict[str, int | torch.SymInt | tuple] = {}
        self.groups: dict[str, int | torch.SymInt] = {}  # of variable B and C
        self.equal_sizes: Sequence[tuple[str, str]] = ()
        self.options: dict[str, object] = {}
        self.is_complex = any(tensors[name].is_complex() for name in complex_by)
        # An int, since torch.compile of PyTorch 2.11 does not accept a bool as an index.
        precision = int(any(tensor.dtype in _DOUBLE for tensor in tensors.values()))
        self.compute_dtype = SINGLE_OR_DOUBLE[precision]
        self.state_dtype = COMPLEX[precision] if self.is_complex else self.compute_dtype

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def check_dims(self, name: str, tensor: Tensor, dims: tuple[str, ...]) -> None:
        """Calls the function check_dims, then fills in the sizes that equal known ones."""
        check_dims(name, tensor, dims, self.sizes)
        for dim, other in self.equal_sizes:
            if other in self.sizes:
                self.sizes.setdefault(dim, self.sizes[other])


# --- one tensor -----------------------------------------------------------------------------------


def check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        fail(f"{name} must be a dense (strided) tensor, got layout {layout}")
    if tensor.is_nested:
        fail(f"{name} must be a dense (strided) tensor, got a nested one")


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        fail(f"{name} must be on the device of {other_name}, {other.device}, got {tensor.device}")


def check_dtype(name: str, tensor: Tensor, allowed: Dtypes, remark: str = "") -> None:
    if tensor.dtype not in allowed:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in allowed)
        wanted = f"{', '.join(others)} or {last}" if others else last
        got = str(tensor.dtype).removeprefix("torch.")
        fail(f"{name} must have dtype {wanted}{remark}, got {got}")


def check_dims(
    name: str, tensor: Tensor, dims: tuple[str, ...], sizes: dict, limits: Mapping = LIMITS
) -> None:
    """Compares the tensor's sizes with the known `sizes`, and adds the unknown ones to them."""
    actual = _sizes_by_dim(tuple(tensor.shape), dims)
    fits, before = actual is not None, None
    for dim, size in actual or ():
        if dim in sizes:
            fits = sizes[dim] == size
        else:
            before = sizes.copy() if before is None else before
            fits = _agrees(name, tensor, dim, size, sizes)
        if not fits:
            break
    if not fits:
        _fail_on_dims(name, tensor, dims, sizes if before is None else before)
    for dim, size in actual:
        if dim not in limits:
            continue
        low, high = limits[dim]
        if size < low or (high is not None and size > high):
            wanted = f"at least {low}" if high is None else f"{low} to {high}"
            fail(f"{name} must have {dim} of {wanted}, got {tuple(tensor.shape)}")


def _fail_on_dims(name: str, tensor: Tensor, dims: tuple[str, ...], sizes: dict) -> NoReturn:
    wanted = [size_of(dim, sizes) for dim in dims]
    text = f"{name} must be {tuple_text(dims)}"
    if any(size is not None for size in wanted):
        text += f" = {tuple_text('*' if size is None else size for size in wanted)}"
    fail(f"{text}, got {tuple(tensor.shape)}")


def size_of(dim: str, sizes: dict) -> int | torch.SymInt | tuple | None:
    """Returns the size of a dimension, None if it is not known yet.

    The number of groups is never stored, since it may differ between tensors.
    """
    if dim in sizes:
        return sizes[dim]
    if dim not in EXPRESSIONS:
        return None
    terms, size = EXPRESSIONS[dim]
    for other, factor in terms.items():
        if other not in sizes:
            return None
        size += factor * sizes[other]
    return size


def _agrees(
    name: str, tensor: Tensor, dim: str, size: int | torch.SymInt | tuple, sizes: dict
) -> bool:
    """Returns whether a dimension has this size. A size not known yet is accepted and stored."""
    wanted = size_of(dim, sizes)
    if wanted is not None:
        return wanted == size
    if dim != "groups":
        sizes[dim] = size
    if dim in EXPRESSIONS:
        terms, rest = EXPRESSIONS[dim]
        unknown = [other for other in terms if other not in sizes]
        if len(unknown) == 1:
            rest += sum([terms[other] * sizes[other] for other in terms if other in sizes])
            factor = terms[unknown[0]]
            if (size - rest) % factor != 0:  # such as 2*dim, the channels of x and z
                fail(f"{name} must have an even number of channels, got {tuple(tensor.shape)}")
            sizes[unknown[0]] = (size - rest) // factor
    return True


def check_groups(name: str, groups: int | torch.SymInt, divided: str, call: Call) -> None:
    """Checks that the groups of B or C divide the dimension `divided`, and that both have the same
    number of groups."""
    size = call.sizes[divided]
    if groups == 0 or size % groups != 0:
        fail(f"{name} must have a number of groups that divides {divided} = {size}, got {groups}")
    for other, groups_of_other in call.groups.items():
        if groups_of_other != groups:
            fail(f"{name} must have as many groups as {other}, {groups_of_other}, got {groups}")
    call.groups[name] = groups


def check_shape_of(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.shape != other.shape:
        shapes = f"{tuple(other.shape)}, got {tuple(tensor.shape)}"
        fail(f"{name} must have the shape of {other_name}, {shapes}")


def check_changed(name: str, tensor: Tensor) -> None:
    """Checks that a tensor can be changed in place: elements that share memory could not hold
    different values."""
    shares = any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if shares and tensor.numel() > 0:
        fail(f"{name} must have no stride of 0, got strides {tensor.stride()}")
    check_written(name, tensor)


def check_written(name: str, tensor: Tensor) -> None:
    """Refuses to write to a lazy view, made by conj() or as the imaginary part of a conj() view.

    PyTorch would pass the op a materialized copy and not write it back. Under a compiler the bits
    cannot be queried, and the compiler itself fails on such views.
    """
    if torch.compiler.is_compiling():
        return
    bits = {"conjugate": tensor.is_conj(), "negative": tensor.is_neg()}
    for bit, is_set in bits.items():
        if is_set:
            fail(f"{name} must have no {bit} bit, got a view that has one")


def check_given_gradient(name: str, gradient: Tensor | None, tensor: Tensor | None) -> None:
    """Checks the tensor into which the gradient of an argument is to be written."""
    if (gradient is None) != (tensor is None):
        fail(f"d{name} must be {'None' if tensor is None else 'a Tensor'} where {name} is")
    if tensor is None:
        return
    check_dense(f"d{name}", gradient)
    check_device(f"d{name}", gradient, name, tensor)
    check_dtype(f"d{name}", gradient, (tensor.dtype,))
    check_shape_of(f"d{name}", gradient, name, tensor)
    check_changed(f"d{name}", gradient)


def _sizes_by_dim(shape: tuple, dims: tuple[str, ...]) -> list[tuple[str, object]] | None:
    """Returns pairs of dimension and size, None if the number of dimensions does not match."""
    if dims[0] != ELLIPSIS:
        return list(zip(dims, shape, strict=True)) if len(dims) == len(shape) else None
    leading = len(shape) - (len(dims) - 1)
    if leading < 0:
        return None
    return [(ELLIPSIS, shape[:leading]), *zip(dims[1:], shape[leading:], strict=True)]


def tuple_text(entries: Iterable[object]) -> str:
    texts = [str(entry) for entry in entries]
    if len(texts) > 1:
        return f"({', '.join(texts)})"
    if texts[0].startswith("("):  # the sizes of an ellipsis, already formatted as a tuple
        return texts[0]
    return "(...)" if texts[0] == ELLIPSIS else f"({texts[0]},)"
