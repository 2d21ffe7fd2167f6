"""The causal convolution: what is refused, and with which sentence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import REAL, assert_refused, assert_same_outcome, each_of, on_meta, ones
from selective_scan import causal_conv1d_fn, causal_conv1d_ref

F64, INT32 = torch.float64, torch.int32
GOOD = {"x": ones(1, 4, 6), "weight": ones(4, 3)}
BAD_CALLS = [
    ({"x": ones(1, 4, 6, dtype=INT32)}, f"x must have dtype {REAL}, got int32"),
    (
        {"weight": ones(4, 3, dtype=torch.complex64)},
        f"weight must have dtype {REAL}, got complex64",
    ),
    ({"bias": ones(4, dtype=torch.bool)}, f"bias must have dtype {REAL}, got bool"),
    ({"seq_idx": ones(1, 6)}, "seq_idx must have dtype int32 or int64, got float32"),
    ({"cu_seqlens": ones(2)}, "cu_seqlens must have dtype int32 or int64, got float32"),
    (
        {"initial_states": ones(1, 4, 2, dtype=torch.int8)},
        f"initial_states must have dtype {REAL}, got int8",
    ),
    ({"x": ones(4, 6)}, "x must be (batch, dim, seqlen), got (4, 6)"),
    ({"weight": ones(4, 1, 3)}, "weight must be (dim, width) = (4, *), got (4, 1, 3)"),
    ({"weight": ones(5, 3)}, "weight must be (dim, width) = (4, *), got (5, 3)"),
    ({"weight": ones(4, 0)}, "weight must have width of 1 to 8, got (4, 0)"),
    ({"weight": ones(4, 9)}, "weight must have width of 1 to 8, got (4, 9)"),
    ({"bias": ones(5)}, "bias must be (dim,) = (4,), got (5,)"),
    (
        {"seq_idx": ones(1, 5, dtype=INT32)},
        "seq_idx must be (batch, seqlen) = (1, 6), got (1, 5)",
    ),
    ({"cu_seqlens": ones(1, 2, dtype=INT32)}, "cu_seqlens must be (sequences+1,), got (1, 2)"),
    (
        {"cu_seqlens": ones(0, dtype=INT32)},
        "cu_seqlens must have sequences+1 of at least 1, got (0,)",
    ),
    (
        {"x": ones(2, 4, 6), "cu_seqlens": ones(2, dtype=INT32)},
        "x must have batch of 1 where cu_seqlens is given, got (2, 4, 6)",
    ),
    (
        {"initial_states": ones(1, 4, 3)},
        "initial_states must be (sequences, dim, width-1) = (1, 4, 2), got (1, 4, 3)",
    ),
    (
        {"initial_states": ones(1, 4, 2), "cu_seqlens": ones(3, dtype=INT32)},
        "initial_states must be (sequences, dim, width-1) = (2, 4, 2), got (1, 4, 2)",
    ),
    (
        {"initial_states": ones(1, 4, 2), "seq_idx": ones(1, 6, dtype=INT32)},
        "initial_states must be None where seq_idx is given",
    ),
    (
        {"cu_seqlens": ones(2, dtype=INT32), "seq_idx": ones(1, 6, dtype=INT32)},
        "cu_seqlens must be None where seq_idx is given",
    ),
    (
        {"return_final_states": True, "seq_idx": ones(1, 6, dtype=INT32)},
        "return_final_states must be False where seq_idx is given",
    ),
    ({"activation": "relu"}, "activation must be None or one of silu, swish, got 'relu'"),
    ({"weight": ones(4, 3, device="meta")}, "weight must be on the device of x, cpu, got meta"),
    ({"bias": ones(4).to_sparse()}, "bias must be a dense (strided) tensor, got layout sparse_coo"),
]


# Of the backward op, which has no defaults.
NAMES = ("dout", "dfinal_states", "bias", "seq_idx", "cu_seqlens", "initial_states", "activation")
ABSENT = dict.fromkeys(NAMES)


@each_of(BAD_CALLS)
@pytest.mark.parametrize("conv", [causal_conv1d_fn, causal_conv1d_ref])
def test_bad_call(conv, change, message):
    assert_refused(conv, GOOD | change, message)


@each_of(BAD_CALLS)
@pytest.mark.parametrize("op", ["causal_conv1d_fwd", "causal_conv1d_bwd"])
def test_bad_call_under_compile(op, change, message):
    arguments = on_meta(GOOD | change)
    if op == "causal_conv1d_bwd":
        if "return_final_states" in arguments:
            pytest.skip("the backward op has no such argument")
        arguments = ABSENT | arguments
    assert_refused(getattr(torch.ops.selective_scan, op), arguments, message)


STATES = "final_states_out"


@pytest.mark.parametrize("conv", [causal_conv1d_fn, causal_conv1d_ref])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be a Tensor, got list"),
        ({"bias": 0}, TypeError, "bias must be a Tensor or None, got int"),
        ({"activation": True}, TypeError, "activation must be a str or None, got bool"),
        ({"return_final_states": 1}, TypeError, "return_final_states must be a bool, got int"),
        ({STATES: 1}, TypeError, f"{STATES} must be a Tensor or None, got int"),
        (
            {STATES: ones(1, 4, 2)},
            RuntimeError,
            f"{STATES} must be None unless return_final_states is True",
        ),
        (
            {STATES: ones(1, 4, 3), "return_final_states": True},
            RuntimeError,
            f"{STATES} must be (sequences, dim, width-1) = (1, 4, 2), got (1, 4, 3)",
        ),
        (
            {STATES: ones(1, 4, 2, device="meta"), "return_final_states": True},
            RuntimeError,
            f"{STATES} must be on the device of x, cpu, got meta",
        ),
    ],
)
def test_bad_argument(conv, change, error, message):
    assert_refused(conv, GOOD | change, message, error)


def test_bad_backend():
    with pytest.raises(ValueError, match="backend 'cuda' needs tensors on cuda, got cpu"):
        causal_conv1d_fn(**GOOD, backend="cuda")


@pytest.mark.parametrize("bounds", [(0, 5, 4), (-1, 6), (0, 7)])
def test_boundaries_that_do_not_rise_are_refused(bounds):
    with pytest.raises(RuntimeError, match=r"^selective_scan: cu_seqlens must rise from 0 to at"):
        causal_conv1d_fn(**GOOD, cu_seqlens=torch.tensor(bounds))


@pytest.mark.cuda
@pytest.mark.parametrize("bounds", [(0, 5, 4), (-1, 6), (0, 7), (9, -9, 9, 2**40)])
def test_boundaries_that_do_not_rise_do_no_harm(bounds, cuda_device):
    x, weight = (tensor.to(cuda_device) for tensor in (ones(1, 4, 6), ones(4, 3)))
    cu_seqlens = torch.tensor(bounds, device=cuda_device)
    out, final = causal_conv1d_fn(
        x, weight, cu_seqlens=cu_seqlens, return_final_states=True, activation="silu"
    )
    assert out.isfinite().all()
    assert final.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dout": ones(1, 4, 5)}, "dout must be (batch, dim, seqlen) = (1, 4, 6), got (1, 4, 5)"),
        ({"dout": ones(1, 4, 6, dtype=F64)}, "dout must have dtype float32, got float64"),
        (
            {"dfinal_states": ones(1, 4, 3)},
            "dfinal_states must be (sequences, dim, width-1) = (1, 4, 2), got (1, 4, 3)",
        ),
    ],
)
@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_bad_backward_call(place, change, message):
    arguments = ABSENT | GOOD | change
    arguments = {n: None if value is None else value.to(place) for n, value in arguments.items()}
    assert_refused(torch.ops.selective_scan.causal_conv1d_bwd, arguments, message)


sizes = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@settings(deadline=None, max_examples=200)
@given(
    x=st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 9)) | sizes,
    weight=st.tuples(st.integers(0, 3), st.integers(0, 9)) | sizes,
    bias=st.none() | sizes,
    states=st.none() | sizes | st.just("fitting"),
    bounds=st.none() | st.lists(st.integers(0, 9), max_size=5).map(sorted),
    activation=st.sampled_from([None, "silu", "SiLU"]),
    return_final_states=st.booleans(),
)
def test_any_call(x, weight, bias, states, bounds, activation, return_final_states):
    """It either works as the reference does, or both refuse it with the same sentence."""
    arguments = {"activation": activation, "return_final_states": return_final_states}
    if bounds is not None and bounds and bounds[-1] <= x[-1]:
        arguments["cu_seqlens"] = torch.tensor(bounds)
    if states == "fitting":
        sequences = len(bounds) - 1 if "cu_seqlens" in arguments else x[0]
        states = (sequences, x[1 % len(x)], max(weight[-1] - 1, 0))
    shapes = {"x": x, "weight": weight, "bias": bias, "initial_states": states}
    arguments |= {n: torch.randn(shape) for n, shape in shapes.items() if shape is not None}
    assert_same_outcome(causal_conv1d_fn, causal_conv1d_ref, arguments)
