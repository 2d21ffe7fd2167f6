"""The instantiations of the CUDA kernels: small sources, which setup.py writes into the build
folder with this module.

Separate sources compile in parallel. The launchers choose among the instantiations; one that is
missing here is an undefined symbol there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent

# Methods that share kernels, as in kernel_method() of csrc/core/discretization/method.h.
SERIES = ("highorder", "poly", "rk4")
# Replaces METHOD in structs that are only instantiated for zoh.
COMMON = "kCommonMethod"


def kernel_method(method: str) -> str:
    """Returns the name of the kernels that run a method."""
    return "series" if method in SERIES else method


@dataclass(frozen=True)
class Source:
    """A source file. It exists once per method if its structs contain METHOD, else once."""

    name: str  # of the file, without the method's name
    folder: str  # of the headers
    headers: tuple[str, ...]
    structs: tuple[str, ...]  # METHOD is a placeholder for the method

    def file(self, method: str) -> str:
        is_one = not any("METHOD" in struct for struct in self.structs)
        return f"{self.name}.cu" if is_one else f"{self.name}_{kernel_method(method)}.cu"

    def text(self, method: str) -> str:
        lines = [f'#include "cuda/{self.folder}/{header}.cuh"' for header in self.headers]
        namespace = f"selective_scan::cuda::{self.folder}"
        lines += ["", f"namespace {namespace} {{", ""]
        enumerator = f"Method::k{kernel_method(method).capitalize()}"
        lines += [f"template struct {it.replace('METHOD', enumerator)};" for it in self.structs]
        lines += ["", f"}}  // namespace {namespace}", ""]
        return "\n".join(lines)


# The type of the states.
FLOOR = [
    Source(f"floor_{name}", "floor", ("backward", "forward"), (f"Scan<{kind}>",))
    for name, kind in [
        ("float", "float"),
        ("double", "double"),
        ("complex_float", "Complex<float>"),
        ("complex_double", "Complex<double>"),
    ]
]

# The memory layout of the arrays in a dstate1 problem, and a warp's window. Windows of one channel
# have kernels for vectors of either length and for single elements; windows that warps share only
# have kernels for whole vectors.
DSTATE1_VECTORS = ("Vectors<float>", "Vectors<BFloat16>", "Vectors<Half>")
DSTATE1_ROWS = (*DSTATE1_VECTORS, "Scattered<2>", "Scattered<4>")
DSTATE1 = [
    Source(
        f"dstate1_{window.lower()}",
        "dstate1",
        ("backward", "forward"),
        tuple(f"Kernels<{storage}, {window}Window>" for storage in storages),
    )
    for window, storages in (
        ("Wide", (*DSTATE1_ROWS, "DenseRows<BFloat16>", "DenseRows<Half>")),
        ("Long", (*DSTATE1_ROWS, "HalfVectors<BFloat16>", "HalfVectors<Half>")),
        ("Shared", DSTATE1_VECTORS),
    )
]
# The bytes of an element.
DSTATE1 += [Source("dstate1_states", "dstate1", ("states",), ("States<2>", "States<4>"))]

# The type of the elements, the states of a channel, and whether all steps of the rows are loaded
# at once, which 4-byte elements do not need. For one state there are only kernels that do.
NARROW = [
    Source(
        "narrow",
        "narrow",
        ("backward", "forward"),
        tuple(
            f"Kernels<{element}, {states}, {dense}>"
            for states in (1, 2, 8)
            for element, dense in (
                *(("float", "false"), ("BFloat16", "false"), ("Half", "false")),
                *(("BFloat16", "true"), ("Half", "true")),
            )
            if states > 1 or dense == "true"
        ),
    )
]

# The type of the elements, the states per lane, and the layout of the rows.
PROMPT = [
    Source(
        "prompt",
        "prompt",
        ("forward",),
        tuple(
            f"PromptForward<{element}, {states}, Along::{along}>"
            for element in ("float", "BFloat16", "Half")
            for states, along in (
                *itertools.product((1, 2), ("kSteps", "kChannels")),
                (1, "kElements"),
                (1, "kFourSteps"),
            )
            if (element, along) != ("float", "kFourSteps")
        ),
    )
]

# The type of the states, the states per lane, and log2 of the lanes that share a channel.
STREAMED_FORWARD = [
    Source(
        f"streamed_forward_{name}",
        "streamed",
        ("forward", "summarize"),
        tuple(f"StreamedForward<{shape}, {method}>" for shape in shapes),
    )
    for name, method, shapes in [
        ("float_4x4", "METHOD", ("float, 4, 2",)),
        ("float_wide", COMMON, ("float, 8, 2", "float, 16, 2")),
        ("complex_float_2x8", COMMON, ("Complex<float>, 2, 3",)),
    ]
]

# The bytes of an element, and the dimension along which a warp's lanes lie when they move rows.
STREAMED_MAPS = ("kSteps", "kChannels")
STREAMED_ACCESS = list(itertools.product((2, 4), STREAMED_MAPS))
# The kinds of elements if both 2-byte types share kernels.
STREAMED_SIZES = ("kTwoBytes", "kFloat32")

# The type of the states, log2 of the lanes that share a channel (each with 16 bytes of states),
# whether B and C vary, and the kinds of elements.
STREAMED_BACKWARD = [
    Source(
        f"streamed_backward_{name}",
        "streamed",
        ("backward",),
        (
            *(
                f"StreamedSummary<{kind}, {bits}, {size}, {method}, LaneMap::{lane_map}>"
                for size, lane_map in STREAMED_ACCESS
                if variable == "true"
            ),
            *(
                f"StreamedBackward<{kind}, {bits}, Elements::{of}, {variable}, {method}, "
                f"LaneMap::{lane_map}>"
                for of, lane_map in itertools.product(elements, STREAMED_MAPS)
            ),
        ),
    )
    for name, kind, bits, variable, method, elements in [
        ("float_4_variable", "float", 2, "true", "METHOD", ("kBFloat16", "kFloat16", "kFloat32")),
        ("float_4_constant", "float", 2, "false", COMMON, STREAMED_SIZES),
        ("complex_float_8_variable", "Complex<float>", 3, "true", COMMON, STREAMED_SIZES),
    ]
]

# The same with the states of a channel spread over several warps.
TEAM_BACKWARD = [
    Source(
        "team_backward",
        "streamed",
        ("team_backward",),
        tuple(
            f"TeamBackward<{warps}, {size}, {COMMON}, LaneMap::{lane_map}>"
            for warps in (2, 4)
            for size, lane_map in STREAMED_ACCESS
        ),
    )
]

# The type of the states in arithmetic, the states in 16 bytes of memory, and the most such packs
# that a lane holds for 256 states.
UPDATE_SHAPES = {
    "float": ("4, 1", "4, 2", "8, 1"),
    "double": ("2, 1", "2, 4"),
    "Complex<float>": ("2, 1", "2, 4"),
    "Complex<double>": ("1, 1", "1, 8"),
}
# Dense calls, which use one method: the types of the states and of the inputs.
UPDATE_TYPES = (
    *("float, float", "float, BFloat16", "float, Half"),
    *("BFloat16, BFloat16", "Half, Half"),
)
UPDATE = [
    *(
        Source(
            f"update_{re.sub('[<>]+', '_', kind).strip('_').lower()}",
            "update",
            ("update",),
            tuple(f"Update<{kind}, {shape}>" for shape in shapes),
        )
        for kind, shapes in UPDATE_SHAPES.items()
    ),
    Source(
        "update_dense",
        "update",
        ("dense",),
        tuple(f"DenseUpdate<{types}>" for types in UPDATE_TYPES),
    ),
]

SOURCES = [
    *(*FLOOR, *DSTATE1, *NARROW, *PROMPT),
    *(*STREAMED_FORWARD, *STREAMED_BACKWARD, *TEAM_BACKWARD),
    *UPDATE,
]


def method_names() -> list[str]:
    """Returns the names of all methods from the C++ sources, in the order of the enum."""
    for header in sorted(CSRC.glob("core/**/*.h")):
        found = re.search(r"kMethodNames\[\] = \{([^}]*)\}", header.read_text(encoding="utf-8"))
        if found:
            return re.findall(r'"(\w+)"', found[1])
    raise ValueError("no header of csrc/core defines kMethodNames")


def write(folder: Path, methods: Iterable[str]) -> list[Path]:
    """Makes the folder hold exactly the sources of these methods, and returns their paths.

    A file whose text is unchanged is not written, so that it is not compiled again.
    """
    texts = {
        folder / source.file(method): source.text(method)
        for source in SOURCES
        for method in methods
    }
    folder.mkdir(parents=True, exist_ok=True)
    for path in set(folder.glob("*.cu")) - texts.keys():
        path.unlink()
    for path, text in texts.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return sorted(texts)
