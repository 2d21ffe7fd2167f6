"""The example of docs/contributing.md, added to a copy of the sources as described there: the tests
of the matrix pass with it on the CPU, and kernels of each kind compile with it for CUDA. The copy
is built without the other methods, which are then refused."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from programs import load

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow

NAME = "midpoint"
# A file, a pattern that matches once in it, and the text to insert after the match.
EDITS = (
    ("csrc/core/discretization/method.h", r"enum class Method[^}]*\w(?= \})", ", kMidpoint"),
    ("csrc/core/discretization/method.h", r'kMethodNames\[\] = \{[^}]*"', ', "midpoint"'),
    (
        "csrc/core/discretization.h",
        r"#pragma once\n",
        '\n#include "discretization/midpoint.h"\n',
    ),
    ("selective_scan/_discretization.py", r'Method = Literal\[[^\]]*"', ', "midpoint"'),
    (
        "selective_scan/_discretization.py",
        r"DISCRETIZATIONS[^{]*\{\n(?:    .*\n)*",
        '    "midpoint": lambda delta, x: (x.exp(), delta * (x / 2).exp()),\n',
    ),
    (
        "tests/exact.py",
        r"FORMULAS = \{\n(?:    .*\n)*",
        '    "midpoint": (mpmath.exp, lambda x: mpmath.exp(x / 2)),\n',
    ),
)
# From csrc/cuda/instantiations.py, one source of each kind of CUDA kernels that run any method.
CUDA_SOURCES = (
    "floor_float",
    "streamed_forward_float_4x4",
    "streamed_backward_float_4_variable",
    "update_float",
)


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def insert(path: Path, pattern: str, text: str):
    before = path.read_text()
    after, count = re.subn(pattern, lambda found: found[0] + text, before)
    assert count == 1, f"{path}: {count} places match {pattern}"
    path.write_text(after)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the sources with the method added."""
    tree = tmp_path_factory.mktemp("sources") / "selective_scan"
    unneeded = shutil.ignore_patterns(
        ".*", "build", "dist", "*.so", "*.pyd", "__pycache__", "benchmarks"
    )
    shutil.copytree(ROOT, tree, ignore=unneeded)
    guide = (tree / "docs/contributing.md").read_text(encoding="utf-8")
    (formula,) = re.findall(r"^ *```cpp\n(.*?)^ *```", guide, re.M | re.S)
    (tree / f"csrc/core/discretization/{NAME}.h").write_text(textwrap.dedent(formula))
    for name, pattern, text in EDITS:
        insert(tree / name, pattern, text)
    # Only one instruction set is built: the others have the same templates and take as long each.
    guard = "defined(__x86_64__)"
    for name in ("capability.cpp", "capabilities/instructions.h"):
        path = tree / "csrc/cpu" / name
        assert guard in path.read_text(), f"{name} has no {guard}"
        path.write_text(path.read_text().replace(guard, "false"))
    return tree


@pytest.fixture(scope="module")
def built(tree) -> Path:
    """The copy with a CPU library of this method alone, as a debug build: it takes less than half
    the time, and has assertions."""
    build = (sys.executable, "setup.py", "build_ext", "--inplace")
    run(*build, cwd=tree, SELECTIVE_SCAN_METHODS=NAME, USE_CUDA="0", DEBUG="1")
    return tree


@pytest.mark.xdist_group("seventh method")  # one process builds
def test_the_matrix_passes_on_the_cpu(built):
    tests = [f"tests/test_{name}.py" for name in ("core", "gradcheck", "matrix", "reference")]
    select = ("-k", f"({NAME} or methods_are_those) and not test_product", "-m", "not cuda")
    output = run(sys.executable, "-m", "pytest", "-q", *select, *tests, cwd=built)
    assert int(re.search(r"(\d+) passed", output)[1]) > 20, output


@pytest.mark.xdist_group("seventh method")
def test_a_method_left_out_of_a_build_is_refused(built):
    code = """
import torch
from selective_scan import backends, selective_scan_fn
inputs = [torch.rand(1, 2, 5), torch.rand(1, 2, 5), *(torch.rand(2, 3) for _ in range(3))]
print(backends()["cpu"].build["methods"])
try:
    selective_scan_fn(*inputs, discretization_method="rk4")
except RuntimeError as error:
    print(error)
"""
    methods, error = run(sys.executable, "-c", code, cwd=built).splitlines()
    assert methods == NAME
    assert error == (
        "selective_scan: discretization_method 'rk4' was left out of this build "
        f"(SELECTIVE_SCAN_METHODS={NAME}); build again without it"
    )


@pytest.mark.parametrize("name", CUDA_SOURCES)
def test_a_kernel_compiles_for_cuda(tree, tmp_path, name):
    if (nvcc := load(tree / "csrc" / "cuda" / "toolkit.py").find_nvcc()) is None:
        pytest.skip("nvcc was not found")
    instantiations = load(tree / "csrc/cuda/instantiations.py")
    (source,) = (source for source in instantiations.SOURCES if source.name == name)
    # Takes one of the structs that differ only in layouts and element types.
    structs = tuple({struct.split("<")[0]: struct for struct in source.structs}.values())
    path = tmp_path / f"{name}.cu"
    path.write_text(dataclasses.replace(source, structs=structs).text(NAME))
    flags = ("-std=c++20", "--expt-relaxed-constexpr", "-arch=sm_90", f"-I{tree / 'csrc'}")
    unoptimised = ("-Xcicc", "-O1", "-Xptxas", "-O0")  # nothing runs
    run(nvcc, *flags, *unoptimised, "-cubin", path, "-o", tmp_path / "kernel.cubin", cwd=tree)
