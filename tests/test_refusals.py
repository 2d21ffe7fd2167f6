"""What is refused, and with which sentence: one table of bad calls for each operator."""

import warnings

import pytest
import torch

import test_causal_conv1d_pool as pool
import test_compat_directed_functions as directions
import test_selective_scan_prefill as prefill
import test_selective_state_update as update
import test_vision as vision
from cases import COMPLEX, REAL, ones
from problem import METHODS
from refusals import DENSE, PYTHON, Refusals, bad, bf16, by_op, c64, f64, i32, i64, plain, ways_in
from selective_scan import (
    adaptive_unitary_scan_fn,
    adaptive_unitary_scan_ref,
    causal_conv1d_fn,
    causal_conv1d_ref,
    causal_conv1d_update,
    causal_conv1d_update_ref,
    diagonal_scan_fn,
    diagonal_scan_ref,
    exponential_trapezoid_fn,
    exponential_trapezoid_ref,
    mamba_inner_fn,
    mamba_inner_ref,
    rotate_states,
    selective_scan_fn,
    selective_scan_prefill,
    selective_scan_prefill_ref,
    selective_scan_ref,
    selective_state_update,
    selective_state_update_ref,
)
from selective_scan._mamba_operators import MAMBA_INNER
from selective_scan.compat.directions import bimamba_inner_fn
from selective_scan.mamba_inner import mamba_rows
from selective_scan.vision import cross_scan_fn, cross_scan_ref
from test_mamba_inner import BASE as LAYER
from test_mamba_inner import tensors_of
from test_mamba_inner_operator import op_arguments

POLES = "float32, float64, complex64 or complex128"
ANY = f"{REAL.replace(' or', ',')}, {COMPLEX}"
INDICES = "have dtype int32 or int64"
NO_STRIDE = "have no stride of 0"
BACKENDS = [
    *bad("backend", "be a str", 3, None),
    *bad("backend", "be one of auto, cpu, cuda, reference", "tpu"),
]


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ones(*shape, dtype=dtype, device="meta")


def numbers(*shape: int, but: tuple[torch.dtype, ...] = ()) -> list[torch.Tensor]:
    """Of dtypes that no real argument takes."""
    dtypes = (torch.int64, torch.bool, torch.complex64, torch.uint8)
    return [ones(*shape, dtype=dtype) for dtype in dtypes if dtype not in but]


# --- the selective scan ---------------------------------------------------------------------------


def good_scan(is_complex: bool = False, **changes: object) -> dict:
    pole = torch.complex64 if is_complex else torch.float32
    projections = {name: torch.randn(2, 2, 3, 6, dtype=pole) for name in "BC"}
    rows = {"u": torch.randn(2, 4, 6), "delta": torch.rand(2, 4, 6), "z": torch.randn(2, 4, 6)}
    rows |= {"input_delta": torch.rand(2, 4, 6)}
    of_channels = {"A": -torch.rand(4, 3, dtype=pole), "D": torch.randn(4)}
    of_channels |= {"delta_bias": torch.rand(4)}
    options = {"delta_softplus": True, "discretization_method": "foh", "reverse": False}
    options |= {"initial_state": torch.randn(2, 4, 3, dtype=pole), "cu_seqlens": None}
    return rows | of_channels | projections | options | changes


ROWS = "u delta z input_delta"
TENSORS_OF_SCAN = [(name, it) for name, it in good_scan().items() if isinstance(it, torch.Tensor)]
PACKED = {name: ones(1, 4, 6) for name in ROWS.split()}
PACKED |= {name: ones(1, 2, 3, 6) for name in "BC"}
SEQUENCE = "be (batch, dim, seqlen) = (2, 4, 6)"
OF_CHANNELS = "be (dim, dstate) = (4, 3)"
OF_STEPS = "be (batch, dstate, seqlen) = (2, 3, 6)"
OF_GROUPS = "be (batch, groups, dstate, seqlen) = (2, *, 3, 6)"
PROJECTIONS = "be (dim, dstate), (batch, dstate, seqlen) or (batch, groups, dstate, seqlen)"
COMPLEX_CONSTANT = "have dtype complex64 or complex128 (complex A, constant B and C)"
COMPLEX_OR_REAL = f"have dtype complex64, complex128, {REAL}"
GROUPS = "have a number of groups that divides dim = 4"
FLAGS = "delta_softplus reverse return_last_state"
WRONG_METHODS = ("euler", "ZOH", "", "zoh ")
METHOD = f"be one of {', '.join(METHODS)}"
SCAN_TABLE = [
    bad("u delta A B C", "be a Tensor", [1.0], None),
    bad("D z delta_bias initial_state input_delta", "be a Tensor or None", 1.0),
    bad("cu_seqlens", "be a Tensor or None", [0, 6]),
    bad(FLAGS, "be a bool", 1, ones()),
    bad("delta_softplus reverse", "be a bool", None),  # return_last_state may be None
    bad("discretization_method", "be a str", 3, None),
    bad("discretization_method", METHOD, *WRONG_METHODS),
    # dtypes
    bad(ROWS, f"have dtype {REAL}", *numbers(2, 4, 6)),
    bad("D delta_bias", f"have dtype {REAL}", *numbers(4)),
    bad("B C", f"have dtype {REAL}", *numbers(2, 2, 3, 6)),
    bad("A", f"have dtype {POLES}", ones(4, 3, dtype=torch.float16), bf16(4, 3), i32(4, 3)),
    bad("initial_state", "have dtype float32 or float64", c64(2, 4, 3), bf16(2, 4, 3)),
    bad("initial_state", f"have dtype {COMPLEX}", ones(2, 4, 3), is_complex=True),
    bad("initial_state", "have dtype float32 or float64", ones(2, 4, 3, dtype=torch.float16)),
    bad("B C", COMPLEX_CONSTANT, ones(4, 3), is_complex=True),
    bad("B C", COMPLEX_OR_REAL, i64(2, 2, 3, 6), is_complex=True),
    bad(ROWS, f"have dtype {REAL}", c64(2, 4, 6), is_complex=True),
    # shapes
    bad("u", "be (batch, dim, seqlen)", ones(2, 6), ones(2, 4, 6, 1), ones(), ones(6)),
    bad("delta z input_delta", SEQUENCE, ones(2, 4, 5), ones(2, 5, 6), ones(3, 4, 6)),
    bad("delta z input_delta", SEQUENCE, ones(2, 6, 4), ones(4, 6), ones(1, 4, 6)),
    bad("A", "be (dim, dstate) = (4, *)", ones(3, 3), ones(3, 4), ones(4), ones(3), ones()),
    bad("A", "be (dim, dstate) = (4, *)", ones(4, 3, 1, 1), ones(1, 3)),
    *(
        bad(
            "A", f"A of shape {shape} needs discretization_method bilinear, got 'foh'", ones(*shape)
        )
        for shape in ((4, 3, 3), (4, 3, 1))
    ),
    bad("A", "have dstate of at least 1", ones(4, 0)),
    bad("B C", PROJECTIONS, ones(), ones(3), ones(2, 2, 3, 6, 1)),
    bad("B C", OF_CHANNELS, ones(4, 4), ones(3, 3), ones(3, 4), ones(3, 6)),
    bad("B C", OF_STEPS, ones(2, 3, 5), ones(2, 4, 6), ones(1, 3, 6), ones(2, 6, 3)),
    bad("B C", OF_STEPS, ones(2, 3, 12)),
    bad("B C", OF_GROUPS, ones(2, 2, 3, 7), ones(2, 2, 2, 6), ones(1, 2, 3, 6), ones(2, 2, 6, 3)),
    *(bad("B C", f"{GROUPS}, got {it}", ones(2, it, 3, 6)) for it in (0, 3, 5, 8)),
    bad("B C", "be (batch, dstate, 2*seqlen) = (2, 3, 12)", ones(2, 3, 6), is_complex=True),
    bad("B C", "be (batch, dstate, 2*seqlen) = (2, 3, 12)", ones(2, 3, 13), is_complex=True),
    bad(
        "B C",
        "be (batch, groups, dstate, 2*seqlen) = (2, *, 3, 12)",
        ones(2, 2, 3, 6),
        is_complex=True,
    ),
    bad("B C", OF_GROUPS, c64(2, 2, 3, 12), is_complex=True),
    bad("C", "have as many groups as B, 2, got 4", ones(2, 4, 3, 6)),
    bad("C", "have as many groups as B, 2, got 1", ones(2, 3, 6)),
    bad("D delta_bias", "be (dim,) = (4,)", ones(3), ones(4, 1), ones(), ones(1), ones(1, 4)),
    bad(
        "initial_state",
        "be (sequences, dim, dstate) = (2, 4, 3)",
        *(ones(2, 4, 4), ones(2, 3, 4), ones(4, 3), ones(1, 4, 3), ones(2, 4, 3, 1)),
    ),
    # packed sequences
    bad("cu_seqlens", INDICES, ones(3)),
    bad("cu_seqlens", "be (sequences+1,)", i64(1, 2), i64(), initial_state=None, **PACKED),
    bad("cu_seqlens", "have sequences+1 of at least 1", i64(0), **PACKED),
    bad(
        "u",
        "have batch of 1 where cu_seqlens is given",
        ones(2, 4, 6),
        cu_seqlens=torch.zeros(4, dtype=torch.int32),
    ),
    bad(
        "initial_state",
        "be (sequences, dim, dstate) = (3, 4, 3)",
        ones(2, 4, 3),
        cu_seqlens=torch.zeros(4, dtype=torch.int32),
        **PACKED,
    ),
    # places
    bad("cu_seqlens", "be on the device of u", on_meta(3, dtype=torch.int32)),
    *(
        bad(name, "be on the device of u", on_meta(*it.shape))
        for name, it in TENSORS_OF_SCAN
        if name != "u"
    ),
    *(bad(name, DENSE, it.to_sparse()) for name, it in TENSORS_OF_SCAN),
    # What is checked first is said first.
    bad("z", f"have dtype {REAL}", i32(2, 4, 6), delta=ones(2, 4, 7)),
    bad("delta", SEQUENCE, ones(2, 4, 7), z=ones(2, 4, 7)),
    bad("discretization_method", METHOD, "tustin", u=i32(2, 4, 6)),
    BACKENDS,
]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that support of CSR is in beta
    SCAN_TABLE.append(bad("A", DENSE, ones(4, 3).to_sparse_csr()))
SCAN = Refusals(
    ways_in(selective_scan_fn, selective_scan_ref, "selective_scan_fwd", "selective_scan_bwd"),
    good_scan,
    "u",
    SCAN_TABLE,
)


def good_derivative(**changes: object) -> dict:
    return {"dout": ones(2, 4, 6), "dlast_state": None, "states": None} | good_scan(**changes)


DERIVATIVE = Refusals(
    ways_in(None, None, "selective_scan_bwd"),
    good_derivative,
    "u",
    [
        bad("dout", SEQUENCE, ones(2, 4, 5), ones(2, 4)),
        bad("dout", "have dtype float32", f64(2, 4, 6), i64(2, 4, 6)),
        bad("dlast_state", "be (sequences, dim, dstate) = (2, 4, 3)", ones(2, 4)),
        bad("dlast_state", "have dtype float32", ones(2, 4, 3, dtype=torch.float16), c64(2, 4, 3)),
        bad("states", "be (saved values,) = (2,)", ones(2, 1, 4, 3)),
    ],
)


def good_given_gradients(**changes: object) -> dict:
    given = good_derivative()
    return given | {f"d{n}": torch.empty_like(given[n]) for n in (*"uBCz", "delta")} | changes


GIVEN_GRADIENTS = Refusals(
    ways_in(None, None, "selective_scan_bwd_out"),
    good_given_gradients,
    "u",
    [
        bad("du", "have the shape of u, (2, 4, 6)", ones(2, 4, 5)),
        bad("ddelta", "have dtype float32", f64(2, 4, 6)),
        bad("dB", "have the shape of B, (2, 2, 3, 6)", ones(4, 3)),
        bad("dC", "have dtype float32", i64()),
        bad("dz", "be a Tensor where z is", None),
        bad("dz", NO_STRIDE, ones(6).expand(2, 4, 6)),
        bad("dz", "be None where z is", ones(2, 4, 6), z=None),
    ],
)

STATE_GRADIENT = Refusals(
    ways_in(None, None, "selective_scan_state_gradient"),
    lambda **changes: {"dout": ones(2, 4, 6)} | good_scan(**changes),
    "u",
    [bad("dout", "have dtype float32", f64(2, 4, 6)), bad("dout", SEQUENCE, ones(2, 3, 6))],
)

# --- the scan with matrices, the exponential trapezoid --------------------------------------------

ROWS_OF_TWO = {"u": ones(2, 4, 6), "delta": ones(2, 4, 6)}
BILINEAR = {"discretization_method": "bilinear"}
MATRIX = Refusals(
    ways_in(selective_scan_fn, selective_scan_ref),
    plain(**ROWS_OF_TWO, A=ones(4, 3, 3), B=ones(4, 3), C=ones(4, 3), **BILINEAR),
    "u",
    [
        bad("A", "be (dim, dstate, dstate) = (4, *, *)", ones(4, 3, 2), ones(5, 3, 3)),
        bad("A", "have dstate of at least 1", ones(4, 0, 0)),
        bad("A", "be (dim, dstate) = (4, *)", ones(4, 3, 3, 1)),
        *(
            bad(
                "A",
                f"A of shape (4, 3, 3) needs discretization_method bilinear, got '{method}'",
                ones(4, 3, 3),
                discretization_method=method,
            )
            for method in ("zoh", "foh", "rk4")
        ),
        bad("B", "be (dim, dstate) = (4, 5)", ones(4, 3), A=ones(4, 5, 5)),
        bad("initial_state", "be (sequences, dim, dstate) = (2, 4, 3)", ones(2, 4, 3, 3)),
        bad("z input_delta", SEQUENCE, ones(2, 4, 5)),
    ],
)
TRAPEZOID = Refusals(
    ways_in(exponential_trapezoid_fn, exponential_trapezoid_ref),
    plain(**ROWS_OF_TWO, A=-ones(4, 3), B=ones(2, 3, 6), C=ones(2, 3, 6), mix=ones(2, 4, 6)),
    "u",
    [
        bad("mix", "be a Tensor", 0.5),
        bad("reverse", "be a bool", 1),
        bad("mix", SEQUENCE, ones(2, 4, 5), ones(4)),
        bad("mix", f"have dtype {REAL}", i64(2, 4, 6)),
        bad(
            "initial_state",
            "be (sequences, 2, dim, dstate) = (2, 2, 4, 3)",
            *(ones(2, 4, 3), ones(2, 1, 4, 3)),
        ),
        bad("initial_state", "have dtype float32 or float64", bf16(2, 2, 4, 3)),
        bad("A", "be (dim, dstate) = (4, *)", ones(4, 3, 3)),
        bad("B", OF_STEPS, ones(2, 3, 7)),
        bad("u", "have batch of 1 where cu_seqlens is given", ones(2, 4, 6), cu_seqlens=i64(2)),
        BACKENDS,
    ],
)

# --- the diagonal and the adaptive unitary scan ---------------------------------------------------

BROADCASTABLE = "be broadcastable to b, (2, 3)"
DIAGONAL = Refusals(
    ways_in(diagonal_scan_fn, diagonal_scan_ref, "diagonal_scan_fwd"),
    plain(a=ones(2, 3), b=ones(2, 3)),
    "b",
    [
        bad("a", "be a Tensor", [1.0]),
        bad("b", "be a Tensor", None),
        bad("initial_state", "be a Tensor or None", 0),
        bad("reverse", "be a bool", 1),
        bad("a", f"have dtype {ANY}", i64(2, 3)),
        bad("b", f"have dtype {ANY}", ones(2, 3, dtype=torch.bool)),
        bad("a", f"have dtype {POLES} (complex b)", ones(1, dtype=torch.float16), b=c64(2, 3)),
        bad("b", f"have dtype {POLES} (complex a)", bf16(2, 3), a=c64(1)),
        bad("initial_state", "have dtype float32 or float64", bf16(2)),
        bad("initial_state", f"have dtype {COMPLEX}", ones(2), a=c64(1)),
        bad("b", "be (..., seqlen)", ones()),
        bad("a", BROADCASTABLE, ones(2, 4), ones(1, 2, 3), ones(0, 3)),
        bad("initial_state", "be (...) = (2,)", ones(2, 3)),
        bad("initial_state", "be (...) = (4, 2)", ones(2), b=ones(4, 2, 3)),
        bad(
            "b",
            "be (1, ..., seqlen) where cu_seqlens is given",
            ones(3),
            a=ones(3),
            cu_seqlens=i32(2),
        ),
        bad("b", "have batch of 1 where cu_seqlens is given", ones(2, 3), cu_seqlens=i32(2)),
        bad("cu_seqlens", INDICES, ones(2), a=ones(3), b=ones(1, 3)),
        bad(
            "initial_state",
            "be (sequences, ...) = (2, 4)",
            ones(1, 4),
            a=ones(3),
            b=ones(1, 4, 3),
            cu_seqlens=i64(3),
        ),
        bad("a", "be on the device of b", on_meta(2, 3)),
        bad("a", DENSE, ones(2, 3).to_sparse()),
        BACKENDS,
    ],
)
DIAGONAL_DERIVATIVE = Refusals(
    ways_in(None, None, "diagonal_scan_bwd"),
    plain(dh=ones(2, 3), a=ones(2, 3), h=ones(2, 3), reverse=False, complex_b=False),
    "h",
    [
        bad("dh", "have the shape of h, (2, 3)", ones(2, 4)),
        bad("dh", "have dtype float32", f64(2, 3)),
        bad("a", "be broadcastable to h, (2, 4)", ones(2, 3), h=ones(2, 4)),
        bad("dh", "be on the device of h", on_meta(2, 3)),
    ],
)

WEIGHTS = "be (dstate,), (batch, dstate, seqlen) or (batch, groups, dstate, seqlen)"
UNITARY_TABLE = [
    bad("u", "be (batch, dim, seqlen)", ones(2, 6)),
    bad("u", f"have dtype {REAL}", i64(2, 6, 5)),
    bad("dt z", "be (batch, dim, seqlen) = (2, 6, 5)", ones(2, 6, 4)),
    bad("x", "be (dim, dstate, dim) = (6, *, 6)", ones(6, 4, 5)),
    bad("x", "have dstate of at least 1", ones(6, 0, 6)),
    bad("x", f"have dtype {REAL}", c64(6, 4, 6)),
    bad("x_bias", "be (dim, dstate) = (6, 4)", ones(4, 6)),
    bad("D", "be (dim,) = (6,)", ones(5)),
    bad("initial_state", f"have dtype {COMPLEX}", ones(2, 6, 4)),
    bad("initial_state", "be (batch, dim, dstate) = (2, 6, 4)", c64(2, 6, 3)),
    bad("D", "be on the device of u", on_meta(6)),
    bad("x_bias", DENSE, ones(6, 4).to_sparse()),
]


def of_weights(B: str, C: str) -> list:
    """The op takes the polar forms of B and C, b and c."""
    return [
        bad(B, f"have dtype {COMPLEX}", ones(4)),
        bad(B, "be (dstate,) = (4,)", c64(5)),
        bad(B, WEIGHTS, c64(6, 4)),
        bad(C, "be (batch, dstate, seqlen) = (2, 4, 5)", c64(2, 4, 6)),
        bad(C, "have a number of groups that divides dim = 6, got 4", c64(2, 4, 4, 5)),
        bad(C, f"have as many groups as {B}, 1, got 2", c64(2, 2, 4, 5), **{B: c64(2, 4, 5)}),
    ]


GOOD_UNITARY = {"u": ones(2, 6, 5), "dt": ones(2, 6, 5), "x": ones(6, 4, 6), "x_bias": ones(6, 4)}
GOOD_UNITARY |= {"D": ones(6)}
UNITARY = Refusals(
    ways_in(adaptive_unitary_scan_fn, adaptive_unitary_scan_ref),
    plain(**GOOD_UNITARY, B=c64(4), C=c64(4)),
    "u",
    [
        bad("u", "be a Tensor", [1.0]),
        bad("D", "be a Tensor", None),
        bad("z", "be a Tensor or None", 1.0),
        bad("return_last_state", "be a bool", 1),
        *UNITARY_TABLE,
        *of_weights("B", "C"),
        BACKENDS,
    ],
)
UNITARY_OP = Refusals(
    ways_in(None, None, "adaptive_unitary_scan_fwd"),
    plain(**GOOD_UNITARY, b=c64(4), c=c64(4)),
    "u",
    [*UNITARY_TABLE, *of_weights("b", "c")],
)

# --- the convolution ------------------------------------------------------------------------------

WIDTH = "have width of 1 to 8"
ACTIVATION = "be None or one of silu, swish"
OF_SEQUENCES = "be (sequences, dim, width-1)"
OUT = "final_states_out"
CONVOLUTION = Refusals(
    ways_in(causal_conv1d_fn, causal_conv1d_ref, "causal_conv1d_fwd", "causal_conv1d_bwd"),
    plain(x=ones(1, 4, 6), weight=ones(4, 3)),
    "x",
    [
        bad("x", "be a Tensor", [1.0]),
        bad("bias", "be a Tensor or None", 0),
        bad("activation", "be a str or None", True),
        bad("return_final_states", "be a bool", 1),
        bad(OUT, "be a Tensor or None", 1),
        bad("x", f"have dtype {REAL}", i32(1, 4, 6)),
        bad("weight", f"have dtype {REAL}", c64(4, 3)),
        bad("bias", f"have dtype {REAL}", ones(4, dtype=torch.bool)),
        bad("seq_idx", INDICES, ones(1, 6)),
        bad("cu_seqlens", INDICES, ones(2)),
        bad("initial_states", f"have dtype {REAL}", ones(1, 4, 2, dtype=torch.int8)),
        bad("x", "be (batch, dim, seqlen)", ones(4, 6)),
        bad("weight", "be (dim, width) = (4, *)", ones(4, 1, 3), ones(5, 3)),
        bad("weight", WIDTH, ones(4, 0), ones(4, 9)),
        bad("bias", "be (dim,) = (4,)", ones(5)),
        bad("seq_idx", "be (batch, seqlen) = (1, 6)", i32(1, 5)),
        bad("cu_seqlens", "be (sequences+1,)", i32(1, 2)),
        bad("cu_seqlens", "have sequences+1 of at least 1", i32(0)),
        bad("x", "have batch of 1 where cu_seqlens is given", ones(2, 4, 6), cu_seqlens=i32(2)),
        bad("initial_states", f"{OF_SEQUENCES} = (1, 4, 2)", ones(1, 4, 3)),
        bad("initial_states", f"{OF_SEQUENCES} = (2, 4, 2)", ones(1, 4, 2), cu_seqlens=i32(3)),
        bad("initial_states", "be None where seq_idx is given", ones(1, 4, 2), seq_idx=i32(1, 6)),
        bad("cu_seqlens", "be None where seq_idx is given", i32(2), seq_idx=i32(1, 6)),
        bad("return_final_states", "be False where seq_idx is given", True, seq_idx=i32(1, 6)),
        bad("activation", ACTIVATION, "relu"),
        bad("weight", "be on the device of x", on_meta(4, 3)),
        bad("bias", DENSE, ones(4).to_sparse()),
        bad(OUT, "be None unless return_final_states is True", ones(1, 4, 2)),
        bad(OUT, f"{OF_SEQUENCES} = (1, 4, 2)", ones(1, 4, 3), return_final_states=True),
        bad(OUT, "be on the device of x", on_meta(1, 4, 2), return_final_states=True),
        BACKENDS,
    ],
)
CONVOLUTION_DERIVATIVE = Refusals(
    ways_in(None, None, "causal_conv1d_bwd"),
    plain(x=ones(1, 4, 6), weight=ones(4, 3)),
    "x",
    [
        bad("dout", "be (batch, dim, seqlen) = (1, 4, 6)", ones(1, 4, 5)),
        bad("dout", "have dtype float32", f64(1, 4, 6)),
        bad("dfinal_states", f"{OF_SEQUENCES} = (1, 4, 2)", ones(1, 4, 3)),
    ],
)
POOL = Refusals(
    ways_in(causal_conv1d_fn, causal_conv1d_ref, "causal_conv1d_prefill"),
    lambda **changes: pool.make("cpu") | changes,
    "x",
    [
        bad("cu_seqlens", "be a Tensor", None),
        bad("x", "have batch of 1 where cu_seqlens is given", ones(2, 20, 100)),
        bad("weight", WIDTH, ones(20, 9)),
        bad("conv_states", "be (slots, dim, width-1) = (*, 20, 3)", ones(9, 20, 4)),
        bad("conv_states", f"have dtype {REAL}", i32(9, 20, 3)),
        bad("conv_states", NO_STRIDE, ones(20, 3).expand(9, 20, 3)),
        bad("bias", "be (dim,) = (20,)", ones(21)),
        bad("activation", ACTIVATION, "gelu"),
        bad("cu_seqlens", INDICES, ones(8)),
        bad("cache_indices", "be (sequences,) = (7,)", i32(6)),
        bad("conv_states", f"{OF_SEQUENCES} = (7, 20, 3)", ones(9, 20, 3), cache_indices=None),
        bad("has_initial_state", "have dtype bool", ones(7)),
        bad("seq_idx", "be None where conv_states is given", i32(1, 100)),
        bad("initial_states", "be None where conv_states is given", ones(7, 20, 3)),
        bad("return_final_states", "be False where conv_states is given", True),
    ],
)
CONVOLUTION_UPDATE = Refusals(
    ways_in(causal_conv1d_update, causal_conv1d_update_ref, "causal_conv1d_update"),
    plain(x=ones(2, 4), conv_state=ones(2, 4, 3), weight=ones(4, 4)),
    "x",
    [
        bad("x", "be a Tensor", None),
        bad("cache_seqlens", "be a Tensor or None", 3),
        bad("activation", "be a str or None", 1),
        bad("pad_slot_id", "be an int", None, True),
        bad("x", f"have dtype {REAL}", i32(2, 4)),
        bad("conv_state", f"have dtype {REAL}", ones(2, 4, 3, dtype=torch.int8)),
        bad("cache_seqlens", INDICES, ones(2)),
        bad("out", "have dtype float32", bf16(2, 4)),
        bad("out", NO_STRIDE, ones(1).expand(2, 4)),
        bad("conv_state", NO_STRIDE, ones(4, 3).expand(2, 4, 3)),
        bad("x", "be (batch, dim) or (batch, dim, steps)", ones(4)),
        bad("conv_state", "be (batch, dim, state_len) = (2, 4, *)", ones(3, 4, 3)),
        bad(
            "conv_state",
            "be (slots, dim, state_len) = (*, 4, *)",
            ones(3, 5, 3),
            conv_state_indices=i32(2),
        ),
        bad("weight", "be (dim, width) = (4, *)", ones(5, 3)),
        bad("weight", WIDTH, ones(4, 9)),
        bad(
            "conv_state", "have state_len of at least width-1 = 4", ones(2, 4, 3), weight=ones(4, 5)
        ),
        bad("bias", "be (dim,) = (4,)", ones(5)),
        bad("cache_seqlens", "be (batch,) = (2,)", i64(3)),
        bad("conv_state_indices", "be (batch,) = (2,)", i64(2, 1)),
        bad("out", "be (batch, dim) = (2, 4)", ones(2, 4, 1)),
        bad("activation", ACTIVATION, "gelu"),
        bad("bias", "be on the device of x", on_meta(4)),
        BACKENDS,
    ],
)

# --- decoding -------------------------------------------------------------------------------------

STEPS = {"steps": 2}
HEADS = {"heads": 4, "dim": 6}
C64 = torch.complex64
COMPLEX_STATE = "have dtype complex64 or complex128 (complex A)"
DESTINATIONS = "dst_state_batch_indices"
UPDATE = Refusals(
    ways_in(selective_state_update, selective_state_update_ref, "selective_state_update"),
    lambda **changes: update.make(update.Case(**changes), "cpu"),
    "x",
    [
        bad("state", "be a Tensor", None),
        bad("out", "be a Tensor or None", 1.0),
        bad("dt_softplus", "be a bool", 1),
        bad("pad_slot_id", "be an int", True, 1.0),
        bad("discretization_method", "be a str", None),
        bad("state", "be (slots, dim, dstate) or (slots, heads, dim, dstate)", ones(3, 20)),
        bad("state", "have dstate of at least 1", ones(3, 20, 0)),
        bad("state", f"have dtype {REAL}", i64(3, 20, 16), c64(3, 20, 16)),
        bad("state", COMPLEX_STATE, ones(3, 20, 16), state=C64),
        bad("x", "be (batch, dim) or (batch, steps, dim)", ones(3, 20, 1, 1)),
        bad("x", "be (batch, heads, dim) or (batch, steps, heads, dim)", ones(3, 6), **HEADS),
        bad("x", "be (batch, dim) = (3, 20)", ones(3, 21), ones(2, 20)),
        bad("x", "be (batch, dim) = (*, 20)", ones(2, 21), indices=torch.int32),
        bad("x", "be (batch, steps, dim) = (3, *, 20)", ones(3, 2, 21), **STEPS),
        bad("dt input_delta", "be (batch, dim) = (3, 20)", ones(3, 1)),
        bad("input_delta", f"have dtype {REAL}", c64(3, 20)),
        bad("dt", "be (batch, steps, dim) = (3, 2, 20)", ones(3, 3, 20), **STEPS),
        bad("A", "be (dim, dstate) = (20, 16)", ones(20, 15)),
        bad("A", "be (heads, dim, dstate) = (4, 6, 16)", ones(6, 16), **HEADS),
        bad("A", f"have dtype {POLES}", bf16(20, 16)),
        bad("B", "be (batch, dstate) or (batch, groups, dstate)", ones(3)),
        bad(
            "B", "be (batch, steps, dstate) or (batch, steps, groups, dstate)", ones(3, 16), **STEPS
        ),
        bad("B", "be (batch, dstate) = (3, 16)", ones(3, 15)),
        bad("B", "have a number of groups that divides dim = 20, got 3", ones(3, 3, 16)),
        bad("B", "have a number of groups that divides heads = 4, got 3", ones(3, 3, 16), **HEADS),
        bad("C", "have as many groups as B, 2, got 4", ones(3, 4, 16), groups=2),
        bad("C", COMPLEX_STATE, ones(3, 16), state=C64),
        bad("D", "be (dim,) = (20,)", ones(1)),
        bad("D", "be (heads, dim) = (4, 6)", ones(6), **HEADS),
        bad("z", "be (batch, dim) = (3, 20)", ones(3, 20, 1)),
        bad("dt_bias", f"have dtype {REAL}", c64(20)),
        bad("state_batch_indices", "be (batch,) = (3,)", i64(2)),
        bad("state_batch_indices", INDICES, ones(3)),
        bad(DESTINATIONS, "be (batch, steps) = (3, 1)", i64(3, 2)),
        bad(DESTINATIONS, "be (batch, steps) = (3, 2)", i64(3, 3), **STEPS),
        bad(DESTINATIONS, "be (batch,) or (batch, steps)", i64(3, 1, 1)),
        bad("out", "be (batch, dim) = (3, 20)", ones(3, 21)),
        bad("out", "have dtype float32", bf16(3, 20)),
        bad("out", NO_STRIDE, ones(20).expand(3, 20)),
        bad("state", NO_STRIDE, ones(3, 20, 1).expand(3, 20, 16)),
        BACKENDS,
    ],
)

ALONE = {"has_indices": False, "every": 0}
PREFILL = Refusals(
    ways_in(selective_scan_prefill, selective_scan_prefill_ref, "selective_scan_prefill"),
    lambda **changes: prefill.make(prefill.Case(**changes), "cpu"),
    "u",
    [
        bad("states cu_seqlens", "be a Tensor", None),
        bad("has_initial_state", "be a Tensor or None", True),
        bad("delta_softplus", "be a bool", 1),
        bad("pad_slot_id", "be an int", True),
        bad("checkpoint_every", "be an int", 1.0),
        bad("u", "be (dim, total)", ones(1, 12, 150)),
        bad("u", f"have dtype {REAL}", i64(12, 150)),
        bad("states", "be (slots, dim, dstate) = (*, 12, *)", ones(9, 12), ones(9, 11, 5)),
        bad("states", "be (sequences, dim, dstate) = (7, 12, *)", ones(9, 12, 5), **ALONE),
        bad("states", "have dstate of at least 1", ones(9, 12, 0)),
        bad("states", f"have dtype {REAL}", i64(9, 12, 5)),
        bad("states", COMPLEX_STATE, ones(9, 12, 5), states=C64),
        bad("delta input_delta", "be (dim, total) = (12, 150)", ones(12, 149)),
        bad("A", "be (dim, dstate) = (12, 5)", ones(12, 6)),
        bad("A", f"have dtype {POLES}", bf16(12, 5)),
        bad("B", "be (dim, dstate) or (groups, dstate, total)", ones(5)),
        bad("B", "be (dim, dstate) = (12, 5)", ones(5, 150)),
        bad("B", "be (groups, dstate, total) = (*, 5, 150)", ones(2, 5, 149)),
        bad("B", "be (groups, dstate, 2*total) = (*, 5, 300)", ones(2, 5, 150), states=C64),
        bad("B", COMPLEX_CONSTANT, ones(12, 5), states=C64),
        bad("B", "have a number of groups that divides dim = 12, got 5", ones(5, 5, 150)),
        bad("C", "have as many groups as B, 2, got 4", ones(4, 5, 150)),
        bad("D", "be (dim,) = (12,)", ones(1)),
        bad("z", "be (dim, total) = (12, 150)", ones(150, 12)),
        bad("input_delta", f"have dtype {REAL}", i64(12, 150)),
        bad("delta_bias", f"have dtype {REAL}", c64(12)),
        bad("cu_seqlens", INDICES, ones(8)),
        bad("cu_seqlens", "be (sequences+1,)", i64(2, 4)),
        bad("cu_seqlens", "have sequences+1 of at least 1", i64(0)),
        bad("cache_indices", "be (sequences,) = (7,)", i64(6)),
        bad("cache_indices", INDICES, ones(7)),
        bad("has_initial_state", "be (sequences,) = (7,)", ones(6, dtype=torch.bool)),
        bad("has_initial_state", "have dtype bool", i64(7)),
        bad("checkpoint_every", "be at least 0", -1),
        bad("checkpoint_every", "be at least 1 where checkpoint_slots is given", 0),
        bad("first_position", "be (sequences,) = (7,)", i64(8)),
        bad("checkpoint_slots", "be a Tensor where checkpoint_every is above 0, got None", None),
        bad("checkpoint_slots", "be (sequences, checkpoints) = (7, *)", i64(7)),
        bad("out", "be (dim, total) = (12, 150)", ones(12, 151)),
        bad("out", "have dtype float32", bf16(12, 150)),
        bad("out", NO_STRIDE, ones(150).expand(12, 150)),
        bad("states", NO_STRIDE, ones(12, 5).expand(70, 12, 5)),
        BACKENDS,
    ],
)

# --- a layer --------------------------------------------------------------------------------------

INNER = [
    bad("xz", "be a Tensor", None),
    bad("delta_softplus", "be a bool", 1),
    bad("checkpoint_lvl", "be an int", True),
    bad("checkpoint_lvl", "be one of 1, 0", 2),
    bad("b_c_dt_rms_eps", "be a float", "0"),
    bad("b_c_dt_rms_eps", "be at least 0", -1.0),
    bad("discretization_method", METHOD, "euler"),
    bad("xz", "be (batch, 2*dim, seqlen)", ones(2, 6)),
    bad("xz", "have an even number of channels", ones(2, 13, 70)),
    bad("conv1d_weight", "be (dim, 1, width) = (6, 1, *)", ones(6, 4)),
    bad("conv1d_weight", WIDTH, ones(6, 1, 9)),
    bad("x_proj_weight", "be (dt_rank+dstate+dstate, dim) = (11, 6)", ones(12, 6)),
    bad("x_proj_weight", "be (dt_rank+dstate, dim) = (7, 6)", ones(11, 6), B=ones(6, 4)),
    bad("B_proj_bias", "be None where B is given", ones(4), B=ones(6, 4)),
    bad("C_proj_bias b_rms_weight", "be (dstate,) = (4,)", ones(1)),
    bad("dt_rms_weight", "be (dim,) = (6,)", ones(3)),
    bad("out_proj_bias", "be (d_model,) = (5,)", ones(1)),
    bad("A", "be (dim, dstate) = (6, *)", ones(6)),
    bad("A", f"have dtype {POLES}", bf16(6, 4)),
    bad("xz", f"have dtype {REAL}", i64(2, 12, 70)),
    bad("D", "be on the device of xz", on_meta(6)),
    BACKENDS,
]


def of_layer(bidirectional: bool) -> Refusals:
    return Refusals(
        ways_in(mamba_inner_fn, mamba_inner_ref),
        lambda **changes: tensors_of(LAYER) | {"bidirectional": bidirectional} | changes,
        "xz",
        INNER,
    )


NO_REVERSE = "be False where A_b is given, got True"
BIMAMBA = Refusals(
    ways_in(bimamba_inner_fn, None),
    lambda **changes: directions.tensors_of() | {"delta_softplus": True} | changes,
    "xz",
    [
        bad("A_b xz", "be a Tensor", None, 1),
        bad("delta_softplus", "be a bool", 1),
        bad("A_b", "be (dim, dstate) = (6, 3)", ones(6, 4)),
        bad("A_b", "have dtype float32 or float64", c64(6, 3)),
        bad("D", "be (dim,) = (6,)", ones(5)),
        bad("x_proj_weight", "be (dt_rank+dstate+dstate, dim) = (8, 6)", ones(7, 6)),
    ],
)
# How a layer of two directions is made of rows.
ROWS_OF_LAYER = Refusals(
    ways_in(mamba_rows, None),
    lambda **changes: (
        {
            name: it
            for name, it in directions.tensors_of().items()
            if name not in ("out_proj_weight", "out_proj_bias")
        }
        | {"delta_softplus": True, "reverse": False}
        | changes
    ),
    "xz",
    [bad("reverse", NO_REVERSE, True)],
)


def good_layer(**changes: object) -> dict:
    names = MAMBA_INNER.arguments.names
    return dict(zip(names, op_arguments(LAYER, requires_grad=False, **changes), strict=True))


# What the function does by several calls of the op.
LAYER_OP = Refusals(
    ways_in(None, None, "mamba_inner_fwd"),
    good_layer,
    "xz",
    [
        bad("reverse", "be False where bidirectional is given, got True", True, bidirectional=True),
        bad("reverse", "be False where A_b is given, got True", True, A_b=ones(6, 4)),
        bad(
            "reverse",
            "be False where cu_seqlens is given, got True",
            True,
            xz=ones(1, 12, 70),
            cu_seqlens=torch.tensor([0, 70]),
        ),
        bad("bidirectional", "be False where A_b is given, got True", True, A_b=ones(6, 4)),
        bad(
            "A_b",
            "be None where in_proj_weight is given",
            ones(6, 4),
            in_proj_weight=ones(12, 3),
            xz=ones(2, 70, 3),
        ),
        bad(
            "out_proj_bias", "be None where out_proj_weight is None", ones(6), out_proj_weight=None
        ),
        bad("A_b", "be (dim, dstate) = (6, 4)", ones(6, 5)),
    ],
)

# --- maps, rotations, norms -----------------------------------------------------------------------

CROSS_SCAN = Refusals(
    ways_in(cross_scan_fn, cross_scan_ref),
    lambda **changes: dict(zip(vision.NAMES, vision.make(torch.float32), strict=True)) | changes,
    "x",
    [
        bad("delta", "be a list of Tensors", 3),
        bad("x", "be (batch, dim, height, width)", ones(2, 6, 35)),
        bad("delta", "be (batch, 4, ...)", ones(2, 3, 6, 5, 7)),
        bad("delta", "have 4 maps, one for each direction, got 3", [ones(2, 6, 5, 7)] * 3),
        bad(
            "delta",
            "delta[0] must be (batch, dim, height, width) = (2, 6, 5, 7), got (2, 6, 7, 5)",
            ones(2, 4, 6, 7, 5),
        ),
        bad("A", "be (4, dim, dstate) = (4, 6, *)", -ones(24, 3)),
        bad(
            "B",
            "B[0] must be (batch, dstate, height, width) = (2, *, 5, 7), got (2, 3, 7, 5)",
            ones(2, 4, 3, 7, 5),
        ),
        bad(
            "C",
            "C[0] must be (batch, groups, dstate, height, width) = (2, *, 3, 5, 7), "
            "got (2, 1, 4, 5, 7)",
            ones(2, 4, 1, 4, 5, 7),
        ),
        bad("D", "be (4, dim) = (4, 6)", ones(6)),
        bad("B", f"B[0] must have dtype {REAL}", c64(2, 4, 3, 5, 7)),
        bad("discretization_method", METHOD, "euler"),
    ],
)
GROUPED = {"B": ones(1, 3, 2, 5), "C": ones(1, 3, 2, 5), "angles": ones(1, 3, 1, 5)}
ROTATION = Refusals(
    ways_in(rotate_states, None),
    plain(B=ones(1, 2, 5), C=ones(1, 2, 5), angles=ones(1, 1, 5)),
    "B",
    [
        bad("angles", "be a Tensor", None),
        bad("B", f"have dtype {REAL}", c64(1, 2, 5)),
        bad("B", "be (batch, dstate, seqlen) or (batch, groups, dstate, seqlen)", ones(2, 5)),
        bad("B", "have an even dstate", ones(1, 3, 5)),
        bad("C", "be (batch, dstate, seqlen) = (1, 2, 5)", ones(1, 2, 4)),
        bad(
            "angles",
            "be (batch, groups, dstate/2, seqlen) = (1, 3, 1, 5)",
            ones(1, 1, 5),
            **GROUPED,
        ),
        bad("C", "be (batch, groups, dstate, seqlen) = (1, 3, 2, 5)", ones(1, 1, 2, 5), **GROUPED),
    ],
)
NORM = Refusals(
    {"op": by_op("add_rms_norm_fwd")},  # which has no fake kernel
    plain(hidden=ones(2, 9), weight=ones(9), eps=1e-5, dtype=torch.float32),
    "hidden",
    [
        bad("weight", "be (channels,) = (9,)", ones(8)),
        bad("residual", "have the shape of hidden, (2, 9)", ones(1, 9)),
        bad("hidden", f"have dtype {REAL}", i32(2, 9)),
    ],
)

TABLES = {
    "scan": SCAN,
    "scan's derivative": DERIVATIVE,
    "scan's derivative into given tensors": GIVEN_GRADIENTS,
    "gradient of the initial state": STATE_GRADIENT,
    "matrix scan": MATRIX,
    "exponential trapezoid": TRAPEZOID,
    "diagonal scan": DIAGONAL,
    "diagonal scan's derivative": DIAGONAL_DERIVATIVE,
    "unitary scan": UNITARY,
    "unitary scan's op": UNITARY_OP,
    "convolution": CONVOLUTION,
    "convolution's derivative": CONVOLUTION_DERIVATIVE,
    "convolution over a pool": POOL,
    "convolution's update": CONVOLUTION_UPDATE,
    "update": UPDATE,
    "prefill": PREFILL,
    "layer": of_layer(bidirectional=False),
    "layer of two directions": of_layer(bidirectional=True),
    "layer's op": LAYER_OP,
    "rows of a layer": ROWS_OF_LAYER,
    "layer of Vim's fork": BIMAMBA,
    "cross scan": CROSS_SCAN,
    "rotation": ROTATION,
    "norm": NORM,
}
each_way = pytest.mark.parametrize(
    ("table", "way"), [(name, way) for name, table in TABLES.items() for way in table.ways]
)


@each_way
def test_good_calls_pass(table, way, device):
    """The tables are about what differs from these."""
    call = TABLES[table].ways[way]
    call(TABLES[table].call(device))
    if table == "scan":
        call(SCAN.call(device, is_complex=True))


@each_way
def test_bad_calls_are_refused_in_the_same_words(table, way, device):
    TABLES[table].check(way, device)


@pytest.mark.parametrize("table", [name for name, it in TABLES.items() if "reference" in it.ways])
def test_the_backend_must_match_the_device(table, device):
    other = "cuda" if device == "cpu" else "cpu"
    refusals = TABLES[table]
    arguments = refusals.call(device)
    given = arguments[refusals.anchor].device
    message = f"^selective_scan: backend '{other}' needs tensors on {other}, got {given}$"
    for way in PYTHON:
        names = refusals.ways[way].names
        if names is None or "backend" in names:
            with pytest.raises(ValueError, match=message):
                refusals.ways[way](arguments | {"backend": other})
    refusals.ways["function"](arguments | {"backend": device})
