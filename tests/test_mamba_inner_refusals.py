"""mamba_inner_fn: what is refused, and with which sentence."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import REAL, assert_refused, fake
from problem import METHODS
from selective_scan import mamba_inner_fn, mamba_inner_ref
from test_mamba_inner import BASE, EVERYTHING, tensors_of
from test_mamba_inner_operator import op_arguments

b, e, s, n, r = BASE.batch, BASE.dim, BASE.seqlen, BASE.dstate, BASE.rank
BAD = [
    ({"xz": None}, TypeError, "xz must be a Tensor, got NoneType"),
    ({"delta_softplus": 1}, TypeError, "delta_softplus must be a bool, got int"),
    ({"checkpoint_lvl": True}, TypeError, "checkpoint_lvl must be an int, got bool"),
    ({"checkpoint_lvl": 2}, RuntimeError, "checkpoint_lvl must be one of 1, 0, got 2"),
    ({"b_c_dt_rms_eps": "0"}, TypeError, "b_c_dt_rms_eps must be a float, got str"),
    ({"b_c_dt_rms_eps": -1.0}, RuntimeError, "b_c_dt_rms_eps must be at least 0, got -1.0"),
    (
        {"discretization_method": "euler"},
        RuntimeError,
        f"discretization_method must be one of {', '.join(METHODS)}, got 'euler'",
    ),
    ({"xz": (b, e)}, RuntimeError, f"xz must be (batch, 2*dim, seqlen), got ({b}, {e})"),
    (
        {"xz": (b, 2 * e + 1, s)},
        RuntimeError,
        f"xz must have an even number of channels, got ({b}, {2 * e + 1}, {s})",
    ),
    (
        {"conv1d_weight": (e, 4)},
        RuntimeError,
        f"conv1d_weight must be (dim, 1, width) = ({e}, 1, *), got ({e}, 4)",
    ),
    (
        {"conv1d_weight": (e, 1, 9)},
        RuntimeError,
        f"conv1d_weight must have width of 1 to 8, got ({e}, 1, 9)",
    ),
    (
        {"x_proj_weight": (r + 2 * n + 1, e)},
        RuntimeError,
        f"x_proj_weight must be (dt_rank+dstate+dstate, dim) = (11, {e}), got (12, {e})",
    ),
    (
        {"B": (e, n)},
        RuntimeError,
        f"x_proj_weight must be (dt_rank+dstate, dim) = ({r + n}, {e}), got ({r + 2 * n}, {e})",
    ),
    (
        {"B": (e, n), "B_proj_bias": (n,)},
        RuntimeError,
        "B_proj_bias must be None where B is given",
    ),
    ({"C_proj_bias": (1,)}, RuntimeError, f"C_proj_bias must be (dstate,) = ({n},), got (1,)"),
    ({"b_rms_weight": (1,)}, RuntimeError, f"b_rms_weight must be (dstate,) = ({n},), got (1,)"),
    ({"dt_rms_weight": (r,)}, RuntimeError, f"dt_rms_weight must be (dim,) = ({e},), got ({r},)"),
    (
        {"out_proj_bias": (1,)},
        RuntimeError,
        f"out_proj_bias must be (d_model,) = ({BASE.d_model},), got (1,)",
    ),
    ({"A": (e,)}, RuntimeError, f"A must be (dim, dstate) = ({e}, *), got ({e},)"),
    (
        {"A": torch.zeros(e, n, dtype=torch.bfloat16)},
        RuntimeError,
        "A must have dtype float32, float64, complex64 or complex128, got bfloat16",
    ),
    (
        {"xz": torch.zeros(b, 2 * e, s, dtype=torch.int64)},
        RuntimeError,
        f"xz must have dtype {REAL}, got int64",
    ),
    (
        {"D": torch.zeros(e, device="meta")},
        RuntimeError,
        "D must be on the device of xz, cpu, got meta",
    ),
    (
        {"backend": "cudnn"},
        ValueError,
        "backend must be one of auto, cpu, cuda, reference, got 'cudnn'",
    ),
]


@pytest.mark.parametrize("way", ["kernels", "both ways", "reference", "fake"])
@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[row[2] for row in BAD])
def test_bad_calls(changes, error, message, way):
    given = tensors_of(BASE) | {
        name: torch.zeros(value) if isinstance(value, tuple) else value
        for name, value in changes.items()
    }
    if way == "fake":
        if "meta" in message:
            pytest.skip("fake tensors are where they say")
        given = fake(given, FakeTensorMode())
    function = mamba_inner_ref if way == "reference" else mamba_inner_fn
    assert_refused(function, given | {"bidirectional": way == "both ways"}, message, error)


def test_a_bad_call_after_a_good_one():
    """What was checked is not checked again, but for what has changed."""
    tensors = tensors_of(EVERYTHING)
    for _ in range(2):
        mamba_inner_fn(**tensors)
        with pytest.raises(RuntimeError, match="out_proj_bias must be"):
            mamba_inner_fn(**tensors | {"out_proj_bias": torch.zeros(1)})


@pytest.mark.parametrize("way", ["op", "fake"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reverse": True, "bidirectional": True}, "reverse must be False where bidirectional is"),
        ({"reverse": True, "A_b": torch.ones(e, n)}, "reverse must be False where A_b is given"),
        (
            {"reverse": True, "xz": torch.ones(1, 2 * e, s), "cu_seqlens": torch.tensor([0, s])},
            "reverse must be False where cu_seqlens is given",
        ),
        (
            {"bidirectional": True, "A_b": torch.ones(e, n)},
            "bidirectional must be False where A_b is given",
        ),
        (
            {"A_b": torch.ones(e, n), "in_proj_weight": torch.ones(2 * e, 3),
             "xz": torch.ones(b, s, 3)},
            "A_b must be None where in_proj_weight is given",
        ),
        (
            {"out_proj_weight": None, "out_proj_bias": torch.ones(e)},
            "out_proj_bias must be None where out_proj_weight is None",
        ),
        ({"A_b": torch.ones(e, n + 1)}, "A_b must be (dim, dstate) = "),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)  # fmt: skip
def test_what_the_op_does_not_do_at_once(changes, message, way):
    arguments = op_arguments(BASE, requires_grad=False, **changes)
    if way == "fake":
        mode = FakeTensorMode()
        arguments = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    with pytest.raises(RuntimeError, match=re.escape(message)):
        torch.ops.selective_scan.mamba_inner_fwd(*arguments, False)


def test_the_backward_op_checks_what_it_is_given():
    ops = torch.ops.selective_scan
    arguments = op_arguments(BASE, requires_grad=False)
    out, _, *kept = ops.mamba_inner_fwd(*arguments, True)
    message = r"dout must be \(batch, seqlen, d_model\) = \(2, 70, 5\), got \(2, 70, 4\)"
    with pytest.raises(RuntimeError, match=message):
        ops.mamba_inner_bwd(torch.ones(2, 70, 4), *arguments[:-1], *kept, torch.float32)
    kept[3] = kept[3][:, :-1]
    with pytest.raises(RuntimeError, match=r"y must be \(batch, seqlen, dim\) = \(2, 70, 6\)"):
        ops.mamba_inner_bwd(torch.ones_like(out), *arguments[:-1], *kept, torch.float32)
