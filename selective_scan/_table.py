"""Tables that declare the arguments of an operator.

csrc/torch/argument_tables.py translates the tables to C++. A dtype or a shape that an operator
checks by its own function is not translated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn, get_args

import torch
from torch import Tensor

from ._checks import (
    BOOL,
    COMPLEX,
    ELLIPSIS,
    EXPRESSIONS,
    HALF,
    INTEGER,
    REAL,
    SINGLE_OR_DOUBLE,
    Call,
    Dtypes,
    Expression,
    check_changed,
    check_dense,
    check_device,
    check_dims,
    check_dtype,
    check_groups,
    fail,
    tuple_text,
)


@dataclass(frozen=True)
class TensorArgument:
    """An argument that is a tensor.

    Attributes:
        name: as in the schema of the op.
        dtypes: the allowed dtypes, or a function that returns them and a remark, for a given call.
        shape: the names of the dimensions, which are converted to a Shape; or a Shape, or another
            function that checks the shape.
        optional: whether the argument may be None.
        dims: the names of the dimensions, if `shape` is a function other than a Shape.
        is_changed: whether the op changes the tensor in place.
    """

    name: str
    dtypes: Dtypes | Callable[[Tensor, Call], tuple[Dtypes, str]]
    shape: tuple[str, ...] | Callable[[str, Tensor, Call], None]
    optional: bool = False
    dims: tuple[str, ...] = ()
    is_changed: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.shape, tuple):
            object.__setattr__(self, "shape", Shape((self.shape,)))

    @property
    def has_gradient(self) -> bool:
        return self.dtypes not in (INTEGER, BOOL)

    def tensors(self, value: Tensor | None) -> dict[str, Tensor]:
        """Returns the tensors in a value of this argument, by name."""
        return {} if value is None else {self.name: value}

    def check_type(self, value: object) -> None:
        if isinstance(value, Tensor) or (value is None and self.optional):
            return
        fail_on_type(self.name, "a Tensor or None" if self.optional else "a Tensor", value)

    def check_dtype(self, name: str, tensor: Tensor, call: Call) -> None:
        allowed, remark = self.dtypes, ""
        if not isinstance(allowed, tuple):
            allowed, remark = allowed(tensor, call)
        check_dtype(name, tensor, allowed, remark)

    def dims_of(self, tensor: Tensor) -> tuple[str, ...]:
        """Returns the names of a tensor's dimensions, an empty tuple if none match its rank."""
        if not isinstance(self.shape, Shape):
            return self.dims
        return next((dims for dims in self.shape.alternatives if len(dims) == tensor.dim()), ())

    @property
    def dim_names(self) -> set[str]:
        """The names of all dimensions that the tensor may have."""
        return self.shape.names if isinstance(self.shape, Shape) else set(self.dims)


@dataclass(frozen=True)
class TensorList(TensorArgument):
    """An argument that is a list of tensors of one dtype and shape, named by their index, such as
    ``weights[3]``. All lists of a table have as many tensors as the one it is `counted_by`.

    Attributes:
        optional: whether the list may be None or empty.
        same_dtype: the list whose first tensor determines the dtype, if not this list.
    """

    same_dtype: str | None = None

    def tensors(self, value: Sequence[Tensor] | None) -> dict[str, Tensor]:
        return {f"{self.name}[{i}]": tensor for i, tensor in enumerate(value or ())}

    def check_type(self, value: object) -> None:
        if value is None and self.optional:
            return
        if not isinstance(value, list | tuple):
            wanted = "a list of Tensors" + (" or None" if self.optional else "")
            fail_on_type(self.name, wanted, value)
        for i, tensor in enumerate(value):
            if not isinstance(tensor, Tensor):
                fail_on_type(f"{self.name}[{i}]", "a Tensor", tensor)

    def check_dtype(self, name: str, tensor: Tensor, call: Call) -> None:
        first = f"{self.same_dtype or self.name}[0]"
        if name == first:
            super().check_dtype(name, tensor, call)
        else:
            check_dtype(name, tensor, (call[first].dtype,), f" (as {first})")


@dataclass(frozen=True)
class Option:
    """An argument that is a bool (possibly NumPy's) or one of some choices. Its default is False or
    the first choice, or None if it is optional.

    Attributes:
        name: as in the schema of the op.
        choices: the allowed values, all of one type; a bool if there are none.
        none_is_default: whether None stands for the default.
        optional: whether None is a separate value.
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
        is_flag = isinstance(value, bool) or _is_numpy_bool(value)  # a bool is also an int
        if is_flag != (self.type is bool) or not (is_flag or isinstance(value, self.type)):
            wanted = _with_article(self.type)
            fail_on_type(self.name, f"{wanted} or None" if self.optional else wanted, value)

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
        default: the default value.
        low: the smallest allowed value; None means no limit.
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
            fail_on_type(self.name, _with_article(self.type), value)

    def check_value(self, value: float) -> None:
        if self.low is not None and not value >= self.low:
            fail(f"{self.name} must be at least {self.low}, got {value}")


def _with_article(kind: type) -> str:
    return f"{'an' if kind is int else 'a'} {kind.__name__}"


def _is_numpy_bool(value: object) -> bool:
    """Recognizes NumPy's bool by name, bool_ or bool, since NumPy need not be installed."""
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")


def fail_on_type(name: str, wanted: str, value: object) -> NoReturn:
    raise TypeError(f"selective_scan: {name} must be {wanted}, got {type(value).__name__}")


BackendName = Literal["auto", "cpu", "cuda", "reference"]
BACKEND = Option("backend", get_args(BackendName))
# Published models pass None for "no".
RETURN_LAST_STATE = Option("return_last_state", none_is_default=True)


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
        arguments: their declarations.
        anchor: the tensor whose device all others must share.
        complex_by: the tensors that make the state complex if any of them is complex.
        counted_by: the list of tensors whose length all other lists must have.
        measured_by: the tensors whose shapes are checked before those of the others.
        equal_sizes: maps the name of an argument to two dimensions that have the same size in
            calls without this argument.
        relations: fails if arguments that are valid by themselves do not fit together.
    """

    def __init__(
        self,
        *arguments: TensorArgument | Option | Number,
        anchor: str,
        complex_by: tuple[str, ...] = (),
        counted_by: str | None = None,
        measured_by: tuple[str, ...] = (),
        equal_sizes: Mapping[str, tuple[str, str]] = {"cu_seqlens": ("sequences", "batch")},
        relations: Callable[[Call], None] = lambda call: None,
    ) -> None:
        self.arguments = arguments
        self.names = tuple(argument.name for argument in arguments)
        self.tensors = tuple(a for a in arguments if isinstance(a, TensorArgument))
        self.options = tuple(a for a in arguments if not isinstance(a, TensorArgument))
        self.defaults = tuple(getattr(argument, "default", None) for argument in arguments)
        self.anchor = anchor
        self.counted_by = counted_by
        self._relations = relations
        self.complex_by = complex_by
        self.equal_sizes = equal_sizes
        self.by_shape = self._in_order_of_shapes(measured_by)

    def _in_order_of_shapes(self, measured_by: tuple[str, ...]) -> list[TensorArgument]:
        """Returns the tensors in the order in which their shapes are checked: first the ones that
        determine the sizes of others."""
        order = []
        bounds = [argument for argument in self.tensors if "sequences+1" in argument.dim_names]
        for argument in sorted(
            self.tensors,
            key=lambda a: (a.name not in measured_by, isinstance(a.shape, BroadcastableTo)),
        ):
            before = bounds if "sequences" in argument.dim_names else []
            order += [it for it in (*before, argument) if it not in order]
        return order

    def check_types(self, values: Sequence[object]) -> None:
        """Raises a TypeError if a tensor or, after those, an option has a wrong type."""
        given = dict(zip(self.names, values, strict=False))
        for argument in (*self.tensors, *self.options):
            argument.check_type(given[argument.name])

    def check_values(self, values: Sequence[object]) -> Call:
        """Calls check() with the arguments of an op by position. PyTorch may omit the last values,
        or append one of its own."""
        filled = (*values, *self.defaults[len(values) :])
        return self.check(dict(zip(self.names, filled, strict=False)))

    def check(self, given: Mapping[str, object]) -> Call:
        """Raises a RuntimeError if values, which have the right types, are otherwise invalid."""
        for option in self.options:
            option.check_value(given[option.name])
        self._check_counts(given)
        tensors = {a.name: a.tensors(given[a.name]) for a in self.tensors}
        present = {name: tensor for some in tensors.values() for name, tensor in some.items()}
        for name, tensor in present.items():
            check_dense(name, tensor)
        for name, tensor in present.items():
            check_device(name, tensor, self.anchor, present[self.anchor])
        call = Call(present, self.anchor, self.complex_by)
        call.equal_sizes = [pair for name, pair in self.equal_sizes.items() if name not in present]
        call.options = {option.name: given[option.name] for option in self.options}
        for argument in self.tensors:
            for name, tensor in tensors[argument.name].items():
                argument.check_dtype(name, tensor, call)
        for argument in self.by_shape:
            for name, tensor in tensors[argument.name].items():
                argument.shape(name, tensor, call)
        for argument in self.tensors:
            for name, tensor in tensors[argument.name].items() if argument.is_changed else ():
                check_changed(name, tensor)
        self._relations(call)
        return call

    def _check_counts(self, given: Mapping[str, object]) -> None:
        wanted = None if self.counted_by is None else len(given[self.counted_by])
        if wanted == 0:
            fail(f"{self.counted_by} must have at least one tensor, got none")
        for argument in self.tensors:
            if not isinstance(argument, TensorList):
                continue
            count = len(given[argument.name] or ())
            if count != wanted and not (count == 0 and argument.optional):
                fail(
                    f"{argument.name} must have as many tensors as {self.counted_by}, {wanted}, "
                    f"got {count}"
                )


# --- dtypes and shapes that depend on other arguments ---------------------------------------------


@dataclass(frozen=True)
class BroadcastableTo:
    other: str

    def __call__(self, name: str, tensor: Tensor, call: Call) -> None:
        wanted, got = call[self.other].shape, tensor.shape
        pairs = zip(reversed(got), reversed(wanted), strict=False)
        if len(got) > len(wanted) or not all(size in (1, other) for size, other in pairs):
            fail(f"{name} must be broadcastable to {self.other}, {tuple(wanted)}, got {tuple(got)}")


@dataclass(frozen=True)
class Shape:
    """The names of a tensor's dimensions. Of several alternatives, the one of its rank applies.

    A dimension "heads?" exists only if an earlier argument has a dimension "heads". "groups" may
    have any size. The other names are as in `Expression`.

    Attributes:
        alternatives: one or more tuples of names.
        where: the argument with which `alternatives` apply; without it `otherwise` does.
        two_of: the last dimension, in which a real tensor has two values per entry if the state is
            complex.
        divided: names of which the first one in the call is the dimension that groups divide. If
            given, the tensor is B or C: with "groups", with a "batch" and one group, or constant.
        is_packed: whether these are the boundaries of sequences in the anchor, whose batch is 1.
        one: a dimension whose size is 1 unless an earlier argument has determined it.
        most: the largest size of the last dimension, if limited.
        before: a check that runs first and fails in some calls. C++ has its own function for it.
    """

    alternatives: tuple[tuple[str, ...], ...]
    where: str | None = None
    otherwise: tuple[tuple[str, ...], ...] = ()
    two_of: str | None = None
    divided: tuple[str, ...] = ()
    is_packed: bool = False
    one: str | None = None
    most: int | None = None
    before: Callable[[str, Tensor, Call], None] | None = None

    def __post_init__(self) -> None:
        for dim in (*self.names, f"2*{self.two_of}"):
            if not dim.rstrip("?").isidentifier() and dim != ELLIPSIS:
                EXPRESSIONS[dim] = Expression.of(dim)
        # Most shapes consist of names only, which are checked faster.
        has_optional = "?" in "".join(self.names)
        conditions = (self.where, self.two_of, self.one, self.most, self.before)
        is_plain = len(self.alternatives) == 1 and all(it is None for it in conditions)
        is_plain = is_plain and not (self.divided or self.is_packed or has_optional)
        object.__setattr__(self, "_has_optional", has_optional)
        object.__setattr__(self, "_is_plain", is_plain)

    @property
    def names(self) -> set[str]:
        return {dim for dims in (*self.alternatives, *self.otherwise) for dim in dims}

    def __call__(self, name: str, tensor: Tensor, call: Call) -> None:
        if self._is_plain:
            return call.check_dims(name, tensor, self.alternatives[0])
        if self.before is not None:
            self.before(name, tensor, call)
        holds = self.where is None or self.where in call.tensors
        of_call = self.alternatives if holds else self.otherwise
        if self._has_optional:
            of_call = [_present(dims, call.sizes) for dims in of_call]
        rank = tensor.dim()
        dims = of_call[0]
        for dims in of_call:
            if len(dims) == rank:
                break
        else:
            if len(of_call) > 1:
                *others, last = map(tuple_text, of_call)
                fail(f"{name} must be {', '.join(others)} or {last}, got {tuple(tensor.shape)}")
        if dims[-1] == self.two_of and call.is_complex and not tensor.is_complex():
            dims = (*dims[:-1], f"2*{self.two_of}")
        if self.one is not None and self.one not in call.sizes:
            check_dims(name, tensor, dims, {**call.sizes, self.one: 1})
        else:
            call.check_dims(name, tensor, dims)
        if self.most is not None and tensor.shape[-1] > self.most:
            fail(f"{name} must have {dims[-1]} of 1 to {self.most}, got {tuple(tensor.shape)}")
        if self.divided and ("groups" in dims or "batch" in dims):
            groups = tensor.shape[dims.index("groups")] if "groups" in dims else 1
            divided = next(dim for dim in self.divided if dim in call.sizes)
            check_groups(name, groups, divided, call)
        if self.is_packed and call.sizes["batch"] != 1:
            shape = tuple(call[call.anchor].shape)
            fail(f"{call.anchor} must have batch of 1 where {name} is given, got {shape}")


def _present(dims: tuple[str, ...], sizes: dict) -> tuple[str, ...]:
    return tuple(
        [dim.rstrip("?") for dim in dims if not dim.endswith("?") or dim.rstrip("?") in sizes]
    )


PROJECTIONS = (("batch", "dstate", "seqlen"), ("batch", "groups", "dstate", "seqlen"))
CU_SEQLENS = TensorArgument(
    "cu_seqlens", INTEGER, Shape((("sequences+1",),), is_packed=True), optional=True
)


# --- dtypes determined by other arguments ---------------------------------------------------------


class Case(NamedTuple):
    """Allowed dtypes, a remark on them, and the conditions under which they apply.

    Attributes:
        is_complex: whether the call's state must be complex; None means either.
        rank: the rank that the tensor must have; None means any.
        given: an argument that must be given, or True; None means no condition.
        is_half: whether the case applies only to float16 and bfloat16 tensors.
    """

    dtypes: Dtypes
    remark: str = ""
    is_complex: bool | None = None
    rank: int | None = None
    given: str | None = None
    is_half: bool = False

    def holds(self, tensor: Tensor, call: Call) -> bool:
        return (
            self.is_complex in (None, call.is_complex)
            and self.rank in (None, tensor.dim())
            and (self.given is None or self.given in call.tensors or call.options.get(self.given))
            and (not self.is_half or tensor.dtype in HALF)
        )


@dataclass(frozen=True)
class Cases:
    """The dtypes of the first case that applies."""

    cases: tuple[Case, ...]

    def __call__(self, tensor: Tensor, call: Call) -> tuple[Dtypes, str]:
        case = next(case for case in self.cases if case.holds(tensor, call))
        return case.dtypes, case.remark


@dataclass(frozen=True)
class DtypeOf:
    """The dtype of another argument."""

    other: str
    remark: str = ""

    def __call__(self, _tensor: Tensor, call: Call) -> tuple[Dtypes, str]:
        return (call[self.other].dtype,), self.remark


STATE_DTYPES = Cases((Case(COMPLEX, is_complex=True), Case(SINGLE_OR_DOUBLE)))
REAL_OR_COMPLEX = Cases((Case(COMPLEX, " (complex A)", is_complex=True), Case(REAL)))
# The dtypes of B and C: constant ones if A is complex, variable ones if A is complex, then those of
# a real A.
PROJECTION_DTYPES = Cases(
    (
        Case(COMPLEX, " (complex A, constant B and C)", is_complex=True, rank=2),
        Case((*COMPLEX, *REAL), is_complex=True),
        Case(REAL),
    )
)
