"""Plans of the convolution, the state update and a token's step: their division among threads."""

import os
import random

import pytest

from plan_calls import A100, H200, RTX3090, T4, Call, fill

# --- the causal convolution -----------------------------------------------------------------------

LAST = {"channel_last": True}
# A call, its width and pass; then the kernels that run it, whether batch entries are whole runs,
# the steps of a thread (columns) or the lanes, segments and rounds of a row (rows), and the blocks.
CONVOLUTIONS = [
    (Call(8, 1536, 2048, 1, **LAST), 4, False, ("columns", True, 64, 768)),
    (Call(8, 1536, 2048, 1, **LAST), 4, True, ("columns", True, 128, 768)),
    (Call(8, 1536, 2048, 1, dtype="float32", **LAST), 4, False, ("columns", True, 104, 960)),
    (Call(8, 1536, 2048, 1, dtype="float32", **LAST), 4, True, ("columns", True, 128, 384)),
    (Call(8, 1536, 2048, 1, dtype="float32", **LAST), 8, True, ("columns", True, 64, 1536)),
    (Call(2, 1536, 512, 1, **LAST), 4, False, ("columns", True, 4, 768)),
    (Call(2, 1536, 512, 1, **LAST), 4, True, ("columns", True, 8, 768)),
    (Call(1, 1536, 40000, 1, packed=True, **LAST), 4, False, ("columns", False, 116, 1044)),
    (Call(1, 24, 1, 1, **LAST), 3, False, ("columns", True, 4, 1)),
    (Call(8, 1536, 2048, 1), 4, False, ("rows", True, (32, 2, 4), 6144)),
    (Call(8, 1536, 2048, 1), 4, True, ("rows", True, (32, 1, 8), 3072)),
    (Call(8, 1536, 2048, 1, dtype="float32"), 4, False, ("rows", True, (32, 4, 4), 12288)),
    (Call(8, 1536, 2048, 1, dtype="float32"), 4, True, ("rows", True, (32, 2, 8), 6144)),
    (Call(64, 384, 197, 1), 4, True, ("rows", True, (32, 1, 1), 6144)),
    (Call(1, 64, 65536, 1), 4, False, ("rows", True, (32, 64, 4), 1024)),
    (Call(64, 384, 197, 1), 4, False, ("rows", True, (32, 1, 2), 6144)),
    (Call(8, 1536, 2048, 1, dtype="float64"), 4, False, ("any strides", True, 128, 1536)),
    (Call(8, 1535, 2048, 1, **LAST), 4, False, ("any strides", True, 128, 1536)),
    (Call(8, 1536, 0, 1), 4, False, ("none", False, 0, 1)),
]


@pytest.mark.parametrize(("call", "width", "is_backward", "expected"), CONVOLUTIONS, ids=str)
def test_convolutions(plan_bindings, call, width, is_backward, expected):
    device = fill(plan_bindings.Device(), H200)
    made = plan_bindings.plan_conv(fill(plan_bindings.Call(), call), device, width, is_backward)
    shape = made["steps"]
    if made["kernels"] == "rows":
        shape = (made["lanes"], made["segments"], made["rounds"])
    assert (made["kernels"], made["is_whole"], shape, made["blocks"]) == expected


@pytest.mark.parametrize("device", [H200, A100, RTX3090, T4], ids=["H200", "A100", "RTX3090", "T4"])
def test_convolutions_cover_all_steps(plan_bindings, device):
    rng = random.Random(os.environ["SELECTIVE_SCAN_TEST_SEED"])
    for _ in range(300):
        batch, dim, seqlen = (int(2 ** rng.uniform(0, most)) for most in (6, 13, 16))
        call = Call(
            batch, dim, seqlen, 1, channel_last=rng.random() < 0.5, packed=rng.random() < 0.2,
            dtype=rng.choice(["float32", "bfloat16", "float64"]), padding=rng.choice([0, 1]),
        )  # fmt: skip
        is_backward = rng.random() < 0.5
        arguments = fill(plan_bindings.Call(), call), fill(plan_bindings.Device(), device)
        made = plan_bindings.plan_conv(*arguments, rng.randint(1, 8), is_backward)
        if made["kernels"] == "rows":
            positions = made["segments"] * made["rounds"] * made["lanes"] * 16
            assert positions >= seqlen
            assert made["part_rows"] == batch * made["segments"]
        else:
            tiles = made["tiles"]
            assert (tiles - 1) * made["tile_steps"] < seqlen <= tiles * made["tile_steps"]
            assert made["part_rows"] == batch * tiles
            assert made["blocks"] % (batch * tiles) == 0


# --- the state update -----------------------------------------------------------------------------

# A call of `seqlen` steps whose groups are heads, and the dtype of states; then the kernel that
# runs it, the lanes that share a channel, and the grid.
UPDATES = [
    (Call(1, 1536, 1, 16), "float32", ("dense", 4, (48, 1))),
    (Call(64, 1536, 1, 16), "float32", ("dense", 4, (48, 64))),
    (Call(64, 1536, 1, 16), "bfloat16", ("dense", 2, (24, 64))),
    (Call(64, 5120, 1, 16), "float32", ("dense", 4, (160, 64))),
    (Call(1024, 1536, 1, 16), "float32", ("dense", 4, (48, 1024))),
    (Call(1024, 1536, 1, 16), "bfloat16", ("dense", 2, (24, 1024))),
    (Call(2**20, 64, 1, 16), "float32", ("any", 4, (2, 61681))),
    (Call(8, 4096, 1, 128, groups=64), "bfloat16", ("any", 16, (512, 4))),
    (Call(8, 1536, 1, 128, dtype="float32"), "float32", ("any", 32, (384, 4))),
    (Call(1, 24, 1, 4, dtype="float16"), "float32", ("any", 1, (1, 1))),
    (Call(64, 1536, 1, 16, wider_rows=True), "bfloat16", ("dense", 2, (24, 64))),
    (Call(8, 768, 1, 16, dtype="float32"), "float32", ("dense", 4, (24, 8))),
    # Calls that the dense kernel does not take.
    (Call(64, 1536, 1, 16, z=False), "float32", ("any", 4, (48, 32))),
    (Call(64, 1536, 1, 32), "float32", ("any", 8, (96, 16))),
    (Call(64, 1536, 1, 16, padding=16), "bfloat16", ("any", 2, (24, 64))),
    (Call(64, 1540, 1, 16), "float32", ("any", 4, (49, 32))),
    (Call(64, 1536, 1, 16, groups=2), "float32", ("any", 4, (48, 32))),
    (Call(64, 1536, 2, 16), "float32", ("any", 4, (48, 32))),
    (Call(64, 1536, 1, 16, mixed=True), "float32", ("any", 4, (48, 32))),
    (Call(64, 1536, 1, 16, padding=1), "float32", ("any", 4, (48, 32))),
    (Call(64, 1536, 1, 15), "bfloat16", ("any", 2, (24, 64))),
    (Call(64, 1536, 1, 16), "float16", ("any", 2, (24, 64))),
    (Call(1, 1536, 1, 256), "float32", ("any", 32, (384, 1))),
    (Call(1, 1536, 1, 16, dtype="float64"), "float64", ("any", 8, (96, 1))),
    (Call(1, 1536, 1, 16, dtype="float32", complex=True), "float32", ("any", 8, (96, 1))),
    (Call(2**18, 8192, 1, 16), "bfloat16", ("any", 2, (128, 52429))),
]


@pytest.mark.parametrize(("call", "state", "expected"), UPDATES, ids=str)
def test_updates(plan_bindings, call, state, expected):
    made = plan_bindings.plan_update(fill(plan_bindings.Call(), call), state)
    assert (made["kernel"], made["lanes"], made["grid"]) == expected


def test_updates_of_all_rows_and_channels(plan_bindings):
    rng = random.Random(os.environ["SELECTIVE_SCAN_TEST_SEED"])
    for _ in range(300):
        batch, dim = (int(2 ** rng.uniform(0, 16)) for _ in range(2))
        dstate = rng.randint(1, 256)
        state = rng.choice(["float32", "bfloat16", "float16", "float64"])
        dtype = "float64" if state == "float64" else rng.choice(["float32", "bfloat16"])
        call = fill(plan_bindings.Call(), Call(batch, dim, 1, dstate, dtype=dtype))
        made = plan_bindings.plan_update(call, state)
        tiles, rows = made["grid"]
        channels = made["threads"] // made["lanes"]
        assert (tiles - 1) * channels < dim <= tiles * channels
        assert rows <= 65535
        assert rows == batch or made["kernel"] == "any"
        packs = -(-dstate // made["lane_states"])
        assert made["many_packs"] == (packs > 32)
        assert made["lanes"] >= min(packs, 32)


# --- a token's step -------------------------------------------------------------------------------

# A GPU, dtype, rows and sizes of a stack of layers; then the blocks, and the stages of the ring.
SMALL, LARGE = (24, 768, 50280, 1536, 16, 48), (64, 2560, 50280, 5120, 16, 160)
STEPS = [
    (H200, "bfloat16", 1, SMALL, (132, 6)),
    (H200, "bfloat16", 8, SMALL, (132, 5)),
    (H200, "bfloat16", 16, SMALL, (132, 4)),
    (H200, "float32", 1, SMALL, (132, 6)),
    (H200, "bfloat16", 1, LARGE, (132, 5)),
    (H200, "bfloat16", 8, LARGE, (132, 3)),
    (H200, "bfloat16", 16, (48, 1536, 50280, 3072, 16, 96), (132, 2)),
    (H200, "float32", 1, (4, 64, 0, 128, 16, 4), (16, 6)),
    (H200, "float16", 1, (1, 16, 0, 16, 1, 1), (2, 6)),
    (A100, "bfloat16", 1, LARGE, (108, 3)),
    (RTX3090, "bfloat16", 1, SMALL, (82, 2)),
]
NO_ROOM = "the shared memory of the GPU's blocks is too small, got "
REFUSED_STEPS = [
    (H200, "bfloat16", 17, (1, 32, 0, 64), "batch*steps must be at most 16, got 17"),
    (H200, "bfloat16", 1, (129, 32, 0, 64), "layers must be at most 128, got 129"),
    (H200, "bfloat16", 1, (1, 24, 0, 64), "d_model must be a positive multiple of 16, got 24"),
    (H200, "bfloat16", 1, (1, 32, 0, 40), "d_inner must be a positive multiple of 16, got 40"),
    (H200, "float64", 1, (1, 32, 0, 64),
     "all tensors must be of at most 4 bytes an element, got 8"),
    (H200, "bfloat16", 16, LARGE, NO_ROOM + "232448"),
    (RTX3090, "bfloat16", 16, SMALL, NO_ROOM + "101376"),
    (T4, "float32", 1, (1, 32, 0, 64),
     "the GPU's compute capability must be 8.0 or later, got 7"),
]  # fmt: skip


@pytest.mark.parametrize(("device", "dtype", "rows", "sizes", "expected"), STEPS, ids=str)
def test_steps(plan_bindings, device, dtype, rows, sizes, expected):
    made = plan_bindings.plan_step(fill(plan_bindings.Device(), device), dtype, rows, *sizes)
    assert (len(made["channels"]), made["stages"]) == expected


@pytest.mark.parametrize(("device", "dtype", "rows", "sizes", "reason"), REFUSED_STEPS, ids=str)
def test_steps_that_are_refused(plan_bindings, device, dtype, rows, sizes, reason):
    device = fill(plan_bindings.Device(), device)
    assert plan_bindings.plan_step(device, dtype, rows, *sizes) == reason


def test_every_block_of_a_step_has_channels_and_outputs(plan_bindings):
    """A block without any would not wait for other blocks' values, nor they for its values."""
    rng = random.Random(os.environ["SELECTIVE_SCAN_TEST_SEED"])
    device = fill(plan_bindings.Device(), H200)
    for _ in range(300):
        dim, inner = (16 * int(2 ** rng.uniform(0, 9)) for _ in range(2))
        rows, dtype = rng.randint(1, 16), rng.choice(["float32", "bfloat16", "float16"])
        sizes = (rng.randint(1, 128), dim, rng.choice([0, 5, 50280]), inner)
        rest = (rng.randint(1, 64), rng.randint(1, dim))
        made = plan_bindings.plan_step(device, dtype, rows, *sizes, *rest)
        if isinstance(made, str):
            assert made.startswith(NO_ROOM)
            continue
        assert (sum(made["channels"]), sum(made["outputs"])) == (inner, dim)
        # A word that blocks exchange belongs to a single block.
        assert {n % 4 for n in (*made["channels"], *made["outputs"])} == {0}
        assert min(*made["channels"], *made["outputs"]) >= 4
        assert made["shared_bytes"] <= H200.block_shared_bytes
        assert made["activation_pitch"] > max(dim, inner)
        words = rows * (dim + 2 * inner) // (1 if dtype == "float32" else 2)
        assert made["workspace_bytes"] >= 8 * words
