"""Checks an installed wheel of selective_scan: its libraries load, the CPU kernels are correct, and
error messages of C++ arrive in Python.

Needs no GPU. Run it outside the source tree, with the Python of the environment to check.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import torch

import selective_scan
from selective_scan import selective_scan_fn, selective_scan_ref

METHODS = ("zoh", "foh", "bilinear", "poly", "highorder", "rk4")


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.to(torch.float64)
    return float((value.to(torch.float64) - expected).norm() / expected.norm())


def check_cpu(method: str) -> float:
    """Returns the largest relative error of the output and the gradients against the fp64
    reference."""
    batch, dim, dstate, seqlen = 2, 12, 16, 67
    inputs = {
        "u": torch.randn(batch, dim, seqlen),
        "delta": 0.1 * torch.rand(batch, dim, seqlen),
        "A": -torch.rand(dim, dstate) - 0.5,
        "B": torch.randn(batch, 2, dstate, seqlen),
        "C": torch.randn(batch, 2, dstate, seqlen),
        "D": torch.randn(dim),
        "z": torch.randn(batch, dim, seqlen),
    }
    results = []
    for function, dtype in (
        (selective_scan_fn, torch.float32),
        (selective_scan_ref, torch.float64),
    ):
        leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in inputs.items()}
        out = function(**leaves, discretization_method=method)
        gradients = torch.autograd.grad(out.square().sum(), list(leaves.values()))
        results.append((out.detach(), *gradients))
    return max(relative_error(*pair) for pair in zip(*results, strict=True))


def check_refusal() -> str:
    """Makes C++ throw by calling an op directly; the Python function would refuse it first."""
    u, A = torch.ones(2, 12, 67), torch.ones(12, 16)
    B = torch.ones(2, 1, 16, 66)
    try:
        torch.ops.selective_scan.selective_scan_fwd(u, u, A, B, B)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "none"


def check_cuda_library() -> str:
    """Loads the CUDA library, which does not need a GPU, and returns a description of its build."""
    if torch.version.cuda is None:
        return "not loaded: this torch is not a CUDA build"
    library = Path(selective_scan.__file__).with_name("_cuda.so")
    if not library.exists():
        return "not in this wheel"
    torch.ops.load_library(str(library))
    return torch.ops.selective_scan.cuda_build_info()


def main() -> None:
    version = importlib.metadata.version("torch-selective-scan")
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"selective_scan {version} with torch {torch.__version__}, Python {python}")
    print(f"  at {Path(selective_scan.__file__).parent}")
    seed = torch.seed()
    for method in METHODS:
        error = check_cpu(method)
        print(f"  {method:10} CPU forward and backward, relative error {error:.1e}")
        if not error < 1e-5:
            sys.exit(f"{method} is wrong on the CPU (seed {seed})")
    refusal = check_refusal()
    print(f"  {refusal}")
    if not refusal.startswith("selective_scan: B must be"):
        sys.exit("what C++ refused did not arrive with its words")
    print(f"  CUDA library: {check_cuda_library()}")
    print(selective_scan.backends())


if __name__ == "__main__":
    main()
