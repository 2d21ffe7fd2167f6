"""Which slices of its states a call is run in, and what is copied before and added up behind them:
csrc/cuda/plan decides it on the host. No GPU is needed."""

import random
from dataclasses import replace

import pytest
import torch

from plan_calls import CONSTANT, HALF, Call, random_call

# A call, and of its forward and its backward pass: the states and the path of each slice, how many
# arrays are copied first, and how many are added up at last. None where a call runs as it is.
STREAMED = ["streamed"]
SLICES = [
    (Call(8, 1536, 2048, 16), None, None),
    (Call(8, 1024, 512, 64), None, None),
    (
        Call(8, 1024, 512, 65, dtype="float32"),
        ([64, 1], ["streamed", "dstate1"], 0, 1),
        ([64, 1], ["streamed", "dstate1"], 0, 4),
    ),
    (Call(8, 1024, 512, 128), ([64] * 2, STREAMED * 2, 3, 1), ([64] * 2, STREAMED * 2, 4, 4)),
    (
        Call(8, 1023, 512, 200, channel_last=True, dtype="float32"),
        ([64, 64, 64, 8], [*STREAMED * 3, "narrow"], 3, 1),
        ([64, 64, 64, 8], [*STREAMED * 3, "narrow"], 4, 4),
    ),
    (
        Call(8, 1024, 512, 17, complex=True),
        ([16, 1], STREAMED * 2, 3, 1),
        ([16, 1], STREAMED * 2, 4, 4),
    ),
    (
        Call(8, 1024, 512, 32, **CONSTANT),
        ([16] * 2, STREAMED * 2, 0, 1),
        ([16] * 2, STREAMED * 2, 0, 4),
    ),
    # By another method, for which kernels hold fewer states.
    (
        Call(8, 1024, 512, 40, method="foh"),
        ([16, 16, 8], STREAMED * 3, 3, 1),
        ([16, 16, 8], STREAMED * 3, 4, 4),
    ),
    (Call(8, 1024, 512, 24, method="foh", **CONSTANT), None, None),
    (Call(8, 1024, 512, 24, method="rk4", complex=True), None, None),
    # Too few elements, or what only the floor takes.
    (Call(1, 64, 64, 128), None, None),
    (Call(8, 1024, 512, 128, dtype="float64"), None, None),
    (Call(8, 1024, 512, 128, C="constant"), None, None),
    (Call(8, 1024, 512, 24, complex=True, **CONSTANT), None, None),
    (Call(8, 1024, 1024, 16, mixed=True, complex=True, **CONSTANT), None, None),
    # Of several dtypes.
    (Call(8, 1024, 1024, 16, mixed=True), ([16], STREAMED, 2, 1), ([16], STREAMED, 3, 2)),
    (
        Call(8, 1024, 1024, 32, mixed=True),
        ([32], STREAMED, 2, 1),
        ([32], STREAMED, 3, 2),
    ),
    (
        Call(8, 1024, 1024, 16, mixed=True, channel_last=True),
        ([16], STREAMED, 2, 1),
        ([16], STREAMED, 3, 2),
    ),
    (
        Call(8, 1024, 1024, 1, mixed=True),
        ([1], ["dstate1"], 2, 1),
        ([1], ["dstate1"], 3, 2),
    ),
    (Call(8, 1024, 1024, 16, mixed=True, C="constant"), None, None),
    (Call(1, 256, 256, 16, mixed=True), None, None),
    # Whose gradients of B and C need more digits than their kernels have.
    (HALF, None, None),
    (replace(HALF, complex=True), None, ([16], STREAMED, 4, 3)),
    (replace(HALF, dstate=32), None, ([32], STREAMED, 4, 3)),
    (replace(HALF, dtype="bfloat16"), None, ([16], STREAMED, 4, 3)),
    (replace(HALF, projection_dtype="float32"), None, ([16], STREAMED, 4, 3)),
    (replace(HALF, complex=True, projection_dtype="bfloat16"), None, None),
    (replace(HALF, complex=True, state_alone=True), None, None),
    (replace(HALF, B="constant", C="constant"), None, None),
    # Of several layouts, of which forward that of u is taken.
    (Call(8, 1024, 1024, 16, turned=("z", "dz")), ([16], STREAMED, 1, 0), None),
    (
        Call(8, 1024, 1024, 16, channel_last=True, turned=("u", "out")),
        ([16], STREAMED, 2, 0),
        None,
    ),
    # Rows that are no vectors as they lie.
    (
        Call(8, 1023, 1024, 16, channel_last=True),
        ([16], STREAMED, 3, 1),
        ([16], STREAMED, 4, 3),
    ),
    (Call(8, 1024, 1023, 16), None, None),
    (Call(8, 1023, 1023, 16), None, None),
    # Where the input has steps of its own the floor takes the call as it is.
    (Call(2, 512, 1000, 200, input_delta=True), None, None),
    (Call(2, 1024, 800, 16, mixed=True, input_delta=True), None, None),
]


@pytest.mark.parametrize(("call", "forward", "backward"), SLICES, ids=str)
def test_slices(plan, call, forward, backward):
    for which, expected in (("forward", forward), ("backward", backward)):
        made = plan(which, call, slices=True)
        if made is not None:
            made = (made["states"], made["paths"], made["copies"], made["sums"][-1])
        assert made == expected, which


def test_random_slices(plan):
    """Every state is in one slice, of both passes alike, and what slices leave is added up."""
    generator = random.Random(torch.initial_seed())  # of the run and of the test
    for _ in range(500):
        call = random_call(generator)
        if call.complex and call.dtype == "float64":  # of which 256 may be too many
            continue
        made = {which: plan(which, call, slices=True) for which in ("forward", "backward")}
        counts = {len(it["states"]) if it else 1 for it in made.values()}
        assert len(counts) == 1, call  # saved states lie likewise
        for it in filter(None, made.values()):
            assert sum(it["states"]) == call.dstate, call
            assert min(it["states"]) > 0, call
            assert it["scratch_bytes"] % 256 == 0
            if len(it["states"]) > 1:
                assert it["sums"][-1] > 0
