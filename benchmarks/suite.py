"""Which problems a run measures."""

from __future__ import annotations

from collections.abc import Sequence

from problems import METHODS, SHAPES, VARIANTS, Problem, Shape

_DTYPES = {"cuda": ("bfloat16", "float32"), "cpu": ("float32", "bfloat16")}
# The shapes of the whole suite; methods and variants are compared at the first.
_SUITE = {
    "cuda": (
        "mamba-130m", "mamba-370m", "mamba-790m", "mamba-2.8b", "vim-small", "vmamba-t",
        "vmamba-hi", "long-64k", "long-1m", "d-state64", "launch-bound", "small", "medium", "large",
    ),
    "cpu": ("laptop-512", "mamba-130m-b1", "short-512", "small", "medium", "large"),
}  # fmt: skip
_QUICK = ("small", "medium")


def _product(
    shapes: Sequence[Shape], dtypes: Sequence[str], variants: Sequence[str], methods: Sequence[str]
) -> list[Problem]:
    return [
        Problem(shape, dtype, VARIANTS[variant], method)
        for shape in shapes
        for dtype in dtypes
        for variant in variants
        for method in methods
    ]


def select_problems(
    device_type: str,
    *,
    shapes: Sequence[Shape] | None = None,
    dtypes: Sequence[str] | None = None,
    variants: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    quick: bool = False,
) -> list[Problem]:
    """The product of what is named, or the device's whole suite where no shapes are.

    The suite times every shape with and without z; at its first shape every other variant too, and
    every method with real and complex A.
    """
    dtypes = dtypes or (_DTYPES[device_type][:1] if quick else _DTYPES[device_type])
    if shapes or quick:
        shapes = shapes or [SHAPES[name] for name in _QUICK]
        return _product(shapes, dtypes, variants or ("plain",), methods or ("zoh",))

    suite = [SHAPES[name] for name in _SUITE[device_type]]
    base = suite[:1]
    problems = _product(suite, dtypes, variants or ("plain", "no-z"), methods or ("zoh",))
    if variants is None:
        problems += _product(base, dtypes, tuple(VARIANTS), ("zoh",))
    if methods is None:
        problems += _product(base, dtypes, ("plain", "complex"), METHODS)
    return list(dict.fromkeys(problems))  # each once
