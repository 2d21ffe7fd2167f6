"""Outputs and all gradients of every kind of problem, against the reference in float64.

A base case is changed along one axis at a time, then along pairs of axes whose features meet in a
kernel; the whole product is `slow`.
"""

import itertools

import pytest
import torch

from accuracy import assert_same_bits
from problem import (
    COMPLEX_KINDS,
    DTYPES,
    LAYOUTS,
    METHODS,
    REAL_KINDS,
    TENSORS,
    Case,
    check,
    detached,
    generator,
    inputs_on,
    lay_out,
    make,
    op_arguments,
    part_of,
    scan,
)
from selective_scan import selective_scan_fn

BASE = Case()
COMPLEX = Case(complex=True)
LENGTHS = (1, 2, 31, 32, 33, 64, 65, 1000, 2049)
OPTIONAL = ("D", "z", "delta_bias", "delta_softplus", "initial_state")
NOTHING = dict.fromkeys(OPTIONAL, False)
HALF = (torch.float16, torch.bfloat16)


def kinds(is_complex):
    return COMPLEX_KINDS if is_complex else REAL_KINDS


def groups_agree(B, C):
    """True if B and C agree in groups: "shared" is one group, "grouped" may be several."""
    names = {kind.removeprefix("packed_") for kind in (B, C)} - {"constant"}
    counted = {"grouped" if name == "grouped" else "shared" for name in names}
    return len(counted) < 2


def one_axis_at_a_time():
    for base in (BASE, COMPLEX):
        yield base
        yield from (base.with_(method=method) for method in METHODS)
        yield from (base.with_(dtype=dtype) for dtype in DTYPES)
        yield from (base.with_(seqlen=seqlen) for seqlen in LENGTHS)
        yield from (base.with_(layout=layout) for layout in LAYOUTS)
        for B, C in itertools.product(kinds(base.complex), repeat=2):
            groups = base.groups if groups_agree(B, C) else 1
            yield base.with_(B=B, C=C, groups=groups)
        yield from (base.with_(groups=groups) for groups in (1, 3, 6))
        yield from (base.with_(**{name: False}) for name in OPTIONAL)
        yield from (base.with_(**(NOTHING | {name: True})) for name in OPTIONAL)
        yield base.with_(**NOTHING)
        yield base.with_(reverse=True)
        yield base.with_(cotangents=("out",))
        yield base.with_(cotangents=("last_state",))
        yield from (base.with_(batch=batch) for batch in (1, 3, 5))
        yield from (base.with_(dim=dim, groups=1) for dim in (1, 3, 33, 64, 130))
        yield from (base.with_(dim=dim, groups=2) for dim in (34, 128))
        yield from (base.with_(dstate=dstate) for dstate in (1, 4, 5, 24, 64))
        yield from (base.with_(input_delta=dtype) for dtype in DTYPES)
        # A memory that fades slowly accumulates the rounding errors of the whole sequence.
        yield base.with_(decay=1e-3, seqlen=1000)
        yield base.with_(decay=1e-3, seqlen=1000, reverse=True, dtype=torch.bfloat16)


def mixed_dtypes():
    for base in (BASE, COMPLEX):
        for dtype, projection in itertools.product(DTYPES, repeat=2):
            yield base.with_(dtype=dtype, projection_dtype=projection)
        for dtype in (torch.float32, torch.bfloat16):
            yield base.with_(dtype=dtype, pole_dtype=torch.float64)
        for dtype, other in itertools.product(HALF, (torch.float32, torch.float64)):
            yield base.with_(dtype=dtype, delta_dtype=other)
            yield base.with_(dtype=other, z_dtype=dtype)
        for dtype, channel in itertools.product(HALF, DTYPES):
            yield base.with_(dtype=dtype, channel_dtype=channel)
    packed = COMPLEX.with_(B="packed_grouped", C="packed_grouped")
    for dtype in DTYPES:
        yield packed.with_(dtype=dtype)
        yield packed.with_(projection_dtype=dtype)


def pairs():
    """Yields pairs of features that share an index, a buffer or a branch."""
    for base in (BASE, COMPLEX):
        for seqlen in (1, 33, 64, 65, 257):
            for layout in ("channel_last", "sliced"):
                yield base.with_(seqlen=seqlen, layout=layout)
            yield base.with_(seqlen=seqlen, reverse=True)
            yield base.with_(seqlen=seqlen, initial_state=False)
            yield base.with_(seqlen=seqlen, dtype=torch.bfloat16)
            yield base.with_(seqlen=seqlen, cotangents=("last_state",), reverse=True)
            yield base.with_(seqlen=seqlen, dstate=3, dim=10)
        for layout in LAYOUTS:
            yield base.with_(layout=layout, reverse=True)
            yield base.with_(layout=layout, dtype=torch.bfloat16)
            yield base.with_(layout=layout, B="constant", C="constant")
            yield base.with_(layout=layout, B="shared", C="constant")
            yield base.with_(layout=layout, input_delta=torch.bfloat16, method="foh", seqlen=67)
            for name in ("u", "delta", "z"):
                yield base.with_(layout=layout, layout_of=(name,))
            yield base.with_(layout=layout, layout_of=("B", "C"))
        for method in METHODS:
            yield base.with_(method=method, reverse=True, seqlen=65)
            yield base.with_(method=method, B="constant", C="shared", groups=1)
            yield base.with_(method=method, dtype=torch.bfloat16)
            yield base.with_(method=method, dtype=torch.float64)
            yield from (
                base.with_(method=method, dtype=dtype, input_delta=dtype, seqlen=65)
                for dtype in (torch.float32, torch.bfloat16, torch.float64)
            )
            yield base.with_(method=method, input_delta=torch.bfloat16, reverse=True, **NOTHING)
            yield base.with_(method=method, delta_softplus=False, delta_bias=False)
            yield base.with_(method=method, dstate=7, initial_state=False)
        for B, C in (("constant", "grouped"), ("grouped", "constant")):
            one = base.with_(B=B, C=C, dtype=torch.bfloat16, seqlen=127)
            yield from (one, one.with_(dtype=torch.float16), one.with_(dstate=20, dim=40))
            yield one.with_(projection_dtype=torch.float32, z=False)
            yield one.with_(dim=37, groups=1, seqlen=96, initial_state=False)
            yield one.with_(layout="channel_last", layout_of=("B", "C"), seqlen=128)
            yield one.with_(batch=1, seqlen=2048)
        for groups, kind in itertools.product((1, 2, 6), kinds(base.complex)[2:]):
            yield base.with_(groups=groups, B=kind, C="constant", dstate=8)
            yield base.with_(groups=groups, B="constant", C=kind, reverse=True)
        for names in itertools.combinations(OPTIONAL, 2):
            yield base.with_(**dict.fromkeys(names, False))
    for layout, reverse in itertools.product(LAYOUTS, (False, True)):
        yield COMPLEX.with_(B="packed_grouped", C="packed_grouped", layout=layout, reverse=reverse)
        yield COMPLEX.with_(B="packed", C="shared", groups=1, layout=layout, reverse=reverse)


def product_of(base):
    """Yields the product of the other axes, with few lengths since those are tested above. Cases
    that differ only in layout follow each other, so that they share the reference's results."""
    for B, C in itertools.product(kinds(base.complex), repeat=2):
        groups = base.groups if groups_agree(B, C) else 1
        for options, layout in (({}, "contiguous"), (NOTHING, "channel_last")):
            yield base.with_(B=B, C=C, groups=groups, layout=layout, seqlen=37, **options)
    for seqlen, layout in itertools.product((1, 33, 65), LAYOUTS):
        yield base.with_(seqlen=seqlen, layout=layout)
    if base.dtype == torch.float32:
        for flags in itertools.product((False, True), repeat=len(OPTIONAL)):
            yield base.with_(seqlen=34, **dict(zip(OPTIONAL, flags, strict=True)))
    yield base.with_(seqlen=2049, dstate=16)


PRODUCT_BASES = [
    Case(complex=is_complex, method=method, dtype=dtype, reverse=reverse, dstate=5)
    for is_complex, method, dtype, reverse in itertools.product(
        (False, True), METHODS, DTYPES, (False, True)
    )
]
LONG = [
    Case(batch=1, dim=2, seqlen=16_385, dstate=4),
    Case(batch=1, dim=2, seqlen=16_385, dstate=4, reverse=True, complex=True, method="foh"),
]


FIRST = list(dict.fromkeys(itertools.chain(one_axis_at_a_time(), mixed_dtypes(), pairs())))


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_case(case, device):
    check(case, device)


@pytest.mark.slow
@pytest.mark.parametrize("base", PRODUCT_BASES, ids=str)
def test_product(base, device):
    """Runs about sixty cases in one test, since they are too many to collect one by one."""
    failures = []
    for case in product_of(base):
        try:
            check(case, device)
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_sequence(case, device):
    check(case, device)


@pytest.mark.parametrize("case", [BASE, COMPLEX.with_(method="foh", dtype=torch.float64)], ids=str)
def test_the_reference_is_a_backend_on_every_device(case, device):
    check(case, device, "reference")


# --- properties of every problem ------------------------------------------------------------------

SAMPLES = [
    BASE,
    COMPLEX,
    BASE.with_(dtype=torch.bfloat16, layout="channel_last", method="bilinear", seqlen=129),
    BASE.with_(input_delta=torch.float32, method="foh"),
    COMPLEX.with_(B="packed_grouped", C="constant", reverse=True, method="foh", **NOTHING),
]


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_saving_states_for_backward_does_not_change_the_output(case, device):
    inputs = inputs_on(case, device)
    for expected, actual in zip(scan(case, inputs), scan(case, detached(inputs)), strict=True):
        assert torch.equal(expected, actual)
        assert expected.requires_grad
        assert not actual.requires_grad


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_the_backward_op_takes_states_as_they_come_or_none(case, device):
    case = case.with_(seqlen=129)
    problem = make(case)
    arguments = op_arguments(case, inputs_on(case, device))
    ops = torch.ops.selective_scan
    *_, states = ops.selective_scan_fwd(*arguments, True)
    cotangents = [problem.cotangents[name].to(device) for name in ("out", "last_state")]
    given = ops.selective_scan_bwd(*cotangents, *arguments, states)
    # No states, or states as vmap may pass them: misaligned or strided.
    strided = states.repeat_interleave(2)[::2]
    for others in (None, states[:0], lay_out(states, "offset"), strided):
        recomputed = ops.selective_scan_bwd(*cotangents, *arguments, others)
        torch.testing.assert_close(recomputed, given, rtol=1e-5, atol=1e-5)
    without = ops.selective_scan_bwd(None, None, *arguments, states)
    assert not any(gradient.any() for gradient in without if gradient is not None)


@pytest.mark.parametrize("layout", ["sliced", "channel_last", "wider_rows"])
@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_gradients_go_where_the_caller_wants_them(case, layout, device):
    """Gradients are written into the caller's tensors, and the memory beside them is unchanged."""
    case = case.with_(seqlen=72, dim=16)
    arguments = op_arguments(case, inputs_on(case, device))
    ops = torch.ops.selective_scan
    out, last_state, states = ops.selective_scan_fwd(*arguments, True)
    expected = dict(
        zip(TENSORS, ops.selective_scan_bwd(out, last_state, *arguments, states), strict=True)
    )
    names = ("u", "delta", "B", "C", "z")
    surroundings, given = {}, dict.fromkeys(f"d{name}" for name in names)
    for name in names:
        if expected[name] is not None:
            surroundings[name], given[f"d{name}"] = surrounded(expected[name], layout)
    others = ops.selective_scan_bwd_out(out, last_state, *arguments, states, **given)
    assert_same_bits(others, [expected[name] for name in TENSORS if name not in names])
    for name, whole in surroundings.items():
        assert torch.equal(given[f"d{name}"], expected[name]), name
        given[f"d{name}"].fill_(SURROUNDING)
        assert (whole == SURROUNDING).all(), name


SURROUNDING = 7.0


def surrounded(like, layout):
    """Returns a tensor of one value, and a part of it with the shape of `like` and this layout."""
    if layout == "sliced":
        whole = like.new_full([size + 2 for size in like.shape], SURROUNDING)
        return whole, whole[tuple(slice(1, -1) for _ in like.shape)]
    order = [*range(like.dim() - 2), -1, -2] if layout == "channel_last" else range(like.dim())
    whole = like.permute(*order)
    whole = whole.new_full([*whole.shape[:-1], 3 * whole.shape[-1]], SURROUNDING)
    part = whole[..., like.shape[order[-1]] : 2 * like.shape[order[-1]]]
    return whole, part.permute(*order)


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_reverse_is_flip_scan_flip(case, device):
    inputs = detached(inputs_on(case.with_(layout="contiguous"), device))

    def flip(name, value):
        if value is None or name not in ("u", "delta", "z", "B", "C", "input_delta"):
            return value
        packed = getattr(case, name, None) in ("packed", "packed_grouped")
        if name in ("B", "C") and getattr(case, name) == "constant":
            return value
        return value.unflatten(-1, (-1, 2)).flip(-2).flatten(-2) if packed else value.flip(-1)

    flipped = {name: flip(name, value) for name, value in inputs.items()}
    out, last_state = scan(case, inputs, reverse=not case.reverse)
    expected_out, expected_state = scan(case, flipped)
    torch.testing.assert_close(out, expected_out.flip(-1))
    torch.testing.assert_close(last_state, expected_state)


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_two_halves_are_one_scan(case, device):
    """initial_state continues where last_state stopped."""
    case = case.with_(layout="contiguous", dtype=torch.float32)
    inputs = detached(inputs_on(case, device))
    out, last_state = scan(case, inputs)
    cut = 1 + int(torch.randint(case.seqlen - 1, (), generator=generator(f"cut {case}")))
    pieces = [(0, cut), (cut, case.seqlen)]
    outs, state = {}, inputs["initial_state"]
    for first, last in reversed(pieces) if case.reverse else pieces:
        piece = part_of(inputs, first, last) | {"initial_state": state}
        outs[first], state = scan(case, piece)
    torch.testing.assert_close(torch.cat([outs[0], outs[cut]], -1), out)
    torch.testing.assert_close(state, last_state)


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_without_return_last_state_the_result_is_a_tensor(case, device):
    inputs = inputs_on(case, device)
    out = selective_scan_fn(**inputs, **make(case).options)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, scan(case, detached(inputs))[0])


@pytest.mark.parametrize("layout", ["contiguous", "channel_last", "dim_first"])
def test_the_output_has_the_strides_of_a_dense_u(layout, device):
    case = BASE.with_(layout=layout)
    inputs = inputs_on(case, device)
    out = selective_scan_fn(**inputs, **make(case).options)
    assert out.stride() == inputs["u"].stride()


def test_ids_are_unique():
    names = [str(case) for case in FIRST]
    assert len(set(names)) == len(names)
