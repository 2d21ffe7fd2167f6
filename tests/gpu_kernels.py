"""The kernels that the CUDA library has for the present GPU, as the library itself reports."""

import functools

import pytest
import torch

# The bytes of a block on Hopper, which suffice for every call.
HOPPER_SHARED_BYTES = 232448


@functools.cache
def facts() -> dict[str, str]:
    """Returns the facts of the first GPU that its plans use."""
    text = torch.ops.selective_scan.cuda_device_facts(0)
    return dict(fact.split("=") for fact in text.split())


def skip_without_path(path: str) -> None:
    if path not in facts()["paths"].split(","):
        pytest.skip(f"the GPU has no kernels of the path {path}")


def has_step() -> bool:
    """Returns whether the GPU has the kernel of a step through layers."""
    sizes = {"layers": 1, "d_model": 32, "d_inner": 64, "dstate": 16, "dt_rank": 2}
    sizes |= {"width": 4, "vocabulary": 0}
    return torch.ops.selective_scan.cuda_step_workspace_bytes(0, 4, 1, *sizes.values()) >= 0


def skip_without_step(device: str) -> None:
    if device == "cuda" and not has_step():
        pytest.skip("the GPU lacks the kernel of a step through layers")


def has_less_shared_memory() -> bool:
    return int(facts()["block_shared_bytes"]) < HOPPER_SHARED_BYTES
