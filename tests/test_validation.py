"""What is refused, and with which sentence: one table of bad calls for every way into the library.

The Python function on C++ kernels and on the reference, the ops as anyone may call them through
torch.ops, and the fake kernels of torch.compile all refuse the same calls with the same words.
"""

import os

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from bad_calls import BAD_CALLS, BATCH, DIM, DSTATE, SEQLEN, Bad, Value, arguments_of, good_call
from cases import fake
from problem import METHODS, OP_ORDER, TENSORS
from selective_scan import selective_scan_fn, selective_scan_ref


def call_auto(arguments):
    return selective_scan_fn(**arguments)


def call_reference(arguments):
    return selective_scan_fn(**({"backend": "reference"} | arguments))


def call_reference_itself(arguments):
    return selective_scan_ref(**arguments)


def call_op(arguments):
    return torch.ops.selective_scan.selective_scan_fwd(*(arguments[name] for name in OP_ORDER))


def call_backward_op(arguments):
    return torch.ops.selective_scan.selective_scan_bwd(
        arguments["u"], None, *(arguments[name] for name in OP_ORDER), None
    )


def faked(call):
    def call_faked(arguments):
        with FakeTensorMode() as mode:
            return call(fake(arguments, mode))

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
    if entry == "fake auto":
        return not bad.python_only and bad.error is RuntimeError
    return True


@pytest.mark.parametrize("entry", ENTRIES)
def test_good_calls_pass(entry, device):
    """The table is about what differs from these."""
    for is_complex in (False, True):
        ENTRIES[entry](arguments_of(Bad({}, "", is_complex=is_complex), device))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
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
        (
            "dlast_state",
            Value((b, d)),
            f"be (sequences, dim, dstate) = ({b}, {d}, {n}), got (2, 4)",
        ),
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


@pytest.mark.parametrize("fake", [False, True], ids=["kernel", "fake"])
def test_the_backward_op_checks_the_gradients_that_it_is_given(fake, device):
    b, d, n, s = BATCH, DIM, DSTATE, SEQLEN
    arguments = arguments_of(Bad({}, ""), device)
    good = {f"d{name}": torch.empty_like(arguments[name]) for name in ("u", "delta", "B", "C", "z")}
    rows = [
        ("du", Value((b, d, s - 1)), f"have the shape of u, ({b}, {d}, {s}), got (2, 4, 5)"),
        ("ddelta", Value((b, d, s), torch.float64), "have dtype float32, got float64"),
        ("dB", Value((d, n)), f"have the shape of B, {tuple(good['dB'].shape)}, got (4, 3)"),
        ("dC", Value((), torch.int64), "have dtype float32, got int64"),
        ("dz", None, "be a Tensor where z is"),
        (
            "dz",
            Value((b, d, s), make=lambda shape, **options: torch.ones(s, **options).expand(shape)),
            "have no stride of 0, got strides (0, 0, 1)",
        ),
    ]

    def call(arguments):
        return torch.ops.selective_scan.selective_scan_bwd_out(
            arguments["u"],
            None,
            *(arguments[name] for name in OP_ORDER),
            None,
            **{name: arguments[name] for name in good},
        )

    call = faked(call) if fake else call
    assert outcome_of(call, arguments | good) == "accepted"
    for name, value, message in rows:
        changed = {name: None if value is None else value.on(device)}
        outcome = outcome_of(call, arguments | good | changed)
        assert outcome == (RuntimeError, f"selective_scan: {name} must {message}")
    outcome = outcome_of(call, arguments | good | {"z": None})
    assert outcome == (RuntimeError, "selective_scan: dz must be None where z is")


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
    choices = {"discretization_method": METHODS, "backend": ("auto", "reference", device)}
    optional = name in ("D", "z", "delta_bias", "initial_state", "input_delta")
    flag = name in ("delta_softplus", "reverse", "return_last_state")
    hypothesis.assume(not ((optional or name == "return_last_state") and value is None))
    hypothesis.assume(not (flag and isinstance(value, bool)))
    hypothesis.assume(not (isinstance(value, str) and value in choices.get(name, ())))
    arguments = arguments_of(Bad({}, ""), device) | {name: value}
    outcome = outcome_of(call_auto, arguments)
    assert outcome != "accepted"
    error, message = outcome
    is_choice = isinstance(value, str) and name in choices
    assert error in ((RuntimeError, ValueError) if is_choice else (TypeError,))
    assert message.startswith(f"selective_scan: {name} ")


def test_bools_of_numpy_are_bools(device):
    arguments = arguments_of(Bad({}, ""), device)
    expected = call_auto(arguments)
    flags = {name: np.bool_(arguments[name]) for name in ("delta_softplus", "reverse")}
    assert torch.equal(call_auto(arguments | flags), expected)
    for call in (call_auto, call_reference):
        assert len(call(arguments | {"return_last_state": np.bool_(True)})) == 2
        assert isinstance(call(arguments | {"return_last_state": None}), torch.Tensor)


@pytest.mark.filterwarnings("ignore")  # of PyTorch, whose quantised tensors will go
@pytest.mark.parametrize("name", ["u", "B", "D"])
def test_a_quantised_tensor_is_refused(name):
    arguments = arguments_of(Bad({}, ""), "cpu")
    arguments[name] = torch.quantize_per_tensor(arguments[name], 0.1, 0, torch.qint8)
    for call in (call_auto, call_reference):
        with pytest.raises(RuntimeError, match=f"^selective_scan: {name} must have dtype .* qint8"):
            call(arguments)
