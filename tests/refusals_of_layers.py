"""Tables of the calls that a layer and its parts refuse, with the message of each refusal."""

from collections.abc import Callable

import torch

import test_causal_conv1d_pool as pool
import test_compat_directed_functions as directions
import test_s6_step as s6
import test_vision as vision
from cases import REAL, ones
from refusals import (
    BACKENDS,
    DENSE,
    INDICES,
    METHOD,
    NO_STRIDE,
    POLES,
    Refusals,
    Way,
    bad,
    bf16,
    by_op,
    c64,
    f64,
    i32,
    i64,
    on_meta,
    plain,
    ways_in,
)
from s6_step import s6_step, s6_step_ref
from selective_scan import (
    causal_conv1d_fn,
    causal_conv1d_ref,
    causal_conv1d_update,
    causal_conv1d_update_ref,
    mamba_inner_fn,
    mamba_inner_ref,
    rotate_states,
)
from selective_scan._mamba_operators import MAMBA_INNER, Layer
from selective_scan._s6_step import StackTensors
from selective_scan.compat.directions import bimamba_inner_fn
from selective_scan.mamba_inner import run_layer
from selective_scan.vision import cross_scan_fn, cross_scan_ref
from test_mamba_inner import BASE as LAYER
from test_mamba_inner import tensors_of
from test_mamba_inner_operator import op_arguments

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
        bad("cache_indices", "be None unless conv_states is given", i32(1)),
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


LAYER_OF_ONE_DIRECTION, LAYER_OF_TWO = of_layer(bidirectional=False), of_layer(bidirectional=True)
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
# The rows that a layer of two directions consists of.
ROWS_OF_LAYER = Refusals(
    ways_in(lambda **given: run_layer(Layer(**given)), None),
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


# Calls that the function runs as several calls of the op, or of an argument that it has not.
LAYER_OP = Refusals(
    ways_in(lambda **given: MAMBA_INNER(*given.values()), None, "mamba_inner_fwd"),
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
        bad("residual", "have dtype float32", bf16(2, 70, 5)),
        bad("residual", "be (batch, seqlen, d_model) = (2, 70, 5)", ones(2, 69, 5)),
    ],
)

# --- maps, rotations, norms -----------------------------------------------------------------------

CROSS_SCAN = Refusals(
    ways_in(cross_scan_fn, cross_scan_ref),
    lambda **changes: dict(zip(vision.NAMES, vision.make(torch.float32), strict=True)) | changes,
    "x",
    [
        bad("delta", "be a Tensor or a list of Tensors", 3, None),
        BACKENDS,
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
    {"op": by_op("add_rms_norm_fwd")},  # the op has no fake kernel
    plain(hidden=ones(2, 9), weight=ones(9), eps=1e-5, dtype=torch.float32),
    "hidden",
    [
        bad("weight", "be (channels,) = (9,)", ones(8)),
        bad("residual", "have the shape of hidden, (2, 9)", ones(1, 9)),
        bad("hidden", f"have dtype {REAL}", i32(2, 9)),
    ],
)

# --- a step through layers ------------------------------------------------------------------------


def good_step(**changes: object) -> dict:
    """Returns a good call's arguments, with the stack's lists separate, as the op takes them."""
    arguments = {"eps": 1e-5} | s6.make(s6.BASE.with_(**changes))
    return arguments | arguments.pop("stack")._asdict()


def by_stack(function: Callable) -> Callable[[dict], object]:
    def call(arguments: dict) -> object:
        lists = {name: arguments[name] for name in StackTensors._fields}
        others = {name: it for name, it in arguments.items() if name not in lists}
        return function(stack=StackTensors(**lists), **others)

    return call


WAYS = {"function": Way(by_stack(s6_step)), "s6_step": by_op("s6_step")}
SLOTS = {"slots": 4}
HEAD = {"vocabulary": 6}
AS_WEIGHTS = "have dtype float32 (as in_proj[0])"
STEP = Refusals(
    WAYS
    | {f"fake {name}": way.faked for name, way in WAYS.items()}
    | {
        "reference": Way(lambda it: by_stack(s6_step)({"backend": "reference"} | it)),
        "reference itself": Way(by_stack(s6_step_ref)),
    },
    good_step,
    "hidden",
    [
        bad("hidden D[1]", "be a Tensor", None, 1),
        bad("norm_f", "be a Tensor or None", 1.0),
        bad("D", "be a list of Tensors", None, ones(64)),
        bad("norm", "be a list of Tensors or None", 1),
        bad("delta_softplus", "be a bool", 1),
        bad("hidden", "be (batch, steps, d_model)", ones(2, 32)),
        bad("hidden", f"have dtype {REAL}", c64(2, 1, 32)),
        bad("norm[1]", "be (d_model,) = (32,)", ones(31)),
        bad("norm[1]", "have dtype float32 (as norm[0])", bf16(32)),
        bad("in_proj", "have at least one tensor, got none", []),
        bad("in_proj[0]", "be (2*d_inner, d_model) = (128, 32)", ones(128, 33)),
        bad("in_proj[1]", "be (2*d_inner, d_model) = (128, 32)", ones(64, 32)),
        bad("in_proj[0]", f"have dtype {REAL}", i64(128, 32)),
        bad("conv1d[0]", "be (d_inner, 1, width) = (*, 1, *)", ones(64, 4)),
        bad("conv1d[1]", "be (d_inner, 1, width) = (64, 1, 4)", ones(64, 1, 5)),
        bad("conv1d[1]", AS_WEIGHTS, bf16(64, 1, 4)),
        bad("conv1d[0]", WIDTH, ones(64, 1, 9)),
        bad("conv1d_bias", "have as many tensors as in_proj, 2, got 1", [ones(64)]),
        bad("conv1d_bias[0]", "be (d_inner,) = (64,)", ones(63)),
        bad("x_proj", "have as many tensors as in_proj, 2, got 0", []),
        bad("x_proj[1]", "be (dt_rank+2*dstate, d_inner) = (34, 64)", ones(33, 64)),
        bad("x_proj[0]", AS_WEIGHTS, f64(34, 64)),
        bad("dt_proj[1]", "be (d_inner, dt_rank) = (64, 2)", ones(64, 3)),
        bad("dt_proj_bias[1]", "be (d_inner,) = (64,)", ones(64, 1)),
        bad("A_log[1]", "be (d_inner, dstate) = (64, 16)", ones(64, 15)),
        bad("A_log[0]", f"have dtype {REAL}", c64(64, 16)),
        bad("A_log[0]", "have dstate of 1 to 64", ones(64, 65), dstate=65),
        bad("D[0]", "be (d_inner,) = (64,)", ones(1)),
        bad("out_proj[1]", "be (d_model, d_inner) = (32, 64)", ones(32, 63)),
        bad("out_proj_bias[0]", "be (d_model,) = (32,)", ones(64), biases=("out_proj",)),
        bad("conv_state[1]", "be (batch, d_inner, width-1) = (2, 64, 3)", ones(2, 64, 4)),
        bad("conv_state[1]", "be (slots, d_inner, width-1) = (4, 64, 3)", ones(3, 64, 3), **SLOTS),
        bad(
            "conv_state[1]",
            "have the strides of conv_state[0], (192, 1, 64), got (192, 3, 1)",
            ones(2, 64, 3),
        ),
        bad("state", "have as many tensors as in_proj, 2, got 3", [ones(2, 64, 16)] * 3),
        bad("state[0]", "be (batch, d_inner, dstate) = (2, 64, 16)", ones(3, 64, 16)),
        bad("state[1]", "have dtype float32 (as state[0])", bf16(2, 64, 16)),
        bad(
            "state[1]",
            "have the strides of state[0], (1024, 16, 1), got (1024, 1, 64)",
            ones(2, 16, 64).transpose(1, 2),
        ),
        bad("state[0]", NO_STRIDE, ones(2, 64, 1).expand(2, 64, 16)),
        bad("norm_f", "be (d_model,) = (32,)", ones(33)),
        bad("head", "be (vocabulary, d_model) = (*, 32)", ones(6, 31), **HEAD),
        bad("head", AS_WEIGHTS, bf16(6, 32), **HEAD),
        bad("state_batch_indices", "be (batch,) = (2,)", i64(3), **SLOTS),
        bad("state_batch_indices", INDICES, ones(2), **SLOTS),
        bad("workspace", "have dtype uint8", ones(8)),
        bad("discretization_method", METHOD, "euler"),
        BACKENDS,
    ],
)
