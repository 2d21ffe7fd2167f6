"""Compares shapes, types and layouts around every threshold with the nearest ordinary problem."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.checks import check
from harness.operators import Scan, make_scan
from harness.problems import DTYPES, VARIANTS, Problem, Shape
from harness.records import Row
from harness.timing import measure

BASES = {
    "cuda": Problem(Shape("base", 8, 1024, 1024, 16), "bfloat16"),
    "cpu": Problem(Shape("base", 2, 256, 256, 16), "float32"),
    "quick": Problem(Shape("base", 1, 8, 32, 4), "float32"),
}
PASSES = ("forward", "backward")
_POWERS = tuple(1 << i for i in range(17))


@dataclass(frozen=True)
class Point:
    """A problem on an axis of the sweep. `change`, if any, modifies its inputs."""

    axis: str
    value: str
    problem: Problem
    neighbour: Problem  # an ordinary one
    change: Callable[[Scan], None] | None = None

    def __str__(self) -> str:
        return f"{self.axis} {self.value}"


# --- the points -----------------------------------------------------------------------------------


def _resized(problem: Problem, **sizes: int) -> Problem:
    shape = replace(problem.shape, **sizes)
    name = f"{shape.batch}x{shape.dim}x{shape.seqlen}x{shape.dstate}x{shape.groups}"
    return replace(problem, shape=replace(shape, name=name))


def _varied(problem: Problem, variant: str) -> Problem:
    return replace(problem, variant=VARIANTS[variant])


def _sizes(
    axis: str, base: Problem, field: str, values: Sequence[int], ordinary: Sequence[int]
) -> Iterator[Point]:
    """Yields a point for each value of one size; the nearest ordinary value is the neighbor."""
    for value in sorted(set(values)):
        nearest = min(ordinary, key=lambda other: abs(math.log(other / value)))
        if value != nearest:
            neighbour = _resized(base, **{field: nearest})
            yield Point(axis, str(value), _resized(base, **{field: value}), neighbour)


def _around(*centres: int, least: int = 1) -> list[int]:
    """Returns each of these values and its two neighbors, if at least `least`."""
    values = {centre + move for centre in centres for move in (-1, 0, 1)}
    return sorted(value for value in values if value >= least)


def _cast(*names: str, dtype: str) -> Callable[[Scan], None]:
    def change(scan: Scan) -> None:
        for name in names:
            scan.tensors[name] = scan.tensors[name].to(DTYPES[dtype])

    return change


def _constant(name: str) -> Callable[[Scan], None]:
    def change(scan: Scan) -> None:
        shape = scan.problem.shape
        scan.tensors[name] = scan.randn(shape.dim, shape.dstate, dtype=scan.real)
        scan.axes[name] = "d"

    return change


def _turned(*names: str) -> Callable[[Scan], None]:
    """Transposes in memory: channels (or states) become contiguous instead of steps."""

    def change(scan: Scan) -> None:
        for name in names:
            tensor = scan.tensors[name].transpose(-1, -2).contiguous()
            scan.tensors[name] = tensor.transpose(-1, -2)

    return change


def _shifted(*names: str) -> Callable[[Scan], None]:
    """Shifts the memory by one element, so that it is misaligned."""

    def change(scan: Scan) -> None:
        for name in names:
            tensor = scan.tensors[name]
            moved = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
            scan.tensors[name] = moved.copy_(tensor)

    return change


def _padded(*names: str) -> Callable[[Scan], None]:
    """Adds one element of padding after every row."""

    def change(scan: Scan) -> None:
        for name in names:
            tensor = scan.tensors[name]
            wide = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 1)
            scan.tensors[name] = wide[..., :-1].copy_(tensor)

    return change


def find_points(base: Problem) -> list[Point]:
    """Returns all points of the sweep around a base, which is itself ordinary."""
    shape = base.shape
    complex_base = _varied(base, "complex")
    last = _varied(base, "channel-last")
    points: list[Point] = []

    states = [1, 2, 3, 5, 8, 12, *_around(16, 32, 64, 128, least=2), 48, 96, 192, 255, 256]
    points += _sizes("states", base, "dstate", states, (1, 4, 16, 32, 64))
    few = [1, 2, 3, 8, 15, 17, 24, 32, 33, 64]
    points += _sizes("complex states", complex_base, "dstate", few, (4, 16))
    steps = [1, 2, 7, *_around(32, 64, 256, shape.seqlen, 2 * shape.seqlen, least=2)]
    points += _sizes("steps", base, "seqlen", steps, _POWERS[3:])
    channels = [1, 3, 7, *_around(8, 32, 64, shape.dim, least=2), shape.dim + 8]
    points += _sizes("channels", base, "dim", channels, _POWERS)
    points += _sizes(
        "channels, channel-last", last, "dim", [*_around(shape.dim), shape.dim + 4], _POWERS
    )
    points += _sizes(
        "steps, channel-last", last, "seqlen", [33, *_around(shape.seqlen)], _POWERS[3:]
    )
    batches = [1, 2, 3, 5, shape.batch + 1]
    points += _sizes("batch", base, "batch", batches, (shape.batch,))
    groups = sorted({n for n in (2, 4, 8, shape.dim // 8, shape.dim) if shape.dim % n == 0})
    points += _sizes("groups", base, "groups", groups, (1,))
    # The same number of elements, in long sequences of few channels.
    few_channels = min(64, shape.dim)
    long = _resized(
        base, batch=1, dim=few_channels, seqlen=shape.batch * shape.seqlen * shape.dim // 128
    )
    points += _sizes("states, few channels", long, "dstate", [1, 2, 3, 8, 17, 32], (4, 16))
    points += _sizes("groups, few channels", long, "groups", [2, 8, few_channels], (1,))

    odd = "float32" if base.dtype == "bfloat16" else "bfloat16"
    for names in (("delta",), ("z",), ("u",), ("B",), ("C",), ("B", "C"), ("delta", "z")):
        change = _cast(*names, dtype=odd)
        points.append(Point("types", f"{', '.join(names)} {odd}", base, base, change))
    for dtype in DTYPES:
        if dtype != base.dtype:
            points.append(Point("types", f"all {dtype}", replace(base, dtype=dtype), base))

    for name in ("B", "C"):
        points.append(Point("kinds", f"constant {name}", base, base, _constant(name)))
    for variant in ("constant", "no-z", "reverse", "initial-state", "channel-last"):
        points.append(Point("kinds", variant, _varied(base, variant), base))
    points.append(
        Point("kinds", "complex-constant", _varied(base, "complex-constant"), complex_base)
    )

    for names in (("u",), ("delta",), ("z",), ("B",), ("C",), ("B", "C")):
        points.append(Point("layouts", f"{', '.join(names)} turned", base, base, _turned(*names)))
    for names in (("u",), ("delta",), ("B",), ("u", "delta", "z", "B", "C")):
        label = "all" if len(names) > 2 else names[0]
        points.append(Point("layouts", f"{label} one off", base, base, _shifted(*names)))
        points.append(Point("layouts", f"{label} in rows + 1", base, base, _padded(*names)))
    return points


# --- measurement ----------------------------------------------------------------------------------


def _passes(scan: Scan, backward: bool) -> dict[str, Callable[[], object]]:
    calls = scan.passes(backward)
    return {which: calls[which] for which in PASSES if which in calls}


def measure_point(point: Point, options: argparse.Namespace) -> list[Row]:
    """Checks the point, then alternates between timing its passes and its neighbor's.

    The ratio is that of the times per state update. If the point has fewer updates than its
    neighbor, it is the ratio of the times themselves.
    """
    scan = make_scan(point.problem, options.device, options.seed)
    if point.change:
        point.change(scan)
        scan.dout = scan.dout.to(scan.tensors["u"].dtype)
    error = max(check(scan, options.backward).values())
    neighbour = make_scan(point.neighbour, options.device, options.seed)
    calls = _passes(scan, options.backward)
    ordinary = {f"neighbour {k}": f for k, f in _passes(neighbour, options.backward).items()}
    names = ("warmup", "runs", "budget", "cold_l2")
    limits = {name: getattr(options, name) for name in names}
    times = measure({**calls, **ordinary}, options.device, **limits)
    more = max(1.0, point.problem.updates / point.neighbour.updates)
    rows = []
    for which in calls:
        time, other = times[which], times[f"neighbour {which}"]
        rows.append(
            {
                "axis": point.axis,
                "value": point.value,
                "sizes": list(point.problem.sizes),
                "dtype": point.problem.dtype,
                "variant": point.problem.variant.name,
                "which": which,
                "time": vars(time),
                "neighbour": list(point.neighbour.sizes),
                "neighbour_ms": other.median,
                "ratio": time.median / other.median / more,
                "error": error,
            }
        )
    return rows


def choose_points(options: argparse.Namespace) -> list[Point]:
    """Returns the points around the device's base, or around the given shape and dtype."""
    base = BASES["quick" if options.quick else options.device.type]
    if options.shapes:
        base = replace(base, shape=options.shapes[0])
    if options.dtype:
        base = replace(base, dtype=options.dtype[0])
    return find_points(base)[:: 8 if options.quick else 1]
