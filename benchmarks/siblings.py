"""The operators beside the selective scan: what is measured of them, and their check against fp64.

As with the selective scan, kernels are called through torch.ops without autograd, after a check of
sampled rows or channels over the whole sequence. Time is counted against what copying as many bytes
would take: every input and every result once, and nothing for what a kernel computes on the way (of
the adaptive unitary scan the angles, which are a matrix product, are by far the largest).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from checks import TOLERANCE, prefix_scan, relative_l2
from problems import DTYPES, nbytes
from selective_scan import adaptive_unitary_scan_ref, diagonal_scan_ref
from selective_scan.adaptive_unitary import polar_form
from timing import Timing

OPERATORS = ("selective_scan", "diagonal", "adaptive_unitary")
LAYOUTS = ("contiguous", "channel-last")
# Gradients summed over a sequence whose states never decay: terms of either sign cancel.
_SUM_SLACK = 50
_SAMPLED = 2
# The reference walks through time step by step; beyond this it takes longer than is worth it.
_MOST_REFERENCE_STEPS = 256


@dataclass(frozen=True)
class SiblingProblem:
    operator: str
    name: str
    sizes: tuple[int, ...]  # batch, dim, seqlen, and dstate of the adaptive unitary scan
    dtype: str = "float32"
    layout: str = "contiguous"

    def __str__(self) -> str:
        return f"{self.operator} {self.name} {self.dtype} {self.layout}"


_DIAGONAL = {
    "rows-2k": (8, 1536, 2048),
    "rows-64k": (1, 512, 65536),
    "rows-128": (128, 2048, 128),
    "rows-16m": (1, 4, 1 << 24),
}
_UNITARY = {"aussm-64": (16, 64, 2048, 16), "aussm-256": (8, 256, 2048, 16)}
_CPU_DIAGONAL = {"rows-2k-small": (2, 512, 2048), "rows-1m": (1, 4, 1 << 20)}
_CPU_UNITARY = {"aussm-64-small": (2, 64, 1024, 16)}
_QUICK = {"diagonal": {"tiny": (2, 16, 64)}, "adaptive_unitary": {"tiny": (2, 8, 64, 4)}}


def select_siblings(
    operators: Sequence[str], device_type: str, dtypes: Sequence[str] | None, *, quick: bool
) -> list[SiblingProblem]:
    """The problems of the operators named; every layout at the first shape of the diagonal scan."""
    suite = {
        "diagonal": _DIAGONAL if device_type == "cuda" else _CPU_DIAGONAL,
        "adaptive_unitary": _UNITARY if device_type == "cuda" else _CPU_UNITARY,
    }
    usual = {"diagonal": ("float32", "bfloat16"), "adaptive_unitary": ("float32",)}
    problems = []
    for operator in operators:
        shapes = _QUICK[operator] if quick else suite[operator]
        for number, (name, sizes) in enumerate(shapes.items()):
            layouts = LAYOUTS if operator == "diagonal" and number == 0 else LAYOUTS[:1]
            problems += [
                SiblingProblem(operator, name, sizes, dtype, layout)
                for dtype in dtypes or usual[operator]
                for layout in layouts
            ]
    return problems


class DiagonalInputs:
    """h[t] = a[t]·h[t-1] + b[t] with a in (0.5, 1), as a gated linear recurrence has it."""

    def __init__(self, problem: SiblingProblem, device: torch.device, seed: int):
        generator = torch.Generator(device=device).manual_seed(seed)
        dtype = DTYPES[problem.dtype]
        batch, dim, seqlen = problem.sizes

        def sequence(draw: Callable[..., Tensor]) -> Tensor:
            is_last = problem.layout == "channel-last"
            size = (batch, seqlen, dim) if is_last else (batch, dim, seqlen)
            values = draw(size, generator=generator, device=device, dtype=dtype)
            return values.transpose(1, 2) if is_last else values

        self.a = sequence(torch.rand).mul_(0.5).add_(0.5)
        self.b = sequence(torch.randn)
        self.dh = sequence(torch.randn)

    def forward(self) -> Tensor:
        return torch.ops.selective_scan.diagonal_scan_fwd(self.a, self.b, None, False)

    def training_forward(self) -> Tensor:
        return self.forward()

    def backward(self, h: Tensor, dh: Tensor | None = None) -> tuple[Tensor, ...]:
        dh = self.dh if dh is None else dh
        return torch.ops.selective_scan.diagonal_scan_bwd(dh, self.a, h, None, False, False)

    def reference(self) -> Tensor:
        return diagonal_scan_ref(self.a, self.b)

    def bytes_moved(self, which: str) -> int:
        return nbytes([self.b]) * (3 if which == "forward" else 5)

    def check(self, backward: bool) -> dict[str, float]:
        batch, dim, _ = self.b.shape
        rows = torch.randperm(dim)[:_SAMPLED].to(self.b.device)
        entry = int(torch.randint(batch, ()))
        a, b = (x[entry, rows].double().requires_grad_(backward) for x in (self.a, self.b))
        expected = prefix_scan(a, b)
        h = self.forward()
        results = {"h": (h[entry, rows], expected.detach(), 1)}
        if backward:
            gradients = torch.autograd.grad(expected, (a, b), self.dh[entry, rows].double())
            for name, actual, gradient in zip("ab", self.backward(h), gradients, strict=False):
                results[f"d{name}"] = (actual[entry, rows], gradient, 1)
        return _errors(results)


class UnitaryInputs:
    """Angles of about a radian, D and z."""

    def __init__(self, problem: SiblingProblem, device: torch.device, seed: int):
        generator = torch.Generator(device=device).manual_seed(seed)
        dtype = DTYPES[problem.dtype]
        parameter = torch.float64 if dtype == torch.float64 else torch.float32
        batch, dim, seqlen, dstate = problem.sizes

        def randn(*size: int, dtype: torch.dtype = parameter) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype)

        self.u = randn(batch, dim, seqlen, dtype=dtype)
        self.dt = randn(batch, dim, seqlen, dtype=dtype).abs_().mul_(0.1)
        self.x = randn(dim, dstate, dim) / dim**0.5
        self.x_bias = randn(dim, dstate)
        state = torch.complex128 if parameter == torch.float64 else torch.complex64
        self.b, self.c = (randn(dstate, dtype=state) for _ in range(2))
        self.polar = tuple(polar_form(weight, state) for weight in (self.b, self.c))
        self.D = randn(dim)
        self.z = randn(batch, dim, seqlen, dtype=dtype)
        self.dout = randn(batch, dim, seqlen, dtype=dtype)

    def _arguments(self) -> tuple[Tensor | None, ...]:
        return (self.u, self.dt, self.x, self.x_bias, *self.polar, self.D, self.z, None)

    def forward(self, save_states: bool = False) -> Tensor:
        return self._forward(save_states)[0]

    def _forward(self, save_states: bool) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.selective_scan.adaptive_unitary_scan_fwd(*self._arguments(), save_states)

    def training_forward(self) -> Tensor:
        return self._forward(True)[2]

    def backward(self, states: Tensor, dout: Tensor | None = None) -> tuple[Tensor, ...]:
        dout = self.dout if dout is None else dout
        return torch.ops.selective_scan.adaptive_unitary_scan_bwd(
            dout, None, *self._arguments(), states
        )

    def reference(self) -> Tensor:
        return adaptive_unitary_scan_ref(
            self.u, self.dt, self.x, self.x_bias, self.b, self.c, self.D, self.z
        )

    def bytes_moved(self, which: str) -> int:
        inputs = nbytes([self.u, self.dt, self.z, self.x, self.x_bias])
        if which == "forward":
            return inputs + nbytes([self.u])
        return 2 * inputs + nbytes([self.dout])

    def check(self, backward: bool) -> dict[str, float]:
        """A few channels of one batch entry, with all that turns them."""
        batch, dim, _ = self.u.shape
        channels = torch.randperm(dim)[:_SAMPLED].to(self.u.device)
        entry = int(torch.randint(batch, ()))

        def leaf(x: Tensor) -> Tensor:
            wide = torch.complex128 if x.is_complex() else torch.float64
            return x.detach().to(wide, copy=True).requires_grad_(backward)

        u, dt, z = (
            leaf(self.u[entry]),
            leaf(self.dt[entry, channels]),
            leaf(self.z[entry, channels]),
        )
        x, x_bias, D = (leaf(t[channels]) for t in (self.x, self.x_bias, self.D))
        b, c = (leaf(weight) for weight in self.polar)
        theta = torch.einsum("dnr,rt->dnt", x, u) + x_bias[..., None]
        silu_u = torch.nn.functional.silu(u[channels])
        drive = b[:, None] * (dt * silu_u)[:, None, :]
        states = prefix_scan(torch.polar(torch.ones_like(theta), theta), drive)
        y = (c[:, None] * states).real.sum(dim=1)
        expected = (y + D[:, None] * silu_u) * torch.nn.functional.silu(z)

        out, _, saved = self._forward(backward)
        results = {"out": (out[entry, channels], expected.detach(), 1)}
        if backward:
            leaves = (u, dt, x, x_bias, b, c, D, z)
            wanted = torch.autograd.grad(expected, leaves, self.dout[entry, channels].double())
            masked = torch.zeros_like(self.dout)
            masked[entry, channels] = self.dout[entry, channels]
            du, ddt, dx, dx_bias, db, dc, dD, dz = self.backward(saved, masked)[:8]
            actual = (du[entry], ddt[entry, channels], dx[channels], dx_bias[channels], db, dc,
                      dD[channels], dz[entry, channels])  # fmt: skip
            names = ("u", "dt", "x", "x_bias", "b", "c", "D", "z")
            for name, got, gradient in zip(names, actual, wanted, strict=True):
                slack = 1 if name in ("dt", "z") else _SUM_SLACK
                results[f"d{name}"] = (got, gradient, slack)
        return _errors(results)


_INPUTS = {"diagonal": DiagonalInputs, "adaptive_unitary": UnitaryInputs}


def _errors(results: dict[str, tuple[Tensor, Tensor, float]]) -> dict[str, float]:
    errors = {name: relative_l2(got, expected) for name, (got, expected, _) in results.items()}
    wrong = [
        f"{name} {errors[name]:.1e}"
        for name, (got, _, slack) in results.items()
        if not errors[name] <= slack * TOLERANCE[got.dtype]
    ]
    if wrong:
        raise RuntimeError(f"relative error of {', '.join(wrong)}")
    return errors


@dataclass
class SiblingRow:
    """One pass of one problem."""

    operator: str
    shape: str
    sizes: tuple[int, ...]
    dtype: str
    layout: str
    which: str
    threads: int
    time: Timing
    bytes_moved: int
    copy_bytes_per_s: float
    error: float
    peer_ms: float | None = None
    reference: Timing | None = None

    @property
    def gb_per_s(self) -> float:
        return self.bytes_moved / self.time.median / 1e6

    @property
    def of_copy(self) -> float:
        return self.gb_per_s * 1e9 / self.copy_bytes_per_s

    @property
    def peer_ratio(self) -> float | None:
        return None if self.peer_ms is None else self.peer_ms / self.time.median

    @property
    def reference_ratio(self) -> float | None:
        return None if self.reference is None else self.reference.median / self.time.median

    def as_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "GB_per_s": self.gb_per_s,
            "fraction_of_copy_bandwidth": self.of_copy,
            "speedup_over_peer": self.peer_ratio,
            "speedup_over_reference": self.reference_ratio,
        }


class SiblingAnchors:
    """Times of the fastest public kernels, measured before on the GPU that the file names."""

    _FILE = Path(__file__).parent / "anchors" / "h200_siblings.json"

    def __init__(self, device_name: str):
        content = json.loads(self._FILE.read_text())
        self.rows = content["rows"] if content["device"] == device_name else []

    def milliseconds(self, problem: SiblingProblem, which: str) -> float | None:
        for row in self.rows:
            if (row["operator"], row["shape"], row["dtype"], row["layout"], row["which"]) == (
                problem.operator, problem.name, problem.dtype, problem.layout, which,
            ):  # fmt: skip
                return row["ms"]
        return None


def run_sibling(
    problem: SiblingProblem,
    device: torch.device,
    measure: Callable[..., dict[str, Timing]],
    *,
    backward: bool,
    threads: Sequence[int],
    copy_bytes_per_s: float,
    anchors: SiblingAnchors,
    reference_runs: int,
) -> list[SiblingRow]:
    """Checks the kernels on a problem, then times every pass with each number of threads."""
    inputs = _INPUTS[problem.operator](problem, device, seed=torch.initial_seed())
    error = max(inputs.check(backward).values())
    calls: dict[str, Callable[[], object]] = {"forward": inputs.forward}
    if backward:
        saved = inputs.training_forward()
        calls["backward"] = lambda: inputs.backward(saved)
    rows = []
    for number in threads:
        torch.set_num_threads(number)
        for which, time in measure(calls).items():
            rows.append(
                SiblingRow(
                    problem.operator, problem.name, problem.sizes, problem.dtype, problem.layout,
                    which, number, time, inputs.bytes_moved(which), copy_bytes_per_s, error,
                    anchors.milliseconds(problem, which),
                )
            )  # fmt: skip
    if reference_runs and problem.sizes[2] <= _MOST_REFERENCE_STEPS:
        reference = measure({"forward": inputs.reference}, warmup=1, runs=reference_runs)["forward"]
        for row in rows[-len(calls) :]:
            if row.which == "forward":
                row.reference = reference
    return rows
