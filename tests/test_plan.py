"""Which CUDA kernels run a call, and in which launch shape: csrc/cuda/plan decides on the host, by
sizes, layout and the figures of a device. No GPU is needed."""

import importlib
import itertools
import random
import re
from dataclasses import asdict, replace

import pytest
import torch

import test_layouts as layouts
from plan_calls import A100, CONSTANT, H200, HALF, RTX3090, T4, Call, fill, random_call
from test_benchmarks import BENCHMARKS

PACKED_SEQUENCES = 64  # of plan_bindings.cpp
# A call, and for each of its passes the path, the channels of a tile and the segments of time.
TABLE = [
    # A prompt: the states of a channel are in sixteen lanes, or in eight.
    (Call(1, 1536, 512, 16), ("prompt", 12, 1), ("streamed", 96, 8)),
    (Call(1, 5120, 2048, 16), ("prompt", 40, 1), ("streamed", 96, 7)),
    (Call(2, 1024, 800, 16), ("prompt", 16, 1), ("streamed", 96, 5)),
    (
        Call(1, 768, 512, 16, channel_last=True, wider_rows=True),
        ("prompt", 6, 1),
        ("streamed", 96, 16),
    ),
    (Call(1, 256, 512, 16), ("prompt", 2, 1), ("streamed", 32, 16)),
    (Call(1, 1536, 4096, 16), ("prompt", 12, 1), ("streamed", 96, 8)),
    (Call(2, 68, 64, 16, dtype="float32"), ("prompt", 2, 1), ("streamed", 32, 1)),
    # Several dtypes: only the floor takes them as they are.
    (Call(2, 1024, 800, 16, mixed=True), ("floor", 8, 1), ("floor", 8, 1)),
    # Many channels, as in mamba-130m.
    (Call(8, 1536, 2048, 16), ("streamed", 96, 1), ("streamed", 96, 1)),
    (Call(8, 1536, 2048, 16, channel_last=True), ("streamed", 96, 1), ("streamed", 96, 1)),
    # As in a layer: z, B, C and their gradients are slices of wider rows.
    (
        Call(8, 1536, 2048, 16, channel_last=True, wider_rows=True),
        ("streamed", 96, 1),
        ("streamed", 96, 1),
    ),
    (
        Call(2, 1536, 512, 16, channel_last=True, wider_rows=True),
        ("prompt", 24, 1),
        ("streamed", 96, 4),
    ),
    (Call(4, 2048, 2048, 64), ("streamed", 64, 1), ("streamed", 24, 1)),
    # A long sequence is cut into segments.
    (Call(1, 256, 1048576, 16), ("streamed", 64, 263), ("streamed", 96, 44)),
    (
        Call(2, 512, 2048, 8, dtype="float32", complex=True),
        ("streamed", 16, 6),
        ("streamed", 48, 6),
    ),
    # Constant B and C; with few channels the streamed forward kernels would not cut time.
    (Call(8, 1536, 2048, 16, **CONSTANT), ("streamed", 96, 1), ("streamed", 96, 1)),
    (Call(1, 512, 65536, 16, **CONSTANT), ("floor", 16, 17), ("floor", 16, 17)),
    # One state: lanes are along time. With few channels, a warp's lanes are along the time of one
    # channel, which four warps share if there are many steps.
    (Call(64, 768, 784, 1), ("dstate1", 8, 1), ("dstate1", 32, 1)),
    (Call(16, 384, 3136, 1), ("dstate1", 1, 1), ("dstate1", 32, 1)),
    (Call(2, 384, 16384, 1), ("dstate1", 1, 1), ("dstate1", 3, 1)),
    (Call(1, 192, 65536, 1), ("dstate1", 1, 1), ("dstate1", 2, 1)),
    (Call(1, 64, 32768, 1), ("dstate1", 1, 1), ("dstate1", 2, 1)),
    (Call(2, 768, 4096, 1), ("dstate1", 1, 1), ("dstate1", 4, 1)),
    (Call(1, 64, 65536, 1), ("streamed", 32, 256), ("streamed", 64, 128)),
    (Call(1, 1, 1, 1), ("dstate1", 1, 1), ("dstate1", 1, 1)),
    # One image: rows that begin at any address, and few states.
    (Call(1, 768, 197, 16), ("prompt", 6, 1), ("streamed", 64, 7)),
    (Call(1, 1024, 96, 2, dtype="float32"), ("prompt", 8, 1), ("dstate1", 8, 1)),
    (Call(1, 320, 49, 8), ("prompt", 4, 1), ("dstate1", 3, 1)),
    (Call(1, 160, 196, 8), ("prompt", 2, 1), ("dstate1", 2, 1)),
    # The warps of a channel's states no longer run all at the same time, or take too many steps.
    (Call(8, 1024, 96, 2, dtype="float32"), ("streamed", 16, 1), ("narrow", 32, 1)),
    (Call(4, 320, 49, 8), ("prompt", 10, 1), ("narrow", 16, 1)),
    (Call(4, 160, 196, 8), ("prompt", 6, 1), ("streamed", 64, 7)),
    (Call(1, 160, 520, 8), ("prompt", 2, 1), ("streamed", 32, 17)),
    # Few states are padded to sixteen, and so is one, if it is complex.
    (Call(8, 1024, 1024, 1, complex=True), ("streamed", 32, 1), ("streamed", 48, 1)),
    (Call(8, 1536, 2048, 2), ("streamed", 96, 1), ("streamed", 96, 1)),
    # The steps of input_delta take the place of one warp.
    (Call(8, 1536, 2048, 16, input_delta=True), ("streamed", 96, 1), ("streamed", 88, 1)),
    # Calls that only the floor takes.
    (Call(2, 4, 0, 4, dtype="float32"), ("floor", 8, 1), ("floor", 8, 1)),
    (Call(2, 1024, 800, 16, dtype="float64"), ("floor", 8, 1), ("floor", 8, 1)),
    # Packed sequences; many channels need no segments.
    (
        Call(1, 1536, 40000, 16, channel_last=True, packed=True),
        ("streamed", 32, 66),
        ("streamed", 96, 78),
    ),
    (Call(1, 256, 40000, 16, packed=True), ("streamed", 32, 146), ("streamed", 96, 78)),
    # At most 1024 segments: the block that cuts packed sequences has one thread for each.
    (Call(1, 32, 1000000, 16, packed=True), ("streamed", 32, 1011), ("streamed", 32, 1011)),
    (Call(1, 8192, 40000, 16, packed=True), ("streamed", 64, 1), ("streamed", 64, 1)),
    (Call(1, 8192, 1000, 16, packed=True), ("streamed", 64, 1), ("streamed", 64, 1)),
    (Call(1, 256, 2000, 16, packed=True), ("streamed", 8, 14), ("streamed", 96, 7)),
    # Calls without kernels of their kind.
    (Call(1, 8192, 40000, 32, packed=True), ("floor", 8, 1), ("floor", 8, 1)),
    (Call(8, 1536, 2048, 65), ("floor", 8, 1), ("floor", 8, 1)),
    (Call(8, 1536, 2048, 16, C="constant"), ("floor", 16, 1), ("floor", 16, 1)),
]


# The map by which the forward pass moves u, delta, z and out, and the units in which the backward
# pass moves u, delta, z, dout, du, ddelta and dz: the initials of steps, channels and elements.
MAMBA = Call(8, 1536, 2048, 16)
ROWS = [
    (MAMBA, "steps", "sssssss"),
    (replace(MAMBA, channel_last=True), "step pairs", "ccccccc"),
    (replace(MAMBA, channel_last=True, wider_rows=True), "step pairs", "ccccccc"),
    # input_delta and its gradient come last.
    (replace(MAMBA, input_delta=True), "steps", "sssssssss"),
    (replace(MAMBA, input_delta=True, turned=("input_delta",)), "elements", "ssssssscs"),
    (replace(MAMBA, turned=("z", "dz")), "elements", "sscsssc"),
    (replace(MAMBA, turned=("u", "out", "dout")), "elements", "csscsss"),
    (
        replace(MAMBA, channel_last=True, wider_rows=True, turned=("u", "out", "du")),
        "elements",
        "scccscc",
    ),
    (replace(MAMBA, dtype="float32", turned=("dout",)), "steps", "ssscsss"),
    # Against the direction of time, the backward pass moves rows along time by single elements.
    (replace(MAMBA, reverse=True, turned=("u", "out")), "elements", "ceeeeee"),
    # Rows that are not aligned.
    (replace(MAMBA, seqlen=2047), "elements", "eeeeeee"),
    (replace(MAMBA, seqlen=2047, turned=("u", "out")), "elements", "ceeeeee"),
    (replace(MAMBA, B="constant", C="constant", turned=("z",)), "elements", "sscssss"),
    (replace(MAMBA, dstate=8, complex=True, turned=("z",)), "channels", "sscssss"),
    # A packed sequence may begin at any step.
    (replace(MAMBA, batch=1, packed=True, channel_last=True), "step pairs", "ccccccc"),
    (replace(MAMBA, batch=1, packed=True), "elements", "eeeeeee"),
    (
        replace(MAMBA, batch=1, packed=True, channel_last=True, dtype="float32"),
        "elements",
        "ccccccc",
    ),
]


def test_the_layouts_that_are_tested_take_the_streamed_path(plan):
    sizes = layouts.SIZES["cuda"]
    for dtype in ("float32", "bfloat16"):
        for which in ("forward", "backward"):
            call = Call(dstate=16, dtype=dtype, turned=("u", "out", "du"), **sizes)
            assert plan(which, call)["path"] == "streamed"


@pytest.mark.parametrize(("call", "forward", "backward"), ROWS, ids=str)
def test_rows(plan, call, forward, backward):
    assert plan("forward", call, wanted="streamed")["map"] == forward
    rows = plan("backward", call, wanted="streamed")["rows"]
    assert "".join(row[0] for row in rows if row != "absent") == backward


def bytes_of(call):
    """Returns the bytes of a call's rows, B, C and states at chunk boundaries, in the precision of
    its arithmetic."""
    projections = 2 * call.groups * call.dstate * call.seqlen
    chunks = -(-call.seqlen // 32) + PACKED_SEQUENCES * call.packed
    states = call.dim * call.dstate * chunks
    numbers = call.batch * (call.dim * call.seqlen + projections + states)
    return numbers * (8 if call.dtype == "float64" else 4) * (2 if call.complex else 1)


@pytest.mark.parametrize(("call", "forward", "backward"), TABLE)
def test_table(plan, call, forward, backward):
    names = ("path", "tile_channels", "segments")
    for which, expected, times in (("forward", forward, 1), ("backward", backward, 3)):
        made = plan(which, call)
        assert tuple(made[name] for name in names) == expected, which
        # Each block of this kernel has its own sums of dB and dC.
        has_state_warps = made["path"] == "dstate1" and call.dstate > 1
        sums = 132 * call.seqlen * 2 * 16 * 4 * has_state_warps
        assert made["scratch_bytes"] <= times * bytes_of(call) + sums + 1024, which


# Passes of which a single result is wanted: backward the state's gradient, forward the map of all
# steps.
ALONE = [
    ("backward", Call(1, 2048, 65536, 16), "streamed", 6),
    ("backward", Call(2, 1024, 800, 16), "streamed", 5),
    ("backward", Call(64, 1024, 100, 1), "streamed", 1),
    ("backward", Call(2, 64, 64, 16, dtype="float32"), "streamed", 1),
    ("backward", Call(1, 1536, 2048, 16, **CONSTANT), "floor", 1),
    ("backward", Call(1, 64, 4096, 16, dtype="float64"), "floor", 8),
    ("forward", Call(1, 2048, 65536, 16), "streamed", 6),  # three blocks per multiprocessor
    ("forward", Call(2, 1024, 800, 16), "streamed", 3),
    ("forward", Call(2, 64, 64, 16, dtype="float32"), "streamed", 1),
    ("forward", Call(1, 2048, 65535, 16), "floor", 1),  # may have a partial chunk
    ("forward", Call(64, 1024, 100, 1), "floor", 1),
    ("forward", Call(1, 1536, 2048, 16, **CONSTANT), "floor", 1),
    ("forward", Call(1, 64, 4096, 16, dtype="float64"), "floor", 8),
]


@pytest.mark.parametrize(("which", "call", "path", "segments"), ALONE, ids=str)
def test_what_is_wanted_alone(plan, which, call, path, segments):
    made = plan(which, replace(call, state_alone=True, map_alone=True))
    assert (made["path"], made["segments"]) == (path, segments)
    if which == "backward":
        assert plan(which, call, wanted=path)["segments"] == segments


@pytest.mark.parametrize("device", [H200, A100, RTX3090], ids=["H200", "A100", "RTX3090"])
def test_models_are_not_left_to_the_floor(plan, device, monkeypatch):
    """Holds for any batch, from one image on, and for images of any size: the floor is correct for
    every call, but many times slower for these."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    users = importlib.import_module("harness.users")
    left = []
    for user in users.SCANS:
        for batch, larger in itertools.product((1, 2, 5, user.batch), (1, 4, 16)):
            seqlen = min(user.seqlen * larger, 2**21)
            call = Call(batch, user.dim, seqlen, user.dstate, user.groups, dtype=user.dtype)
            left += [
                (user.name, which, call)
                for which in ("forward", "backward")
                if plan(which, call, device)["path"] == "floor"
            ]
    assert not left


def shares_of(count, share):
    """Returns how many of `count` items each block gets if it takes `share` of those left."""
    return [min(share, count - first) for first in range(0, count, share)]


def check_plan(made, call, device):
    """Asserts that a single block has every step of a channel, and that the grid can be
    launched."""
    tiles = shares_of(call.dim // call.groups, made["tile_channels"])
    assert made["tiles"] == len(tiles)
    assert sum(tiles) == call.dim // call.groups
    steps = call.seqlen
    # Packed sequences that are cut are in chunks: as many as there may be at most.
    if call.packed and made["path"] == "streamed" and made["segments"] > 1:
        steps = 32 * min(steps, steps // 32 + PACKED_SEQUENCES)
    segments = shares_of(steps, made["segment_steps"])
    assert made["segments"] == len(segments)
    assert sum(segments) == steps
    assert made["segments"] == 1 or made["segment_steps"] % 32 == 0
    assert 1 <= made["tiles_per_sum"] <= made["tiles"]

    blocks, rows, layers = made["grid"]
    assert 1 <= blocks < 2**31
    assert 1 <= rows < 2**16
    assert 1 <= layers < 2**16
    assert made["threads"] in range(32, 1025, 32)
    assert 0 <= made["shared_bytes"] <= device.block_shared_bytes
    assert made["scratch_bytes"] >= 0
    assert made["scratch_bytes"] % 256 == 0


def plan_or_refusal(plan, *arguments):
    """Returns the plan, or the message by which the call is refused."""
    try:
        return plan(*arguments)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("device", [H200, A100, RTX3090, T4], ids=["H200", "A100", "RTX3090", "T4"])
def test_random_calls(plan, plan_bindings, device):
    generator = random.Random(torch.initial_seed())  # the seed of the run and the test
    for _ in range(700):
        call = random_call(generator)
        for which in ("forward", "backward"):
            made = plan_or_refusal(plan, which, call, device)
            assert plan_or_refusal(plan, which, call, device) == made
            if isinstance(made, str):  # e.g. 256 states of complex128
                assert "have not enough shared memory" in made, call
                assert call.complex or device == T4, call
                assert call.dtype == "float64", call
                continue
            assert device != T4 or made["path"] in ("dstate1", "floor")
            check_plan(made, call, device)
            # The path that the rules choose can be requested; other paths run the call too, or say
            # why they cannot.
            assert plan(which, call, device, made["path"]) == made
            for path in plan_bindings.paths:
                other = plan_or_refusal(plan, which, call, device, path)
                if isinstance(other, str):
                    assert other.startswith(f"selective_scan: {refusal(path)}")
                else:
                    check_plan(other, call, device)


def refusal(path):
    return f"SELECTIVE_SCAN_CUDA_KERNELS={path} cannot run this call: "


@pytest.mark.parametrize(
    ("path", "changes", "reason"),
    [
        ("dstate1", {"dstate": 1, "method": "rk4"}, "the method must be zoh"),
        ("prompt", {"method": "poly"}, "the method must be zoh"),
        ("streamed", {"dstate": 17, "method": "foh"}, "by a method other than zoh .* 16, got 17"),
        ("streamed", {"complex": True, "method": "bilinear"}, "by a method other than zoh A must"),
        ("streamed", {**CONSTANT, "method": "foh"}, "by a method other than zoh .* C variable"),
        ("dstate1", {"dstate": 1, "C": "constant"}, "B and C must both be variable"),
        ("dstate1", {"dstate": 17}, "dstate must be .*1.*, got 17"),
        ("dstate1", {"dstate": 1, "mixed": True}, "must have one dtype and the same strides"),
        ("dstate1", {"dstate": 1, "complex": True}, "A must be real and arithmetic fp32"),
        ("streamed", {"dstate": 65}, "dstate must be at most 64"),
        ("streamed", {"batch": 1, "packed": True, "dstate": 32}, "of packed .* 16, got 32"),
        ("streamed", {"batch": 1, "packed": True, "complex": True}, "of packed .* must be real"),
        ("streamed", {"batch": 1, "packed": True, **CONSTANT}, "of packed .* C variable"),
        ("dstate1", {"batch": 1, "dstate": 1, "packed": True}, "sequences are packed"),
        ("streamed", {"input_delta": True, "dstate": 17}, "where the input has steps of its own"),
        ("streamed", {"input_delta": True, **CONSTANT}, "where the input has steps of its own"),
        ("streamed", {"input_delta": True, "complex": True}, "where the input has steps of its"),
        ("streamed", {"C": "constant"}, "both be variable or both be constant"),
        ("streamed", {"complex": True, **CONSTANT}, "A must be real|B and C must be variable"),
        ("streamed", {"dtype": "float64"}, "arithmetic must be fp32"),
        ("streamed", {"mixed": True}, "must have one dtype"),
        ("floor", {"dstate": 257}, "dstate must be at most 256, got 257"),
        ("prompt", {"dstate": 17}, "dstate must be at most 16, got 17"),
        ("prompt", {"mixed": True}, "must have one dtype"),
        ("prompt", {"B": "constant"}, "B and C must both be variable"),
        ("prompt", {"complex": True}, "A must be real and arithmetic fp32"),
        ("prompt", {"channel_last": True, "dim": 1023}, "or be vectors of two along channels"),
        ("prompt", {"batch": 1, "packed": True}, "sequences are packed"),
        ("prompt", {"input_delta": True}, "the input has steps of its own"),
    ],
)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_refusals(plan, which, path, changes, reason):
    call = replace(Call(2, 1024, 800, 16), **changes)
    if which == "backward" and path == "prompt":
        reason = "it has no backward pass"
    expected = (
        f"selective_scan: SELECTIVE_SCAN_CUDA_KERNELS={path} cannot run this call: .*{reason}"
    )
    with pytest.raises(RuntimeError, match=expected):
        plan(which, call, wanted=path)


@pytest.mark.parametrize("path", ["streamed", "prompt"])
def test_kernels_that_need_asynchronous_copies(plan, path):
    expected = re.escape(f"{refusal(path)}the GPU's compute capability must be 8.0 or later, got 7")
    with pytest.raises(RuntimeError, match=expected):
        plan("forward", Call(2, 1024, 800, 16), T4, path)


def test_no_copies_for_kernels_that_are_not_there(plan):
    """Slices and copies of rows only serve the streamed kernels."""
    for call in (
        Call(2, 512, 1000, 200),
        Call(2, 1024, 800, 16, mixed=True),
        Call(2, 64, 2056, 20, dtype="float32", complex=True),
    ):
        for which in ("forward", "backward"):
            assert plan(which, call, T4, slices=True) is None
            assert plan(which, call, T4)["path"] == "floor"
    assert plan("forward", Call(2, 512, 1000, 200), A100, slices=True) is not None


def test_a_device_may_be_said_to_have_less(plan_bindings):
    device = fill(plan_bindings.Device(), H200)
    text = "major=7 multiprocessors=40  block_shared_bytes=65536 shared_bytes=65536"
    facts = plan_bindings.facts_of(plan_bindings.lessened(device, text))
    assert dict(fact.split("=") for fact in facts.split()) == {
        name: str(value) for name, value in asdict(T4).items()
    }
    for unchanged in ("", plan_bindings.facts_of(device)):
        assert plan_bindings.facts_of(plan_bindings.lessened(device, unchanged)) == (
            plan_bindings.facts_of(device)
        )


@pytest.mark.parametrize(
    "entry", ["40", "multiprocessors", "multiprocessors=", "multiprocessors=133", "major=0",
              "major=7.5", "cores=1", "multiprocessors=1,major=7"]
)  # fmt: skip
def test_what_a_device_cannot_be_said_to_have(plan_bindings, entry):
    expected = "entries such as multiprocessors=40, no greater than what the device has"
    with pytest.raises(RuntimeError, match=f"DEVICE must be unset or have {expected}.*'{entry}'"):
        plan_bindings.lessened(fill(plan_bindings.Device(), H200), f"shared_bytes=5000 {entry}")


@pytest.mark.parametrize(
    "changes",
    [
        {"complex": True},
        {"dstate": 17},
        {"dstate": 64},
        {"dtype": "bfloat16"},
        {"projection_dtype": "float32"},
    ],
)
def test_sums_without_the_digits_of_their_gradients(plan, changes):
    call = replace(HALF, **changes)
    assert plan("forward", call, wanted="streamed")["path"] == "streamed"
    with pytest.raises(RuntimeError, match="where u has 16 bits, B and C must be bfloat16"):
        plan("backward", call, wanted="streamed")


def test_too_many_states(plan):
    """If no kernel can run a call, the error says why."""
    call = Call(1, 8, 64, 257)
    with pytest.raises(RuntimeError, match="selective_scan: dstate must be at most 256, got 257"):
        plan("forward", call)


@pytest.mark.parametrize("path", ["streamed", "floor", "prompt"])
def test_wanted_path(plan, path):
    """A path can be requested even if it is not the better choice."""
    for which in ("forward", "backward") if path in ("streamed", "floor") else ("forward",):
        for seqlen in (64, 800, 65536):
            made = plan(which, Call(2, 1024, seqlen, 16), wanted=path)
            assert made["path"] == path
            check_plan(made, Call(2, 1024, seqlen, 16), H200)


# --- packed sequences cut into segments -----------------------------------------------------------


def chunks_of(lengths):
    return [-(-length // 32) for length in lengths]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("reversed_", [False, True])
def test_cuts_of_packed_sequences(plan_bindings, backwards, reversed_):
    """The segments cover all chunks, and only sequences longer than the uncut limit are cut. As few
    pieces as possible are cut off, so that the rest, at the end or backwards at the beginning, is
    within the limit. A short rest may stay with a piece."""
    generator = random.Random(torch.initial_seed())  # the seed of the run and the test
    for _ in range(300):
        lengths = [
            generator.choice([0, 1, 32, 33, generator.randint(0, 300), generator.randint(0, 5000)])
            for _ in range(generator.randint(1, 20))
        ]
        count = sum(chunks_of(lengths))
        most = count + generator.randint(0, 5)  # the largest possible count
        piece = generator.randint(1, max(most, 1))
        uncut = generator.randint(piece, 5 * piece)
        segments = max(-(-most // piece), 1)
        bounds = [0, *itertools.accumulate(lengths)]
        cuts = plan_bindings.cut_packed(bounds, reversed_, segments, piece, uncut, backwards)
        assert len(cuts) == segments + 1
        assert cuts[0] == 0
        assert cuts[-1] == count
        assert cuts == sorted(cuts)
        assert max(b - a for a, b in itertools.pairwise(cuts)) <= uncut + 2 * piece

        begin, allowed = 0, {count}
        for length in chunks_of(lengths[::-1] if reversed_ else lengths):
            end = begin + length
            pieces = -(-max(length - uncut, 0) // piece)
            inside = {
                end - i * piece if backwards else begin + i * piece for i in range(1, pieces + 1)
            }
            cut_off = {cut for cut in cuts if begin < cut < end}
            assert cut_off == inside or (uncut < 2 * piece and cut_off < inside)
            allowed |= {begin} | inside
            begin = end
        assert allowed.issuperset(cuts)
