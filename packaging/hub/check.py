"""Loads two builds of build_locally.py into one process with the package `kernels`, and compares
their results.

check.py REPOSITORY REPOSITORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import kernels
import torch


def main() -> None:
    builds = [kernels.get_local_kernel(Path(path).absolute()) for path in sys.argv[1:]]
    names = [build._ops.ops.name for build in builds]
    assert len(set(names)) == len(builds), names
    assert not hasattr(torch.ops.selective_scan, "selective_scan_fwd")
    u, delta, B, C = torch.rand(4, 2, 8, 40)
    tensors = u, delta, -torch.rand(8, 4), B[:, :4], C[:, :4]
    results = []
    for build, name in zip(builds, names, strict=True):
        assert build.backends()["cpu"].available
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        with torch.profiler.profile() as profile:
            out = build.selective_scan_fn(*leaves)
        assert {event.key for event in profile.key_averages()} >= {f"{name}::selective_scan_fwd"}
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
        print(f"{name}: {build.__file__}")
    assert all(map(torch.equal, *results))
    print(f"{len(builds)} builds in one process, the same results by ops of {' and '.join(names)}")


if __name__ == "__main__":
    main()
