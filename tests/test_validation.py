"""Random calls of the selective scan have the same outcome in every way to call it, and further
checks of arguments that no table can express."""

from functools import partial

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import assert_same_outcome, ones
from problem import DTYPES, METHODS, TENSORS
from properties import fresh
from refusals import outcome_of
from refusals_of_scans import PACKED as PACKED_SCAN
from refusals_of_scans import SCAN, UNITARY
from selective_scan import (
    MambaMixer,
    adaptive_unitary_scan_fn,
    adaptive_unitary_scan_ref,
    causal_conv1d_fn,
    causal_conv1d_ref,
    causal_conv1d_update,
    causal_conv1d_update_ref,
    diagonal_scan_fn,
    diagonal_scan_ref,
    selective_scan_fn,
    selective_scan_prefill,
)

call_auto, call_reference = SCAN.ways["function"], SCAN.ways["reference"]


def test_tensors_on_two_devices(cuda_device):
    arguments = SCAN.call(cuda_device)
    for name in TENSORS[1:]:
        mixed = arguments | {name: arguments[name].cpu()}
        for way in ("function", "selective_scan_fwd", "reference"):
            expected = f"selective_scan: {name} must be on the device of u, cuda:0, got cpu"
            assert outcome_of(SCAN.ways[way], mixed) == (RuntimeError, expected)


# Calls of 6 packed steps.
PACKED = {
    "scan": lambda **bounds: SCAN.ways["function"](
        SCAN.good(**PACKED_SCAN, initial_state=None) | bounds
    ),
    "diagonal scan": lambda **bounds: diagonal_scan_fn(ones(1, 6), ones(1, 6), **bounds),
    "convolution": lambda **bounds: causal_conv1d_fn(ones(1, 4, 6), ones(4, 3), **bounds),
    "prefill": lambda **bounds: selective_scan_prefill(
        *(ones(4, 6), ones(9, 4, 3), ones(4, 6), -ones(4, 3), ones(4, 3), ones(4, 3)),
        **bounds,
        cache_indices=torch.zeros(len(bounds["cu_seqlens"]) - 1, dtype=torch.int32),
    ),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(
    ("bounds", "got"),
    [((0, 5, 4), "4 after 5"), ((-1, 6), "-1 after 0"), ((0, 7), "7 after 0"),
     ((2**40,), f"{2**40} after 0")],
)  # fmt: skip
def test_boundaries_that_do_not_rise(name, bounds, got):
    """On a CPU the host sees such boundaries and refuses them."""
    with pytest.raises(RuntimeError) as caught:
        PACKED[name](cu_seqlens=torch.tensor(bounds))
    wanted = f"cu_seqlens must be non-decreasing, from 0 to seqlen = 6, got {got}"
    assert str(caught.value) == f"selective_scan: {wanted}"


@pytest.mark.parametrize(
    ("module", "parameter", "argument"),
    [("", "A_log", "A"), ("conv1d", "weight", "conv1d_weight"),
     ("x_proj", "weight", "x_proj_weight")],
)  # fmt: skip
def test_a_missing_weight_is_named(module, parameter, argument):
    layer = MambaMixer(8)
    setattr(layer.get_submodule(module), parameter, None)
    with pytest.raises(RuntimeError) as caught:
        layer(ones(1, 5, 8))
    assert str(caught.value) == f"selective_scan: {argument} must be a Tensor, got None"


# --- random calls ---------------------------------------------------------------------------------

OTHER_DTYPES = (torch.complex64, torch.complex128, torch.int64, torch.bool, torch.int8)
ANY_DTYPES = (*DTYPES, *OTHER_DTYPES)
GOOD_SHAPES = {name: tuple(value.shape) for name, value in SCAN.good().items() if name in TENSORS}
sizes = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 12])
anything = st.tuples(st.lists(sizes, max_size=5).map(tuple), st.sampled_from(ANY_DTYPES))


@st.composite
def nearly_good(draw, name):
    """Draws the right shape with one size changed, dropped or added, or another dtype."""
    shape = list(GOOD_SHAPES[name])
    kind = draw(st.sampled_from(["size", "drop", "add", "dtype"]))
    position = draw(st.integers(0, len(shape) - 1))
    if kind == "size":
        shape[position] = draw(sizes)
    elif kind == "drop":
        del shape[position]
    elif kind == "add":
        shape.insert(position, draw(sizes))
    dtype = draw(st.sampled_from(ANY_DTYPES)) if kind == "dtype" else torch.float32
    return tuple(shape), dtype


@st.composite
def changed_calls(draw):
    names = draw(st.lists(st.sampled_from(TENSORS), min_size=1, max_size=3, unique=True))
    changes = {name: draw(st.one_of(anything, nearly_good(name))) for name in names}
    return draw(st.booleans()), changes


@fresh(max_examples=400)
@given(call=changed_calls())
def test_random_calls_have_the_same_outcome_everywhere(call, device):
    """All accept a call, or all refuse it with one message, which begins with an argument's
    name."""
    is_complex, changes = call
    arguments = SCAN.call(device, is_complex=is_complex)
    for name, (shape, dtype) in changes.items():
        arguments[name] = torch.ones(shape, dtype=dtype, device=device)
    outcomes = {
        name: outcome_of(way, arguments)
        for name, way in SCAN.ways.items()
        if name not in ("reference itself", "fake function")
    }
    assert len(set(outcomes.values())) == 1, outcomes
    outcome = outcomes["function"]
    if outcome == "accepted":
        out = selective_scan_fn(**arguments)
        assert (out.shape, out.dtype) == (arguments["u"].shape, arguments["u"].dtype)
        return
    error, message = outcome
    assert error is RuntimeError
    prefix, _, rest = message.partition(": ")
    assert prefix == "selective_scan"
    assert rest.split()[0] in TENSORS
    if {"u", "A", "B"}.isdisjoint(changes):  # other sizes are checked against theirs
        assert rest.split()[0] in changes


FLAGS = ("delta_softplus", "reverse", "return_last_state")
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
@given(
    name=st.sampled_from([*TENSORS, *FLAGS, "discretization_method", "backend"]),
    value=PYTHON_VALUES,
)
def test_random_python_values(name, value, device):
    choices = {"discretization_method": METHODS, "backend": ("auto", "reference", device)}
    optional = name in ("D", "z", "delta_bias", "initial_state", "input_delta")
    hypothesis.assume(not ((optional or name == "return_last_state") and value is None))
    hypothesis.assume(not (name in FLAGS and isinstance(value, bool)))
    hypothesis.assume(not (isinstance(value, str) and value in choices.get(name, ())))
    arguments = SCAN.call(device) | {name: value}
    outcome = outcome_of(call_auto, arguments)
    assert outcome != "accepted"
    error, message = outcome
    is_choice = isinstance(value, str) and name in choices
    assert error in ((RuntimeError, ValueError) if is_choice else (TypeError,))
    assert message.startswith(f"selective_scan: {name} ")


def test_bools_of_numpy_are_bools(device):
    arguments = SCAN.call(device)
    expected = call_auto(arguments)
    flags = {name: np.bool_(arguments[name]) for name in ("delta_softplus", "reverse")}
    assert torch.equal(call_auto(arguments | flags), expected)
    for call in (call_auto, call_reference):
        assert len(call(arguments | {"return_last_state": np.bool_(True)})) == 2
        assert isinstance(call(arguments | {"return_last_state": None}), torch.Tensor)


@pytest.mark.filterwarnings("ignore")  # PyTorch warns that it will drop quantized tensors
@pytest.mark.parametrize("name", ["u", "B", "D"])
def test_a_quantised_tensor_is_refused(name):
    arguments = SCAN.call("cpu")
    arguments[name] = torch.quantize_per_tensor(arguments[name], 0.1, 0, torch.qint8)
    for call in (call_auto, call_reference):
        with pytest.raises(RuntimeError, match=f"^selective_scan: {name} must have dtype .* qint8"):
            call(arguments)


# --- random calls of other operators -------------------------------------------------------------
# A call works as by the reference, or both refuse it with the same message.

few = st.lists(st.integers(0, 3), max_size=3)
sizes_of_some = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@fresh(max_examples=150)
@given(a=few, b=few, initial=st.none() | few)
def test_any_diagonal_scan(a, b, initial):
    arguments = {"a": torch.rand(a), "b": torch.rand(b)}
    if initial is not None:
        arguments["initial_state"] = torch.rand(initial)
    assert_same_outcome(diagonal_scan_fn, diagonal_scan_ref, arguments)


@fresh(max_examples=100)
@given(
    name=st.sampled_from([*UNITARY.good(), "z", "initial_state"]),
    shape=st.lists(st.sampled_from([0, 1, 2, 4, 5, 6]), max_size=4),
)
def test_any_shape_of_one_argument_of_a_unitary_scan(name, shape):
    dtype = torch.complex64 if name in ("B", "C", "initial_state") else torch.float32
    arguments = UNITARY.good() | {name: torch.rand(shape, dtype=dtype)}
    functions = adaptive_unitary_scan_fn, adaptive_unitary_scan_ref
    assert_same_outcome(*functions, arguments, rtol=1e-4, atol=1e-4)


@fresh(max_examples=200)
@given(
    x=st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 9)) | sizes_of_some,
    weight=st.tuples(st.integers(0, 3), st.integers(0, 9)) | sizes_of_some,
    bias=st.none() | sizes_of_some,
    states=st.none() | sizes_of_some | st.just("fitting"),
    bounds=st.none() | st.lists(st.integers(0, 9), max_size=5).map(sorted),
    activation=st.sampled_from([None, "silu", "SiLU"]),
    return_final_states=st.booleans(),
)
def test_any_convolution(x, weight, bias, states, bounds, activation, return_final_states):
    arguments = {"activation": activation, "return_final_states": return_final_states}
    if bounds is not None and bounds and bounds[-1] <= x[-1]:
        arguments["cu_seqlens"] = torch.tensor(bounds)
    if states == "fitting":
        sequences = len(bounds) - 1 if "cu_seqlens" in arguments else x[0]
        states = (sequences, x[1 % len(x)], max(weight[-1] - 1, 0))
    shapes = {"x": x, "weight": weight, "bias": bias, "initial_states": states}
    arguments |= {n: torch.randn(shape) for n, shape in shapes.items() if shape is not None}
    assert_same_outcome(causal_conv1d_fn, causal_conv1d_ref, arguments)


@fresh(max_examples=100)
@given(
    batch=st.integers(0, 3),
    dim=st.integers(0, 40),
    steps=st.none() | st.integers(0, 9),
    width=st.integers(1, 8),
    spare=st.integers(-1, 5),
    ring=st.booleans(),
    slots=st.none() | st.integers(3, 5),
)
def test_any_update_of_a_convolution(batch, dim, steps, width, spare, ring, slots):
    arguments = {
        "x": torch.randn(batch, dim, *(() if steps is None else (steps,))),
        "conv_state": torch.randn(slots or batch, dim, max(width - 1 + spare, 0)),
        "weight": torch.randn(dim, width),
    }
    if ring:
        arguments["cache_seqlens"] = torch.randint(0, 50, (batch,))
    if slots is not None:
        arguments["conv_state_indices"] = torch.randperm(slots)[:batch] - 1

    def out_and_state(update, conv_state, **given):
        state = conv_state.clone()
        return update(conv_state=state, **given), state

    updates = causal_conv1d_update, causal_conv1d_update_ref
    assert_same_outcome(*(partial(out_and_state, update) for update in updates), arguments)
