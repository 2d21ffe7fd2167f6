"""Creates inputs of a problem, runs the passes of its operator, and computes its results in fp64.

Kernels are called through torch.ops, without autograd.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.problems import DTYPES, Problem

Tensors = dict[str, Tensor]


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def prefix_scan(a: Tensor, b: Tensor) -> Tensor:
    """Computes h[t] = a[t]·h[t-1] + b[t] along the last dimension, by doubling."""
    shift = 1
    while shift < a.shape[-1]:
        b = torch.cat([b[..., :shift], a[..., shift:] * b[..., :-shift] + b[..., shift:]], dim=-1)
        a = torch.cat([a[..., :shift], a[..., shift:] * a[..., :-shift]], dim=-1)
        shift *= 2
    return b


@functools.cache
def _optional_arguments() -> int:
    """Returns how many of the arguments cu_seqlens and input_delta the ops have; older revisions in
    a comparison may lack them."""
    schema = torch.ops.selective_scan.selective_scan_bwd.default._schema
    names = {argument.name for argument in schema.arguments}
    return len(names & {"cu_seqlens", "input_delta"})


class Scan:
    """One operator on fresh random inputs.

    Attributes:
        tensors: the inputs that are present, by name; all of them are differentiable.
        dout: the gradient of the output.
        axes: for each input the meaning of its first dimensions, b for batch and d for channels. A
            dimension is included only if a channel's results depend on no other index of it.
    """

    names: tuple[str, ...]
    axes: dict[str, str]

    def __init__(self, problem: Problem, device: torch.device, seed: int):
        self.problem = problem
        self.dtype = DTYPES[problem.dtype]
        self.real = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.complex = torch.complex128 if self.dtype == torch.float64 else torch.complex64
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self.tensors = self.make_tensors()
        self.dout = self.sequence("dout")

    def make_tensors(self) -> Tensors:
        raise NotImplementedError

    def forward(self, save_states: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns (out, last_state, the tensor saved for the backward pass)."""
        raise NotImplementedError

    def backward(self, saved: Tensor, dout: Tensor | None = None) -> Tensors:
        """Returns the gradient of each present input, by name."""
        raise NotImplementedError

    def exact(self, tensors: Tensors, channels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns (out, last_state) of tensors cut to these channels, in the tensors' precision."""
        raise NotImplementedError

    def reference(self, tensors: Tensors) -> Tensor:
        """Runs the package's reference."""
        raise NotImplementedError

    def randn(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        device = self._generator.device
        return torch.randn(
            size, generator=self._generator, device=device, dtype=dtype or self.dtype
        )

    def rand(self, *size: int) -> Tensor:
        generator = self._generator
        return torch.rand(size, generator=generator, device=generator.device, dtype=self.real)

    def sequence(self, name: str = "u") -> Tensor:
        shape, variant = self.problem.shape, self.problem.variant
        if name in variant.slices:
            rows = self.randn(shape.batch, shape.seqlen, 2 * shape.dim)
            return rows[..., shape.dim :].transpose(1, 2)
        if name in variant.channel_last:
            return self.randn(shape.batch, shape.seqlen, shape.dim).transpose(1, 2)
        return self.randn(shape.batch, shape.dim, shape.seqlen)

    def arguments(self) -> list[Tensor | None]:
        return [self.tensors.get(name) for name in self.names]

    def named(self, gradients: Iterable[Tensor]) -> Tensors:
        pairs = zip(self.names, gradients, strict=True)
        return {name: gradient for name, gradient in pairs if name in self.tensors}

    def passes(self, backward: bool) -> dict[str, Callable[[], object]]:
        calls: dict[str, Callable[[], object]] = {"forward": lambda: self.forward(False)}
        if backward:
            saved = self.forward(True)[2]
            calls["backward"] = lambda: self.backward(saved)
        return calls

    def results(self) -> dict[str, list[Tensor]]:
        """Returns the results of either pass."""
        *results, saved = self.forward(True)
        present = [result for result in results if result is not None]
        return {"forward": present, "backward": list(self.backward(saved).values())}

    def bytes_moved(self, which: str) -> int:
        """Returns the bytes of a pass that reads every input and writes every result once."""
        present = nbytes(self.tensors.values())
        forward = present + nbytes([self.dout])
        backward = 2 * present + nbytes([self.dout])
        if which == "backward":
            return backward
        return forward + backward if which == "forward + backward" else forward


class SelectiveScan(Scan):
    """The selective scan with inputs distributed as at Mamba's initialization.

    A is -(1..N), or -1/2 + iπ(0..N-1) if complex. The step sizes softplus(delta + delta_bias) are
    spread around values that are log-uniform in [0.001, 0.1]. With a complex A, variable B and C
    are real tensors of last dimension 2·seqlen.
    """

    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state", "input_delta")

    def make_tensors(self) -> Tensors:
        shape, variant = self.problem.shape, self.problem.variant
        state = self.complex if variant.is_complex else self.real
        B, C = self.projections(state)
        device = self._generator.device
        index = torch.arange(shape.dstate, device=device, dtype=self.real).repeat(shape.dim, 1)
        minus_half = torch.full_like(index, -0.5)
        step = torch.exp(math.log(1e-3) + self.rand(shape.dim) * math.log(100))
        tensors = {
            "u": self.sequence("u"),
            "delta": 0.5 * self.sequence("delta"),
            "A": torch.complex(minus_half, math.pi * index) if variant.is_complex else -index - 1,
            "B": B,
            "C": C,
            "D": self.randn(shape.dim, dtype=self.real),
            "delta_bias": step + torch.log(-torch.expm1(-step)),  # the inverse of softplus
        }
        if variant.has_z:
            tensors["z"] = self.sequence("z")
        if variant.initial_state:
            size = (shape.batch, shape.dim, shape.dstate)
            tensors["initial_state"] = self.randn(*size, dtype=state)
        if variant.has_input_delta:
            tensors["input_delta"] = self.sequence("input_delta")
        constant = "d" if variant.is_constant else "b"
        self.axes = dict.fromkeys(("u", "delta", "z", "initial_state", "input_delta"), "bd")
        self.axes |= {"A": "d", "B": constant, "C": constant, "D": "d", "delta_bias": "d"}
        self._method, self._reverse = self.problem.method, variant.reverse
        return {name: tensors[name] for name in self.names if name in tensors}

    def projections(self, state: torch.dtype) -> list[Tensor]:
        """Returns B and C."""
        shape, variant = self.problem.shape, self.problem.variant
        if variant.is_constant:
            return [self.randn(shape.dim, shape.dstate, dtype=state) for _ in "BC"]
        dtype = DTYPES[variant.projection_dtype or self.problem.dtype]
        groups, dstate = shape.groups, shape.dstate
        if "B" in variant.channel_last:
            is_sliced = "B" in variant.slices
            rank = max(1, shape.dim // 32) if is_sliced else 0  # Mamba's dt_rank
            widths = [rank, groups * dstate, groups * dstate]
            rows = self.randn(shape.batch, shape.seqlen, sum(widths), dtype=dtype)
            parts = rows.split(widths, dim=-1)[1:]
            parts = parts if is_sliced else map(Tensor.contiguous, parts)
            return [x.unflatten(-1, (groups, dstate)).permute(0, 2, 3, 1) for x in parts]
        steps = 2 * shape.seqlen if variant.is_complex else shape.seqlen
        return [self.randn(shape.batch, groups, dstate, steps, dtype=dtype) for _ in "BC"]

    def _scanned(self) -> tuple[object, ...]:
        """Returns the arguments of both ops that precede the states."""
        *inputs, initial_state, input_delta = self.arguments()
        last = (None, input_delta)[: _optional_arguments()]
        return *inputs, True, self._method, initial_state, self._reverse, *last

    def forward(self, save_states: bool) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.selective_scan.selective_scan_fwd(*self._scanned(), save_states)

    def backward(self, saved: Tensor | None, dout: Tensor | None = None) -> Tensors:
        gradients = torch.ops.selective_scan.selective_scan_bwd(
            self.dout if dout is None else dout, None, *self._scanned(), saved
        )
        pairs = zip(self.names, gradients, strict=False)  # older revisions lack some of them
        return {name: gradient for name, gradient in pairs if name in self.tensors}

    def passes(self, backward: bool) -> dict[str, Callable[[], object]]:
        calls = super().passes(backward)
        if backward and self.dout.is_cuda:
            calls["training forward"] = lambda: self.forward(True)
        elif backward:
            calls["forward + backward"] = lambda: self.backward(self.forward(True)[2])
        return calls

    def bytes_moved(self, which: str) -> int:
        A = self.tensors["A"]
        last_state = self.problem.shape.batch * nbytes([A])
        return super().bytes_moved(which) + (0 if which == "backward" else last_state)

    def keywords(self, tensors: Tensors | None = None) -> dict[str, object]:
        """Returns the arguments of selective_scan_fn and selective_scan_ref."""
        return {
            **(self.tensors if tensors is None else tensors),
            "delta_softplus": True,
            "discretization_method": self._method,
            "reverse": self._reverse,
        }

    def reference(self, tensors: Tensors) -> Tensor:
        from selective_scan import selective_scan_ref

        return selective_scan_ref(**self.keywords(tensors))

    def exact(self, tensors: Tensors, channels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the reference's results, with time scanned in parallel."""
        from selective_scan._discretization import DISCRETIZATIONS

        u, delta, A, B, C, D = (tensors[name] for name in self.names[:6])

        def to_channels(x: Tensor) -> Tensor:
            """Returns B or C as (batch or 1, dim, dstate, seqlen or 1)."""
            if x.dim() == 2:
                return x[None, :, :, None]
            if A.is_complex() and not x.is_complex():
                x = torch.view_as_complex(x.unflatten(-1, (u.shape[-1], 2)).contiguous())
            return x.repeat_interleave(u.shape[1] // x.shape[1], dim=1)

        step = F.softplus(delta + tensors["delta_bias"][:, None])[:, :, None, :]
        abar, bbar = DISCRETIZATIONS[self._method](step, step * A[None, :, :, None])
        if "input_delta" in tensors:
            bbar = bbar / step * tensors["input_delta"][:, :, None, :]
        drive = bbar * to_channels(B) * u[:, :, None, :]
        if self._reverse:
            abar, drive = abar.flip(-1), drive.flip(-1)
        if "initial_state" in tensors:
            first = drive[..., :1] + abar[..., :1] * tensors["initial_state"][..., None]
            drive = torch.cat([first, drive[..., 1:]], dim=-1)
        states = prefix_scan(abar.expand_as(drive), drive)
        last_state = states[..., -1]
        y = (to_channels(C) * (states.flip(-1) if self._reverse else states)).sum(dim=2)
        out = (2 * y.real if y.is_complex() else y) + D[:, None] * u
        return (out * F.silu(tensors["z"]) if "z" in tensors else out), last_state


class DiagonalScan(Scan):
    """The scan h[t] = a[t]·h[t-1] + b[t] with a in (0.5, 1), a gated linear recurrence."""

    names = ("a", "b")
    axes = {"a": "bd", "b": "bd"}  # noqa: RUF012  read only

    def make_tensors(self) -> Tensors:
        a = self.sequence().uniform_(0.5, 1, generator=self._generator)
        return {"a": a, "b": self.sequence()}

    def forward(self, save_states: bool) -> tuple[Tensor, None, Tensor]:
        h = torch.ops.selective_scan.diagonal_scan_fwd(*self.arguments(), None, False)
        return h, None, h

    def backward(self, saved: Tensor, dout: Tensor | None = None) -> Tensors:
        dout = self.dout if dout is None else dout
        a = self.tensors["a"]
        da, db, _ = torch.ops.selective_scan.diagonal_scan_bwd(
            dout, a, saved, None, False, None, False
        )
        return self.named((da, db))

    def reference(self, tensors: Tensors) -> Tensor:
        from selective_scan import diagonal_scan_ref

        return diagonal_scan_ref(**tensors)

    def exact(self, tensors: Tensors, channels: Tensor) -> tuple[Tensor, None]:
        return prefix_scan(**tensors), None


class AdaptiveUnitaryScan(Scan):
    """The adaptive unitary scan with angles of about a radian, D and z, and with B and C in the
    polar form that the kernels take."""

    names = ("u", "dt", "x", "x_bias", "b", "c", "D", "z", "initial_state")
    # A channel's angles depend on every channel of u.
    axes = {"u": "b", "dt": "bd", "x": "d", "x_bias": "d", "b": "", "c": "", "D": "d", "z": "bd"}  # noqa: RUF012

    def make_tensors(self) -> Tensors:
        dim, dstate = self.problem.shape.dim, self.problem.shape.dstate

        def weight() -> Tensor:
            angle = self.randn(dstate, dtype=self.real)
            return torch.polar(F.softplus(self.randn(dstate, dtype=self.real)), angle)

        return {
            "u": self.sequence(),
            "dt": self.sequence().abs_().mul_(0.1),
            "x": self.randn(dim, dstate, dim, dtype=self.real) / dim**0.5,
            "x_bias": self.randn(dim, dstate, dtype=self.real),
            "b": weight(),
            "c": weight(),
            "D": self.randn(dim, dtype=self.real),
            "z": self.sequence(),
        }

    def forward(self, save_states: bool) -> tuple[Tensor, Tensor, Tensor]:
        ops = torch.ops.selective_scan
        return ops.adaptive_unitary_scan_fwd(*self.arguments(), save_states)

    def backward(self, saved: Tensor, dout: Tensor | None = None) -> Tensors:
        dout = self.dout if dout is None else dout
        ops = torch.ops.selective_scan
        return self.named(ops.adaptive_unitary_scan_bwd(dout, None, *self.arguments(), saved))

    def reference(self, tensors: Tensors) -> Tensor:
        from selective_scan import adaptive_unitary_scan_ref

        def raw(polar: Tensor) -> Tensor:
            return torch.complex(polar.abs().expm1().log(), polar.angle())

        first, last = ([tensors[n] for n in names] for names in (self.names[:4], self.names[6:8]))
        return adaptive_unitary_scan_ref(*first, raw(tensors["b"]), raw(tensors["c"]), *last)

    def exact(self, tensors: Tensors, channels: Tensor) -> tuple[Tensor, Tensor]:
        u, dt, x, x_bias, b, c, D, z = (tensors[name] for name in self.names[:8])
        theta = torch.einsum("dnr,brt->bdnt", x, u) + x_bias[..., None]
        silu_u = F.silu(u[:, channels])
        drive = b[:, None] * (dt * silu_u)[:, :, None, :]
        states = prefix_scan(torch.polar(torch.ones_like(theta), theta), drive)
        y = (c[:, None] * states).real.sum(dim=2)
        return (y + D[:, None] * silu_u) * F.silu(z), states[..., -1]


_SCANS = {
    "selective_scan": SelectiveScan,
    "diagonal": DiagonalScan,
    "adaptive_unitary": AdaptiveUnitaryScan,
}


def make_scan(problem: Problem, device: torch.device, seed: int) -> Scan:
    return _SCANS[problem.operator](problem, device, seed)
