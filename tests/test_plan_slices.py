"""The slices of its states in which a call runs, the arrays copied before them and the sums after
them: csrc/cuda/plan decides on the host. No GPU is needed."""

import random
from dataclasses import replace

import pytest
import torch

from plan_calls import CONSTANT, HALF, Call, random_call

# A call, and for its forward and backward pass the states and the path of each slice, the number of
# arrays copied first and the number of arrays summed at the end. None: it runs as it is.
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
    # Another method, whose kernels hold fewer states.
    (
        Call(8, 1024, 512, 40, method="foh"),
        ([16, 16, 8], STREAMED * 3, 3, 1),
        ([16, 16, 8], STREAMED * 3, 4, 4),
    ),
    (Call(8, 1024, 512, 24, method="foh", **CONSTANT), None, None),
    (Call(8, 1024, 512, 24, method="rk4", complex=True), None, None),
    # Too few elements, or calls that only the floor takes.
    (Call(1, 64, 64, 128), None, None),
    (Call(8, 1024, 512, 128, dtype="float64"), None, None),
    (Call(8, 1024, 512, 128, C="constant"), None, None),
    (Call(8, 1024, 512, 24, complex=True, **CONSTANT), None, None),
    (Call(8, 1024, 1024, 16, mixed=True, complex=True, **CONSTANT), None, None),
    # Several dtypes.
    (Call(8, 1024, 1024, 16, mixed=True), ([16], STREAMED, 2, 1), ([16], STREAMED, 3, 2)),
    (Call(8, 1024, 1024, 32, mixed=True), ([32], STREAMED, 2, 1), ([32], STREAMED, 3, 2)),
    (
        Call(8, 1024, 1024, 16, mixed=True, channel_last=True),
        ([16], STREAMED, 2, 1),
        ([16], STREAMED, 3, 2),
    ),
    (Call(8, 1024, 1024, 1, mixed=True), ([1], ["dstate1"], 2, 1), ([1], ["dstate1"], 3, 2)),
    (Call(8, 1024, 1024, 16, mixed=True, C="constant"), None, None),
    (Call(1, 256, 256, 16, mixed=True), None, None),
    # Calls whose gradients of B and C need more digits than their kernels keep.
    (HALF, None, None),
    (replace(HALF, complex=True), None, ([16], STREAMED, 4, 3)),
    (replace(HALF, dstate=32), None, ([32], STREAMED, 4, 3)),
    (replace(HALF, dtype="bfloat16"), None, ([16], STREAMED, 4, 3)),
    (replace(HALF, projection_dtype="float32"), None, ([16], STREAMED, 4, 3)),
    (replace(HALF, complex=True, projection_dtype="bfloat16"), None, None),
    (replace(HALF, complex=True, state_alone=True), None, None),
    (replace(HALF, B="constant", C="constant"), None, None),
    # Several layouts; the forward pass takes that of u.
    (Call(8, 1024, 1024, 16, turned=("z", "dz")), ([16], STREAMED, 1, 0), None),
    (Call(8, 1024, 1024, 16, channel_last=True, turned=("u", "out")), ([16], STREAMED, 2, 0), None),
    # Rows that cannot be read as vectors in place.
    (Call(8, 1023, 1024, 16, channel_last=True), ([16], STREAMED, 3, 1), ([16], STREAMED, 4, 3)),
    (Call(8, 1024, 1023, 16), None, None),
    (Call(8, 1023, 1023, 16), None, None),
    # With input_delta the floor takes the call as it is.
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
    """Every state is in one slice, the same in both passes, and results of slices are summed."""
    generator = random.Random(torch.initial_seed())  # the seed of the run and the test
    for _ in range(500):
        call = random_call(generator)
        if call.complex and call.dtype == "float64":  # 256 of these may be too many
            continue
        made = {which: plan(which, call, slices=True) for which in ("forward", "backward")}
        counts = {len(it["states"]) if it else 1 for it in made.values()}
        assert len(counts) == 1, call  # saved states have one layout
        for it in filter(None, made.values()):
            assert sum(it["states"]) == call.dstate, call
            assert min(it["states"]) > 0, call
            assert it["scratch_bytes"] % 256 == 0
            if len(it["states"]) > 1:
                assert it["sums"][-1] > 0
