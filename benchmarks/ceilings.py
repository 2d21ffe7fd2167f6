"""What the machine can do at best: copy bandwidth and the rate of state updates."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from problems import Problem, flops_per_update

_SPECIAL_FUNCTIONS_PER_CLOCK_AND_SM = 16  # of every NVIDIA GPU since compute capability 5.0
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}


@dataclass(frozen=True)
class Ceilings:
    """Floors follow from these: a pass moves its bytes once and computes every state update.

    On a GPU a state update costs at least one exponential of the special-function unit; on a CPU
    its floating-point operations at one core's fused multiply-add peak, times the threads.
    """

    device_type: str
    copy_bytes_per_s: float
    exp_per_s: float | None = None
    fma_flops_per_s: float | None = None
    source: str = ""

    def updates_per_s(self, problem: Problem, which: str, threads: int) -> float | None:
        """The rate of state updates that arithmetic allows, or None where it is not counted."""
        if self.device_type == "cuda":
            return self.exp_per_s
        if problem.variant.is_complex or not self.fma_flops_per_s:
            return None
        wide = 0.5 if problem.dtype == "float64" else 1.0  # half the lanes of a vector
        return wide * threads * self.fma_flops_per_s / flops_per_update(which)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large copy: the best of ten."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        if device.type == "cuda":
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            target.copy_(source)
            seconds = time.perf_counter() - start
        best = max(best, 2 * source.numel() / seconds)
    return best


def exp_rate(device: torch.device) -> float:
    """Exponentials per second of the special-function units at the highest clock."""
    properties = torch.cuda.get_device_properties(device)
    clock_khz = getattr(properties, "clock_rate", None)
    if clock_khz is None:
        raise RuntimeError("this PyTorch does not tell the GPU's clock: give --exp-rate")
    per_clock = properties.multi_processor_count * _SPECIAL_FUNCTIONS_PER_CLOCK_AND_SM
    return per_clock * clock_khz * 1e3


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "selective_scan"


@functools.cache
def _fma_library() -> ctypes.CDLL:
    """Builds fma_peak.cpp with the system's compiler, once for each version of it."""
    source = Path(__file__).with_name("fma_peak.cpp")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise RuntimeError(
            f"the multiply-add peak needs a C++ compiler, {compiler!r} was not found"
        )
    digest = hashlib.sha256(source.read_bytes() + compiler.encode()).hexdigest()[:16]
    folder = _cache_folder()
    library = folder / f"fma_peak-{platform.machine()}-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / library.name
            command = [compiler, "-O3", "-shared", "-fPIC", str(source), "-o", str(built)]
            subprocess.run(command, check=True)
            built.replace(library)  # at once: two programs may build at the same time
    loaded = ctypes.CDLL(str(library))
    loaded.fma_flops_per_second.restype = ctypes.c_double
    loaded.fma_flops_per_second.argtypes = [ctypes.c_char_p, ctypes.c_double]
    return loaded


def kernel_capability() -> str:
    """The instruction set that the CPU kernels use on this processor."""
    return json.loads(torch.ops.selective_scan.cpu_build_info())["capability"]


def fma_peak(capability: str, seconds: float = 0.3) -> float:
    """One core's fp32 multiply-add peak in flops per second, at a capability's vector width."""
    if capability not in ("avx2", "avx512"):
        capability = "default"
    return _fma_library().fma_flops_per_second(capability.encode(), seconds)


def find_ceilings(
    device: torch.device,
    anchor_ceilings: dict[str, float],
    copy_gb_per_s: float | None,
    exp_per_s: float | None,
) -> Ceilings:
    """Given figures first, then the anchor file's (for a GPU), then measured ones."""
    sources = []

    def choose(name: str, given: float | None, anchor: float | None, measure) -> float:
        if given is not None:
            sources.append(f"{name} given")
            return given
        if anchor is not None:
            sources.append(f"{name} from the anchor file")
            return anchor
        sources.append(f"{name} {measure.__doc__.split(':')[0].lower()}")
        return measure()

    def measured_copy() -> float:
        """Measured: a large copy."""
        return copy_bandwidth(device) / 1e9

    def derived_exp() -> float:
        """From the clock: 16 per clock and multiprocessor."""
        return exp_rate(device)

    if device.type == "cuda":
        copy = choose("copy", copy_gb_per_s, anchor_ceilings.get("copy_GB_s"), measured_copy)
        exp = choose("exp", exp_per_s, anchor_ceilings.get("ex2_per_s"), derived_exp)
        return Ceilings("cuda", copy * 1e9, exp_per_s=exp, source=", ".join(sources))

    capability = kernel_capability()
    copy = choose("copy", copy_gb_per_s, None, measured_copy)
    sources.append(f"multiply-add peak of one core measured ({capability})")
    peak = fma_peak(capability)
    return Ceilings("cpu", copy * 1e9, fma_flops_per_s=peak, source=", ".join(sources))
