"""Tests of refusals: tables of bad calls, checked against every way to call an operator.

The Python function on kernels and on the reference, the ops called directly through torch.ops, and
the fake kernels of torch.compile all refuse the same calls with the same message.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import COMPLEX, REAL, fake, ones
from opchecks import in_order
from problem import METHODS

PYTHON = ("function", "reference", "reference itself")  # ways in that see more than tensors
DENSE = "be a dense (strided) tensor"
EXCLUSIVE = tuple(f"be {it} {when} " for it in ("None", "False") for when in ("where", "unless"))
i32, i64 = partial(ones, dtype=torch.int32), partial(ones, dtype=torch.int64)
f64, c64, bf16 = (
    partial(ones, dtype=dtype) for dtype in (torch.float64, torch.complex64, torch.bfloat16)
)


@dataclass(frozen=True)
class Bad:
    """An argument that makes a good call bad, the message about it, and the call's changes."""

    name: str
    value: object
    sentence: str
    changes: dict

    @property
    def error(self) -> type[Exception]:
        is_of_type = self.sentence.startswith(("be a ", "be an "))
        if is_of_type and " where " not in self.sentence and self.sentence != DENSE:
            return TypeError
        return ValueError if self.name == "backend" else RuntimeError

    @property
    def argument(self) -> str:
        """The argument that has the name, or whose list entry has it."""
        return self.name.partition("[")[0]

    @property
    def is_python_alone(self) -> bool:
        """True if ops cannot be given the value, or refuse it with PyTorch's own message."""
        is_sparse = isinstance(self.value, torch.Tensor) and self.value.layout != torch.strided
        return is_sparse or self.error is not RuntimeError

    @property
    def message(self) -> str:
        has_name = self.sentence.startswith((f"{self.name} ", f"{self.name}["))
        return self.sentence if has_name else f"{self.name} must {self.sentence}"

    def full_message(self, anchor: torch.Tensor) -> str:
        """Returns the message with what was given instead, unless the sentence already says it."""
        value, text = self.value, f"selective_scan: {self.message}"
        if ", got" in text or self.sentence.startswith(EXCLUSIVE):
            return text
        if self.error is TypeError:
            return f"{text}, got {type(value).__name__}"
        if not isinstance(value, torch.Tensor):
            return text if value is None else f"{text}, got {value!r}"
        if "dtype" in text:
            return f"{text}, got {_short(value.dtype)}"
        if self.sentence == DENSE:
            return f"{text}, got layout {_short(value.layout)}"
        if "stride" in text:
            return f"{text}, got strides {value.stride()}"
        if "on the device" in text:
            return f"{text}, {anchor.device}, got {value.device}"
        return f"{text}, got {tuple(value.shape)}"


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


def bad(names: str, sentence: str, *values: object, **changes: object) -> list[Bad]:
    """Returns a bad call for each of the names and values. The message consists of the name,
    "must", the sentence and, unless the sentence says it, what was given."""
    return [Bad(*it, sentence, changes) for it in itertools.product(names.split(), values)]


def on_device(value: object, device: str) -> object:
    """Moves a tensor to a device with its strides, also those of 0; other values stay as they
    are."""
    if isinstance(value, list):
        return [on_device(it, device) for it in value]
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return value
    if value.layout != torch.strided or 0 not in value.stride():
        return value.to(device)
    return value._base.to(device).expand_as(value)


# --- ways in --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to call an operator with named arguments. `names` are the arguments that it accepts;
    None stands for all arguments of a table."""

    call: Callable[[dict], object]
    names: frozenset[str] | None = None

    def __call__(self, arguments: dict) -> object:
        return self.call(arguments)

    @property
    def faked(self) -> "Way":
        def call_faked(arguments: dict) -> object:
            with FakeTensorMode() as mode:
                return self.call(fake(arguments, mode))

        return Way(call_faked, self.names)


def by_op(name: str) -> Way:
    """Returns the way to call an op. A required argument that is missing is None."""
    op = getattr(torch.ops.selective_scan, name)
    names = [it.name for it in op.default._schema.arguments]

    def call(arguments: dict) -> object:
        return op(**dict(zip(names, in_order(op, arguments), strict=True)))

    return Way(call, frozenset(names))


def ways_in(function, reference, *ops: str) -> dict[str, Way]:
    """Returns the ways to call an operator, by name. Without a function only the ops are called;
    without a reference there is no backend either."""
    ways = {name: by_op(name) for name in ops}
    python = {}
    if function is not None:
        ways = {"function": Way(lambda arguments: function(**arguments))} | ways
    if reference is not None:
        python = {
            "reference": Way(lambda it: function(**({"backend": "reference"} | it))),
            "reference itself": Way(
                lambda arguments: reference(**arguments),
                frozenset(inspect.signature(reference).parameters),
            ),
        }
    return ways | python | {f"fake {name}": way.faked for name, way in ways.items()}


def outcome_of(call: Callable[[dict], object], arguments: dict) -> object:
    """Returns the exception's type and message, or "accepted"."""
    try:
        call(arguments)
    except Exception as error:
        return type(error), str(error)
    return "accepted"


@dataclass(frozen=True)
class Refusals:
    """An operator's table of bad calls: the ways to call it, a function that returns a good call
    with given changes, and the arguments that make a call bad. `anchor` names the tensor whose
    device the others must share."""

    ways: dict[str, Way]
    good: Callable[..., dict]
    anchor: str
    table: Iterable[list[Bad]]

    def call(self, device: str, **changes: object) -> dict:
        return {name: on_device(it, device) for name, it in self.good(**changes).items()}

    def rows(self, way: str) -> list[Bad]:
        """Returns the bad calls that can be made in this way."""
        names, is_python = self.ways[way].names, way in PYTHON
        return [
            row
            for row in itertools.chain(*self.table)
            if (is_python or not row.is_python_alone) and (names is None or row.argument in names)
        ]

    def check(self, way: str, device: str) -> None:
        """Checks all rows in one test, since a table has hundreds of them and a call is quick."""
        failures = []
        for row in self.rows(way):
            arguments = self.call(device, **row.changes)
            anchor = arguments[self.anchor]
            value = on_device(row.value, device)
            if row.argument != row.name:
                value, entry = list(arguments[row.argument]), value
                value[int(row.name[len(row.argument) + 1 : -1])] = entry
            arguments[row.argument] = value
            outcome = outcome_of(self.ways[way], arguments)
            expected = (row.error, row.full_message(anchor))
            if outcome != expected:
                failures.append(f"{row}\n  expected {expected}\n  got {outcome}")
        assert not failures, "\n".join(failures)


def plain(**arguments: object) -> Callable[..., dict]:
    """Returns a function that returns a good call of these arguments, with any of them changed."""
    return lambda **changes: arguments | changes


# --- what several tables say ---------------------------------------------------------------------

POLES = "float32, float64, complex64 or complex128"
ANY = f"{REAL.replace(' or', ',')}, {COMPLEX}"
INDICES = "have dtype int32 or int64"
NO_STRIDE = "have no stride of 0"
METHOD = f"be one of {', '.join(METHODS)}"
BACKENDS = [
    *bad("backend", "be a str", 3, None),
    *bad("backend", "be one of auto, cpu, cuda, reference", "tpu"),
]


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ones(*shape, dtype=dtype, device="meta")


def numbers(*shape: int, but: tuple[torch.dtype, ...] = ()) -> list[torch.Tensor]:
    """Returns tensors of the dtypes that no real argument accepts, except those in `but`."""
    dtypes = (torch.int64, torch.bool, torch.complex64, torch.uint8)
    return [ones(*shape, dtype=dtype) for dtype in dtypes if dtype not in but]
