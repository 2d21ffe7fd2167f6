"""What is measured: named shapes, their variants, fresh inputs, and the work of a pass."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from selective_scan._discretization import DISCRETIZATIONS

METHODS = tuple(DISCRETIZATIONS)
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
PASSES = ("forward", "training forward", "backward", "forward + backward")

# Floating-point operations counted per state update of the real zoh scan, exp included.
FORWARD_FLOPS_PER_UPDATE = 20
BACKWARD_FLOPS_PER_UPDATE = 50


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    dim: int
    seqlen: int
    dstate: int
    groups: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        return (self.batch, self.dim, self.seqlen, self.dstate, self.groups)

    @property
    def updates(self) -> int:
        """State updates of one scan: the unit in which work is counted."""
        return self.batch * self.dim * self.seqlen * self.dstate


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("small", 1, 4, 16, 4),
        Shape("medium", 4, 16, 64, 16),
        Shape("large", 16, 64, 256, 64),
        Shape("mamba-130m", 8, 1536, 2048, 16),
        Shape("mamba-370m", 8, 2048, 2048, 16),
        Shape("mamba-790m", 8, 3072, 2048, 16),
        Shape("mamba-2.8b", 4, 5120, 2048, 16),
        Shape("vim-small", 64, 768, 197, 16),
        Shape("vmamba-t", 64, 768, 784, 1, 4),
        Shape("vmamba-hi", 32, 384, 3136, 16, 4),
        Shape("long-64k", 1, 2048, 65536, 16),
        Shape("long-1m", 1, 256, 1048576, 16),
        Shape("d-state64", 4, 2048, 2048, 64),
        Shape("launch-bound", 1, 256, 512, 16),
        Shape("one-call", 1, 64, 16, 16),
        Shape("short-512", 2, 512, 128, 16),
        Shape("laptop-512", 2, 512, 1024, 16),
        Shape("mamba-130m-b1", 1, 1536, 2048, 16),
    )
}


def parse_shape(text: str) -> Shape:
    """A name of SHAPES, or sizes as batch,dim,seqlen,dstate[,groups].

    Raises:
        ValueError: neither of the two, or sizes that make no problem.
    """
    if text in SHAPES:
        return SHAPES[text]
    if not re.fullmatch(r"\d+(,\d+){3,4}", text):
        raise ValueError(
            f"shape must be one of {', '.join(SHAPES)} or batch,dim,seqlen,dstate[,groups], "
            f"got {text!r}"
        )
    sizes = [int(size) for size in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"sizes must be at least 1, got {text!r}")
    shape = Shape("x".join(map(str, sizes)), *sizes)
    if shape.dim % shape.groups:
        raise ValueError(f"groups must divide dim = {shape.dim}, got {shape.groups}")
    return shape


@dataclass(frozen=True)
class Variant:
    """What differs from the plain problem: z, real A, variable B and C, contiguous, in order."""

    name: str
    has_z: bool = True
    is_complex: bool = False
    is_constant: bool = False  # B and C
    channel_last: bool = False
    reverse: bool = False
    initial_state: bool = False


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("plain"),
        Variant("no-z", has_z=False),
        Variant("complex", is_complex=True),
        Variant("constant", is_constant=True),
        Variant("complex-constant", is_complex=True, is_constant=True),
        Variant("channel-last", channel_last=True),
        Variant("reverse", reverse=True),
        Variant("initial-state", initial_state=True),
    )
}


@dataclass(frozen=True)
class Problem:
    shape: Shape
    dtype: str = "float32"
    variant: Variant = field(default_factory=lambda: VARIANTS["plain"])
    method: str = "zoh"

    def __str__(self) -> str:
        return f"{self.shape.name} {self.dtype} {self.variant.name} {self.method}"


@dataclass
class Inputs:
    """Arguments of the operator, in its order, and the gradient of its output."""

    u: torch.Tensor
    delta: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor
    z: torch.Tensor | None
    delta_bias: torch.Tensor
    initial_state: torch.Tensor | None
    dout: torch.Tensor
    method: str
    reverse: bool

    def tensors(self) -> dict[str, torch.Tensor]:
        """The differentiable inputs that are present, by name."""
        names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def keywords(self) -> dict[str, object]:
        """As selective_scan_fn and selective_scan_ref take them."""
        return {
            **self.tensors(),
            "delta_softplus": True,
            "discretization_method": self.method,
            "reverse": self.reverse,
        }

    def forward_op(self, save_states: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The kernel without autograd: (out, last_state, states)."""
        return torch.ops.selective_scan.selective_scan_fwd(
            self.u, self.delta, self.A, self.B, self.C, self.D, self.z, self.delta_bias,
            True, self.method, self.initial_state, self.reverse, save_states,
        )  # fmt: skip

    def backward_op(
        self, states: torch.Tensor | None, dout: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The kernel without autograd: the gradient of each present input, by name."""
        gradients = torch.ops.selective_scan.selective_scan_bwd(
            self.dout if dout is None else dout, None,
            self.u, self.delta, self.A, self.B, self.C, self.D, self.z, self.delta_bias,
            True, self.method, self.initial_state, self.reverse, states,
        )  # fmt: skip
        names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
        present = self.tensors()
        return {name: grad for name, grad in zip(names, gradients, strict=True) if name in present}


def make_inputs(problem: Problem, device: torch.device, seed: int) -> Inputs:
    """Fresh random inputs, distributed as at Mamba's initialisation.

    A is -(1..N), for complex A -1/2 + iπ(0..N-1); the step sizes softplus(delta + delta_bias) are
    spread around values that are log-uniform in [0.001, 0.1]. With a complex A, variable B and C
    are real tensors of last dimension 2·seqlen.
    """
    batch, dim, seqlen, dstate, groups = problem.shape.sizes
    variant = problem.variant
    dtype = DTYPES[problem.dtype]
    parameter = torch.float64 if dtype == torch.float64 else torch.float32
    state = torch.complex(torch.empty(0, dtype=parameter), torch.empty(0, dtype=parameter)).dtype
    state = state if variant.is_complex else parameter
    generator = torch.Generator(device=device).manual_seed(seed)

    def randn(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    def sequence() -> torch.Tensor:
        if variant.channel_last:
            return randn(batch, seqlen, dim).transpose(1, 2)
        return randn(batch, dim, seqlen)

    def projection() -> torch.Tensor:
        if variant.is_constant:
            return randn(dim, dstate, dtype=state)
        steps = 2 * seqlen if variant.is_complex else seqlen
        if variant.channel_last:
            return randn(batch, steps, groups, dstate).permute(0, 2, 3, 1).contiguous()
        return randn(batch, groups, dstate, steps)

    index = torch.arange(dstate, device=device, dtype=parameter).repeat(dim, 1)
    if variant.is_complex:
        A = torch.complex(torch.full_like(index, -0.5), math.pi * index)
    else:
        A = -(index + 1)
    uniform = torch.rand(dim, generator=generator, device=device, dtype=parameter)
    step = torch.exp(math.log(1e-3) + uniform * math.log(100))
    return Inputs(
        u=sequence(),
        delta=0.5 * sequence(),
        A=A,
        B=projection(),
        C=projection(),
        D=randn(dim, dtype=parameter),
        z=sequence() if variant.has_z else None,
        delta_bias=step + torch.log(-torch.expm1(-step)),  # the inverse of softplus
        initial_state=randn(batch, dim, dstate, dtype=state) if variant.initial_state else None,
        dout=sequence(),
        method=problem.method,
        reverse=variant.reverse,
    )


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def bytes_moved(inputs: Inputs, which: str) -> int:
    """Bytes of a pass that reads every input and writes every result once."""
    present = nbytes(inputs.tensors().values())
    batch, dim, _ = inputs.u.shape
    last_state = batch * dim * inputs.A.shape[1] * inputs.A.element_size()
    forward = present + nbytes([inputs.u]) + last_state
    backward = 2 * present + nbytes([inputs.dout])
    if which == "backward":
        return backward
    return forward + backward if which == "forward + backward" else forward


def flops_per_update(which: str) -> int:
    if which == "backward":
        return BACKWARD_FLOPS_PER_UPDATE
    both = FORWARD_FLOPS_PER_UPDATE + BACKWARD_FLOPS_PER_UPDATE
    return both if which == "forward + backward" else FORWARD_FLOPS_PER_UPDATE
