"""The CPU kernels exist for several instruction sets, of which the rest of the suite runs the best
that the processor has. Here the others compute a few problems, each in a process of its own."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from problem import METHODS, Case, check
from selective_scan import backends

VARIABLE = "SELECTIVE_SCAN_CPU_CAPABILITY"
CHANGES = (
    {"reverse": True},
    {"dtype": torch.float16, "layout": "channel_last"},
    {"dtype": torch.bfloat16, "dstate": 5},
    {"dtype": torch.float64, "dstate": 9, "B": "constant"},
)


def main() -> None:
    """Solves the problems with the capability that the environment asks for."""
    cpu = backends()["cpu"]
    if not cpu.available:
        sys.exit(cpu.reason)
    print(cpu.build["capability"])
    for method, is_complex, changes in itertools.product(METHODS, (False, True), CHANGES):
        check(Case(method=method, complex=is_complex, seqlen=35, **changes))


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_capability(capability):
    if backends()["cpu"].build["capability"] == capability:
        pytest.skip("the rest of the suite runs with this one")
    paths = (str(Path(__file__).parent), str(Path(__file__).parents[1]))
    environment = os.environ | {
        VARIABLE: capability,
        "PYTHONPATH": os.pathsep.join((*paths, os.environ.get("PYTHONPATH", ""))),
    }
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    if "on this processor" in run.stderr:
        pytest.skip(f"this processor lacks {capability}")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split() == [capability]


def test_an_unknown_capability_is_named():
    environment = os.environ | {VARIABLE: "sse9"}
    code = "import selective_scan; print(selective_scan.backends()['cpu'].reason)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{VARIABLE} must be one of default" in run.stdout
    assert "got 'sse9'" in run.stdout


if __name__ == "__main__":
    main()
