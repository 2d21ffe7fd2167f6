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

# Type of the states, states per lane. A lane holds 16 bytes of states, or a single state.
TYPES = [
    ("float", 1),
    ("float", 4),
    ("double", 2),
    ("Complex<float>", 2),
    ("Complex<double>", 1),
]
# enum Method of core/discretization.h
METHODS = ["Zoh", "Foh", "Bilinear", "Poly", "Highorder", "Rk4"]

DIRECTORY = pathlib.Path(__file__).resolve().parent / "instantiations"

SOURCE = """\
// Written by generate_instantiations.py; do not edit.
#include "../scan_backward.cuh"
#include "../scan_forward.cuh"

namespace selective_scan::cuda {{

template struct Scan<{type}, {states}, Method::k{method}>;

}}  // namespace selective_scan::cuda
"""


def sources():
    """Maps file names to their text."""
    texts = {}
    for (kind, states), method in itertools.product(TYPES, METHODS):
        type_name = kind.replace("Complex<", "complex_").rstrip(">")
        name = f"scan_{type_name}_{states}_{method.lower()}.cu"
        texts[name] = SOURCE.format(type=kind, states=states, method=method)
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
