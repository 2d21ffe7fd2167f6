"""Runs a few problems on kernels that the rest of the suite does not choose.

The rest of the suite runs the CPU kernels of the processor's best instruction set, and each CUDA
path where it applies. Here the CPU kernels of the other instruction sets and the CUDA paths that
were not chosen solve problems, each in its own process.
"""

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import programs
import test_adaptive_unitary as unitary
import test_denormals as denormals
import test_diagonal_scan as diagonal
import test_matrix_scan as matrix
import test_paths as paths
import test_s6_step as step
import test_selective_state_update as update
from gpu_kernels import has_step, skip_without_path
from problem import METHODS, Case, check
from problem import run as solve
from selective_scan import backends

VARIABLE = "SELECTIVE_SCAN_CPU_CAPABILITY"
CUDA_VARIABLE = "SELECTIVE_SCAN_CUDA_KERNELS"
CHANGES = (
    {"reverse": True},
    {"dtype": torch.float16, "layout": "channel_last"},
    {"dtype": torch.bfloat16, "dstate": 5},
    {"dtype": torch.float64, "dstate": 9, "B": "constant"},
    {"dim": 2, "seqlen": 301},  # lanes are segments instead of channels
)
DIAGONAL = (
    {"shape": (3, 37, 131)},
    {"shape": (40, 131), "reverse": True, "a": torch.bfloat16, "b": torch.bfloat16},
    {"shape": (2, 3000)},  # lanes are segments of a row
    {"shape": (2, 19, 70), "layout": "channel_last", "a": torch.float64},
    {"shape": (18, 131), "a": torch.complex64, "initial_state": torch.complex64},
    {"shape": (2, 2049), "b": torch.complex128, "initial_state": None, "reverse": True},
    {"shape": (5, 20, 67), "a_shape": (20, 1)},
)
MATRIX = (
    {"dim": 19, "groups": 1},
    {"complex": True, "B": "packed_grouped", "C": "constant"},
    {"dtype": torch.float64, "dstate": 9},
    {"dtype": torch.float64, "complex": True, "reverse": True},
)
UNITARY = ({}, {"dim": 20, "dtype": torch.bfloat16}, {"B": "grouped", "C": "shared", "groups": 1})

UPDATE = (
    {"dim": 37, "state": torch.bfloat16, "x": torch.float16},
    {"dim": 21, "dstate": 5, "steps": 2},
    {"dim": 33, "state": torch.complex64, "groups": 3},
    {"dim": 6, "heads": 2, "state": torch.float64, "dt_softplus": False},
)


def check_scans(device, changes_of_cases) -> None:
    for method, is_complex, changes in itertools.product(METHODS, (False, True), changes_of_cases):
        check(Case(method=method, complex=is_complex, **{"seqlen": 35, **changes}), device)


PACKED = tuple(
    {"batch": 1, "cu_seqlens": bounds, "seqlen": seqlen} | changes
    for (bounds, seqlen), changes in itertools.product(
        (
            ((3, 30, 30, 31, 64, 130), 140),
            ((0, 5, 70, 71, 2300, 2310, 2600), 2601),  # has segments
        ),
        (
            {"dstate": 16, "dim": 16, "layout": "channel_last", "dtype": torch.bfloat16},
            {"dstate": 5, "dim": 6, "reverse": True, "dtype": torch.float16},
            {"dstate": 9, "dim": 16, "initial_state": False, "layout": "channel_last"},
        ),
    )
)

# By path: problems that it can solve, for most of which it would not be chosen.
CUDA_PATHS = {
    "floor": ({"dstate": 1}, {"dstate": 64, "seqlen": 70}),
    "dstate1": ({"dstate": 1, "dim": 2, "seqlen": 8200}, {"dstate": 1, "seqlen": 70}),
    "streamed": (
        {"dstate": 5, "seqlen": 40},
        {"dstate": 16, "seqlen": 70, "dtype": torch.bfloat16},
        {"dstate": 16, "seqlen": 1030, "dim": 8, "B": "constant", "C": "constant"},
        *PACKED,
    ),
}


def check_cuda_path(path: str) -> None:
    """Solves problems by the CUDA kernels that the environment selects."""
    if path == "floor":
        check_scans("cuda", (*CHANGES, *CUDA_PATHS[path]))
        return
    for method, changes in itertools.product(METHODS, CUDA_PATHS[path]):
        is_common = path == "streamed" and "B" not in changes
        if is_common or method == "zoh":  # only zoh has all the other kernels
            check(Case(method=method, complex=False, **changes), "cuda")


def main() -> None:
    """Solves the problems with the capability that the environment selects."""
    cpu = backends()["cpu"]
    if not cpu.available:
        sys.exit(cpu.reason)
    print(cpu.build["capability"])
    check_scans("cpu", CHANGES)
    for case in paths.LARGE:
        check(case, "cpu")
    for changes in DIAGONAL:
        diagonal.check(diagonal.Case(**changes), "cpu")
    for changes in MATRIX:
        matrix.check(matrix.BASE.with_(**changes))
    for changes in UNITARY:
        unitary.check(unitary.Case(**changes), "cpu")
    for method, changes in itertools.product(METHODS, UPDATE):
        update.check(update.Case(method=method, **changes), "cpu")
    if not denormals.has_no_mode:
        denormals.check_all()


def run(capability, *arguments, variable=VARIABLE):
    """Runs Python in another process, with the package that this one imported."""
    paths, environment = [Path(__file__).parent], {variable: capability}
    return programs.run_python(*arguments, paths=paths, environment=environment, limit=None)


def run_on_path(path: str, program: str) -> None:
    """Runs a program in another process that uses the CUDA kernels of one path."""
    result = run(path, "-c", program, variable=CUDA_VARIABLE)
    assert result.returncode == 0, result.stdout + result.stderr


def solve_on_gpu(case: Case) -> dict[str, torch.Tensor | None]:
    """Returns outputs and gradients, moved to the CPU."""
    results = solve(case, "cuda")
    return {name: None if value is None else value.cpu() for name, value in results.items()}


def solved_on_path(path: str, module: str, tmp_path_factory):
    """Returns what a module's solve_all() saves in a process that uses one path's CUDA kernels."""
    file = tmp_path_factory.mktemp(path) / "results.pt"
    run_on_path(path, f"import {module}; {module}.solve_all({str(file)!r})")
    return torch.load(file)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_capability(capability):
    if backends()["cpu"].build["capability"] == capability:
        pytest.skip("the rest of the suite runs with this one")
    result = run(capability, __file__)
    if "on this processor" in result.stderr:
        pytest.skip(f"this processor lacks {capability}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split() == [capability]


def test_an_unknown_capability_is_named():
    result = run("sse9", "-c", "import selective_scan; print(selective_scan.backends()['cpu'])")
    assert f"{VARIABLE} must be one of default" in result.stdout
    assert "got 'sse9'" in result.stdout


def weak_symbols(objects: list[Path]) -> set[str]:
    """Returns the symbols of which the linker keeps any one definition."""
    printed = subprocess.run(["nm", "--defined-only", *objects], capture_output=True, check=True)
    lines = (line.split() for line in printed.stdout.decode().splitlines())
    return {words[2] for words in lines if len(words) == 3 and words[1] in "WVu"}


def test_code_for_newer_processors_is_linked_nowhere_else():
    """Otherwise the linker might replace another source's copy of a function by one with
    instructions that the processor lacks."""
    folders = sorted((Path(__file__).parents[1] / "build").glob("temp.linux*/_cpu"))
    if not folders or shutil.which("nm") is None:
        pytest.skip("needs the objects of a build, and nm")
    for folder in folders:
        objects = list(folder.glob("**/*.o"))
        if any(b".debug_info" in path.read_bytes() for path in objects):
            pytest.skip("a debug build inlines nothing, and is for one machine")
        newer = [path for path in objects if path.name.startswith("avx")]
        others = weak_symbols([path for path in objects if path not in newer])
        assert others, folder
        for name in ("avx2", "avx512"):
            own = weak_symbols([path for path in newer if path.stem.split("_")[0] == name])
            assert not own & others
            others |= own


def cuda_program(path):
    return f"import test_capabilities; test_capabilities.check_cuda_path({path!r})"


@pytest.mark.parametrize("path", CUDA_PATHS)
def test_a_cuda_path(cuda_device, path):
    skip_without_path(path)
    run_on_path(path, cuda_program(path))


def test_a_cuda_path_that_cannot_run_a_call_says_why(cuda_device):
    result = run("dstate1", "-c", cuda_program("streamed"), variable=CUDA_VARIABLE)
    expected = f"{CUDA_VARIABLE}=dstate1 cannot run this call: dstate must be 1, got 5"
    assert expected in result.stderr


def test_a_step_that_a_gpu_has_no_kernel_for_says_why(cuda_device):
    if has_step():
        pytest.skip("this GPU has the kernel")
    message = r"the GPU's compute capability must be 8\.0 or later on CUDA, got 7"
    with pytest.raises(RuntimeError, match=message):
        step.s6_step(**step.make(step.BASE, cuda_device))


def test_unknown_cuda_kernels_are_named(cuda_device):
    result = run("fastest", "-c", cuda_program("floor"), variable=CUDA_VARIABLE)
    names = "unset or one of dstate1, streamed, floor, narrow, prompt"
    assert f"{CUDA_VARIABLE} must be {names}" in result.stderr
    assert "got 'fastest'" in result.stderr


if __name__ == "__main__":
    main()
