"""mamba_inner_fn: everything between a layer's projections, against its parts in float64."""

import inspect
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from accuracy import Error, assert_accurate, assert_same_bits
from cases import Axes
from problem import generator, lay_out, plain_solutions
from selective_scan import mamba_inner_fn, mamba_inner_ref
from selective_scan._discretization import METHODS
from selective_scan.mamba_inner import rms_norm

ARGUMENTS = list(inspect.signature(mamba_inner_fn).parameters)


@dataclass(frozen=True)
class Case(Axes):
    """A call. The defaults are the base case, and tests change one axis at a time."""

    batch: int = 2
    dim: int = 6
    seqlen: int = 70
    dstate: int = 4
    rank: int = 3
    d_model: int = 5
    width: int = 4
    complex: bool = False
    given: str = ""  # those of B and C that are given
    absent: tuple[str, ...] = (
        *("B_proj_bias", "C_proj_bias", "b_rms_weight", "c_rms_weight", "dt_rms_weight"),
    )
    dtype: torch.dtype = torch.float32  # of xz and the weights
    xz: str = "channel_last"
    options: tuple = ()


BASE = Case()  # runs as one op
EVERYTHING = Case(absent=())


def tensors_of(case: Case, device: str = "cpu", dtype: torch.dtype | None = None) -> dict:
    """Returns leaves that require grad, in `dtype` or that of the case. A, B, C, D and delta_bias
    are in single or double precision."""
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
            value = value.to(to.to_complex() if value.is_complex() else to)  # rounds as the input
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
    """Returns the result and the gradients of the tensors, by name."""
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
    """Compares the result and all gradients with the reference in float64."""
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
    """Every part's result is rounded to the half type, as in the composition of the parts."""
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
    """Returns the shapes of the tensors that autograd keeps, without arguments."""
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


# --- autocast -------------------------------------------------------------------------------------


def test_autocast(device):
    """Products are in the half type and the weights' gradients in float32, with the bits of a call
    whose tensors were cast before."""
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


# --- the norm, layouts ----------------------------------------------------------------------------


def test_the_norm():
    x, weight = torch.randn(2, 7, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), F.rms_norm(x, (5,), weight, 1e-3))


def test_the_gradient_of_xz_is_one_buffer_in_the_layout_of_rows(device):
    tensors = tensors_of(BASE, device)
    gradient = run(mamba_inner_fn, BASE, tensors)["dxz"]
    assert gradient.transpose(1, 2).is_contiguous()
    assert gradient.stride() == tensors["xz"].stride()


def test_the_reference_has_the_same_signature():
    assert inspect.signature(mamba_inner_ref) == inspect.signature(mamba_inner_fn)
    required = "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight"
    assert ARGUMENTS[:6] == required.split()
