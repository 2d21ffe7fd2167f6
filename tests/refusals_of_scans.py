"""Tables of the calls that the scans refuse, with the message of each refusal."""

import warnings

import torch

import test_selective_scan_prefill as prefill
import test_selective_state_update as update
from cases import COMPLEX, REAL, ones
from refusals import (
    ANY,
    BACKENDS,
    DENSE,
    INDICES,
    METHOD,
    NO_STRIDE,
    POLES,
    Refusals,
    bad,
    bf16,
    c64,
    f64,
    i32,
    i64,
    numbers,
    on_meta,
    plain,
    ways_in,
)
from selective_scan import (
    adaptive_unitary_scan_fn,
    adaptive_unitary_scan_ref,
    diagonal_scan_fn,
    diagonal_scan_ref,
    exponential_trapezoid_fn,
    exponential_trapezoid_ref,
    selective_scan_fn,
    selective_scan_prefill,
    selective_scan_prefill_ref,
    selective_scan_ref,
    selective_state_update,
    selective_state_update_ref,
)

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
    # devices and layouts
    bad("cu_seqlens", "be on the device of u", on_meta(3, dtype=torch.int32)),
    *(
        bad(name, "be on the device of u", on_meta(*it.shape))
        for name, it in TENSORS_OF_SCAN
        if name != "u"
    ),
    *(bad(name, DENSE, it.to_sparse()) for name, it in TENSORS_OF_SCAN),
    # If several arguments are wrong, the message is that of the first check.
    bad("z", f"have dtype {REAL}", i32(2, 4, 6), delta=ones(2, 4, 7)),
    bad("delta", SEQUENCE, ones(2, 4, 7), z=ones(2, 4, 7)),
    bad("discretization_method", METHOD, "tustin", u=i32(2, 4, 6)),
    BACKENDS,
]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the warning that CSR support is in beta
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
        bad(
            "cu_seqlens",
            "be None where A is (dim, dstate, dstate)",
            i64(2),
            **dict.fromkeys(ROWS_OF_TWO, ones(1, 4, 6)),
        ),
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
    """Returns rows for B and C; the op takes their polar forms, named b and c."""
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
