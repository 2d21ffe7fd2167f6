#!/usr/bin/env python3
"""Writes instantiations/: one small source per entry of the table below.

Separate sources compile in parallel. launch.cu chooses among the entries; one that is missing here
is an undefined symbol there.

    python csrc/cuda/generate_instantiations.py            write the sources
    python csrc/cuda/generate_instantiations.py --check    fail unless they are up to date
"""

import argparse
import itertools
import pathlib
import sys

# Type of the states, states per lane, log2 of the lanes that share a channel (None: any). A lane holds
# 16 bytes of states. Kernels with a fixed number of lanes are for 1, 13 to 16 (15 and 16 if complex) and
# 61 to 64 states.
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


def sources():
    """Maps file names to their text."""
    texts = {}
    for (kind, states, bits), method in itertools.product(TYPES, METHODS):
        type_name = kind.replace("Complex<", "complex_").rstrip(">")
        lanes = "any" if bits is None else 2**bits
        name = f"scan_{type_name}_{states}x{lanes}_{method.lower()}.cu"
        lane_bits = "kAnyLanes" if bits is None else bits
        texts[name] = SOURCE.format(type=kind, states=states, lane_bits=lane_bits, method=method)
    return texts


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
