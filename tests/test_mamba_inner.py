"""mamba_inner_fn: everything between a layer's projections against its parts in float64."""

import inspect
import itertools
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from cases import Axes
from problem import Error, assert_accurate, assert_same_bits, generator, lay_out, plain_solutions
from selective_scan import S6, mamba_inner_fn, mamba_inner_ref
from selective_scan._discretization import METHODS
from selective_scan._mamba_inner import rms_norm, rms_norm_backward
from selective_scan._mamba_operators import MAMBA_INNER, PLAIN_MAMBA_INNER

ARGUMENTS = list(inspect.signature(mamba_inner_fn).parameters)


@dataclass(frozen=True)
class Case(Axes):
    """A call; the defaults are the base case, of which tests change an axis at a time."""

    batch: int = 2
    dim: int = 6
    seqlen: int = 70
    dstate: int = 4
    rank: int = 3
    d_model: int = 5
    width: int = 4
    complex: bool = False
    given: str = ""  # which of B and C
    absent: tuple[str, ...] = (
        *("B_proj_bias", "C_proj_bias", "b_rms_weight", "c_rms_weight", "dt_rms_weight"),
    )
    dtype: torch.dtype = torch.float32  # of xz and the weights
    xz: str = "channel_last"
    options: tuple = ()


BASE = Case()  # which is plain, and has an op of its own, as long as it goes one way
EVERYTHING = Case(absent=())


def tensors_of(case: Case, device: str = "cpu", dtype: torch.dtype | None = None) -> dict:
    """Leaves that require grad, of `dtype` or the case's; A and what is like it are in single or
    double precision."""
    random = generator(case.with_(dtype=torch.float64, xz="", options=()))

    def normal(*shape, scale=1.0):
        return scale * torch.randn(shape, generator=random, dtype=torch.float64)

    dim, dstate, rank = case.dim, case.dstate, case.rank
    states = dstate * (2 if case.complex else 1)
    A = -0.2 - torch.rand(dim, dstate, generator=random, dtype=torch.float64)
    values = {
        "xz": normal(case.batch, 2 * dim, case.seqlen),
        "conv1d_weight": normal(dim, 1, case.width, scale=0.5),
        "conv1d_bias": normal(dim),
        "x_proj_weight": normal(rank + (2 - len(case.given)) * states, dim, scale=dim**-0.5),
        "delta_proj_weight": normal(dim, rank, scale=rank**-0.5),
        "out_proj_weight": normal(case.d_model, dim, scale=dim**-0.5),
        "out_proj_bias": normal(case.d_model),
        "A": torch.complex(A, normal(dim, dstate)) if case.complex else A,
        "B": None,
        "C": None,
        "D": normal(dim),
        "delta_bias": normal(dim, scale=0.1) - 0.5,
        "B_proj_bias": normal(states),
        "C_proj_bias": normal(states),
        "b_rms_weight": normal(states),
        "c_rms_weight": normal(states),
        "dt_rms_weight": normal(dim),
    }
    for name in case.given:
        values[name] = (
            torch.complex(*normal(2, dim, dstate)) if case.complex else normal(dim, dstate)
        )
        values[f"{name}_proj_bias"] = values[f"{name.lower()}_rms_weight"] = None
    values |= dict.fromkeys(case.absent)
    dtype = dtype or case.dtype
    single = torch.promote_types(dtype, torch.float32)
    tensors = {}
    for name, value in values.items():
        if value is not None:
            to = single if name in ("A", "B", "C", "D", "delta_bias") else case.dtype
            value = value.to(to.to_complex() if value.is_complex() else to)  # as rounded as given
            to = single if name in ("A", "B", "C", "D", "delta_bias") else dtype
            value = value.to(device, to.to_complex() if value.is_complex() else to)
            if name == "xz":
                value = lay_out_xz(value, case.xz)
            value = value.detach().requires_grad_()
        tensors[name] = value
    return tensors


def lay_out_xz(xz, layout):
    if layout != "seqlen_first":
        return lay_out(xz, layout)
    return xz.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def run(function, case, tensors, cotangent=None):
    """The result, then the gradients of the tensors, by name."""
    out = function(**tensors, **dict(case.options))
    if cotangent is None:
        cotangent = torch.randn(out.shape, generator=generator(case), dtype=torch.float64)
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    gradients = torch.autograd.grad(
        out, list(present.values()), cotangent.to(out), materialize_grads=True, allow_unused=True
    )
    return {"out": out} | {
        f"d{name}": gradient for name, gradient in zip(present, gradients, strict=True)
    }


def check(case, device, tolerance, **changes):
    """Everything against the reference in float64."""
    actual = run(mamba_inner_fn, case.with_(**changes), tensors_of(case, device))
    reference = partial(run, mamba_inner_ref, case)
    expected = reference(tensors_of(case, "cpu", torch.float64))
    plain = partial(plain_solutions, reference, tensors_of(case), case.dtype == torch.float64)
    for name, value in actual.items():
        assert value.shape == expected[name].shape, name
        if value.numel() > 0:
            assert_accurate(name, value, expected, tolerance, 0.0, plain)
    for name, tensor in tensors_of(case).items():
        if tensor is not None:
            assert actual[f"d{name}"].dtype == tensor.dtype, name


CASES = [
    BASE,
    EVERYTHING,
    EVERYTHING.with_(complex=True),
    *(BASE.with_(complex=c, given=given) for c in (False, True) for given in ("B", "C", "BC")),
    *(BASE.with_(absent=(*BASE.absent, name)) for name in ("D", "delta_bias", "conv1d_bias")),
    BASE.with_(absent=(*BASE.absent, "out_proj_bias")),
    EVERYTHING.with_(absent=("b_rms_weight", "c_rms_weight", "dt_rms_weight")),
    EVERYTHING.with_(absent=("B_proj_bias", "c_rms_weight")),
    *(BASE.with_(width=width) for width in (1, 2, 8)),
    *(BASE.with_(xz=xz) for xz in ("contiguous", "sliced", "seqlen_first", "expanded")),
    *(BASE.with_(seqlen=seqlen) for seqlen in (0, 1, 3, 33, 257)),
    BASE.with_(batch=0),
    BASE.with_(batch=1, seqlen=1),
    BASE.with_(dim=1, rank=1, dstate=1, d_model=1),
    BASE.with_(dim=40, dstate=16, seqlen=100),
    BASE.with_(seqlen=9, options=(("delta_softplus", False), ("discretization_method", "poly"))),
]


@pytest.mark.parametrize("bidirectional", [False, True], ids=["forwards", "both ways"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_parts_in_float64(case, bidirectional, device):
    case = case.with_(options=(*case.options, ("bidirectional", bidirectional)))
    check(case.with_(dtype=torch.float64), device, 1e-12)
    check(case, device, 1e-4)  # a sum of few terms may cancel


@pytest.mark.parametrize("method", METHODS)
def test_methods(method, device):
    check(
        BASE.with_(dtype=torch.float64, options=(("discretization_method", method),)), device, 1e-12
    )


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype, bidirectional, device):
    """Every result of a part is rounded to them, as in the composition of the parts."""
    case = BASE.with_(dim=64, dstate=8, rank=8, d_model=32, dtype=dtype)
    case = case.with_(options=(("bidirectional", bidirectional),))
    tensors = tensors_of(case, device)
    actual = run(mamba_inner_fn, case, tensors)
    composed = run(mamba_inner_ref, case, tensors)
    exact = run(mamba_inner_ref, case, tensors_of(case, "cpu", torch.float64))
    for name, value in actual.items():
        error = Error.of(value.detach().cpu().double(), exact[name].detach())
        by_parts = Error.of(composed[name].detach().cpu().double(), exact[name].detach())
        assert error.relative_l2 <= 3 * by_parts.relative_l2 + torch.finfo(dtype).eps, (
            f"{name}: {error}, {by_parts}"
        )


@pytest.mark.parametrize("options", [{"checkpoint_lvl": 0}, {"checkpoint_lvl": 1}], ids=str)
@pytest.mark.parametrize("case", [BASE, EVERYTHING.with_(complex=True)], ids=str)
def test_what_is_kept_and_every_run_gives_the_same_bits(case, options, device):
    case = case.with_(options=(("bidirectional", True),))
    tensors = tensors_of(case, device)
    expected = run(mamba_inner_fn, case, tensors)
    case = case.with_(options=(*case.options, *options.items()))
    cotangent = torch.randn(expected["out"].shape, generator=generator(BASE), dtype=torch.float64)
    first = run(mamba_inner_fn, case, tensors, cotangent)
    assert torch.equal(first["out"], expected["out"])
    assert_same_bits(first, run(mamba_inner_fn, case, tensors, cotangent))


def test_levels_of_checkpointing_agree(device):
    results = [
        run(
            mamba_inner_fn,
            EVERYTHING.with_(options=(("checkpoint_lvl", level),)),
            tensors_of(EVERYTHING, device),
            torch.ones(2, 70, 5),
        )
        for level in (0, 1)
    ]
    assert_same_bits(*results)


def saved_shapes(**options):
    """Of what autograd keeps, without arguments."""
    case = BASE.with_(seqlen=64)
    tensors = tensors_of(case)
    pointers = {tensor.data_ptr() for tensor in tensors.values() if tensor is not None}
    shapes = []

    def pack(tensor):
        if tensor.data_ptr() not in pointers:
            shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mamba_inner_fn(**tensors, **options)
    return sorted(shapes)


def test_what_is_kept():
    b, s, e = BASE.batch, 64, BASE.dim
    x_dbl = (b, s, BASE.rank + 2 * BASE.dstate)
    (states,) = [shape for shape in saved_shapes() if len(shape) == 1]
    assert saved_shapes() == sorted([states, (b, s, e), x_dbl])
    assert saved_shapes(checkpoint_lvl=0) == sorted([states, *[(b, s, e)] * 3, x_dbl])
    assert saved_shapes(bidirectional=True) == sorted([states, states, (b, s, e), x_dbl])


def test_nothing_is_kept_without_gradients():
    with torch.no_grad():
        arguments = op_arguments(BASE)
        out, *kept = torch.ops.selective_scan.mamba_inner_fwd(*arguments, False)
    assert out.shape == (2, 70, 5)
    assert all(tensor is None for tensor in kept)


# --- autocast -------------------------------------------------------------------------------------


def test_autocast(device):
    """Products in the half type, weights' gradients in float32; as if tensors were cast before."""
    case = BASE.with_(dim=64, dstate=8, rank=8, d_model=32)
    tensors = tensors_of(case, device)
    with torch.autocast(device, torch.bfloat16):
        actual = run(mamba_inner_fn, case, tensors)
    assert actual["out"].dtype == torch.bfloat16
    cast = ("xz", "x_proj_weight", "delta_proj_weight", "out_proj_weight", "out_proj_bias")
    halves = {
        name: tensor.detach().bfloat16().requires_grad_() if name in cast else tensor
        for name, tensor in tensors.items()
    }
    expected = run(mamba_inner_fn, case, halves)
    for name, value in actual.items():
        assert torch.equal(value.to(expected[name].dtype), expected[name]), name
        tensor = tensors.get(name.removeprefix("d"))
        assert tensor is None or value.dtype == tensor.dtype, name
    with torch.autocast(device, torch.bfloat16):
        composed = run(mamba_inner_ref, case, tensors)
    for name, value in actual.items():
        assert Error.of(value.double(), composed[name].double()).relative_l2 < 0.02, name


def test_autocast_leaves_doubles_alone(device):
    tensors = tensors_of(BASE, device, torch.float64)
    with torch.autocast(device, torch.bfloat16):
        assert mamba_inner_fn(**tensors).dtype == torch.float64
        assert mamba_inner_ref(**tensors).dtype == torch.float64


# --- what PyTorch sees ----------------------------------------------------------------------------


def op_arguments(case, device="cpu", requires_grad=True, operator=MAMBA_INNER, **changes):
    tensors = tensors_of(case, device) | changes
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            tensors[name] = tensor.detach().requires_grad_(requires_grad)
    names, defaults = operator.arguments.names, operator.arguments.defaults
    # Without softplus steps may be negative, with which states grow without bound.
    given = dict(zip(names, defaults, strict=True)) | {"delta_softplus": True} | tensors
    return tuple(given[name] for name in names)


QUICK = ("test_schema", "test_faketensor", "test_autograd_registration")
THOROUGH = (*QUICK, "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(
    ("case", "tests"),
    [
        (BASE.with_(seqlen=40), THOROUGH),
        (EVERYTHING.with_(complex=True, seqlen=5), QUICK),
        (BASE.with_(given="BC", xz="contiguous", batch=1, seqlen=0), QUICK),
    ],
    ids=str,
)
def test_opcheck(case, tests, device):
    ops = torch.ops.selective_scan
    for bidirectional, save_states, chosen in ((False, False, QUICK), (True, True, tests)):
        arguments = op_arguments(case, device, bidirectional=bidirectional)
        torch.library.opcheck(ops.mamba_inner_fwd, (*arguments, save_states), test_utils=chosen)
        arguments = op_arguments(case, device, False, bidirectional=bidirectional)
        out, *kept = ops.mamba_inner_fwd(*arguments, save_states)
        torch.library.opcheck(
            ops.mamba_inner_bwd, (torch.ones_like(out), *arguments, *kept), test_utils=chosen
        )


def input_of_a_layer(case, device="cpu"):
    """What takes the place of xz and A, and the projection of the former."""
    random = generator(case)
    hidden = torch.randn(case.batch, case.seqlen, 3, generator=random, dtype=torch.float64)
    weight = torch.randn(2 * case.dim, 3, generator=random, dtype=torch.float64)
    bias = torch.randn(2 * case.dim, generator=random, dtype=torch.float64)
    A_log = torch.rand(case.dim, case.dstate, generator=random, dtype=torch.float64)
    tensors = {"xz": hidden, "in_proj_weight": weight, "in_proj_bias": bias, "A": A_log}
    return {
        name: tensor.to(device, case.dtype).requires_grad_() for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("of_layer", [False, True], ids=["of xz", "of a layer's input"])
@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16], ids=str)
def test_opcheck_of_a_plain_layer(autocast_dtype, of_layer, device):
    case = BASE.with_(seqlen=40)
    for level, save_states, chosen in ((0, False, QUICK), (0, True, QUICK), (1, True, THOROUGH)):
        changes = input_of_a_layer(case, device) if of_layer else {}
        changes |= {"checkpoint_lvl": level, "autocast_dtype": autocast_dtype}
        ops = torch.ops.selective_scan
        arguments = op_arguments(case, device, True, PLAIN_MAMBA_INNER, **changes)
        torch.library.opcheck(
            ops.plain_mamba_inner_fwd, (*arguments, save_states), test_utils=chosen
        )
        arguments = op_arguments(case, device, False, PLAIN_MAMBA_INNER, **changes)
        out, cast_input, *kept = ops.plain_mamba_inner_fwd(*arguments, save_states)
        assert (cast_input is None) == (not save_states or not of_layer or not autocast_dtype)
        torch.library.opcheck(
            ops.plain_mamba_inner_bwd, (torch.ones_like(out), *arguments, *kept), test_utils=chosen
        )


class _SeeParts(TorchDispatchMode):
    """With it a layer is made of its parts, in Python."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert "plain" not in str(op)
        return op(*args, **(kwargs or {}))


PLAIN = [
    BASE,
    BASE.with_(dim=64, dstate=16, rank=8, d_model=32, dtype=torch.bfloat16, seqlen=200),
    BASE.with_(dtype=torch.float16, absent=(*BASE.absent, "out_proj_bias", "D")),
    BASE.with_(dtype=torch.float64, absent=(*BASE.absent, "conv1d_bias", "delta_bias")),
    *(BASE.with_(xz=xz) for xz in ("contiguous", "sliced", "expanded")),
    *(BASE.with_(batch=batch, seqlen=seqlen) for batch, seqlen in ((2, 0), (0, 5), (1, 2))),
    BASE.with_(options=(("checkpoint_lvl", 0), ("delta_softplus", False)), seqlen=9),
]


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_plain_layer_has_the_bits_of_its_parts(case, autocast, device):
    tensors = tensors_of(case, device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        actual = run(mamba_inner_fn, case, tensors)
        with _SeeParts():
            expected = run(mamba_inner_fn, case, tensors)
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name
        assert value.dtype == expected[name].dtype, name
        assert value.stride() == expected[name].stride(), name


@pytest.mark.parametrize("of_layer", [False, True], ids=["of xz", "of a layer's input"])
def test_gradcheck_of_a_plain_layer(of_layer):
    case = TINY.with_(absent=BASE.absent)
    changes = input_of_a_layer(case) if of_layer else {}
    given = op_arguments(case, operator=PLAIN_MAMBA_INNER, **changes)
    places = [i for i, value in enumerate(given) if isinstance(value, torch.Tensor)]

    def function(*values):
        arguments = list(given)
        for place, value in zip(places, values, strict=True):
            arguments[place] = value
        return PLAIN_MAMBA_INNER(*arguments)[0]

    assert torch.autograd.gradcheck(function, [given[place] for place in places])


TINY = EVERYTHING.with_(
    batch=1, dim=2, seqlen=3, dstate=2, rank=1, d_model=2, width=2, dtype=torch.float64
)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("complex", [False, True])
def test_gradcheck(complex, bidirectional):
    case = TINY.with_(complex=complex)
    tensors = tensors_of(case)

    def function(*values):
        given = tensors | dict(zip(present, values, strict=True))
        return mamba_inner_fn(**given, bidirectional=bidirectional)

    present = [name for name, tensor in tensors.items() if tensor is not None]
    assert torch.autograd.gradcheck(function, [tensors[name] for name in present])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile(backend, device):
    torch._dynamo.reset()
    compiled = torch.compile(mamba_inner_fn, fullgraph=True, backend=backend)
    tensors = tensors_of(EVERYTHING, device)
    for autocast, seqlen in itertools.product((False, True), (70, 33)):
        case = EVERYTHING.with_(seqlen=seqlen)
        tensors = tensors_of(case, device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            expected = run(mamba_inner_fn, case, tensors)
            actual = run(compiled, case, tensors)
        for name, value in actual.items():
            torch.testing.assert_close(value, expected[name])


def test_export(device):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, tensor in tensors.items():
                setattr(self, name, None if tensor is None else torch.nn.Buffer(tensor))

        def forward(self, xz):
            return mamba_inner_fn(xz, *(getattr(self, name) for name in list(tensors)[:11]))

    tensors = tensors_of(BASE, device)
    xz = tensors.pop("xz").detach()
    layer = Layer()
    program = torch.export.export(layer, (xz,))
    assert "selective_scan.plain_mamba_inner_fwd" in str(program.graph)
    torch.testing.assert_close(program.module()(xz), layer(xz))


def test_transforms(device):
    tensors = tensors_of(BASE, device, torch.float64)
    xz = tensors.pop("xz").detach()
    tensors = {name: None if x is None else x.detach() for name, x in tensors.items()}

    def loss(xz):
        return mamba_inner_fn(xz, **tensors).square().sum()

    single = torch.func.grad(loss)(xz)
    both = torch.func.vmap(torch.func.grad(loss))(torch.stack([xz, 2 * xz]))
    # The products of both are one, summed otherwise.
    tolerance = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(both[0], single, **tolerance)
    torch.testing.assert_close(both[1], torch.func.grad(loss)(2 * xz), **tolerance)
    with pytest.raises(RuntimeError, match="mamba_inner_ref, or backend='reference', supports it"):
        torch.func.jvp(loss, (xz,), (xz,))


def test_a_second_derivative_is_refused(device):
    tensors = tensors_of(BASE, device)
    out = mamba_inner_fn(**tensors)
    (gradient,) = torch.autograd.grad(out.sum(), tensors["xz"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        gradient.sum().backward()


def test_its_products_are_counted(device):
    case = BASE
    tensors = tensors_of(case, device)
    rows = 2 * case.batch * case.seqlen * case.dim
    products = rows * (2 * case.rank + 2 * case.dstate + case.d_model)
    with FlopCounterMode(display=False) as counter:
        out = mamba_inner_fn(**tensors)
    counted = counter.get_flop_counts()["Global"]
    assert sum(counted[op] for op in (torch.ops.aten.mm, torch.ops.aten.addmm)) == products
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() >= 2 * products


# --- S6, the norm, layouts ------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_layer_of_s6(bidirectional, device):
    model = S6(8, 4, bidirectional=bidirectional, device=device)
    (layer,) = model.layers
    names = ("conv1d", "x_proj", "dt_proj", "out_proj", "in_proj")
    mixer = layer if hasattr(layer, "conv1d") else layer.mixer
    conv, x_proj, dt_proj, out_proj, in_proj = (getattr(mixer, name) for name in names)
    hidden = torch.randn(2, 20, 8, device=device)
    xz = in_proj(layer.norm(hidden)).transpose(1, 2)
    out = mamba_inner_fn(
        xz,
        conv.weight,
        conv.bias,
        x_proj.weight,
        dt_proj.weight,
        out_proj.weight,
        None,
        -mixer.A_log.exp(),
        D=mixer.D,
        delta_bias=dt_proj.bias,
        bidirectional=bidirectional,
    )
    torch.testing.assert_close(hidden + out, layer(hidden))


def test_the_norm():
    x, weight = torch.randn(2, 7, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    expected = F.rms_norm(x, (5,), weight, 1e-3)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), expected)
    gradient = torch.randn(2, 7, 5)
    wanted = torch.autograd.grad(expected, (x, weight), gradient)
    torch.testing.assert_close(rms_norm_backward(gradient, x, weight, 1e-3), wanted)


def test_the_gradient_of_xz_is_one_buffer_in_the_layout_of_rows(device):
    tensors = tensors_of(BASE, device)
    gradient = run(mamba_inner_fn, BASE, tensors)["dxz"]
    assert gradient.transpose(1, 2).is_contiguous()
    assert gradient.stride() == tensors["xz"].stride()


def test_the_reference_has_the_same_signature():
    assert inspect.signature(mamba_inner_ref) == inspect.signature(mamba_inner_fn)
    assert ARGUMENTS[:6] == [
        "xz",
        "conv1d_weight",
        "conv1d_bias",
        "x_proj_weight",
        "delta_proj_weight",
        "out_proj_weight",
    ]
