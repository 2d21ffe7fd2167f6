"""Writes the tables of docs/performance.md and README.md from the records in benchmarks/results.

A table, and below it its records with their revision, device and date, is written between
`<!-- NAME table -->` and `<!-- end of NAME table -->`, and replaces the text there. Needs only
Python.

Example:
    python benchmarks/tables.py
    python benchmarks/tables.py --check
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
_FILES = (_ROOT / "README.md", _ROOT / "docs" / "performance.md")
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_PASSES = ("forward", "backward")
# The users' calls shown in README.md; performance.md has all of them.
_README_SCANS = (
    "mamba-130m train", "mamba-2.8b train", "falcon-mamba-7b train", "130m prefill 512",
    "jamba prefill 8192", "vim-small", "vmamba-t stage 1", "vmamba-t stage 3",
    "mambavision stage 3", "u-mamba 3d", "segmamba", "mambair", "caduceus 131k", "semamba",
    "s-d-mamba N=2", "pointmamba",
)  # fmt: skip
_README_MODELS = (
    "layers-130m", "layers-64k", "layers-vision", "130m token", "2.8b token", "2.8b tokens",
)  # fmt: skip

Row = dict[str, object]
Table = tuple[Sequence[str], list[list[str]]]


@functools.cache
def load(name: str) -> dict[str, object]:
    """Loads a record, with the rows of all operators in one list; older files have a list for each
    kind."""
    content = json.loads((_RESULTS / f"{name}.json").read_text())
    for row in content.pop("siblings", ()):
        variant = "plain" if row["layout"] == "contiguous" else row["layout"]
        content["rows"].append({**row, "variant": variant, "method": "zoh"})
    for row in content["rows"]:
        row.setdefault("operator", "selective_scan")
    return content


def select(*records: str, **values: object) -> list[Row]:
    """Returns the rows of some records in which all of these fields have these values."""
    rows = [row for name in records for row in load(name)["rows"]]
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


def find(*records: str, **values: object) -> Row | None:
    return next(iter(select(*records, **values)), None)


def figure(value: float) -> str:
    """Formats three digits, or all digits before the point."""
    return f"{value:#.3g}".rstrip(".") if value < 100 else f"{value:.0f}"


def times(value: float | None) -> str:
    return "" if not value else f"{value:.1f}×" if value < 20 else f"{value:.0f}×"


def milliseconds(row: Row | None) -> str:
    """Formats the median, with the speedup over the peer in brackets."""
    if row is None:
        return ""
    faster = row.get("speedup_over_peer")
    if not faster:
        return figure(row["time"]["median"])
    text = f"{faster:.2f}" if faster < 10 else figure(faster)
    return f"{figure(row['time']['median'])} ({text}×)"


def sizes(row: Row) -> str:
    batch, dim, seqlen, *others = row["sizes"]
    groups = f", {others[1]} groups" if others[1:] and others[1] > 1 else ""
    return ", ".join(map(str, (batch, dim, seqlen, *others[:1]))) + groups


def scans(record: str, names: Sequence[str] = ()) -> Table:
    """Returns a line for each scan that a published model makes, or only for the named ones."""
    lines = []
    for row in select(record, kind="scan", which="forward"):
        if not names or row["name"] in names:
            backward = find(record, kind="scan", name=row["name"], which="backward")
            cells = [milliseconds(row), milliseconds(backward)]
            lines.append([row["name"], sizes(row), row["dtype"], *cells])
    return ("call", "batch, dim, seqlen, dstate", "dtype", *_PASSES), lines


def models(record: str, names: Sequence[str] = ()) -> Table:
    """Returns a line for each model of layers or tokens, or only for the named ones."""
    rows = [*select(record, kind="layer"), *select(record, kind="token")]
    return ("call", "sizes", "dtype", "what", "ms"), [
        [row["name"], model_sizes(row), row["dtype"], row["which"], milliseconds(row)]
        for row in rows
        if not names or row["name"] in names
    ]


def model_sizes(row: Row) -> str:
    *shape, layers = row["sizes"]
    names = ("batch", "seqlen", "d_model") if row["kind"] == "layer" else ("batch", "d_model")
    parts = [f"{name} {size}" for name, size in zip(names, shape, strict=True)]
    return ", ".join([*parts, f"{layers} layers" if layers > 1 else "1 layer"])


def variants(record: str) -> Table:
    """Returns the times of both passes in both dtypes for each variant."""
    kinds = [(which, dtype) for which in _PASSES for dtype in _DTYPES]
    names = dict.fromkeys(row["variant"] for row in select(record))
    return ("variant", *(f"{which} {_DTYPES[dtype]}" for which, dtype in kinds)), [
        [name, *(milliseconds(find(record, variant=name, method="zoh", which=which, dtype=dtype))
                 for which, dtype in kinds)]
        for name in names
    ]  # fmt: skip


def methods(record: str, shape: str, dtype: str, threads: int | None = None) -> Table:
    """Returns milliseconds, with the ratio to zoh's time in brackets."""
    kinds = [(variant, which) for variant in ("plain", "complex") for which in _PASSES]
    rows = select(record, shape=shape, dtype=dtype)
    rows = [row for row in rows if threads in (None, row["threads"])]
    medians = {(row["method"], row["variant"], row["which"]): row["time"]["median"] for row in rows}
    lines = []
    for method in dict.fromkeys(method for method, *_ in medians):
        values = [(medians[(method, *kind)], medians[("zoh", *kind)]) for kind in kinds]
        lines.append([method, *(f"{figure(ms)} ({ms / zoh:.2f})" for ms, zoh in values)])
    real = [f"{'complex' if variant == 'complex' else 'real'} {which}" for variant, which in kinds]
    return ("method", *real), lines


def memory(record: str) -> Table:
    header = ("batch, dim, seqlen, dstate", "dtype", "forward", "saved states", "backward")
    lines = []
    for row in load(record)["memory"]:
        values = [
            row[f"{name}_MiB"] for name in ("forward", "saved_states", "backward", "peer_backward")
        ]
        if row["variant"] == "plain" and values[-1]:
            cells = [f"{value:.0f}" for value in values]
            shape = sizes(find(record, shape=row["shape"]))
            lines.append([shape, _DTYPES[row["dtype"]], *cells])
    return (*header, "mamba-ssm's backward"), lines


def host(record: str) -> Table:
    def cells(row: Row) -> list[str]:
        time = row["us_per_call"]
        return [row["what"], f"{time['median']:.0f}", f"{time['q1']:.0f}–{time['q3']:.0f}"]

    return ("call", "µs", "quartiles"), list(map(cells, load(record)["host_overhead"]))


def siblings(record: str) -> Table:
    header = ("operator", "batch, dim, seqlen, dstate", "dtype", "layout")
    figures = [f"{which}{what}" for which in _PASSES for what in (", ms", ", GB/s")]
    rows = [row for row in select(record, which="forward") if row["operator"] != "selective_scan"]
    lines = []
    for row in rows:
        key = {name: row[name] for name in ("operator", "shape", "dtype", "variant")}
        found = [find(record, which=which, **key) for which in _PASSES]
        cells = [c for each in found for c in (milliseconds(each), f"{each['GB_per_s']:.0f}")]
        layout = "contiguous" if row["variant"] == "plain" else row["variant"]
        lines.append([row["operator"].replace("_", " "), sizes(row), row["dtype"], layout, *cells])
    return (*header, *figures), lines


def cpu(record: str, ipex: str) -> Table:
    header = (
        "batch, dim, seqlen, dstate", "dtype", "forward, 1 thread", "2 threads",
        "over ref, textbook", "over IPEX, 1 and 2 threads", "forward + backward, 2 threads",
        "over ref, textbook", "of peak, 1 thread: forward, backward",
    )  # fmt: skip
    lines = []
    for shape in ("laptop-512", "mamba-130m-b1", "short-512"):
        for dtype in ("float32", "bfloat16"):
            at = functools.partial(
                find, record, shape=shape, dtype=dtype, variant="plain", method="zoh"
            )
            one, two = (at(which="forward", threads=threads) for threads in (1, 2))
            both, backward = (
                at(which="forward + backward", threads=2),
                at(which="backward", threads=1),
            )
            peers = select(ipex, shape=one["sizes"][:4], dtype=dtype)

            def others(row: Row) -> str:
                found = [row[f"speedup_over_{name}"] for name in ("reference", "textbook")]
                return ", ".join(filter(None, map(times, found)))

            peaks = [f"{100 * row['peak_fraction']:.0f} %" for row in (one, backward)]
            lines.append(
                [
                    sizes(one), dtype, milliseconds(one), milliseconds(two), others(two),
                    ", ".join(times(row["speedup"]) for row in peers), milliseconds(both),
                    others(both), ", ".join(peaks),
                ]
            )  # fmt: skip
    return header, lines


def processor(environment: dict) -> str:
    device = environment["device"]
    is_gpu = device.startswith("NVIDIA")
    return device if is_gpu else environment["built"]["cpu_build_info"]["capability"]


def transformers(*records: str) -> Table:
    header = ("pass", "its own scan, ms", "selective_scan, ms", "faster", "no scan at all")
    names = ("transformers", "selective_scan")
    return ("processor", *header), [
        [processor(load(record)["environment"]), row["pass"],
         *(figure(row[name]["median"]) for name in names), times(row["speedup"]),
         times(row["largest_speedup"])]
        for record in records
        for row in load(record)["rows"]
    ]  # fmt: skip


def compiled(*records: str) -> Table:
    rows = [row for row in select(*records) if row["compiled_reference"]]
    return ("batch, dim, seqlen, dstate", "pass", "ms", "torch.compile of the reference, ms"), [
        [sizes(row), row["which"], milliseconds(row), figure(row["compiled_reference"]["median"])]
        for row in rows
    ]


def layers(record: str) -> Table:
    """Returns the times of models of layers, with the speedup over mamba_ssm's in brackets."""
    header = ("batch, seqlen, d_model; layers", "pass", "eager", "graphed passes")
    header = (*header, "as one CUDA graph", "compiled", "both directions", "matrix products alone")
    ways = ("S6 with graphed passes", "S6 as a CUDA graph", "S6 compiled", "S6 bidirectional")
    lines = []
    for row in select(record, what="S6", dtype="bfloat16"):
        *shape, depth = row["sizes"]
        key = {"shape": row["shape"], "which": row["which"], "dtype": "bfloat16"}
        found = [find(record, what=name, **key) for name in (*ways, "matrix products")]
        peer = find(record, what="mamba_ssm", **key)
        eager = f"{milliseconds(row)} ({1 / row['over_mamba_ssm']:.2f}×)"
        lines.append(
            [f"{', '.join(map(str, shape))}; {depth}", row["which"], eager,
             *map(milliseconds, found), f"{row['peak_MiB']:.0f}", f"{peer['peak_MiB']:.0f}"]
        )  # fmt: skip
    return (*header, "MiB", "mamba-ssm's MiB"), lines


def layer_parts(record: str) -> Table:
    parts = load(record)["parts"]
    names = list(dict.fromkeys(row["part"] for row in parts))
    cells = {(row["shape"], row["which"], row["part"]): figure(row["ms"]) for row in parts}
    keys = dict.fromkeys((shape, which) for shape, which, _ in cells)
    return ("shape", "pass", *names), [
        [*key, *(cells.get((*key, name), "") for name in names)] for key in keys
    ]


def packed(record: str) -> Table:
    """Returns milliseconds, with the ratio to a dense batch of as many steps in brackets."""
    rows = select(record)
    dense = {
        row["which"]: row["time_ms"]["median"]
        for row in rows
        if row["implementation"].startswith("dense")
    }
    lines = []
    for row in rows:
        ms = row["time_ms"]["median"]
        time = f"{figure(ms)} ({ms / dense[row['which']]:.2f})"
        lines.append([row["which"], row["implementation"], str(row["steps"]), time])
    return ("pass", f"{rows[0]['sequences']} sequences", "steps", "ms"), lines


def serving(record: str) -> Table:
    keys = dict.fromkeys((row["batch"], row["dim"]) for row in select(record))
    lines = []
    for batch, dim in keys:
        found = [
            find(record, batch=batch, dim=dim, state=state) for state in ("float32", "bfloat16")
        ]
        cells = [(figure(r["time_us"]["median"]), f"{r['GB_per_s']:.0f}") for r in found]
        lines.append([str(batch), str(dim), *(cell for pair in cells for cell in pair)])
    header = ("batch", "dim", "fp32 state, µs", "GB/s", "bf16 state, µs", "GB/s")
    return header, lines


def convolution(record: str) -> Table:
    """Returns microseconds, with the fraction of a copy's bandwidth in brackets, and those of
    torch's convolution."""
    header = ("batch, dim, seqlen", "dtype", "layout")
    rows = select(record, which="forward")
    lines = []
    for row in rows:
        key = {name: row[name] for name in ("sizes", "dtype", "layout")}
        found = [find(record, which=which, **key) for which in _PASSES]
        ours = [f"{r['ours']['median'] * 1e3:.1f} ({r['of_copy']:.2f})" for r in found]
        theirs = [f"{r['torch']['median'] * 1e3:.0f}" for r in found]
        layout = row["layout"].replace("_", "-")
        lines.append([sizes(row), row["dtype"], layout, *ours, *theirs])
    return (*header, "forward, µs", "backward", "torch's forward", "torch's backward"), lines


def matrix(record: str) -> Table:
    header = ("batch, dim, seqlen, dstate", "pass", "kernels, ms", "reference, ms", "faster")
    return (*header, "kernels, MiB", "reference, MiB"), [
        [", ".join(map(str, row["shape"])), row["pass"], figure(row["kernels"]["median"]),
         figure(row["reference"]["median"]), times(row["speedup"]), figure(row["kernels_MiB"]),
         figure(row["reference_MiB"])]
        for row in select(record)
    ]  # fmt: skip


# By name: the function that makes the table, and the records that it reads.
TABLES: dict[str, tuple[Callable[..., Table], tuple[str, ...]]] = {
    "speed": (functools.partial(scans, names=_README_SCANS), ("h200_users",)),
    "model speed": (functools.partial(models, names=_README_MODELS), ("h200_users",)),
    "users' scans": (scans, ("h200_users",)),
    "users' models": (models, ("h200_users",)),
    "variants": (variants, ("h200_variants",)),
    "methods": (
        functools.partial(methods, shape="mamba-130m", dtype="bfloat16"), ("h200_methods",),
    ),
    "memory": (memory, ("h200",)),
    "host": (host, ("h200_host",)),
    "siblings": (siblings, ("h200_siblings",)),
    "layers": (layers, ("h200_layer",)),
    "layer parts": (layer_parts, ("h200_layer",)),
    "convolution": (convolution, ("h200_conv",)),
    "packed": (packed, ("h200_packed",)),
    "serving": (serving, ("h200_serving",)),
    "matrix": (matrix, ("h200_matrix",)),
    "cpu users' scans": (scans, ("cpu_users",)),
    "cpu users' models": (models, ("cpu_users",)),
    "cpu": (cpu, ("cpu", "cpu_ipex")),
    "cpu methods": (
        functools.partial(methods, shape="laptop-512", dtype="float32", threads=2), ("cpu",),
    ),
    "cpu compiled": (compiled, ("cpu_compiled",)),
    "avx2": (cpu, ("cpu_avx2", "cpu_avx2_ipex")),
    "avx2 methods": (
        functools.partial(methods, shape="laptop-512", dtype="float32", threads=2), ("cpu_avx2",),
    ),
    "cuda transformers": (transformers, ("h200_transformers",)),
    "falcon_mamba": (transformers, ("h200_falcon_mamba",)),
    "transformers": (transformers, ("cpu_transformers", "cpu_avx2_transformers")),
}  # fmt: skip


def sources(records: Sequence[str]) -> str:
    """Describes the records: their device, PyTorch, revision and date."""
    named: dict[str, list[str]] = {}
    for name in records:
        environment = load(name)["environment"]
        revision = environment["revision"] or "not recorded"
        what = (
            f"{environment['device']}, torch {environment['torch']}, revision {revision}, "
            f"{environment['date'][:10]}"
        )
        named.setdefault(what, []).append(f"`{name}.json`")
    return "; ".join(f"{' and '.join(names)}: {what}" for what, names in named.items())


def write_table(name: str) -> Iterator[str]:
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}, there are {', '.join(TABLES)}")
    function, records = TABLES[name]
    header, lines = function(*records)
    yield f"<!-- {name} table -->"
    yield ""
    for line in (header, ["---"] * len(header), *lines):
        yield f"| {' | '.join(line)} |"
    yield ""
    yield f"{sources(records)}."
    yield ""
    yield f"<!-- end of {name} table -->"


def main(arguments: Sequence[str] | None = None) -> int:
    description, _, example = __doc__.partition("Example:")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"example:{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a table is out of date"
    )
    options = parser.parse_args(arguments)
    status = 0
    for path in _FILES:
        old = path.read_text()
        new, count = re.subn(
            r"<!-- (?P<name>\S[^>]*) table -->\n.*?<!-- end of (?P=name) table -->",
            lambda match: "\n".join(write_table(match["name"])),
            old,
            flags=re.DOTALL,
        )
        name = path.name
        if count == 0:
            print(f"{name} has no place for a table", file=sys.stderr)
            status = 1
        if new == old:
            continue
        if options.check:
            print(f"{name} is not up to date: run python benchmarks/tables.py", file=sys.stderr)
            status = 1
        else:
            path.write_text(new)
            print(f"Wrote the tables of {name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
