"""What the arguments of an operator must be: a table, and the checks that read it.

csrc/torch/*_arguments.cpp check dtypes and shapes in the same order with the same sentences. These
serve where they do not run, in the references and in the fake kernels of torch.compile, and for
what only Python can see: types, layouts, devices, the backend.

Sizes may be symbolic: they are compared, and turned into text only for an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
SINGLE_OR_DOUBLE = (torch.float32, torch.float64)
REAL = (torch.float32, *HALF, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGER = (torch.int32, torch.int64)
BOOL = (torch.bool,)
_DOUBLE = (torch.float64, torch.complex128)
MAX_WIDTH = 8  # of the convolution, as in csrc/core/conv_params.h
# The least and the largest sizes of dimensions; None is any.
_LIMITS = {"dstate": (1, None), "width": (1, MAX_WIDTH), "sequences+1": (1, None)}
ELLIPSIS = "..."

Dtypes = tuple[torch.dtype, ...]


def fail(message: str) -> NoReturn:
    raise RuntimeError(f"selective_scan: {message}")


class Call:
    """The tensors of a call by name, and what follows from them.

    Attributes:
        tensors: those that are there.
        options: the other arguments, by name.
        anchor: the name of that on whose device the others are.
        sizes: of the dimensions by name, as far as shapes were checked; "..." is a tuple of sizes,
            "1" is 1.
        is_complex: whether the state is.
        compute_dtype: of all arithmetic: float32, or float64 if any tensor is float64 or
            complex128.
        state_dtype: the compute dtype, its complex counterpart if the state is complex.
    """

    def __init__(self, tensors: dict[str, Tensor], anchor: str, complex_by: Sequence[str]) -> None:
        self.tensors = tensors
        self.anchor = anchor
        self.sizes: dict[str, int | torch.SymInt | tuple] = {"1": 1}
        self.groups: dict[str, int | torch.SymInt] = {}  # of projections with steps
        self.options: dict[str, object] = {}
        self.is_complex = any(tensors[name].is_complex() for name in complex_by)
        # As a number, since torch.compile of PyTorch 2.11 takes no bool for an index.
        precision = int(any(tensor.dtype in _DOUBLE for tensor in tensors.values()))
        self.compute_dtype = SINGLE_OR_DOUBLE[precision]
        self.state_dtype = COMPLEX[precision] if self.is_complex else self.compute_dtype

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


# --- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorArgument:
    """An argument that is a tensor.

    Attributes:
        name: as in the schema of the op.
        dtypes: those allowed, or what finds them, and a remark on them, for a tensor of a call.
        shape: the names of its dimensions; or what checks its shape.
        optional: whether it may be None.
        dims: the names of its dimensions, where `shape` is a function of one's own.
        is_changed: whether the op changes it in place.
    """

    name: str
    dtypes: Dtypes | Callable[[Tensor, Call], tuple[Dtypes, str]]
    shape: tuple[str, ...] | Callable[[str, Tensor, Call], None]
    optional: bool = False
    dims: tuple[str, ...] = ()
    is_changed: bool = False

    @property
    def has_gradient(self) -> bool:
        return self.dtypes not in (INTEGER, BOOL)

    def tensors(self, value: Tensor | None) -> dict[str, Tensor]:
        """Those that an argument of this value has, by name."""
        return {} if value is None else {self.name: value}

    def check_type(self, value: object) -> None:
        if isinstance(value, Tensor) or (value is None and self.optional):
            return
        _fail_on_type(self.name, "a Tensor or None" if self.optional else "a Tensor", value)

    def check_dtype(self, name: str, tensor: Tensor, call: Call) -> None:
        allowed, remark = self.dtypes, ""
        if not isinstance(allowed, tuple):
            allowed, remark = allowed(tensor, call)
        check_dtype(name, tensor, allowed, remark)

    def check_shape(self, name: str, tensor: Tensor, call: Call) -> None:
        if isinstance(self.shape, tuple):
            check_dims(name, tensor, self.shape, call.sizes)
        else:
            self.shape(name, tensor, call)


@dataclass(frozen=True)
class TensorList(TensorArgument):
    """An argument that is a list of tensors, all of one dtype and shape, whose names have their
    number: ``weights[3]``. The others of a table that is `measured_by` one have as many.

    Attributes:
        optional: whether it may be None, or empty.
        same_dtype: the list whose first tensor has the dtype, if not this one.
    """

    same_dtype: str | None = None

    def tensors(self, value: Sequence[Tensor] | None) -> dict[str, Tensor]:
        return {f"{self.name}[{i}]": tensor for i, tensor in enumerate(value or ())}

    def check_type(self, value: object) -> None:
        if value is None and self.optional:
            return
        if not isinstance(value, list | tuple):
            wanted = "a list of Tensors" + (" or None" if self.optional else "")
            _fail_on_type(self.name, wanted, value)
        for i, tensor in enumerate(value):
            if not isinstance(tensor, Tensor):
                _fail_on_type(f"{self.name}[{i}]", "a Tensor", tensor)

    def check_dtype(self, name: str, tensor: Tensor, call: Call) -> None:
        first = f"{self.same_dtype or self.name}[0]"
        if name == first:
            super().check_dtype(name, tensor, call)
        else:
            check_dtype(name, tensor, (call[first].dtype,), f" (as {first})")


@dataclass(frozen=True)
class Option:
    """An argument that is a bool, NumPy's too, or one of some choices; left out, it is False, or
    the first, or None if it is optional.

    Attributes:
        name: as in the schema of the op.
        choices: all of one type.
        none_is_default: whether None stands for the value left out.
        optional: whether None is a value of its own.
    """

    name: str
    choices: tuple[str, ...] | tuple[int, ...] = ()
    none_is_default: bool = False
    optional: bool = False

    @property
    def type(self) -> type:
        return type(self.choices[0]) if self.choices else bool

    @property
    def default(self) -> bool | str | int | None:
        if self.optional:
            return None
        return self.choices[0] if self.choices else False

    def check_type(self, value: object) -> None:
        if value is None and (self.none_is_default or self.optional):
            return
        is_flag = isinstance(value, bool) or _is_numpy_bool(value)  # a bool is an int, too
        if is_flag != (self.type is bool) or not (is_flag or isinstance(value, self.type)):
            wanted = _with_article(self.type)
            _fail_on_type(self.name, f"{wanted} or None" if self.optional else wanted, value)

    def check_value(self, value: object) -> None:
        if self.choices and value not in self.choices and not (value is None and self.optional):
            wanted = "None or one of" if self.optional else "one of"
            got = f"'{value}'" if isinstance(value, str) else value
            fail(f"{self.name} must be {wanted} {', '.join(map(str, self.choices))}, got {got}")


@dataclass(frozen=True)
class Number:
    """An argument that is a number of the type of its default, or an int in place of a float.

    Attributes:
        name: as in the schema of the op.
        default: what it is where it is left out.
        low: the least that it may be; None is any.
    """

    name: str
    default: int | float
    low: int | None = None
    optional = False

    @property
    def type(self) -> type:
        return type(self.default)

    def check_type(self, value: object) -> None:
        if not isinstance(value, int | self.type) or isinstance(value, bool):
            _fail_on_type(self.name, _with_article(self.type), value)

    def check_value(self, value: float) -> None:
        if self.low is not None and not value >= self.low:
            fail(f"{self.name} must be at least {self.low}, got {value}")


def _with_article(kind: type) -> str:
    return f"{'an' if kind is int else 'a'} {kind.__name__}"


def _is_numpy_bool(value: object) -> bool:
    """NumPy, which calls its type bool_ or bool, need not be installed."""
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")


def _fail_on_type(name: str, wanted: str, value: object) -> NoReturn:
    raise TypeError(f"selective_scan: {name} must be {wanted}, got {type(value).__name__}")


BackendName = Literal["auto", "cpu", "cuda", "reference"]
BACKEND = Option("backend", get_args(BackendName))


def check_backend(backend: str, device: torch.device) -> None:
    if backend not in BACKEND.choices:
        names = ", ".join(BACKEND.choices)
        raise ValueError(f"selective_scan: backend must be one of {names}, got '{backend}'")
    if backend in ("cpu", "cuda") and backend != device.type:
        raise ValueError(
            f"selective_scan: backend '{backend}' needs tensors on {backend}, got {device}"
        )


class Table:
    """The arguments of an operator, in the order of its op.

    Args:
        arguments: what they are.
        anchor: the tensor on whose device the others are.
        complex_by: the tensors of which any makes the state complex, if it is so itself.
        counted_by: the list of tensors of which others have as many.
        measured_by: the tensors whose shapes are looked at before those of the others.
        relations: fails where arguments, each right by itself, do not go together.
    """

    def __init__(
        self,
        *arguments: TensorArgument | Option | Number,
        anchor: str,
        complex_by: tuple[str, ...] = (),
        counted_by: str | None = None,
        measured_by: tuple[str, ...] = (),
        relations: Callable[[Call], None] = lambda call: None,
    ) -> None:
        self.arguments = arguments
        self.names = tuple(argument.name for argument in arguments)
        self.tensors = tuple(a for a in arguments if isinstance(a, TensorArgument))
        self.options = tuple(a for a in arguments if not isinstance(a, TensorArgument))
        self.defaults = tuple(getattr(argument, "default", None) for argument in arguments)
        self.anchor = anchor
        self._complex_by = complex_by
        self._counted_by = counted_by
        self._relations = relations
        # Named dimensions first, by which the shapes of others may be measured.
        self._by_shape = sorted(
            self.tensors,
            key=lambda a: (a.name not in measured_by, isinstance(a.shape, BroadcastableTo)),
        )

    def check_types(self, values: Sequence[object]) -> None:
        """TypeError unless every tensor is one, and then every option what it must be."""
        given = dict(zip(self.names, values, strict=False))
        for argument in (*self.tensors, *self.options):
            argument.check_type(given[argument.name])

    def check_values(self, values: Sequence[object]) -> Call:
        """As check. PyTorch may have left out the last ones, or have one of its own behind them."""
        filled = (*values, *self.defaults[len(values) :])
        return self.check(dict(zip(self.names, filled, strict=False)))

    def check(self, given: Mapping[str, object]) -> Call:
        """RuntimeError unless values of the right types are right in all else, too."""
        for option in self.options:
            option.check_value(given[option.name])
        self._check_counts(given)
        tensors = {a.name: a.tensors(given[a.name]) for a in self.tensors}
        present = {name: tensor for some in tensors.values() for name, tensor in some.items()}
        for name, tensor in present.items():
            check_dense(name, tensor)
        for name, tensor in present.items():
            check_device(name, tensor, self.anchor, present[self.anchor])
        call = Call(present, self.anchor, self._complex_by)
        call.options = {option.name: given[option.name] for option in self.options}
        for argument in self.tensors:
            for name, tensor in tensors[argument.name].items():
                argument.check_dtype(name, tensor, call)
        for argument in self._by_shape:
            for name, tensor in tensors[argument.name].items():
                argument.check_shape(name, tensor, call)
        self._relations(call)
        for argument in self.tensors:
            for name, tensor in tensors[argument.name].items() if argument.is_changed else ():
                check_changed(name, tensor)
        return call

    def _check_counts(self, given: Mapping[str, object]) -> None:
        wanted = None if self._counted_by is None else len(given[self._counted_by])
        if wanted == 0:
            fail(f"{self._counted_by} must have at least one tensor, got none")
        for argument in self.tensors:
            if not isinstance(argument, TensorList):
                continue
            count = len(given[argument.name] or ())
            if count != wanted and not (count == 0 and argument.optional):
                fail(
                    f"{argument.name} must have as many tensors as {self._counted_by}, {wanted}, "
                    f"got {count}"
                )


# --- dtypes and shapes that depend on other arguments ---------------------------------------------


def state_dtypes(_tensor: Tensor, call: Call) -> tuple[Dtypes, str]:
    return (COMPLEX if call.is_complex else SINGLE_OR_DOUBLE), ""


@dataclass(frozen=True)
class BroadcastableTo:
    other: str

    def __call__(self, name: str, tensor: Tensor, call: Call) -> None:
        wanted, got = call[self.other].shape, tensor.shape
        pairs = zip(reversed(got), reversed(wanted), strict=False)
        if len(got) > len(wanted) or not all(size in (1, other) for size, other in pairs):
            fail(f"{name} must be broadcastable to {self.other}, {tuple(wanted)}, got {tuple(got)}")


def check_cu_seqlens(name: str, tensor: Tensor, call: Call) -> None:
    check_dims(name, tensor, ("sequences+1",), call.sizes)
    call.sizes["sequences"] = call.sizes["sequences+1"] - 1
    if call.sizes["batch"] != 1:
        shape = tuple(call[call.anchor].shape)
        fail(f"{call.anchor} must have batch of 1 where {name} is given, got {shape}")


CU_SEQLENS = TensorArgument(
    "cu_seqlens", INTEGER, check_cu_seqlens, optional=True, dims=("sequences+1",)
)


@dataclass(frozen=True)
class Blocks:
    """The dimensions of square matrices, whose last one has the size of `outer`; or a `block` that
    divides it, for the blocks on the diagonal of a matrix that is 0 elsewhere."""

    dims: tuple[str, ...]
    outer: str

    def __call__(self, name: str, tensor: Tensor, call: Call) -> None:
        dims = (*self.dims[:-1], self.outer)
        if tensor.dim() == len(dims):
            outer, block = call.sizes[self.outer], tensor.shape[-1]
            if block > 0 and outer % block == 0:
                dims = self.dims
        check_dims(name, tensor, dims, call.sizes)


@dataclass(frozen=True)
class Projection:
    """B or C: constant with these dimensions; or with steps, (batch, dstate, seqlen) for all of dim
    or (batch, groups, dstate, seqlen). A real one for a complex state has two values a step."""

    constant: tuple[str, ...]

    def __call__(self, name: str, tensor: Tensor, call: Call) -> None:
        sizes = call.sizes.copy()
        steps = "seqlen"
        if call.is_complex and not tensor.is_complex():
            steps = "2*seqlen"
            sizes[steps] = 2 * sizes["seqlen"]
        of_all, of_groups = ("batch", "dstate", steps), ("batch", "groups", "dstate", steps)
        if tensor.dim() == len(self.constant):
            return check_dims(name, tensor, self.constant, sizes)
        if tensor.dim() == 3:
            groups = 1
            check_dims(name, tensor, of_all, sizes)
        elif tensor.dim() == 4:
            groups = tensor.shape[1]
            check_dims(name, tensor, of_groups, sizes)
        else:
            fail(
                f"{name} must be {_tuple_text(self.constant)}, (batch, dstate, seqlen) or "
                f"(batch, groups, dstate, seqlen), got {tuple(tensor.shape)}"
            )
        check_groups(name, groups, "dim", call)


def check_groups(name: str, groups: int | torch.SymInt, divided: str, call: Call) -> None:
    """Of B or C: as many as the others of the call have, which share the dimension `divided`."""
    size = call.sizes[divided]
    if groups == 0 or size % groups != 0:
        fail(f"{name} must have a number of groups that divides {divided} = {size}, got {groups}")
    for other, groups_of_other in call.groups.items():
        if groups_of_other != groups:
            fail(f"{name} must have as many groups as {other}, {groups_of_other}, got {groups}")
    call.groups[name] = groups


# --- dtypes that others decide --------------------------------------------------------------------


def real_or_complex(_tensor: Tensor, call: Call) -> tuple[Dtypes, str]:
    return (COMPLEX, " (complex A)") if call.is_complex else (REAL, "")


def dtype_of_anchor(_tensor: Tensor, call: Call) -> tuple[Dtypes, str]:
    return (call[call.anchor].dtype,), ""


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
    name: str, tensor: Tensor, dims: tuple[str, ...], sizes: dict, limits: Mapping = _LIMITS
) -> None:
    """Compares the tensor's sizes with those of `sizes`, and puts the others there."""
    known = {dim: sizes[dim] for dim in dims if dim in sizes}
    actual = _sizes_by_dim(tuple(tensor.shape), dims)
    if actual is None or not all(sizes.setdefault(dim, size) == size for dim, size in actual):
        text = f"{name} must be {_tuple_text(dims)}"
        if known:
            text += f" = {_tuple_text(known.get(dim, '*') for dim in dims)}"
        fail(f"{text}, got {tuple(tensor.shape)}")
    for dim, size in actual:
        if dim not in limits:
            continue
        low, high = limits[dim]
        if size < low or (high is not None and size > high):
            wanted = f"at least {low}" if high is None else f"{low} to {high}"
            fail(f"{name} must have {dim} of {wanted}, got {tuple(tensor.shape)}")


def check_shape_of(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.shape != other.shape:
        shapes = f"{tuple(other.shape)}, got {tuple(tensor.shape)}"
        fail(f"{name} must have the shape of {other_name}, {shapes}")


def check_changed(name: str, tensor: Tensor) -> None:
    """Elements that share memory would have no one value."""
    if any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        fail(f"{name} must have no stride of 0, got strides {tensor.stride()}")


def check_given_gradient(name: str, gradient: Tensor | None, tensor: Tensor | None) -> None:
    """Checks what the gradient of an argument is written into."""
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
    """Pairs of dimension and size, None where there are too few or too many."""
    if dims[0] != ELLIPSIS:
        return list(zip(dims, shape, strict=True)) if len(dims) == len(shape) else None
    leading = len(shape) - (len(dims) - 1)
    if leading < 0:
        return None
    return [(ELLIPSIS, shape[:leading]), *zip(dims[1:], shape[leading:], strict=True)]


def _tuple_text(entries: Iterable[object]) -> str:
    texts = [str(entry) for entry in entries]
    if len(texts) > 1:
        return f"({', '.join(texts)})"
    if texts[0].startswith("("):  # the sizes of an ellipsis, which are a tuple
        return texts[0]
    return "(...)" if texts[0] == ELLIPSIS else f"({texts[0]},)"
