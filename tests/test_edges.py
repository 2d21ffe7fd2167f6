"""Extreme sizes, odd tensors, and partial requests for gradients."""

import pytest
import torch

import test_adaptive_unitary as unitary
import test_causal_conv1d as convolution
import test_diagonal_scan as diagonal
import test_matrix_scan as matrix
import test_packed as packed
from accuracy import Tolerance, assert_same_bits, complaint
from operator_cases import call_of, each_case
from problem import (
    TENSORS,
    Case,
    check,
    detached,
    inputs_on,
    lay_out,
    make,
    reference,
    run,
    scan,
)
from selective_scan import selective_scan_fn, selective_scan_ref

SMALL = Case(dim=4, dstate=4, seqlen=40)
STATE_SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 128, 255, 256)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dstate", STATE_SIZES)
@pytest.mark.parametrize("is_complex", [False, True])
def test_state_sizes(dstate, is_complex, device):
    check(Case(dstate=dstate, complex=is_complex, dim=4, seqlen=35, method="foh"), device)


@pytest.mark.parametrize("dstate", [3, 33, 256])
@pytest.mark.parametrize("kind", ["constant", "shared", "grouped"])
def test_state_sizes_in_bfloat16(dstate, kind, device):
    groups = 2 if kind == "grouped" else 1
    check(
        Case(dstate=dstate, dim=4, seqlen=34, dtype=torch.bfloat16, B=kind, C=kind, groups=groups),
        device,
    )


def test_a_state_size_beyond_the_limit_works_or_is_refused(device):
    # With fewer channels, one whose 3000 terms of ddelta_bias cancel would dominate the error.
    case = Case(dstate=1000, dim=32, seqlen=3)
    try:
        actual = run(case, device)
    except RuntimeError as error:
        assert str(error).startswith("selective_scan: A must have dstate of at most ")  # noqa: PT017
        return
    for name, exact in reference(case).items():
        assert not complaint(actual[name], exact, Tolerance(1e-5)), name


EMPTY = {
    "scan": [
        *(
            SMALL.with_(complex=is_complex, **sizes)
            for is_complex in (False, True)
            for sizes in ({"batch": 0}, {"dim": 0}, {"batch": 0, "dim": 0})
        ),
        *(
            SMALL.with_(seqlen=0, initial_state=initial_state, reverse=reverse, **kind)
            for reverse in (False, True)
            for kind in (
                {},
                {"complex": True},
                {"complex": True, "B": "packed_grouped", "C": "packed_grouped"},
            )
            for initial_state in (False, True)
        ),
        *(
            packed.BASE.with_(seqlen=seqlen, cu_seqlens=bounds)
            for seqlen, bounds in ((0, (0, 0, 0)), (130, (50,)), (40, (9, 9)))
        ),
    ],
    "matrix scan": [matrix.BASE.with_(seqlen=0)],
    "unitary scan": [
        unitary.Case(seqlen=0),
        *(unitary.Case(batch=0, seqlen=seqlen) for seqlen in (67, 0)),
        unitary.Case(dim=0, B="shared", C="shared", groups=1),
    ],
    "diagonal scan": [*(diagonal.Case(shape, (1,)) for shape in ((0,), (3, 0), (0, 5), (2, 0, 4)))],
    "convolution": [
        *(
            convolution.Case(*sizes, activation=None)
            for sizes in ((0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0))
        ),
        *(
            convolution.Case(1, dim, seqlen, activation=None, cu_seqlens=(0, 0, seqlen))
            for dim, seqlen in ((0, 5), (3, 0), (0, 0))
        ),
    ],
}


@each_case(EMPTY)
def test_nothing_to_compute(operator, case, device):
    """A call without steps, rows or channels gives what the reference gives: zeros, except that a
    sequence without steps keeps its state."""
    call = call_of(operator, case, device)
    actual, expected = call.solve(), call.solve(call.reference)
    last, initial = actual.get("last_state"), call.tensors.get("initial_state")
    for name, value in actual.items():
        wanted = expected[name]
        torch.testing.assert_close(value, torch.zeros_like(value) if wanted is None else wanted)
        assert "_state" in name or not value.any(), name
    if last is not None and operator != "convolution":
        assert torch.equal(last, torch.zeros_like(last) if initial is None else initial)
    if last is not None and initial is not None:
        assert torch.equal(actual["dinitial_state"], call.cotangents(actual)["last_state"])


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("function", [selective_scan_fn, selective_scan_ref])
def test_gradients_of_no_steps_are_zeros(function, is_complex, device):
    case = SMALL.with_(seqlen=0, complex=is_complex, input_delta=torch.float32)
    inputs = {name: value for name, value in inputs_on(case, device).items() if value is not None}
    gradients = torch.autograd.grad(function(**inputs).sum(), list(inputs.values()))
    for value, gradient in zip(inputs.values(), gradients, strict=True):
        assert torch.equal(gradient, torch.zeros_like(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_channels_than_a_grid_dimension_holds(dtype, device):
    check(Case(batch=1, dim=70_000, seqlen=3, dstate=2, dtype=dtype), device)


def test_a_large_batch(device):
    check(Case(batch=70_000, dim=1, groups=1, seqlen=2, dstate=1), device)


# By what exceeds 2^31 elements: sequences such as u, the states saved for backward, or B and C.
LARGE = {
    "sequences": {"batch": 3, "dim": 4096, "seqlen": 180_000, "dstate": 1, "groups": 1},
    "states": {"batch": 1, "dim": 8192, "seqlen": 35_200, "dstate": 256, "groups": 1},
    "projections": {"batch": 1, "dim": 64, "seqlen": 140_000, "dstate": 256, "groups": 64},
}


def assert_equal_but_for_rounding(actual, expected):
    """Asserts equality up to rounding: runs of other sizes divide the work differently, so single
    values may round the other way."""
    atol = 2**-8 * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=atol)


@pytest.mark.xdist_group("gpu_memory")  # one at a time
@pytest.mark.parametrize("layout", ["contiguous", "channel_last"])
@pytest.mark.parametrize("what", LARGE)
def test_more_elements_than_32_bits_count(what, layout, cuda_device):
    """A slice of the result agrees with a run on the slice."""
    batch, dim, seqlen, dstate, groups = LARGE[what].values()
    elements = {
        "sequences": batch * dim * seqlen,
        "states": batch * dim * dstate * (seqlen // 32 - 1),
        "projections": batch * groups * dstate * seqlen,
    }
    assert elements[what] > 2**31
    needed = 16 * elements["sequences"] + 8 * elements["states"] + 24 * elements["projections"]
    # Partial sums of dB and dC, one for each block that runs at a time.
    multiprocessors = torch.cuda.get_device_properties(cuda_device).multi_processor_count
    needed += 8 * elements["projections"] * min(dim // groups // 5, multiprocessors)
    torch.cuda.empty_cache()  # earlier tests may have left memory in the cache
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory, there are {free >> 30}")

    def random(*shape):
        shape = shape if layout == "contiguous" else (*shape[:-2], shape[-1], shape[-2])
        value = torch.rand(shape, dtype=torch.bfloat16, device=cuda_device)
        return value if layout == "contiguous" else value.transpose(-1, -2)

    inputs = {name: random(batch, dim, seqlen) for name in ("u", "delta")}
    inputs |= {name: random(batch, groups, dstate, seqlen) for name in ("B", "C")}
    A = -torch.rand(dim, dstate, device=cuda_device)
    dout = random(batch, dim, seqlen)
    for value in inputs.values():
        value.requires_grad_()
    out = selective_scan_fn(**inputs, A=A)
    gradients = dict(
        zip(inputs, torch.autograd.grad(out, list(inputs.values()), dout), strict=True)
    )

    # The first and the last channel of the last batch, each alone.
    for channel in (0, dim - 1):
        part = (slice(batch - 1, batch), slice(channel, channel + 1))
        group = channel // (dim // groups)
        of = dict.fromkeys(("u", "delta"), part)
        of |= {name: (part[0], slice(group, group + 1)) for name in ("B", "C")}
        alone = {name: value.detach()[of[name]].requires_grad_() for name, value in inputs.items()}
        expected = selective_scan_fn(**alone, A=A[channel : channel + 1])
        assert_equal_but_for_rounding(out[part], expected)
        names = list(alone) if groups == dim else ["u", "delta"]
        wanted = torch.autograd.grad(expected, [alone[name] for name in names], dout[part])
        for name, value in zip(names, wanted, strict=True):
            assert_equal_but_for_rounding(gradients[name][of[name]], value)


# --- odd tensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["A", "B", "C", "initial_state"])
def test_lazily_conjugated_tensors(name, device):
    case = SMALL.with_(complex=True)
    inputs = detached(inputs_on(case, device))
    lazy, eager = inputs[name].conj(), inputs[name].conj().resolve_conj()
    assert lazy.is_conj()
    assert not eager.is_conj()
    assert_same_with(case, inputs, name, lazy, eager)


@pytest.mark.parametrize("name", ["u", "delta", "z"])
def test_lazily_negated_tensors(name, device):
    case = SMALL.with_(complex=False)
    inputs = detached(inputs_on(case, device))
    lazy = torch.complex(torch.zeros_like(inputs[name]), -inputs[name].abs()).conj().imag
    assert lazy.is_neg()
    assert_same_with(case, inputs, name, lazy, lazy.resolve_neg())


def assert_same_with(case, inputs, name, lazy, eager):
    results = []
    for value in (lazy, eager):
        leaf = value.detach().requires_grad_()
        out, last_state = scan(case, inputs | {name: leaf})
        (gradient,) = torch.autograd.grad(out.sum() + last_state.abs().sum(), leaf)
        results.append((out, last_state, gradient))
    assert_same_bits(*results)


@pytest.mark.parametrize("name", ["B", "C"])
def test_packed_projections_as_views_of_complex_ones(name, device):
    """Packed projections may be views of complex ones: view_as_real(...).flatten(-2)."""
    case = SMALL.with_(complex=True, seqlen=33)
    inputs = detached(inputs_on(case, device))
    packed = torch.view_as_real(inputs[name]).flatten(-2)
    expected = scan(case, inputs)
    torch.testing.assert_close(scan(case, inputs | {name: packed}), expected)


def test_one_tensor_for_several_arguments(device):
    case = SMALL.with_(delta_softplus=True)
    inputs = detached(inputs_on(case, device))
    shared = inputs["u"].clone().requires_grad_()
    out, _ = scan(case, inputs | {"u": shared, "delta": shared, "z": shared})
    cotangent = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, shared, cotangent)
    apart = [inputs["u"].clone().requires_grad_() for _ in range(3)]
    other, _ = scan(case, inputs | dict(zip(("u", "delta", "z"), apart, strict=True)))
    torch.testing.assert_close(out, other)
    torch.testing.assert_close(gradient, sum(torch.autograd.grad(other, apart, cotangent)))


def test_inputs_are_not_written_to(device):
    case = SMALL.with_(complex=True, layout="sliced")
    inputs = inputs_on(case, device)
    before = {name: value.detach().clone() for name, value in inputs.items()}
    versions = {name: value._version for name, value in inputs.items()}
    out, last_state = scan(case, inputs)
    (out.sum() + last_state.abs().sum()).backward()
    for name, value in inputs.items():
        assert torch.equal(value, before[name]), name
        assert value._version == versions[name], name


def test_results_share_no_memory_with_inputs(device):
    case = SMALL.with_(seqlen=0)
    inputs = inputs_on(case, device)
    _, last_state = scan(case, inputs)
    assert last_state.data_ptr() != inputs["initial_state"].data_ptr()


# --- gradients in part ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("is_complex", [False, True])
def test_a_single_input_requires_grad(name, is_complex, device):
    case = SMALL.with_(complex=is_complex, input_delta=torch.float32)
    everything = inputs_on(case, device)
    out, last_state = scan(case, everything)
    loss = out.sum() + last_state.abs().square().sum()
    (expected,) = torch.autograd.grad(loss, everything[name])

    inputs = detached(inputs_on(case, device))
    inputs[name].requires_grad_()
    out, last_state = scan(case, inputs)
    (out.sum() + last_state.abs().square().sum()).backward()
    assert torch.equal(inputs[name].grad, expected)
    for other, value in inputs.items():
        assert other == name or value.grad is None


# Cotangents of other strides or with a conjugate bit.
COTANGENTS = {
    "channel_last": lambda it: lay_out(it, "channel_last"),
    "sliced": lambda it: lay_out(it, "sliced"),
    "expanded": lambda it: it[:1, :1, :1].expand(it.shape),  # as from sum().backward()
    "conjugated": lambda it: it.conj(),
}


@pytest.mark.parametrize("kind", COTANGENTS)
@pytest.mark.parametrize("is_complex", [False, True])
def test_a_gradient_may_be_laid_out_in_any_way(is_complex, kind, device):
    case = SMALL.with_(complex=is_complex)
    given = [COTANGENTS[kind](value.to(device)) for value in make(case).cotangents.values()]
    results = []
    for cotangents in (given, [value.contiguous().resolve_conj() for value in given]):
        inputs = inputs_on(case, device)
        torch.autograd.backward(scan(case, inputs), cotangents)
        results.append({name: value.grad for name, value in inputs.items()})
    for name, expected in results[1].items():
        torch.testing.assert_close(results[0][name], expected, rtol=1e-5, atol=1e-5)


def test_backward_twice_with_a_retained_graph(device):
    case = SMALL
    inputs = inputs_on(case, device)
    out, _ = scan(case, inputs)
    first = torch.autograd.grad(out.sum(), inputs["B"], retain_graph=True)[0]
    second = torch.autograd.grad(out.sum(), inputs["B"])[0]
    assert torch.equal(first, second)
