"""Results as data, as tables on the console, as JSON and as plots."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import selective_scan
from siblings import SiblingRow
from timing import Timing


@dataclass
class Row:
    """One pass of one problem, measured with a number of threads."""

    shape: str
    sizes: tuple[int, int, int, int, int]
    dtype: str
    variant: str
    method: str
    which: str
    threads: int
    time: Timing
    bytes_moved: int
    updates: int
    floor_ms: float
    peak_fraction: float | None
    error: float
    peer: str | None = None
    peer_ms: float | None = None
    reference: Timing | None = None
    compiled_reference: Timing | None = None
    textbook: Timing | None = None

    @property
    def ratio_to_floor(self) -> float:
        return self.time.median / self.floor_ms

    @property
    def gb_per_s(self) -> float:
        return self.bytes_moved / self.time.median / 1e6

    @property
    def ns_per_update(self) -> float:
        return self.time.median * 1e6 / self.updates

    def speedup(self, other_ms: float | None) -> float | None:
        return None if other_ms is None else other_ms / self.time.median

    def as_json(self) -> dict[str, object]:
        derived = {
            "ratio_to_floor": self.ratio_to_floor,
            "GB_per_s": self.gb_per_s,
            "ns_per_update": self.ns_per_update,
            "speedup_over_peer": self.speedup(self.peer_ms),
            "speedup_over_reference": self.speedup(median(self.reference)),
            "speedup_over_compiled_reference": self.speedup(median(self.compiled_reference)),
            "speedup_over_textbook": self.speedup(median(self.textbook)),
        }
        return {**asdict(self), **derived}


def median(timing: Timing | None) -> float | None:
    return None if timing is None else timing.median


# --- the environment and the file -----------------------------------------------------------------


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _revision() -> str | None:
    """The commit whose library is measured, or None outside a repository."""
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        sources = ("--untracked-files=no", "--", "csrc", "selective_scan")
        is_changed = bool(git("status", "--porcelain", *sources))
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if is_changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def environment(device: torch.device) -> dict[str, object]:
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "selective_scan": selective_scan.__version__,
        "revision": _revision(),
        "built": _build_infos(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }


def _build_infos() -> dict[str, dict[str, object]]:
    ops = torch.ops.selective_scan
    names = ("cpu_build_info", "cuda_build_info")
    return {name: json.loads(getattr(ops, name)()) for name in names if hasattr(ops, name)}


def write_json(path: Path, content: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


# --- tables ---------------------------------------------------------------------------------------


def console() -> Console:
    """Where tables go: a terminal as wide as it is, a file as wide as they need."""
    return Console(width=None if sys.stdout.isatty() else 220)


def format_ms(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}" if value < 10 else f"{value:.2f}"


def format_ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×" if value < 100 else f"{value:.0f}×"


def print_table(
    console: Console, title: str, header: Sequence[str], lines: Sequence[Sequence[str]]
) -> None:
    """Prints a table without the columns that no line fills; text to the left, figures right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    kept = [i for i in range(len(header)) if any(line[i] for line in lines)]
    for i in kept:
        is_figure = all(line[i][:1].isdigit() for line in lines if line[i])
        table.add_column(header[i], justify="right" if is_figure else "left", overflow="fold")
    for line in lines:
        table.add_row(*(line[i] for i in kept))
    console.print(table)


_TIMES_HEADER = (
    "shape", "dtype", "variant", "method", "threads", "pass", "ms", "q1–q3", "floor", "× floor",
    "GB/s", "ns/update", "of peak", "peer ms", "× peer", "ref ms", "× ref", "compiled ms",
    "× compiled", "textbook ms", "× textbook", "error",
)  # fmt: skip


def print_times(console: Console, title: str, rows: Sequence[Row], device_type: str) -> None:
    lines = []
    for row in rows:
        fraction = row.peak_fraction
        reference, compiled = median(row.reference), median(row.compiled_reference)
        textbook = median(row.textbook)
        lines.append(
            (
                row.shape, row.dtype, row.variant, row.method,
                str(row.threads) if device_type == "cpu" else "",
                row.which, format_ms(row.time.median),
                f"{format_ms(row.time.q1)}–{format_ms(row.time.q3)}",
                format_ms(row.floor_ms), format_ratio(row.ratio_to_floor),
                f"{row.gb_per_s:.0f}" if device_type == "cuda" else "",
                f"{row.ns_per_update:.3f}" if device_type == "cpu" else "",
                "" if fraction is None else f"{100 * fraction:.0f} %",
                format_ms(row.peer_ms), format_ratio(row.speedup(row.peer_ms)),
                format_ms(reference), format_ratio(row.speedup(reference)),
                format_ms(compiled), format_ratio(row.speedup(compiled)),
                format_ms(textbook), format_ratio(row.speedup(textbook)),
                f"{row.error:.0e}",
            )
        )  # fmt: skip
    print_table(console, title, _TIMES_HEADER, lines)


_SIBLINGS_HEADER = (
    "operator", "shape", "batch, dim, seqlen, …", "dtype", "layout", "threads", "pass", "ms",
    "q1–q3", "GB/s", "of copy", "peer ms", "× peer", "ref ms", "× ref", "error",
)  # fmt: skip


def print_siblings(
    console: Console, title: str, rows: Sequence[SiblingRow], device_type: str
) -> None:
    lines = [
        (
            row.operator, row.shape, ", ".join(map(str, row.sizes)), row.dtype, row.layout,
            str(row.threads) if device_type == "cpu" else "", row.which,
            format_ms(row.time.median), f"{format_ms(row.time.q1)}–{format_ms(row.time.q3)}",
            f"{row.gb_per_s:.3g}" if row.gb_per_s < 100 else f"{row.gb_per_s:.0f}",
            f"{100 * row.of_copy:.0f} %", format_ms(row.peer_ms), format_ratio(row.peer_ratio),
            format_ms(median(row.reference)), format_ratio(row.reference_ratio),
            f"{row.error:.0e}",
        )
        for row in rows
    ]  # fmt: skip
    print_table(console, title, _SIBLINGS_HEADER, lines)


def ratios(rows: Sequence[Row]) -> list[dict[str, object]]:
    """How methods, variants and thread counts compare with zoh, plain and one thread."""

    def key(row: Row, **changes: object) -> tuple[object, ...]:
        names = ("shape", "dtype", "variant", "method", "threads", "which")
        return tuple(changes.get(name, getattr(row, name)) for name in names)

    found = {key(row): row.time.median for row in rows}
    result = []
    for row in rows:
        bases = {
            f"{row.method} / zoh": key(row, method="zoh"),
            f"{row.variant} / plain": key(row, variant="plain"),
            f"1 thread / {row.threads} threads": key(row, threads=1),
        }
        for what, base in bases.items():
            if base == key(row) or base not in found:
                continue
            ratio = row.time.median / found[base]
            result.append(
                {
                    "what": what,
                    "shape": row.shape,
                    "dtype": row.dtype,
                    "variant": row.variant,
                    "method": row.method,
                    "threads": row.threads,
                    "pass": row.which,
                    "ratio": 1 / ratio if base == key(row, threads=1) else ratio,
                }
            )
    return result


def print_ratios(console: Console, found: Sequence[dict[str, object]]) -> None:
    """One line for all dtypes, thread counts and what else a ratio is not about."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for entry in found:
        variant = entry["variant"] if entry["what"].endswith("/ zoh") else ""
        key = (entry["what"], entry["shape"], variant, entry["pass"])
        groups.setdefault(key, []).append(entry["ratio"])
    header = ("what", "shape", "variant", "pass", "ratio", "from–to", "rows")
    lines = [
        (*key, f"{statistics.median(values):.2f}", f"{min(values):.2f}–{max(values):.2f}",
         str(len(values)))
        for key, values in sorted(groups.items())
    ]  # fmt: skip
    if lines:
        print_table(console, "Ratios of medians", header, lines)
