"""Timing: runs in turn after a warm-up, reported as median and quartiles."""

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

# The shortest stretch that the host's clock is asked to resolve.
_MIN_HOST_RUN_SECONDS = 1e-3
# Cycles for which the GPU is kept waiting while the host enqueues a run (about half a millisecond,
# enough for a busy host): the events then enclose the kernels alone, not the gaps between launches.
_QUEUE_AHEAD_CYCLES = 1_000_000
_FEWEST_RUNS = 5
# A runtime's idle threads may spin for 0.2 s, on cores that another process is to have next.
REST_SECONDS = 0.3


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call, where nothing else is said."""

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


# Blocks of a size that were freed are kept apart for the thread, and neighbours cannot join them.
_NO_THREAD_CACHE = "glibc.malloc.tcache_count=0"


def keep_freed_memory() -> None:
    """Has glibc keep the memory that one run frees for the next; may start the program anew.

    Else it may hand megabytes back to the system after every run, or after none, depending on what
    else lies where; to get pages again costs as much as a scan of them. Nor does it find the memory
    of a large tensor again, which PyTorch wants aligned to a page, once the thread's cache has
    taken a few bytes beside it. That cache is set by the environment alone, when a program starts.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "tcache_count" not in tunables:
        os.environ["GLIBC_TUNABLES"] = f"{tunables}:{_NO_THREAD_CACHE}".lstrip(":")
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    trim_threshold, mmap_threshold = -1, -3  # of <malloc.h>
    mallopt(trim_threshold, 1 << 30)
    mallopt(mmap_threshold, 1 << 25)  # the most that it takes


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
    """The replay of a CUDA graph of some calls, whose last result it keeps.

    With capture_error_mode of "thread_local" other threads may do meanwhile what no graph can hold.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and chooses what the first calls do
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

    replay.call = call  # the graph reads what it holds
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
    """Milliseconds of several calls made in turn, so that a drift of the machine meets them all.

    Args:
        calls: what to time, by name.
        device: CUDA work is timed by events, everything else by the host's clock.
        warmup: untimed rounds before the first timed one.
        runs: timed rounds.
        budget: seconds after which no further round starts, once there are five.
        cold_l2: overwrite the GPU's L2 cache before every run.
        queue_ahead: have a run's kernels wait for its launches, so that only the GPU's time counts;
            without it an idle GPU waits for the host, as a user's would.
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
    """As :func:`sample`, its times summed up."""
    found = sample(*arguments, **keywords)
    return {name: Timing.of(values) for name, values in found.items()}


def host_overhead_us(
    call: Callable[[], object], device: torch.device, *, calls: int, repeats: int = 5
) -> Timing:
    """Microseconds per call over `calls` calls in a row, the device's work awaited at the end."""

    def row_of_calls() -> None:
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    samples = timeit.repeat(row_of_calls, number=1, repeat=repeats + 1)
    return Timing.of([seconds / calls * 1e6 for seconds in samples[1:]])  # the first is the warm-up


def peak_mebibytes(call: Callable[[], object], device: torch.device) -> float | None:
    """What a call needs of the GPU's memory beyond what is there before it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20
