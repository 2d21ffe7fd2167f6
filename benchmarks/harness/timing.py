"""Timing: alternating runs after a warm-up, reported as median and quartiles."""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# The shortest time that is measured with the host's clock.
_MIN_HOST_RUN_SECONDS = 1e-3
# Cycles for which the GPU waits while the host enqueues a run (about half a millisecond, enough for
# a busy host), so that the events enclose only the kernels, not the gaps between launches.
_QUEUE_AHEAD_CYCLES = 1_000_000
_FEWEST_RUNS = 5
# A runtime's idle threads may spin for 0.2 s, on cores that another process needs next.
REST_SECONDS = 0.3


@dataclass(frozen=True)
class Timing:
    """Statistics of a call's times, in milliseconds unless stated otherwise."""

    median: float
    q1: float
    q3: float
    best: float
    runs: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        q1 = q3 = samples[0]
        if len(samples) > 1:
            q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(statistics.median(samples), q1, q3, min(samples), len(samples))


# Disables the per-thread cache of freed blocks, with which neighboring free memory cannot merge.
_NO_THREAD_CACHE = "glibc.malloc.tcache_count=0"


def keep_freed_memory() -> None:
    """Makes glibc keep the memory that one run frees for the next; may restart the program.

    Otherwise glibc may return megabytes to the system after every run, or after none, depending on
    the layout of the heap, and getting pages back costs as much as scanning them. It also cannot
    reuse the memory of a large tensor, which PyTorch aligns to a page, once the thread's cache has
    taken a few bytes next to it. That cache can only be disabled by the environment at start.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "tcache_count" not in tunables:
        os.environ["GLIBC_TUNABLES"] = f"{tunables}:{_NO_THREAD_CACHE}".lstrip(":")
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    trim_threshold, mmap_threshold = -1, -3  # constants of <malloc.h>
    mallopt(trim_threshold, 1 << 30)
    mallopt(mmap_threshold, 1 << 25)  # the largest allowed value


def cuda_ms(
    call: Callable[[], object], flush: torch.Tensor | None = None, queue_ahead: bool = True
) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if flush is not None:
        flush.zero_()
    if queue_ahead:
        torch.cuda._sleep(_QUEUE_AHEAD_CYCLES)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def in_graph(
    call: Callable[[], object], calls: int = 1, *, capture_error_mode: str = "global"
) -> Callable[[], object]:
    """Returns a function that replays a CUDA graph of some calls and returns the last result.

    With a capture_error_mode of "thread_local", other threads may make calls during the capture
    that a graph cannot hold.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # the first calls may compile and tune
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=capture_error_mode):
        for _ in range(calls):
            result = call()

    def replay() -> object:
        graph.replay()
        return result

    replay.call = call  # keeps the tensors alive that the graph reads
    return replay


def sample(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    warmup: int,
    runs: int,
    budget: float = math.inf,
    cold_l2: bool = False,
    queue_ahead: bool = True,
) -> dict[str, list[float]]:
    """Returns the milliseconds of several calls, which alternate so that a drift of the machine
    affects all of them.

    Args:
        calls: the calls to time, by name.
        device: CUDA work is timed by events, everything else by the host's clock.
        warmup: the number of untimed rounds before the first timed one.
        runs: the number of timed rounds.
        budget: seconds after which no further round starts, once there are five.
        cold_l2: whether to overwrite the GPU's L2 cache before every run.
        queue_ahead: whether a run's kernels wait until all are launched, so that only the GPU's
            time counts; otherwise an idle GPU waits for the host, as in a user's program.
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
            once = max(timeit.timeit(call, number=1), 1e-7)
            repeats[name] = math.ceil(_MIN_HOST_RUN_SECONDS / once)

    samples: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for done in range(runs):
        if done >= _FEWEST_RUNS and time.perf_counter() - begin > budget:
            break
        for name, call in calls.items():
            if device.type == "cuda":
                samples[name].append(cuda_ms(call, flush, queue_ahead))
            else:
                seconds = timeit.timeit(call, number=repeats[name])
                samples[name].append(seconds / repeats[name] * 1e3)
    return samples


def measure(*arguments, **keywords) -> dict[str, Timing]:
    """Calls :func:`sample` and returns statistics of its times."""
    found = sample(*arguments, **keywords)
    return {name: Timing.of(values) for name, values in found.items()}


def host_overhead_us(call: Callable[[], object], device: torch.device, *, calls: int) -> Timing:
    """Returns the microseconds per call over `calls` consecutive calls, including the wait for the
    device at the end."""

    def row_of_calls() -> None:
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    samples = timeit.repeat(row_of_calls, number=1, repeat=6)
    return Timing.of([seconds / calls * 1e6 for seconds in samples[1:]])  # the first is the warm-up


def peak_mebibytes(call: Callable[[], object], device: torch.device) -> float | None:
    """Returns the GPU memory that a call needs beyond the memory allocated before it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
