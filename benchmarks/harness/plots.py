"""Draws charts of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from harness.records import Row


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    plt.close(figure)
    print(f"Drew {path}")


def plot_bars(
    path: Path,
    title: str,
    panels: Mapping[str, Sequence[Row]],
    caption: str,
    *,
    label: Callable[[Row], str],
    group: Callable[[Row], str],
    length: Callable[[Row], float],
    mark: float | None = None,
) -> None:
    """Draws panels side by side, each with a line per label that has a bar per group.

    `mark` is the position of a vertical line; without it the scale is logarithmic.
    """
    panels = {name: rows for name, rows in panels.items() if rows}
    most = max(len({label(row) for row in rows}) for rows in panels.values())
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(1.5 + 5 * len(panels), 1.5 + 0.4 * most),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axes, (name, rows) in zip(all_axes[0], panels.items(), strict=True):
        labels = list(dict.fromkeys(map(label, rows)))
        groups = list(dict.fromkeys(map(group, rows)))
        height = 0.8 / len(groups)
        for index, each in enumerate(groups):
            chosen = [row for row in rows if group(row) == each]
            places = [labels.index(label(row)) + index * height for row in chosen]
            bars = axes.barh(places, list(map(length, chosen)), height, label=each)
            axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
        middle = 0.4 - height / 2
        axes.set_yticks([i + middle for i in range(len(labels))], labels, fontsize=8)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
        axes.set_title(name, fontsize=9)
        if mark is None:
            axes.set_xscale("log")
        else:
            axes.axvline(mark, color="black", linewidth=0.8)
    all_axes[0][-1].legend(fontsize=8)
    figure.suptitle(title)
    figure.supxlabel(caption, fontsize=9)
    _save(figure, path)


def plot_stacks(
    path: Path,
    title: str,
    panels: Mapping[str, Sequence[Row]],
    caption: str,
    *,
    label: Callable[[Row], str],
    group: Callable[[Row], str],
    length: Callable[[Row], float],
) -> None:
    """Draws panels one below the other, each with a bar per label that has a piece per group."""
    most = max(len({label(row) for row in rows}) for rows in panels.values())
    figure, all_axes = plt.subplots(
        len(panels), 1, figsize=(9, 1.2 + len(panels) * (0.8 + 0.4 * most)),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axes, (name, rows) in zip(all_axes[:, 0], panels.items(), strict=True):
        labels = list(dict.fromkeys(map(label, rows)))
        ends = [0.0] * len(labels)
        for index, each in enumerate(dict.fromkeys(map(group, rows))):
            lengths = [0.0] * len(labels)
            for row in rows:
                if group(row) == each:
                    lengths[labels.index(label(row))] += length(row)
            axes.barh(labels, lengths, 0.6, left=ends, label=each, color=f"C{index}")
            ends = [end + own for end, own in zip(ends, lengths, strict=True)]
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(name, fontsize=9)
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    figure.suptitle(title)
    figure.supxlabel(caption, fontsize=9)
    _save(figure, path)


def label(row: Row) -> str:
    """Returns a row's problem, without the dtype and without the default variant and method."""
    usual = ("plain", "zoh")
    return ", ".join(
        [row["shape"], *(row[n] for n in ("variant", "method") if row[n] not in usual)]
    )


def by(rows: Sequence[Row], name: str) -> dict[str, list[Row]]:
    """Groups the rows with the most threads by the value of a name."""
    most = max(row["threads"] for row in rows)
    values = dict.fromkeys(row[name] for row in rows)
    return {v: [row for row in rows if row[name] == v and row["threads"] == most] for v in values}


def plot_speedups(rows: Sequence[Row], device: str, path: Path) -> None:
    """Draws the speedup over the peer, or over the reference if there is no peer, by pass."""
    over = next((n for n in ("peer", "reference") if any(row[n] for row in rows)), None)
    compared = [row for row in rows if over and row[over] and row["which"] != "training forward"]
    if compared:
        name = compared[0]["peer"] if over == "peer" else "selective_scan_ref"
        plot_bars(
            path, f"Selective scan on {device}", by(compared, "dtype"),
            f"speedup over {name}, medians", label=label, group=lambda row: row["which"],
            length=lambda row: row[f"speedup_over_{over}"], mark=1,
        )  # fmt: skip


def plot_users(rows: Sequence[Row], device: str, path: Path) -> None:
    """Draws the speedup of users' scans over their peer, or their time if there is no peer."""
    scans = [row for row in rows if row["kind"] == "scan"]
    compared = [row for row in scans if row["peer_ms"]]
    what = f"speedup over {compared[0]['peer']}" if compared else "ms"
    panels: dict[str, list[Row]] = {}
    for row in compared or scans:
        panels.setdefault(row["dtype"], []).append(row)
    plot_bars(
        path, f"Scans of published models on {device}", panels,
        f"{what}, medians", label=lambda row: row["name"], group=lambda row: row["which"],
        length=lambda row: row["speedup_over_peer"] if compared else row["time"]["median"],
        mark=1 if compared else None,
    )  # fmt: skip


def plot_siblings(rows: Sequence[Row], device: str, path: Path) -> None:
    """Draws the fraction of the copy bandwidth that each pass of the other operators reaches."""
    plot_bars(
        path, f"Diagonal and adaptive unitary scan on {device}", by(rows, "operator"),
        "inputs and results once, in % of copy bandwidth, medians",
        label=lambda row: f"{label(row)}, {row['dtype']}", group=lambda row: row["which"],
        length=lambda row: 100 / row["ratio_to_floor"], mark=100,
    )  # fmt: skip


def plot_cliffs(rows: Sequence[Row], device: str, path: Path) -> None:
    """Draws a panel for each axis of the sweep, with the ratio to the neighbor by pass."""
    axes_names = list(dict.fromkeys(row["axis"] for row in rows))
    columns = 3
    lines = -(-len(axes_names) // columns)
    figure, all_axes = plt.subplots(
        lines, columns, figsize=(5 * columns, 2.8 * lines), squeeze=False, layout="constrained"
    )
    for axes, name in zip(all_axes.flat, axes_names, strict=False):
        chosen = [row for row in rows if row["axis"] == name]
        values = list(dict.fromkeys(row["value"] for row in chosen))
        for which in dict.fromkeys(row["which"] for row in chosen):
            part = [row for row in chosen if row["which"] == which]
            places = [values.index(row["value"]) for row in part]
            axes.plot(places, [row["ratio"] for row in part], "o", markersize=4, label=which)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_xticks(range(len(values)), values, rotation=60, ha="right", fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(name, fontsize=9)
    for axes in all_axes.flat[len(axes_names) :]:
        axes.set_visible(False)
    all_axes[0][0].legend(fontsize=8)
    figure.suptitle(f"Time beside the nearest ordinary problem's on {device}")
    _save(figure, path)
