"""The limits of the machine: copy bandwidth and the rate of state updates."""

from __future__ import annotations

import timeit
from dataclasses import dataclass

import torch

from harness.problems import Problem
from harness.timing import cuda_ms

# Floating-point operations per state update of the real zoh scan, including exp.
FLOPS_PER_UPDATE = {"forward": 20, "backward": 50, "forward + backward": 70}
_SPECIAL_FUNCTIONS_PER_CLOCK_AND_SM = 16  # of every NVIDIA GPU since compute capability 5.0
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}


@dataclass(frozen=True)
class Ceilings:
    """The machine's rates, from which the floors follow: a pass moves its bytes once and computes
    every state update.

    On a GPU a state update costs at least one exponential of the special-function unit; on a CPU
    its floating-point operations at the rate of one core's multiply-adds, times the threads. For
    operators other than the selective scan only the bytes are counted.
    """

    device_type: str
    copy_bytes_per_s: float
    exp_per_s: float | None = None
    fma_flops_per_s: float | None = None
    source: str = ""

    def updates_per_s(self, problem: Problem, which: str, threads: int) -> float | None:
        """Returns the rate of state updates that arithmetic allows, None if it is not counted."""
        if problem.operator != "selective_scan":
            return None
        if self.device_type == "cuda":
            return self.exp_per_s
        if problem.variant.is_complex or not self.fma_flops_per_s:
            return None
        wide = 0.5 if problem.dtype == "float64" else 1.0  # half as many elements per vector
        return wide * threads * self.fma_flops_per_s / FLOPS_PER_UPDATE[which]

    def __str__(self) -> str:
        limits = [f"copy {self.copy_bytes_per_s / 1e9:.0f} GB/s"]
        if self.exp_per_s:
            limits.append(f"{self.exp_per_s:.3g} exponentials/s")
        if self.fma_flops_per_s:
            limits.append(f"{self.fma_flops_per_s / 1e9:.1f} GF/s multiply-add on one core")
        return f"{', '.join(limits)} ({self.source})"


def copy_bandwidth(device: torch.device) -> float:
    """Returns the bytes read and written per second by a large copy, the best of ten."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    if device.type == "cuda":
        seconds = [cuda_ms(lambda: target.copy_(source)) / 1e3 for _ in range(10)]
    else:
        seconds = timeit.repeat(lambda: target.copy_(source), number=1, repeat=10)
    return 2 * source.numel() / min(seconds)


def exp_rate(device: torch.device) -> float:
    """Returns the exponentials per second of the special-function units at the highest clock."""
    properties = torch.cuda.get_device_properties(device)
    clock_khz = getattr(properties, "clock_rate", None)
    if clock_khz is None:
        raise RuntimeError("this PyTorch does not tell the GPU's clock: give --exp-rate")
    per_clock = properties.multi_processor_count * _SPECIAL_FUNCTIONS_PER_CLOCK_AND_SM
    return per_clock * clock_khz * 1e3


def multiply_add_rate() -> float:
    """Returns one core's fp32 operations per second in a matrix product, the best of 200."""
    size = 512
    a, b = torch.rand(2, size, size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = timeit.repeat(lambda: a @ b, number=1, repeat=200)
    torch.set_num_threads(threads)
    return 2 * size**3 / min(seconds)


def find_ceilings(
    device: torch.device,
    anchor_ceilings: dict[str, float],
    copy_gb_per_s: float | None,
    exp_per_s: float | None,
) -> Ceilings:
    """Returns the ceilings: given figures take precedence, then the anchor file's (for a GPU), then
    measured ones."""
    is_cuda = device.type == "cuda"
    anchors = anchor_ceilings if is_cuda else {}
    if copy_gb_per_s or "copy_GB_s" in anchors:
        source = "copy given" if copy_gb_per_s else "copy from the anchor file"
        copy = 1e9 * (copy_gb_per_s or anchors["copy_GB_s"])
    else:
        source, copy = "copy measured", copy_bandwidth(device)
    if not is_cuda:
        source += ", multiply-adds of one core measured by a matrix product"
        return Ceilings("cpu", copy, fma_flops_per_s=multiply_add_rate(), source=source)
    if exp_per_s or "ex2_per_s" in anchors:
        source += ", exp given" if exp_per_s else ", exp from the anchor file"
    else:
        source += ", exp from the clock: 16 per clock and multiprocessor"
    exp = exp_per_s or anchors.get("ex2_per_s") or exp_rate(device)
    return Ceilings("cuda", copy, exp_per_s=exp, source=source)
