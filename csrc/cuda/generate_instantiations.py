#!/usr/bin/env python3
"""Writes instantiations/: one small source per entry of the tables below.

Separate sources compile in parallel. launch.cu chooses among the entries; one that is missing here
is an undefined symbol there.

    python csrc/cuda/generate_instantiations.py            write the sources
    python csrc/cuda/generate_instantiations.py --check    fail unless they are up to date
"""

import argparse
import itertools
import pathlib
import sys

# Type of the states, states per lane, log2 of the lanes that share a channel (None: any). A lane
# holds 16 bytes of states. Kernels with a fixed number of lanes are for dstate 1, 13 to 16 and 61
# to 64 in float, 15 and 16 in Complex<float>.
TYPES = [
    ("float", 1, 0),
    ("float", 4, 2),
    ("float", 4, 4),
    ("float", 4, None),
    ("double", 2, None),
    ("Complex<float>", 2, 3),
    ("Complex<float>", 2, None),
    ("Complex<double>", 1, None),
]
# enum Method of core/discretization.h
METHODS = ["Zoh", "Foh", "Bilinear", "Poly", "Highorder", "Rk4"]

DIRECTORY = pathlib.Path(__file__).resolve().parent / "instantiations"

SOURCE = """\
// Written by generate_instantiations.py; do not edit.
#include "../scan_backward.cuh"
#include "../scan_forward.cuh"

namespace selective_scan::cuda {{

template struct Scan<{type}, {states}, {lane_bits}, Method::k{method}>;

}}  // namespace selective_scan::cuda
"""


# How the arrays of a dstate 1 problem lie in memory, and their elements' types.
DSTATE1_STORAGES = list(itertools.product(["Vectors", "Scattered"], ["float", "BFloat16", "Half"]))

DSTATE1_SOURCE = """\
// Written by generate_instantiations.py; do not edit.
#include "../dstate1/backward.cuh"
#include "../dstate1/forward.cuh"

namespace selective_scan::cuda::dstate1 {{

{instantiations}

}}  // namespace selective_scan::cuda::dstate1
"""


# The streamed forward kernels: type of the states, states per lane, log2 of the lanes that share a
# channel.
STREAMED_FORWARD = [
    ("float", 4, 2),
    ("float", 8, 2),
    ("float", 16, 2),
    ("Complex<float>", 2, 3),
]

STREAMED_FORWARD_SOURCE = """\
// Written by generate_instantiations.py; do not edit.
#include "../streamed/scan_forward.cuh"

namespace selective_scan::cuda::streamed {{

template struct StreamedForward<{type}, {states}, {lane_bits}, Method::k{method}>;

}}  // namespace selective_scan::cuda::streamed
"""


# The streamed backward kernels: type of the states, log2 of the lanes that share a channel (each
# with 16 bytes of states), whether B and C vary.
STREAMED_BACKWARD = [
    ("float", 2, "true"),
    ("float", 2, "false"),
    ("float", 4, "true"),
    ("Complex<float>", 3, "true"),
]

STREAMED_BACKWARD_SOURCE = """\
// Written by generate_instantiations.py; do not edit.
#include "../streamed/scan_backward.cuh"

namespace selective_scan::cuda::streamed {{

{instantiations}

}}  // namespace selective_scan::cuda::streamed
"""


# The relay's forward kernels: states per lane, steps of a chunk, warps of a group.
RELAY_FORWARD = [(4, 16, 1), (4, 16, 4), (1, 32, 1)]
RELAY_STORAGES = ["Vectors<2>", "Vectors<4>", "Elements"]

RELAY_SOURCE = """\
// Written by generate_instantiations.py; do not edit.
#include "../relay/backward.cuh"
#include "../relay/forward.cuh"

namespace selective_scan::cuda::relay {{

{instantiations}

}}  // namespace selective_scan::cuda::relay
"""


def scan_sources():
    """Yields file names and their text."""
    for (kind, states, bits), method in itertools.product(TYPES, METHODS):
        type_name = kind.replace("Complex<", "complex_").rstrip(">")
        lanes = "any" if bits is None else 2**bits
        name = f"scan_{type_name}_{states}x{lanes}_{method.lower()}.cu"
        lane_bits = "kAnyLanes" if bits is None else bits
        yield name, SOURCE.format(type=kind, states=states, lane_bits=lane_bits, method=method)


def dstate1_sources():
    storages = [f"{storage}<{element}>" for storage, element in DSTATE1_STORAGES]
    for method in METHODS:
        instantiations = "\n".join(
            f"template struct Kernels<Method::k{method}, {storage}>;" for storage in storages
        )
        name = f"dstate1_{method.lower()}.cu"
        yield name, DSTATE1_SOURCE.format(instantiations=instantiations)


def streamed_forward_sources():
    for (kind, states, bits), method in itertools.product(STREAMED_FORWARD, METHODS):
        type_name = kind.replace("Complex<", "complex_").rstrip(">")
        name = f"streamed_forward_{type_name}_{states}x{2**bits}_{method.lower()}.cu"
        yield (
            name,
            STREAMED_FORWARD_SOURCE.format(type=kind, states=states, lane_bits=bits, method=method),
        )


def streamed_backward_sources():
    for (kind, bits, variable), method in itertools.product(STREAMED_BACKWARD, METHODS):
        type_name = kind.replace("Complex<", "complex_").rstrip(">")
        projections = "variable" if variable == "true" else "constant"
        name = f"streamed_backward_{type_name}_{2**bits}_{projections}_{method.lower()}.cu"
        instantiations = "\n".join(
            f"template struct StreamedBackward<{kind}, {bits}, {size}, {variable}, "
            f"Method::k{method}, LaneMap::{lane_map}>;"
            for size, lane_map in itertools.product([2, 4], ["kSteps", "kChannels"])
        )
        yield name, STREAMED_BACKWARD_SOURCE.format(instantiations=instantiations)


def relay_sources():
    for method in METHODS:
        forward = [
            f"template struct RelayForward<{states}, {steps}, {group}, {storage}, "
            f"Method::k{method}>;"
            for (states, steps, group), storage in itertools.product(RELAY_FORWARD, RELAY_STORAGES)
        ]
        backward = [
            f"template struct RelayBackward<{storage}, Method::k{method}>;"
            for storage in RELAY_STORAGES
        ]
        name = f"relay_{method.lower()}.cu"
        yield name, RELAY_SOURCE.format(instantiations="\n".join(forward + backward))


def sources():
    """Maps file names to their text."""
    return dict(
        itertools.chain(
            scan_sources(),
            dstate1_sources(),
            streamed_forward_sources(),
            streamed_backward_sources(),
            relay_sources(),
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare, fail on a difference")
    check = parser.parse_args().check

    wanted = sources()
    found = {path.name: path.read_text() for path in DIRECTORY.glob("*.cu")}
    if found == wanted:
        return 0
    if check:
        stale = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
        print("not up to date, run csrc/cuda/generate_instantiations.py:", *stale, file=sys.stderr)
        return 1
    DIRECTORY.mkdir(exist_ok=True)
    for name in found.keys() - wanted.keys():
        (DIRECTORY / name).unlink()
    for name, text in wanted.items():
        (DIRECTORY / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
