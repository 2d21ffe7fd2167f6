"""Plots of a benchmark's rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ceilings import Ceilings
from problems import SHAPES, Problem
from report import Row, format_ratio
from siblings import SiblingRow


def _label(row: Row) -> str:
    return ", ".join(
        [row.shape, *(x for x in (row.variant, row.method) if x not in ("plain", "zoh"))]
    )


def _save(figure: plt.Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    plt.close(figure)
    return path


def plot_speedups(rows: Sequence[Row], device: str, path: Path) -> Path | None:
    """Speedup over the peer, or where there is none over the reference, pass by pass."""
    compared = [row for row in rows if row.peer_ms is not None and row.which != "training forward"]
    if compared:
        name = compared[0].peer
        other_ms = {id(row): row.peer_ms for row in compared}
    else:
        compared = [row for row in rows if row.reference is not None]
        name = "selective_scan_ref"
        other_ms = {id(row): row.reference.median for row in compared}
    if not compared:
        return None
    most_threads = max(row.threads for row in compared)
    compared = [row for row in compared if row.threads == most_threads]
    passes = list(dict.fromkeys(row.which for row in compared))
    dtypes = list(dict.fromkeys(row.dtype for row in compared))
    labels = list(dict.fromkeys(_label(row) for row in compared))
    height = 0.8 / len(passes)
    figure, panels = plt.subplots(
        1, len(dtypes), figsize=(1.5 + 4.5 * len(dtypes), 1.5 + 0.38 * len(labels)),
        sharey=True, squeeze=False, layout="constrained",
    )  # fmt: skip
    for axes, dtype in zip(panels[0], dtypes, strict=True):
        for index, which in enumerate(passes):
            chosen = [row for row in compared if (row.dtype, row.which) == (dtype, which)]
            places = [labels.index(_label(row)) + index * height for row in chosen]
            speedups = [row.speedup(other_ms[id(row)]) for row in chosen]
            bars = axes.barh(places, speedups, height, label=which)
            axes.bar_label(bars, [format_ratio(x) for x in speedups], padding=2, fontsize=7)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_title(dtype, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    panels[0][0].set_yticks([i + 0.4 - height / 2 for i in range(len(labels))], labels, fontsize=8)
    panels[0][0].invert_yaxis()
    panels[0][-1].legend(fontsize=8)
    figure.suptitle(f"Selective scan on {device}")
    figure.supxlabel(f"speedup over {name}, medians", fontsize=9)
    return _save(figure, path)


def plot_siblings(rows: Sequence[SiblingRow], device: str, path: Path) -> Path:
    """What part of the copy bandwidth each pass of the other operators reaches."""
    most_threads = max(row.threads for row in rows)
    rows = [row for row in rows if row.threads == most_threads]
    passes = list(dict.fromkeys(row.which for row in rows))

    def label(row: SiblingRow) -> str:
        layout = () if row.layout == "contiguous" else (row.layout,)
        return ", ".join([row.operator.replace("_", " "), row.shape, row.dtype, *layout])

    labels = list(dict.fromkeys(map(label, rows)))
    height = 0.8 / len(passes)
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.38 * len(labels)), layout="constrained")
    for index, which in enumerate(passes):
        chosen = [row for row in rows if row.which == which]
        places = [labels.index(label(row)) + index * height for row in chosen]
        bars = axes.barh(places, [100 * row.of_copy for row in chosen], height, label=which)
        axes.bar_label(bars, [f"{row.time.median:.3g} ms" for row in chosen], padding=2, fontsize=7)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(labels))], labels, fontsize=8)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    axes.legend(fontsize=8)
    figure.suptitle(f"Diagonal and adaptive unitary scan on {device}")
    figure.supxlabel("inputs and results once, in % of copy bandwidth, medians", fontsize=9)
    return _save(figure, path)


def plot_roofline(rows: Sequence[Row], ceilings: Ceilings, device: str, path: Path) -> Path | None:
    """State updates per second against state updates per byte moved, under the two ceilings."""
    measured = [row for row in rows if row.which in ("forward", "backward")]
    if not measured:
        return None
    threads = max(row.threads for row in measured)
    measured = [row for row in measured if row.threads == threads]
    figure, axes = plt.subplots(figsize=(8, 5.5))
    intensities = np.array([row.updates / row.bytes_moved for row in measured])
    x = np.geomspace(intensities.min() / 2, intensities.max() * 2, 200)
    axes.plot(x, x * ceilings.copy_bytes_per_s, color="black", linewidth=1, label="copy bandwidth")
    for which, marker, color in (("forward", "o", "C0"), ("backward", "v", "C1")):
        chosen = [row for row in measured if row.which == which]
        if not chosen:
            continue
        axes.scatter(
            [row.updates / row.bytes_moved for row in chosen],
            [row.updates / row.time.median * 1e3 for row in chosen],
            marker=marker, edgecolors=color, facecolors="none", s=26, label=which,
        )  # fmt: skip
        arithmetic = ceilings.updates_per_s(Problem(SHAPES["small"]), which, threads)
        if arithmetic:
            name = "exponentials" if ceilings.device_type == "cuda" else "multiply-adds"
            axes.axhline(
                arithmetic, color=color, linewidth=1, linestyle="--", label=f"{name}, {which}"
            )
    axes.set(xscale="log", yscale="log", xlabel="state updates per byte moved once")
    axes.set_ylabel("state updates per second")
    suffix = f", {threads} threads" if ceilings.device_type == "cpu" else ""
    axes.set_title(f"Roofline of the selective scan on {device}{suffix}")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    return _save(figure, path)
