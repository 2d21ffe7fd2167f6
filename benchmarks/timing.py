"""Timing: alternating runs after a warm-up, reported as median and quartiles."""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# The shortest stretch that the host's clock is asked to resolve.
_MIN_HOST_RUN_SECONDS = 1e-3
# Cycles for which the GPU is kept waiting while the host enqueues a run (about half a millisecond,
# enough for a busy host): the events then enclose the kernels alone, not the gaps between launches.
_QUEUE_AHEAD_CYCLES = 1_000_000
_FEWEST_RUNS = 5


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call."""

    median: float
    q1: float
    q3: float
    best: float
    runs: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        if len(samples) > 1:
            q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        else:
            q1 = q3 = samples[0]
        return cls(statistics.median(samples), q1, q3, min(samples), len(samples))


# Blocks of a size that were freed are kept apart for the thread, and neighbours cannot join them.
_NO_THREAD_CACHE = "glibc.malloc.tcache_count=0"


def keep_freed_memory() -> None:
    """Has glibc keep the memory that one run frees for the next; may start the program anew.

    Else it may hand megabytes back to the system after every run, or after none, depending on what
    else lies where; to get pages again costs as much as a scan of them. Nor does it find the memory
    of a large tensor again, which PyTorch wants aligned to a page, once the thread's cache has
    taken a few bytes beside it. That cache is set by the environment alone, when a program starts.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "tcache_count" not in tunables:
        os.environ["GLIBC_TUNABLES"] = f"{tunables}:{_NO_THREAD_CACHE}".lstrip(":")
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    trim_threshold, mmap_threshold = -1, -3  # of malloc.h
    mallopt(trim_threshold, 1 << 30)
    mallopt(mmap_threshold, 1 << 25)  # the most that it takes


def _host_ms(call: Callable[[], object], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats * 1e3


def _cuda_ms(call: Callable[[], object], flush: torch.Tensor | None) -> float:
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    if flush is not None:
        flush.zero_()
    torch.cuda._sleep(_QUEUE_AHEAD_CYCLES)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    warmup: int,
    runs: int,
    budget: float = math.inf,
    cold_l2: bool = False,
) -> dict[str, Timing]:
    """Times several calls in turn, so that a drift of the machine meets them all.

    Args:
        calls: what to time, by name.
        device: CUDA work is timed by events, everything else by the host's clock.
        warmup: untimed rounds before the first timed one.
        runs: timed rounds.
        budget: seconds after which no further round starts, once there are five.
        cold_l2: overwrite the GPU's L2 cache before every run.
    """
    repeats = dict.fromkeys(calls, 1)
    flush = None
    if device.type == "cuda" and cold_l2:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device=device)
    for _ in range(warmup):
        for call in calls.values():
            call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    else:
        for name, call in calls.items():
            once = _host_ms(call, 1) / 1e3
            repeats[name] = max(1, math.ceil(_MIN_HOST_RUN_SECONDS / max(once, 1e-7)))

    samples: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for done in range(runs):
        if done >= _FEWEST_RUNS and time.perf_counter() - begin > budget:
            break
        for name, call in calls.items():
            if device.type == "cuda":
                samples[name].append(_cuda_ms(call, flush))
            else:
                samples[name].append(_host_ms(call, repeats[name]))
    return {name: Timing.of(values) for name, values in samples.items()}


def host_overhead_us(
    call: Callable[[], object], device: torch.device, *, calls: int, repeats: int = 5
) -> Timing:
    """Microseconds per call over `calls` calls in a row, the device's work awaited at the end."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    samples = []
    for _ in range(repeats + 1):  # the first is the warm-up
        synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        samples.append((time.perf_counter() - begin) / calls * 1e6)
    return Timing.of(samples[1:])
