"""The ring that feeds B and C to the streamed CUDA kernels, with bulk copies and without them.

A build for one architecture contains only one of the two ways. Here both run on the present GPU: if
it has bulk copies, -DSELECTIVE_SCAN_NO_BULK_COPY selects the general way.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None) or shutil.which("nvcc")


@pytest.mark.parametrize(
    "flags", [(), ("-DSELECTIVE_SCAN_NO_BULK_COPY",)], ids=["native", "general"]
)
def test_every_warp_reads_every_chunk(cuda_device, tmp_path, flags):
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    major, minor = torch.cuda.get_device_capability(cuda_device)
    if major < 8:
        pytest.skip("the streamed kernels need a compute capability of 8.0")
    program = tmp_path / "chunk_ring"
    subprocess.run(
        [
            nvcc, "-std=c++20", "-O3", f"-arch=sm_{major}{minor}", *flags,
            "-I", str(TESTS.parent / "csrc"), str(TESTS / "chunk_ring.cu"), "-o", str(program),
        ],
        check=True,
    )  # fmt: skip
    result = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    assert int(result.stdout) == 0
