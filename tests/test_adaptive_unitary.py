"""The adaptive unitary scan: kernels against the reference in fp64, and against NumPy."""

import itertools
import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from accuracy import assert_accurate
from cases import Axes
from problem import Draws, generator, laid_out, moved, plain_solutions, results_of
from selective_scan import adaptive_unitary_scan_fn, adaptive_unitary_scan_ref

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128
HALF, BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case(Axes):
    """One call. The defaults are the base case, and a test changes one axis at a time."""

    batch: int = 2
    dim: int = 6
    seqlen: int = 67
    dstate: int = 4
    groups: int = 2
    B: str = "constant"  # or "shared", or "grouped"
    C: str = "constant"
    dtype: torch.dtype = F32  # of u, dt and z
    parameter_dtype: torch.dtype = F32  # of the other tensors, or their real counterparts
    z: bool = True
    initial_state: bool = True
    layout: str = "contiguous"


def make(case: Case, device: str) -> dict[str, torch.Tensor | None]:
    normal = Draws(case).normal

    def weight(kind):
        shape = {
            "constant": (case.dstate,),
            "shared": (case.batch, case.dstate, case.seqlen),
            "grouped": (case.batch, case.groups, case.dstate, case.seqlen),
        }[kind]
        return torch.complex(normal(*shape), normal(*shape))

    sequence = (case.batch, case.dim, case.seqlen)
    state = (case.batch, case.dim, case.dstate)
    values = {
        "u": normal(*sequence),
        "dt": normal(*sequence).abs(),
        "x": normal(case.dim, case.dstate, case.dim) / math.sqrt(max(case.dim, 1)),
        "x_bias": normal(case.dim, case.dstate),
        "B": weight(case.B),
        "C": weight(case.C),
        "D": normal(case.dim),
        "z": normal(*sequence) if case.z else None,
        "initial_state": torch.complex(normal(*state), normal(*state))
        if case.initial_state
        else None,
    }
    tensors = {}
    for name, value in values.items():
        if value is not None:
            dtype = case.dtype if name in ("u", "dt", "z") else case.parameter_dtype
            value = value.to(dtype.to_complex() if value.is_complex() else dtype)
        tensors[name] = value
    return laid_out(tensors, case.layout, device, vectors=False)


def solve(scan, inputs, cotangents) -> dict[str, torch.Tensor]:
    """Returns the outputs, and the gradients of the inputs that are not None."""
    return results_of(scan(**inputs, return_last_state=True), inputs, cotangents)


def make_cotangents(case: Case) -> dict[str, torch.Tensor]:
    random = generator((case, "cotangents"))
    state = (case.batch, case.dim, case.dstate)
    return {
        "out": torch.randn((case.batch, case.dim, case.seqlen), generator=random).to(case.dtype),
        "last_state": torch.randn(state, generator=random, dtype=C64),
    }


def check(case: Case, device: str) -> None:
    inputs = make(case, device)
    cotangents = make_cotangents(case)

    def solve_plainly(plain_inputs):
        return solve(adaptive_unitary_scan_ref, plain_inputs, cotangents)

    exact = solve_plainly(moved(inputs, F64))
    actual = solve(adaptive_unitary_scan_fn, inputs, cotangents)
    if case.layout in ("channel_last", "dim_first"):
        assert actual["out"].stride() == inputs["u"].stride()
    is_double = F64 in (case.dtype, case.parameter_dtype)
    # The rounding errors of all steps stay in the state: a random walk along the sequence.
    compute = (1e-13 if is_double else 4e-6) * math.sqrt(1 + case.seqlen / 64)
    for name, value in actual.items():
        source = inputs["u"] if name == "out" else inputs.get(name.removeprefix("d"))
        expected_dtype = (C128 if is_double else C64) if source is None else source.dtype
        assert value.dtype == expected_dtype, name
        real = value.dtype.to_real() if value.dtype.is_complex else value.dtype
        plain = partial(plain_solutions, solve_plainly, inputs, is_double)
        assert_accurate(name, value, exact, compute, torch.finfo(real).eps, plain)


def case_list():
    base = Case()
    axes = {
        "seqlen": (1, 2, 63, 64, 65, 128, 1000),
        "dim": (1, 3, 16, 34),
        "dstate": (1, 3, 16, 33),
        "batch": (1, 5),
        "dtype": (F64, BF16, HALF),
        "layout": ("channel_last", "dim_first", "sliced", "offset", "expanded"),
        "B": ("shared", "grouped"),
        "C": ("shared", "grouped"),
        "z": (False,),
        "initial_state": (False,),
    }
    cases = [base]
    for axis, values in axes.items():
        groups = {"groups": 1} if axis == "dim" else {}
        cases += [base.with_(**{axis: value}, **groups) for value in values]
    for groups in (1, 2, 3, 6):
        both = base.with_(B="grouped", C="grouped", groups=groups)
        cases += [both, both.with_(layout="channel_last", seqlen=130)]
    # Every size of a team of lanes on a GPU.
    for dstate, dtype, B in itertools.product((9, 40, 70), (F32, F64), ("constant", "shared")):
        cases.append(base.with_(dstate=dstate, dtype=dtype, parameter_dtype=dtype, B=B, groups=1))
    cases.append(base.with_(B="shared", C="shared", dim=20, groups=1))
    cases.append(base.with_(dtype=BF16, parameter_dtype=F64, B="shared", groups=1))
    cases.append(base.with_(dtype=F64, parameter_dtype=F64, B="grouped", dim=40))
    return list(dict.fromkeys(cases))


@pytest.mark.parametrize("case", case_list(), ids=str)
def test_matches_reference(case, device):
    check(case, device)


@pytest.mark.slow
def test_several_slabs(device):
    """Long enough for theta to be computed in more than one slab, of which the last is shorter."""
    check(Case(batch=3, dim=64, dstate=16, seqlen=1200 if device == "cpu" else 20000), device)


def test_reference_is_the_formulas():
    """The reference agrees with the formulas, written as a few lines of NumPy."""
    inputs = make(Case(dtype=F64, parameter_dtype=F64, seqlen=9), "cpu")
    u, dt, x, x_bias, B, C, D, z, h = (tensor.detach().numpy() for tensor in inputs.values())

    def silu(value):
        return value / (1 + np.exp(-value))

    def polar(value):
        return np.log1p(np.exp(value.real)) * np.exp(1j * value.imag)

    out = np.empty_like(u)
    for t in range(u.shape[-1]):
        theta = np.einsum("dnr,br->bdn", x, u[:, :, t]) + x_bias
        h = np.exp(1j * theta) * h + polar(B) * (dt * silu(u))[:, :, t, None]
        y = (polar(C) * h).real.sum(-1)
        out[:, :, t] = (y + D * silu(u[:, :, t])) * silu(z[:, :, t])
    actual, last_state = adaptive_unitary_scan_ref(**inputs, return_last_state=True)
    np.testing.assert_allclose(actual.detach().numpy(), out, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(last_state.detach().numpy(), h, rtol=1e-13, atol=1e-13)


# --- long sequences -------------------------------------------------------------------------------


def long_inputs(seqlen: int, dim: int = 8, dstate: int = 4) -> dict[str, torch.Tensor]:
    case = Case(batch=1, dim=dim, dstate=dstate, seqlen=seqlen, z=False, initial_state=False)
    inputs = {name: t for name, t in make(case, "cpu").items() if t is not None}
    return {name: tensor.detach() for name, tensor in inputs.items()}


def scan_in_numpy(inputs, round_rotation: bool) -> np.ndarray:
    """Returns the last state in fp64, optionally with theta and rotation rounded to fp32 per
    step."""
    wide = moved(inputs, F64)
    u, dt, x, x_bias, B = (wide[n].detach().numpy() for n in ("u", "dt", "x", "x_bias", "B"))
    theta = np.tensordot(u, x, ((1,), (2,))).swapaxes(0, 1) + x_bias
    if round_rotation:
        theta = theta.astype(np.float32).astype(np.float64)
    turns = np.exp(1j * theta)
    if round_rotation:
        turns = turns.astype(np.complex64).astype(np.complex128)
    b = np.log1p(np.exp(B.real)) * np.exp(1j * B.imag)
    v = np.moveaxis(dt * u / (1 + np.exp(-u)), -1, 0)[..., None]
    h = np.zeros(theta.shape[1:], dtype=np.complex128)
    for turn, entering in zip(turns, v, strict=True):
        h = turn * h + b * entering
    return h


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seqlen", "dim", "dstate", "factor"), [(65536, 8, 4, 4), (16384, 256, 1, 12)]
)
def test_phases_do_not_drift(seqlen, dim, dstate, factor, device):
    """The error of the last state is below `factor` times the cost of rounding theta and the
    rotation once per step. The factor is larger for many channels: a sum over them is itself
    rounded, in proportion to the square root of their number."""
    inputs = long_inputs(seqlen, dim, dstate)
    exact = scan_in_numpy(inputs, round_rotation=False)

    def error(h):
        return np.linalg.norm(h - exact) / np.linalg.norm(exact)

    def last_state(tensors):
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        return adaptive_unitary_scan_fn(**tensors, return_last_state=True)[1].cpu().numpy()

    double = {name: tensor.detach() for name, tensor in moved(inputs, F64).items()}
    assert error(last_state(double)) < 1e-9
    assert error(last_state(inputs)) < factor * error(scan_in_numpy(inputs, round_rotation=True))


def test_modulus_is_kept(device):
    """Without input, a state keeps its modulus: a step only rotates it."""
    inputs = long_inputs(65536)
    inputs["dt"] = torch.zeros_like(inputs["dt"])
    inputs["initial_state"] = torch.ones(1, 8, 4, dtype=C64)
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    _, last_state = adaptive_unitary_scan_fn(**inputs, return_last_state=True)
    drift = last_state.abs().double() - 1
    assert drift.mean().abs() < 1e-5  # the mean of 65536 roundings of 6e-8
    assert drift.abs().max() < 1e-4


# --- derivatives and the op -----------------------------------------------------------------------


def test_each_gradient_alone(device):
    """A gradient does not depend on which others are requested, nor on an unused output."""
    inputs = make(Case(), device)
    out, last_state = adaptive_unitary_scan_fn(**inputs, return_last_state=True)
    of_out = torch.autograd.grad(out.sum(), list(inputs.values()), retain_graph=True)
    of_state = torch.autograd.grad(last_state.abs().sum(), list(inputs.values()), allow_unused=True)
    for index, (name, tensor) in enumerate(inputs.items()):
        fixed = {n: t if n == name else t.detach() for n, t in inputs.items()}
        out, last_state = adaptive_unitary_scan_fn(**fixed, return_last_state=True)
        assert torch.equal(
            torch.autograd.grad(out.sum(), tensor, retain_graph=True)[0], of_out[index]
        ), name
        if name not in ("C", "D", "z"):
            alone = torch.autograd.grad(last_state.abs().sum(), tensor)[0]
            assert torch.equal(alone, of_state[index]), name


def test_several_threads(set_threads):
    set_threads(3)
    check(Case(batch=3, dim=64, dstate=16, seqlen=130), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(B="grouped", C="grouped", layout="channel_last", seqlen=65),
        Case(z=False, initial_state=False, dtype=BF16),
    ],
    ids=str,
)
def test_opcheck(case, device):
    arguments = tuple(make(case, device).values())
    ops = torch.ops.selective_scan
    torch.library.opcheck(ops.adaptive_unitary_scan_fwd, (*arguments, True))
    detached = tuple(None if t is None else t.detach() for t in arguments)
    out, last_state, states = ops.adaptive_unitary_scan_fwd(*detached, True)
    cotangents = (torch.randn_like(out), torch.randn_like(last_state))
    torch.library.opcheck(ops.adaptive_unitary_scan_bwd, (*cotangents, *detached, states))
