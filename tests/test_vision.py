"""Maps scanned in four directions: against the reference in double precision, which is compared
with a walk from place to place."""

import contextlib

import pytest
import torch

from directed import assert_near, nudge
from opchecks import Ops
from problem import METHODS
from selective_scan import vision
from selective_scan.vision import cross_scan_fn, cross_scan_ref

BATCH, DIM, DSTATE, HEIGHT, WIDTH = 2, 6, 3, 5, 7
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAMES = ("x", "delta", "A", "B", "C", "D", "delta_bias")


def make(dtype, is_complex=False, groups=None, dstate=DSTATE, height=HEIGHT, width=WIDTH):
    """Returns x, delta, A, B, C, D and delta_bias."""
    places, wide = (height, width), torch.promote_types(dtype, torch.float32)
    kind = wide.to_complex() if is_complex else wide

    def projection():
        shape = (BATCH, 4, *(() if groups is None else (groups,)), dstate, *places)
        return torch.randn(shape, dtype=kind if is_complex else dtype)

    A = -torch.rand(4, DIM, dstate, dtype=wide) - 0.1
    return (
        torch.randn(BATCH, DIM, *places, dtype=dtype),
        torch.randn(BATCH, 4, DIM, *places, dtype=dtype) - 1,
        torch.complex(A, torch.randn_like(A)) if is_complex else A,
        projection(),
        projection(),
        torch.randn(4, DIM, dtype=wide),
        torch.rand(4, DIM, dtype=wide),
    )


def results(function, tensors, cotangent, **options):
    """Returns the output and every gradient, on the CPU."""
    leaves = [t for value in tensors for t in (value if isinstance(value, list) else [value])]
    out = function(*tensors, **options)
    gradients = torch.autograd.grad(out, leaves, cotangent.to(out), materialize_grads=True)
    return [value.detach().cpu() for value in (out, *gradients)]


def check(tensors, device, dtype, **options):
    cotangent = torch.randn(tensors[0].shape, dtype=dtype)

    def solve(size):
        exact = [nudge(tensor, size) for tensor in tensors]
        return results(cross_scan_ref, exact, cotangent, **options)

    given = [tensor.detach().to(device).requires_grad_() for tensor in tensors]
    actual = results(cross_scan_fn, given, cotangent, **options)
    assert [value.dtype for value in actual] == [dtype, *(t.dtype for t in tensors)]
    assert_near(actual, solve, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("method", METHODS)
def test_methods_and_dtypes(method, is_complex, dtype, device):
    options = {"delta_softplus": True, "discretization_method": method}
    check(make(dtype, is_complex), device, dtype, **options)


@pytest.mark.parametrize(
    "sizes",
    [
        {"groups": 2},
        {"dstate": 1},
        {"dstate": 16, "height": 14, "width": 14},
        {"height": 1, "width": 9},
        {"height": 9, "width": 1},
        {"height": 0, "width": 3},
        {"dstate": 1, "height": 31, "width": 17},
    ],
    ids=str,
)
def test_sizes(sizes, device):
    check(make(torch.float32, **sizes), device, torch.float32, delta_softplus=True)


@pytest.mark.parametrize("is_differentiated", [False, True])
@pytest.mark.parametrize("nothing", ["batch", "expanded batch", "dim"])
def test_nothing(nothing, is_differentiated, device):
    """A map without numbers counts as contiguous whatever its strides, so a copy does not change
    them. Its strides may be 0, and gradients have the same strides."""
    x, delta, A, B, C, D, delta_bias = make(torch.float32)
    if nothing == "batch":
        x, delta, B, C = x[:0], delta[:0], B[:0], C[:0]
    elif nothing == "expanded batch":
        x, B, C = x[:0], B[:0], C[:0]
        delta = delta[:1, ..., :1, :1].expand(0, *delta.shape[1:])
    else:
        x, A, D, delta_bias = x[:, :0], A[:, :0], D[:, :0], delta_bias[:, :0]
        delta = delta[:, :, :0]
    tensors = [t.to(device) for t in (x, delta, A, B, C, D, delta_bias)]
    if not is_differentiated:
        assert cross_scan_fn(*tensors).shape == x.shape
        return
    out, *gradients = results(cross_scan_fn, [t.requires_grad_() for t in tensors], x)
    assert out.shape == x.shape
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert gradient.shape == tensor.shape
        assert not gradient.any()


@pytest.mark.parametrize("left_out", [("D",), ("delta_bias",), ("D", "delta_bias")], ids=str)
def test_without(left_out, device):
    given = dict(zip(NAMES, make(torch.float64), strict=True))
    given = {name: None if name in left_out else value for name, value in given.items()}
    given["delta"] = given["delta"].exp()
    placed = {name: None if v is None else v.to(device) for name, v in given.items()}
    actual = cross_scan_fn(**placed)
    torch.testing.assert_close(actual.cpu(), cross_scan_ref(**given))


def test_layouts_and_lists(device):
    """Each direction may have a separate map, in any order of places; x may be channels-last."""
    x, *others = (tensor.to(device) for tensor in make(torch.float64))
    expected = cross_scan_ref(x, *others)

    def lists(value):
        return [
            part.mT.contiguous().mT if k % 2 else part for k, part in enumerate(value.unbind(1))
        ]

    delta, A, B, C, D, bias = others
    by_channels = x.to(memory_format=torch.channels_last)
    out = cross_scan_fn(by_channels, lists(delta), A, lists(B), tuple(lists(C)), D, bias)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(cross_scan_ref(x, lists(delta), A, lists(B), C, D, bias), expected)
    strided = torch.stack([x, x], -1)[..., 0]
    torch.testing.assert_close(cross_scan_fn(strided, *others), expected)


@pytest.mark.parametrize("is_complex", [False, True])
def test_reference_walks_the_map(is_complex):
    """The reference is a walk of h from place to place: by rows, by columns, and both backwards."""
    x, delta, A, B, C, D, bias = make(torch.float64, is_complex)
    rows, columns = range(HEIGHT), range(WIDTH)
    walks = [[(i, j) for i in rows for j in columns], [(i, j) for j in columns for i in rows]]
    walks += [walk[::-1] for walk in walks]
    out = torch.zeros_like(x)
    for k, walk in enumerate(walks):
        h = torch.zeros(BATCH, DIM, DSTATE, dtype=A.dtype)
        for i, j in walk:
            step = torch.nn.functional.softplus(delta[:, k, :, i, j] + bias[k])[..., None]
            u = x[:, :, i, j, None]
            h = torch.exp(step * A[k]) * h + step * B[:, k, None, :, i, j] * u
            y = (C[:, k, None, :, i, j] * h).sum(-1)
            out[..., i, j] += (2 * y.real if is_complex else y) + D[k] * u[..., 0]
    actual = cross_scan_ref(x, delta, A, B, C, D, bias, True)
    torch.testing.assert_close(actual, out)
    torch.testing.assert_close(
        cross_scan_fn(x, delta, A, B, C, D, bias, True, backend="reference"), actual, rtol=0, atol=0
    )


@pytest.mark.parametrize("is_complex", [False, True])
def test_gradcheck(is_complex, device):
    tensors = [
        tensor.to(device).requires_grad_()
        for tensor in make(torch.float64, is_complex, dstate=2, height=2, width=3)
    ]
    torch.autograd.gradcheck(lambda *given: cross_scan_fn(*given, True), tensors)


@pytest.mark.parametrize("is_seen", [False, True], ids=["one node", "parts"])
def test_gradients_in_any_layout(is_seen, device):
    """Gradients of separate maps are laid out by rows or by columns, in one node and in parts."""
    x, delta, A, B, C, D, bias = (tensor.to(device) for tensor in make(torch.float64, groups=2))
    lists = [
        [part.mT.contiguous().mT if (k + i) % 2 else part for k, part in enumerate(it.unbind(1))]
        for i, it in enumerate((delta, B, C))
    ]
    given = [x.to(memory_format=torch.channels_last), lists[0], A, *lists[1:], D, bias]
    leaves = [t for value in given for t in (value if isinstance(value, list) else [value])]
    for leaf in leaves:
        leaf.requires_grad_()
    dout = torch.randn(BATCH, DIM, WIDTH, HEIGHT, dtype=torch.float64).mT
    with Ops() if is_seen else contextlib.nullcontext() as ops:
        actual = results(cross_scan_fn, given, dout)
    assert not is_seen or set(ops.names) == {"selective_scan_fwd", "selective_scan_bwd"}
    torch.testing.assert_close(actual, results(cross_scan_ref, given, dout))


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_maps_made_of_others(create_graph, device):
    """Maps may be computed from x, as in a block, and one map may be passed for several."""
    x, _, A, B, *_ = (tensor.to(device) for tensor in make(torch.float64))
    leaves = [tensor.requires_grad_() for tensor in (x, A, B)]

    def gradients(function):
        made = x.tanh()
        maps = B * made.mean(1)[:, None, None]
        out = function(made, [made.exp()] * 4, A, maps, maps)
        return torch.autograd.grad(out.square().sum(), leaves, create_graph=create_graph)

    torch.testing.assert_close(gradients(cross_scan_fn), gradients(cross_scan_ref))


def test_it_is_one_node():
    tensors = [tensor.requires_grad_() for tensor in make(torch.float32)]
    out = cross_scan_fn(*tensors)
    assert type(out.grad_fn).__name__ == "_CrossScanBackward"
    assert cross_scan_fn(*[tensor.detach() for tensor in tensors]).grad_fn is None
    loss = (out * tensors[0]).sum()
    tensors[0].detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_was_right_is_refused_where_it_is_not(monkeypatch):
    """Arguments like those of an earlier call are not checked again, but changed ones are."""
    given = dict(zip(NAMES, make(torch.float32), strict=True))
    cross_scan_fn(**given, delta_softplus=True)
    with pytest.raises(TypeError, match="delta_softplus must be"):
        cross_scan_fn(**given, delta_softplus=1)
    with pytest.raises(RuntimeError, match="B\\[0\\] must have dtype"):
        cross_scan_fn(**given | {"B": given["B"].int()}, delta_softplus=True)
    with pytest.raises(RuntimeError, match="discretization_method must be"):
        cross_scan_fn(**given, delta_softplus=True, discretization_method="euler")
    monkeypatch.setattr(vision, "_ARGUMENTS", None)  # a check would fail
    cross_scan_fn(**given | {"delta": list(given["delta"].unbind(1))}, delta_softplus=True)


def test_few_kinds_of_calls_are_remembered(monkeypatch):
    monkeypatch.setattr(vision, "_MOST_KINDS", 2)
    monkeypatch.setattr(vision, "_known_kinds", known := set())
    for width in (1, 2, 3):
        cross_scan_fn(*make(torch.float32, width=width))
        assert 1 <= len(known) <= 2
