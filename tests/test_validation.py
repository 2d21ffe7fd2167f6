"""What is refused, and with which sentence: one table of bad calls for every way into the library.

The Python function on C++ kernels and on the reference, the ops as anyone may call them through
torch.ops, and the fake kernels of torch.compile all refuse the same calls with the same words.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from problem import TENSORS
from selective_scan import selective_scan_fn, selective_scan_ref

BATCH, DIM, SEQLEN, DSTATE, GROUPS = 2, 4, 6, 3, 2


def good_call(is_complex=False):
    pole = torch.complex64 if is_complex else torch.float32
    return {
        "u": torch.randn(BATCH, DIM, SEQLEN),
        "delta": torch.rand(BATCH, DIM, SEQLEN),
        "A": -torch.rand(DIM, DSTATE, dtype=pole),
        "B": torch.randn(BATCH, GROUPS, DSTATE, SEQLEN, dtype=pole),
        "C": torch.randn(BATCH, GROUPS, DSTATE, SEQLEN, dtype=pole),
        "D": torch.randn(DIM),
        "z": torch.randn(BATCH, DIM, SEQLEN),
        "delta_bias": torch.rand(DIM),
        "initial_state": torch.randn(BATCH, DIM, DSTATE, dtype=pole),
        "delta_softplus": True,
        "discretization_method": "foh",
        "reverse": False,
    }


@dataclass(frozen=True)
class Bad:
    """A call wrong in the arguments `changes` gives; "{u}" in the message is the device of u."""

    changes: dict[str, object]
    message: str
    error: type[Exception] = RuntimeError
    is_complex: bool = False
    python_only: bool = False  # what the ops cannot be given, or refuse in PyTorch's own words

    def __str__(self):
        return ",".join(self.changes) + ": " + self.message.split(" must be ")[-1]


@dataclass(frozen=True)
class Value:
    """A tensor that is made when the call is, so that it can be on any device."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    make: Callable = field(default=torch.ones)

    def on(self, device):
        return self.make(self.shape, dtype=self.dtype, device=device)


def wrong_types():
    needed, optional = ("u", "delta", "A", "B", "C"), ("D", "z", "delta_bias", "initial_state")
    for name in needed:
        yield Bad({name: [1.0]}, f"{name} must be a Tensor, got list", TypeError)
        yield Bad({name: None}, f"{name} must be a Tensor, got NoneType", TypeError)
    for name in optional:
        yield Bad({name: 1.0}, f"{name} must be a Tensor or None, got float", TypeError)
    for name in ("delta_softplus", "reverse", "return_last_state"):
        yield Bad({name: 1}, f"{name} must be a bool, got int", TypeError)
        yield Bad({name: None}, f"{name} must be a bool, got NoneType", TypeError)
        yield Bad({name: Value(())}, f"{name} must be a bool, got Tensor", TypeError)
    for name in ("discretization_method", "backend"):
        yield Bad({name: 3}, f"{name} must be a str, got int", TypeError)
        yield Bad({name: None}, f"{name} must be a str, got NoneType", TypeError)
    yield Bad(
        {"backend": "tpu"},
        "backend must be one of auto, cpu, cuda, reference, got 'tpu'",
        ValueError,
    )


def wrong_methods():
    for method in ("euler", "ZOH", "", "zoh "):
        yield Bad(
            {"discretization_method": method},
            "discretization_method must be one of zoh, foh, bilinear, poly, highorder, rk4, "
            f"got '{method}'",
        )


REAL = "float32, float16, bfloat16 or float64"


def wrong_dtypes():
    good = {name: tuple(value.shape) for name, value in good_call().items() if name in TENSORS}
    for name in ("u", "delta", "z", "D", "delta_bias", "B", "C"):
        for dtype in (torch.int64, torch.bool, torch.complex64, torch.uint8):
            text = str(dtype).removeprefix("torch.")
            yield Bad(
                {name: Value(good[name], dtype)}, f"{name} must have dtype {REAL}, got {text}"
            )
    for dtype in (torch.float16, torch.bfloat16, torch.int32):
        text = str(dtype).removeprefix("torch.")
        yield Bad(
            {"A": Value(good["A"], dtype)},
            f"A must have dtype float32, float64, complex64 or complex128, got {text}",
        )
    state = good["initial_state"]
    for dtype in (torch.float16, torch.complex64):
        text = str(dtype).removeprefix("torch.")
        yield Bad(
            {"initial_state": Value(state, dtype)},
            f"initial_state must have dtype float32 or float64, got {text}",
        )
    yield Bad(
        {"initial_state": Value(state)},
        "initial_state must have dtype complex64 or complex128, got float32",
        is_complex=True,
    )
    for name in ("B", "C"):
        yield Bad(
            {name: Value((DIM, DSTATE))},
            f"{name} must have dtype complex64 or complex128 (complex A, constant B and C), "
            "got float32",
            is_complex=True,
        )
        yield Bad(
            {name: Value(good[name], torch.int64)},
            f"{name} must have dtype complex64, complex128, float32, float16, bfloat16 or float64, "
            "got int64",
            is_complex=True,
        )
    for name in ("u", "delta", "z"):
        yield Bad(
            {name: Value(good[name], torch.complex64)},
            f"{name} must have dtype {REAL}, got complex64",
            is_complex=True,
        )


def wrong_shapes():
    b, d, n, s, g = BATCH, DIM, DSTATE, SEQLEN, GROUPS
    for shape in ((b, s), (b, d, s, 1), (), (s,)):
        yield Bad({"u": Value(shape)}, f"u must be (batch, dim, seqlen), got {shape}")
    for name in ("delta", "z"):
        for shape in ((b, d, s - 1), (b, d + 1, s), (b + 1, d, s), (b, s, d), (d, s), (1, d, s)):
            yield Bad(
                {name: Value(shape)},
                f"{name} must be (batch, dim, seqlen) = ({b}, {d}, {s}), got {shape}",
            )
    for shape in ((d - 1, n), (n, d), (d,), (n,), (d, n, 1), (1, n), ()):
        yield Bad({"A": Value(shape)}, f"A must be (dim, dstate) = ({d}, *), got {shape}")
    yield Bad({"A": Value((d, 0))}, f"A must have dstate of at least 1, got ({d}, 0)")
    for name in ("B", "C"):
        for shape in ((), (n,), (b, g, n, s, 1)):
            yield Bad(
                {name: Value(shape)},
                f"{name} must be (dim, dstate), (batch, dstate, seqlen) or "
                f"(batch, groups, dstate, seqlen), got {shape}",
            )
        for shape in ((d, n + 1), (d - 1, n), (n, d), (n, s)):
            yield Bad(
                {name: Value(shape)}, f"{name} must be (dim, dstate) = ({d}, {n}), got {shape}"
            )
        for shape in ((b, n, s - 1), (b, n + 1, s), (1, n, s), (b, s, n), (b, n, 2 * s)):
            yield Bad(
                {name: Value(shape)},
                f"{name} must be (batch, dstate, seqlen) = ({b}, {n}, {s}), got {shape}",
            )
        for shape in ((b, g, n, s + 1), (b, g, n - 1, s), (1, g, n, s), (b, g, s, n)):
            yield Bad(
                {name: Value(shape)},
                f"{name} must be (batch, groups, dstate, seqlen) = ({b}, *, {n}, {s}), got {shape}",
            )
        for groups in (0, 3, 5, 8):
            yield Bad(
                {name: Value((b, groups, n, s))},
                f"{name} must have a number of groups that divides dim = {d}, got {groups}",
            )
        for shape, names, sizes in (
            ((b, n, s), "batch, dstate, 2*seqlen", f"{b}, {n}, {2 * s}"),
            ((b, n, 2 * s + 1), "batch, dstate, 2*seqlen", f"{b}, {n}, {2 * s}"),
            ((b, g, n, s), "batch, groups, dstate, 2*seqlen", f"{b}, *, {n}, {2 * s}"),
        ):
            yield Bad(
                {name: Value(shape)},
                f"{name} must be ({names}) = ({sizes}), got {shape}",
                is_complex=True,
            )
        yield Bad(
            {name: Value((b, g, n, 2 * s), torch.complex64)},
            f"{name} must be (batch, groups, dstate, seqlen) = ({b}, *, {n}, {s}), "
            f"got {(b, g, n, 2 * s)}",
            is_complex=True,
        )
    yield Bad({"C": Value((b, 4, n, s))}, "C must have as many groups as B, 2, got 4")
    yield Bad({"C": Value((b, n, s))}, "C must have as many groups as B, 2, got 1")
    for name in ("D", "delta_bias"):
        for shape in ((d - 1,), (d, 1), (), (1,), (1, d)):
            yield Bad({name: Value(shape)}, f"{name} must be (dim,) = ({d},), got {shape}")
    for shape in ((b, d, n + 1), (b, n, d), (d, n), (1, d, n), (b, d, n, 1)):
        yield Bad(
            {"initial_state": Value(shape)},
            f"initial_state must be (batch, dim, dstate) = ({b}, {d}, {n}), got {shape}",
        )


def to_csr(shape, dtype, device):
    return torch.ones(shape, dtype=dtype, device=device).to_sparse_csr()


def to_coo(shape, dtype, device):
    return torch.ones(shape, dtype=dtype, device=device).to_sparse_coo()


def on_meta(shape, dtype, device):
    return torch.ones(shape, dtype=dtype, device="meta")


def wrong_places():
    for name, value in good_call().items():
        if name not in TENSORS:
            continue
        shape = tuple(value.shape)
        yield Bad(
            {name: Value(shape, make=to_coo)},
            f"{name} must be a dense (strided) tensor, got layout sparse_coo",
            python_only=True,
        )
        if len(shape) == 2:
            yield Bad(
                {name: Value(shape, make=to_csr)},
                f"{name} must be a dense (strided) tensor, got layout sparse_csr",
                python_only=True,
            )
        if name != "u":
            yield Bad(
                {name: Value(shape, make=on_meta)},
                f"{name} must be on the device of u, {{u}}, got meta",
            )


def wrong_in_order():
    """Where several things are wrong, what is checked first is said first."""
    b, d, s = BATCH, DIM, SEQLEN
    wide = Value((b, d, s + 1))
    yield Bad(
        {"delta": wide, "z": Value((b, d, s), torch.int32)},
        f"z must have dtype {REAL}, got int32",
    )
    yield Bad(
        {"z": wide, "delta": wide},
        f"delta must be (batch, dim, seqlen) = ({b}, {d}, {s}), got {wide.shape}",
    )
    yield Bad(
        {"u": Value((b, d, s), torch.int32), "discretization_method": "tustin"},
        "discretization_method must be one of zoh, foh, bilinear, poly, highorder, rk4, "
        "got 'tustin'",
    )


BAD_CALLS = [
    *wrong_types(),
    *wrong_methods(),
    *wrong_dtypes(),
    *wrong_shapes(),
    *wrong_places(),
    *wrong_in_order(),
]


def arguments_of(bad, device):
    arguments = good_call(bad.is_complex) | bad.changes
    arguments = {
        name: value.on(device) if isinstance(value, Value) else value
        for name, value in arguments.items()
    }
    return {
        name: value.to(device) if name not in bad.changes and name in TENSORS else value
        for name, value in arguments.items()
    }


def call_auto(arguments):
    return selective_scan_fn(**arguments)


def call_reference(arguments):
    return selective_scan_fn(**({"backend": "reference"} | arguments))


def call_reference_itself(arguments):
    return selective_scan_ref(**arguments)


OP_ORDER = (*TENSORS[:8], "delta_softplus", "discretization_method", "initial_state", "reverse")


def call_op(arguments):
    return torch.ops.selective_scan.selective_scan_fwd(*(arguments[name] for name in OP_ORDER))


def call_backward_op(arguments):
    return torch.ops.selective_scan.selective_scan_bwd(
        arguments["u"], None, *(arguments[name] for name in OP_ORDER), None
    )


def faked(call):
    def call_faked(arguments):
        mode = FakeTensorMode()
        fake = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        with mode:
            return call(fake)

    return call_faked


ENTRIES = {
    "auto": call_auto,
    "reference": call_reference,
    "selective_scan_ref": call_reference_itself,
    "op": call_op,
    "backward op": call_backward_op,
    "fake op": faked(call_op),
    "fake backward op": faked(call_backward_op),
    "fake auto": faked(call_auto),
}


def applies(entry, bad):
    if "op" in entry:
        return bad.error is RuntimeError and not bad.python_only
    if entry == "selective_scan_ref":
        return "backend" not in bad.changes
    if entry == "fake auto":
        return not bad.python_only and bad.error is RuntimeError
    return True


@pytest.mark.parametrize("entry", ENTRIES)
def test_good_calls_pass(entry, device):
    """The table is about what differs from these."""
    for is_complex in (False, True):
        ENTRIES[entry](arguments_of(Bad({}, "", is_complex=is_complex), device))


@pytest.mark.parametrize("entry", ENTRIES)
def test_bad_calls_are_refused_in_the_same_words(entry, device):
    """One test per entry rather than per row: the table has hundreds of rows, a call is quick."""
    failures = []
    for bad in BAD_CALLS:
        if not applies(entry, bad):
            continue
        arguments = arguments_of(bad, device)
        expected = (
            "selective_scan: " + bad.message.format(u=arguments["u"].device)
            if isinstance(arguments["u"], torch.Tensor)
            else "selective_scan: " + bad.message
        )
        outcome = outcome_of(ENTRIES[entry], arguments)
        if outcome != (bad.error, expected):
            failures.append(f"{bad.changes}\n  expected {bad.error, expected}\n  got {outcome}")
    assert not failures, "\n".join(failures)


def outcome_of(call, arguments):
    """The exception's type and message, or "accepted"."""
    try:
        call(arguments)
    except Exception as error:
        return type(error), str(error)
    return "accepted"


def test_backend_must_match_the_device(device):
    arguments = arguments_of(Bad({}, ""), device)
    other = "cuda" if device == "cpu" else "cpu"
    with pytest.raises(ValueError, match="selective_scan: backend") as error:
        selective_scan_fn(**arguments, backend=other)
    assert str(error.value) == (
        f"selective_scan: backend '{other}' needs tensors on {other}, got {arguments['u'].device}"
    )
    selective_scan_fn(**arguments, backend=device)


@pytest.mark.cuda
def test_tensors_on_two_devices(cuda_device):
    arguments = arguments_of(Bad({}, ""), cuda_device)
    for name in TENSORS[1:]:
        mixed = arguments | {name: arguments[name].cpu()}
        for entry in ("auto", "op", "reference"):
            expected = f"selective_scan: {name} must be on the device of u, cuda:0, got cpu"
            assert outcome_of(ENTRIES[entry], mixed) == (RuntimeError, expected)


# --- what only the backward op is given -----------------------------------------------------------


@pytest.mark.parametrize("fake", [False, True], ids=["kernel", "fake"])
def test_the_backward_op_checks_its_gradients(fake, device):
    b, d, n, s = BATCH, DIM, DSTATE, SEQLEN
    rows = [
        ("dout", Value((b, d, s - 1)), f"be (batch, dim, seqlen) = ({b}, {d}, {s}), got (2, 4, 5)"),
        ("dout", Value((b, d)), f"be (batch, dim, seqlen) = ({b}, {d}, {s}), got (2, 4)"),
        ("dout", Value((b, d, s), torch.float64), "have dtype float32, got float64"),
        ("dout", Value((b, d, s), torch.int64), "have dtype float32, got int64"),
        ("dlast_state", Value((b, d)), f"be (batch, dim, dstate) = ({b}, {d}, {n}), got (2, 4)"),
        ("dlast_state", Value((b, d, n), torch.float16), "have dtype float32, got float16"),
        ("dlast_state", Value((b, d, n), torch.complex64), "have dtype float32, got complex64"),
        (
            "states",
            Value((b, 1, d, n)),
            "be (saved values,) = (2,), got (2, 1, 4, 3)",
        ),
    ]
    arguments = arguments_of(Bad({}, ""), device)

    def call(arguments):
        return torch.ops.selective_scan.selective_scan_bwd(
            arguments.get("dout"),
            arguments.get("dlast_state"),
            *(arguments[name] for name in OP_ORDER),
            arguments.get("states"),
        )

    for name, value, message in rows:
        outcome = outcome_of(faked(call) if fake else call, arguments | {name: value.on(device)})
        assert outcome == (RuntimeError, f"selective_scan: {name} must {message}")


# --- random calls ---------------------------------------------------------------------------------

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.bool,
    torch.int8,
)
GOOD_SHAPES = {name: tuple(value.shape) for name, value in good_call().items() if name in TENSORS}
sizes = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 12])
anything = st.tuples(st.lists(sizes, max_size=5).map(tuple), st.sampled_from(DTYPES))


@st.composite
def nearly_good(draw, name):
    """The right shape with one size changed, dropped or added, or another dtype."""
    shape = list(GOOD_SHAPES[name])
    kind = draw(st.sampled_from(["size", "drop", "add", "dtype"]))
    position = draw(st.integers(0, len(shape) - 1))
    if kind == "size":
        shape[position] = draw(sizes)
    elif kind == "drop":
        del shape[position]
    elif kind == "add":
        shape.insert(position, draw(sizes))
    dtype = draw(st.sampled_from(DTYPES)) if kind == "dtype" else torch.float32
    return tuple(shape), dtype


@st.composite
def changed_calls(draw):
    names = draw(st.lists(st.sampled_from(TENSORS), min_size=1, max_size=3, unique=True))
    changes = {name: draw(st.one_of(anything, nearly_good(name))) for name in names}
    return draw(st.booleans()), changes


def fresh(**options):
    """A property test on data that depend on the run's seed, without a deadline."""

    def decorate(test):
        test = hypothesis.settings(
            deadline=None,
            database=None,
            suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
            **options,
        )(test)
        return hypothesis.seed(int(os.environ["SELECTIVE_SCAN_TEST_SEED"]))(test)

    return decorate


@fresh(max_examples=400)
@hypothesis.given(call=changed_calls())
def test_random_calls_have_the_same_outcome_everywhere(call, device):
    """Accepted by all or refused by all, in the same words, which begin with an argument's name."""
    is_complex, changes = call
    arguments = arguments_of(Bad({}, "", is_complex=is_complex), device)
    for name, (shape, dtype) in changes.items():
        arguments[name] = torch.ones(shape, dtype=dtype, device=device)
    outcomes = {
        entry: outcome_of(ENTRIES[entry], arguments)
        for entry in ("auto", "reference", "op", "backward op", "fake op", "fake backward op")
    }
    assert len(set(outcomes.values())) == 1, outcomes
    outcome = outcomes["auto"]
    if outcome == "accepted":
        out = selective_scan_fn(**arguments)
        assert (out.shape, out.dtype) == (arguments["u"].shape, arguments["u"].dtype)
        return
    error, message = outcome
    assert error is RuntimeError
    prefix, _, rest = message.partition(": ")
    assert prefix == "selective_scan"
    assert rest.split()[0] in TENSORS
    if {"u", "A", "B"}.isdisjoint(changes):  # whose sizes the others are measured by
        assert rest.split()[0] in changes


PYTHON_VALUES = st.one_of(
    st.none(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.booleans(),
    st.lists(st.floats(), max_size=3),
    st.builds(object),
)


@fresh(max_examples=200)
@hypothesis.given(
    name=st.sampled_from(
        [
            *TENSORS,
            "delta_softplus",
            "reverse",
            "return_last_state",
            "discretization_method",
            "backend",
        ]
    ),
    value=PYTHON_VALUES,
)
def test_random_python_values(name, value, device):
    optional = name in ("D", "z", "delta_bias", "initial_state")
    hypothesis.assume(not (optional and value is None))
    hypothesis.assume(
        not (isinstance(value, bool) and name in ("delta_softplus", "reverse", "return_last_state"))
    )
    arguments = arguments_of(Bad({}, ""), device) | {name: value}
    outcome = outcome_of(call_auto, arguments)
    assert outcome != "accepted"
    error, message = outcome
    is_choice = isinstance(value, str) and name in ("discretization_method", "backend")
    assert error is not AttributeError
    assert error in ((RuntimeError, ValueError) if is_choice else (TypeError,))
    assert message.startswith(f"selective_scan: {name} must be ")
