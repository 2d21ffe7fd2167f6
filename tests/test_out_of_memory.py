"""Without memory for results the allocator's own exception is raised, and nothing else happens."""

import sys
from pathlib import Path

import pytest
import torch

import programs
from selective_scan import selective_scan_fn

PROGRAM = Path(__file__).with_name("out_of_memory.py")
# Keeps malloc from using address space that it reserved before the limit was set.
NOTHING_IN_RESERVE = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**17)}


def test_more_than_there_can_be(capfd):
    """Forward of an expanded tensor, which takes no memory itself, raises the allocator's error."""
    u = torch.zeros(1, 1, 1).expand(1, 1, 2**45)
    A, B = torch.zeros(1, 1), torch.zeros(1, 1)
    with pytest.raises(RuntimeError, match=r"you tried to allocate 140737488355328 bytes"):
        selective_scan_fn(u, u, A, B, B)
    with pytest.raises(RuntimeError, match=r"you tried to allocate 140737488355328 bytes"):
        torch.ops.selective_scan.selective_scan_fwd(u, u, A, B, B)
    assert selective_scan_fn(u[..., :5], u[..., :5], A, B, B).shape == (1, 1, 5)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
def test_every_function(device):
    done = programs.run_python(PROGRAM, device, environment=NOTHING_IN_RESERVE, limit=None)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "S6"
