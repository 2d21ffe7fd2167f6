"""The CPU kernels exist for several instruction sets, of which the rest of the suite runs the best
that the processor has. Here the others compute a few problems, each in a process of its own."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import selective_scan
from problem import METHODS, Case, check
from selective_scan import backends

VARIABLE = "SELECTIVE_SCAN_CPU_CAPABILITY"
CHANGES = (
    {"reverse": True},
    {"dtype": torch.float16, "layout": "channel_last"},
    {"dtype": torch.bfloat16, "dstate": 5},
    {"dtype": torch.float64, "dstate": 9, "B": "constant"},
    {"dim": 2, "seqlen": 301},  # lanes are segments, not channels
)


def main() -> None:
    """Solves the problems with the capability that the environment asks for."""
    cpu = backends()["cpu"]
    if not cpu.available:
        sys.exit(cpu.reason)
    print(cpu.build["capability"])
    for method, is_complex, changes in itertools.product(METHODS, (False, True), CHANGES):
        check(Case(method=method, complex=is_complex, **{"seqlen": 35, **changes}))


def run(capability, *arguments):
    """Python in another process, with the package that this one imported."""
    folders = (Path(selective_scan.__file__).parents[1], Path(__file__).parent)
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {VARIABLE: capability, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=False,
    )


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


if __name__ == "__main__":
    main()
