#!/usr/bin/env python3
"""Writes instantiations/: one small source per entry of the tables below.

Separate sources compile in parallel. The launchers choose among the entries; one that is missing
here is an undefined symbol there.

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
LINE_LENGTH = 100

SOURCE = """\
// Written by generate_instantiations.py; do not edit.
{includes}

namespace {namespace} {{

{instantiations}

}}  // namespace {namespace}
"""


# How the arrays of a dstate 1 problem lie in memory, and their elements' types.
DSTATE1_STORAGES = list(itertools.product(["Vectors", "Scattered"], ["float", "BFloat16", "Half"]))


# The streamed forward kernels: type of the states, states per lane, log2 of the lanes that share a
# channel.
STREAMED_FORWARD = [
    ("float", 4, 2),
    ("float", 8, 2),
    ("float", 16, 2),
    ("Complex<float>", 2, 3),
]


# The streamed backward kernels: type of the states, log2 of the lanes that share a channel (each
# with 16 bytes of states), whether B and C vary.
STREAMED_BACKWARD = [
    ("float", 2, "true"),
    ("float", 2, "false"),
    ("Complex<float>", 3, "true"),
]


# The same with the states of a channel in several warps.
TEAM_WARPS = [2, 4]


RELAY_STORAGES = ["Vectors<2>", "Vectors<4>", "Elements"]
# The relay's forward kernels: states per lane, steps of a chunk, warps of a group; storages.
RELAY_FORWARD = [
    ((4, 16, 1), RELAY_STORAGES),
    ((4, 16, 4), RELAY_STORAGES),
]
# Element types of its kernels for vectors, one state a lane.
RELAY_ROUNDS = ["kFloat32", "kFloat16", "kBFloat16"]


def source(folder, headers, instantiations):
    """The text of a file that instantiates templates of a folder's headers."""

    namespace = "selective_scan::cuda" + ("" if folder == "general" else f"::{folder}")
    return SOURCE.format(
        includes="\n".join(f'#include "../{folder}/{header}.cuh"' for header in headers),
        namespace=namespace,
        instantiations="\n".join(instantiations),
    )


def instantiation(name, *arguments):
    """One explicit instantiation, on two lines if need be."""
    start = f"template struct {name}<"
    text = f"{start}{', '.join(map(str, arguments))}>;"
    if len(text) <= LINE_LENGTH:
        return text
    first = ", ".join(map(str, arguments[:-1]))
    return f"{start}{first},\n{' ' * len(start)}{arguments[-1]}>;"


def file_name(kind):
    """A type as it stands in the name of a file."""
    return kind.replace("Complex<", "complex_").rstrip(">")


def scan_sources():
    """Yields file names and their text, as do the functions below."""
    for (kind, states, bits), method in itertools.product(TYPES, METHODS):
        lanes = "any" if bits is None else 2**bits
        lane_bits = "kAnyLanes" if bits is None else bits
        text = instantiation("Scan", kind, states, lane_bits, f"Method::k{method}")
        yield (
            f"scan_{file_name(kind)}_{states}x{lanes}_{method.lower()}.cu",
            source("general", ["backward", "forward"], [text]),
        )


def dstate1_sources():
    storages = [f"{storage}<{element}>" for storage, element in DSTATE1_STORAGES]
    for method in METHODS:
        texts = [instantiation("Kernels", f"Method::k{method}", storage) for storage in storages]
        yield f"dstate1_{method.lower()}.cu", source("dstate1", ["backward", "forward"], texts)


def streamed_forward_sources():
    for (kind, states, bits), method in itertools.product(STREAMED_FORWARD, METHODS):
        text = instantiation("StreamedForward", kind, states, bits, f"Method::k{method}")
        yield (
            f"streamed_forward_{file_name(kind)}_{states}x{2**bits}_{method.lower()}.cu",
            source("streamed", ["forward", "summarize"], [text]),
        )


def streamed_backward_sources():
    for (kind, bits, variable), method in itertools.product(STREAMED_BACKWARD, METHODS):
        projections = "variable" if variable == "true" else "constant"
        common = variable, f"Method::k{method}"
        texts = [
            instantiation("StreamedBackward", kind, bits, size, *common, f"LaneMap::{lane_map}")
            for size, lane_map in itertools.product([2, 4], ["kSteps", "kChannels"])
        ]
        yield (
            f"streamed_backward_{file_name(kind)}_{2**bits}_{projections}_{method.lower()}.cu",
            source("streamed", ["backward"], texts),
        )


def team_backward_sources():
    for warps, method in itertools.product(TEAM_WARPS, METHODS):
        texts = [
            instantiation("TeamBackward", warps, size, f"Method::k{method}", f"LaneMap::{lane_map}")
            for size, lane_map in itertools.product([2, 4], ["kSteps", "kChannels"])
        ]
        yield (
            f"team_backward_{warps}_{method.lower()}.cu",
            source("streamed", ["team_backward"], texts),
        )


def relay_sources():
    for method in METHODS:
        name = f"Method::k{method}"
        texts = [
            instantiation("RelayForward", *shape, storage, name)
            for shape, storages in RELAY_FORWARD
            for storage in storages
        ]
        texts += [instantiation("RoundsForward", f"DType::{kind}", name) for kind in RELAY_ROUNDS]
        texts += [instantiation("RelayBackward", storage, name) for storage in RELAY_STORAGES]
        yield (
            f"relay_{method.lower()}.cu",
            source("relay", ["backward", "forward", "rounds"], texts),
        )


def sources():
    """Maps file names to their text."""
    return dict(
        itertools.chain(
            scan_sources(),
            dstate1_sources(),
            streamed_forward_sources(),
            streamed_backward_sources(),
            team_backward_sources(),
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
