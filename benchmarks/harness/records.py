"""Rows as data, and the JSON files that hold them, from which tables and plots are made."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from harness.problems import Problem
from harness.timing import Timing

Row = dict[str, object]
COMPARED = ("reference", "compiled_reference", "textbook")


def make_row(
    problem: Problem,
    which: str,
    threads: int,
    time: Timing,
    *,
    bytes_moved: int,
    floor_ms: float,
    peak_fraction: float | None,
    error: float,
    peer: str | None,
    peer_ms: float | None,
    compared: dict[str, Timing],
) -> Row:
    """Returns the row of one pass of one problem, measured with a number of threads."""
    row = {
        "operator": problem.operator,
        "shape": problem.shape.name,
        "sizes": list(problem.sizes),
        "dtype": problem.dtype,
        "variant": problem.variant.name,
        "method": problem.method,
        "which": which,
        "threads": threads,
        "time": dataclasses.asdict(time),
        "bytes_moved": bytes_moved,
        "updates": problem.updates,
        "floor_ms": floor_ms,
        "peak_fraction": peak_fraction,
        "error": error,
        "peer": peer,
        "peer_ms": peer_ms,
        "ratio_to_floor": time.median / floor_ms,
        "GB_per_s": bytes_moved / time.median / 1e6,
        "ns_per_update": time.median * 1e6 / problem.updates,
        "speedup_over_peer": peer_ms and peer_ms / time.median,
    }
    for name in COMPARED:
        other = compared.get(name)
        row[name] = other and dataclasses.asdict(other)
        row[f"speedup_over_{name}"] = other and other.median / time.median
    return row


# --- the environment and the file -----------------------------------------------------------------


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _revision() -> str | None:
    """Returns the commit whose library is measured, None outside a repository."""

    def git(*arguments: str) -> str:
        root = Path(__file__).resolve().parents[2]
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


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def environment(device: torch.device) -> dict[str, object]:
    import selective_scan

    ops = torch.ops.selective_scan
    names = ("cpu_build_info", "cuda_build_info")
    return {
        "device": device_name(device),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "selective_scan": selective_scan.__version__,
        "revision": _revision(),
        "built": {name: json.loads(getattr(ops, name)()) for name in names if hasattr(ops, name)},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }


def _as_json(value: object) -> object:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)


def write(path: Path | None, content: dict[str, object]) -> None:
    """Writes a file, unless there is no path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=_as_json) + "\n")
    print(f"Wrote {path}")
