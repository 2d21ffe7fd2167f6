"""The measured problems other than users' calls: named shapes, variants, and the suites."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

OPERATORS = ("selective_scan", "diagonal", "adaptive_unitary")
METHODS = ("zoh", "foh", "bilinear", "poly", "highorder", "rk4")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    dim: int
    seqlen: int
    dstate: int = 1
    groups: int = 1


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("small", 1, 4, 16, 4),
        Shape("medium", 4, 16, 64, 16),
        Shape("large", 16, 64, 256, 64),
        Shape("mamba-130m", 8, 1536, 2048, 16),
        Shape("launch-bound", 1, 256, 512, 16),
        Shape("one-call", 1, 64, 16, 16),
        Shape("short-512", 2, 512, 128, 16),
        Shape("laptop-512", 2, 512, 1024, 16),
        Shape("mamba-130m-b1", 1, 1536, 2048, 16),
    )
}


def parse_shape(text: str) -> Shape:
    """Parses a name of SHAPES, or sizes as batch,dim,seqlen,dstate[,groups].

    Raises:
        ValueError: the text is neither of the two, or the sizes are invalid.
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


# The (batch, channels, time) arrays of a selective scan, whose layouts out and the gradients share.
_SEQUENCES = ("u", "delta", "z", "dout")
_TURNED = ("u", "z", "dout", "B", "C")


@dataclass(frozen=True)
class Variant:
    """The differences from the plain problem: z, real A, variable B and C, contiguous, in order."""

    name: str
    has_z: bool = True
    is_complex: bool = False
    is_constant: bool = False  # B and C
    channel_last: tuple[str, ...] = ()  # the arrays with this layout
    slices: tuple[str, ...] = ()  # those of them in wider rows: z of x|z, B and C of dt|B|C
    projection_dtype: str | None = None  # of B and C, if it differs from the others'
    reverse: bool = False
    initial_state: bool = False
    has_input_delta: bool = False


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("plain"),
        Variant("no-z", has_z=False),
        Variant("complex", is_complex=True),
        Variant("constant", is_constant=True),
        Variant("complex-constant", is_complex=True, is_constant=True),
        Variant("channel-last", channel_last=_SEQUENCES),
        Variant("reverse", reverse=True),
        Variant("initial-state", initial_state=True),
        Variant("events", has_z=False, has_input_delta=True),
        # The calls of transformers' layers with a mask or a cache, whose product leaves delta
        # contiguous along time. Layers that normalize B and C create new tensors for them, under
        # autocast in float32 ("padded-normed").
        Variant("padded", channel_last=_TURNED, slices=("z", "B", "C")),
        # The layout in a layer of this library.
        Variant("layer", channel_last=(*_SEQUENCES, "B", "C"), slices=("z", "B", "C")),
        Variant("padded-normed", channel_last=_TURNED, slices=("z",), projection_dtype="float32"),
    )
}

_MIXED = {
    (name := f"channel-last {'+'.join(names)}"): Variant(name, channel_last=names)
    for size in range(1, len(_SEQUENCES))
    for names in itertools.combinations(_SEQUENCES, size)
}
LAYOUTS = ("plain", "channel-last", *_MIXED)  # every combination


@dataclass(frozen=True)
class Problem:
    shape: Shape
    dtype: str = "float32"
    variant: Variant = field(default_factory=lambda: VARIANTS["plain"])
    method: str = "zoh"
    operator: str = "selective_scan"

    def __str__(self) -> str:
        words = [self.shape.name, self.dtype, self.variant.name]
        if self.operator == "selective_scan":
            return " ".join([*words, self.method])
        return " ".join([self.operator, *words])

    @property
    def sizes(self) -> tuple[int, ...]:
        """batch, dim, seqlen, and for the operators that have them dstate and groups."""
        shape = self.shape
        sizes = (shape.batch, shape.dim, shape.seqlen, shape.dstate, shape.groups)
        return sizes[: {"diagonal": 3, "adaptive_unitary": 4}.get(self.operator, 5)]

    @property
    def updates(self) -> int:
        """The number of state updates of one scan, the unit of work."""
        shape = self.shape
        return shape.batch * shape.dim * shape.seqlen * shape.dstate


# --- suites ---------------------------------------------------------------------------------------

_SUITE_DTYPES = {"cuda": ("bfloat16", "float32"), "cpu": ("float32", "bfloat16")}
# The shapes of the whole suite; methods and variants are compared at the first one.
_SUITE = {
    "cuda": ("mamba-130m", "launch-bound", "small", "medium", "large"),
    "cpu": ("laptop-512", "mamba-130m-b1", "short-512", "small", "medium", "large"),
}
_QUICK = ("small", "medium")
SIBLING_SHAPES = {
    ("diagonal", "cuda"): (
        Shape("rows-2k", 8, 1536, 2048),
        Shape("rows-64k", 1, 512, 65536),
        Shape("rows-128", 128, 2048, 128),
        Shape("rows-16m", 1, 4, 1 << 24),
    ),
    ("diagonal", "cpu"): (Shape("rows-2k-small", 2, 512, 2048), Shape("rows-1m", 1, 4, 1 << 20)),
    ("diagonal", "quick"): (Shape("tiny", 2, 16, 64),),
    ("adaptive_unitary", "cuda"): (
        Shape("aussm-64", 16, 64, 2048, 16),
        Shape("aussm-256", 8, 256, 2048, 16),
    ),
    ("adaptive_unitary", "cpu"): (Shape("aussm-64-small", 2, 64, 1024, 16),),
    ("adaptive_unitary", "quick"): (Shape("tiny", 2, 8, 64, 4),),
}


def product(
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    variants: Sequence[str] = ("plain",),
    methods: Sequence[str] = ("zoh",),
    operator: str = "selective_scan",
) -> list[Problem]:
    return [
        Problem(shape, dtype, (VARIANTS | _MIXED)[variant], method, operator)
        for shape, dtype, variant, method in itertools.product(shapes, dtypes, variants, methods)
    ]


def select_problems(
    device_type: str,
    operators: Sequence[str],
    *,
    shapes: Sequence[Shape] | None = None,
    dtypes: Sequence[str] | None = None,
    variants: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    quick: bool,
) -> list[Problem]:
    """Returns the product of the given axes for the selective scan, or its whole suite if no shapes
    are given.

    The suite times every shape with and without z, and its first shape also with every other
    variant, and with every method for real and complex A. The other operators have separate shapes.
    """
    problems: list[Problem] = []
    if "selective_scan" in operators:
        usual = dtypes or _SUITE_DTYPES[device_type][: 1 if quick else None]
        if shapes or quick:
            chosen = shapes or [SHAPES[name] for name in _QUICK]
            problems += product(chosen, usual, variants or ("plain",), methods or ("zoh",))
        else:
            suite = [SHAPES[name] for name in _SUITE[device_type]]
            problems += product(suite, usual, variants or ("plain", "no-z"), methods or ("zoh",))
            if variants is None:
                problems += product(suite[:1], usual, tuple(VARIANTS))
            if methods is None:
                problems += product(suite[:1], usual, ("plain", "complex"), METHODS)
    if "diagonal" in operators:
        usual = dtypes or ("float32", "bfloat16")
        first, *others = SIBLING_SHAPES["diagonal", "quick" if quick else device_type]
        problems += product([first], usual, ("plain", "channel-last"), operator="diagonal")
        problems += product(others, usual, operator="diagonal")
    if "adaptive_unitary" in operators:
        chosen = SIBLING_SHAPES["adaptive_unitary", "quick" if quick else device_type]
        problems += product(chosen, dtypes or ("float32",), operator="adaptive_unitary")
    return list(dict.fromkeys(problems))  # without duplicates
