"""Process groups for tests: processes that are started once and run the functions sent to them."""

from __future__ import annotations

import datetime
import faulthandler
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from programs import copies

# The longest that a test waits for the processes to start or for the result of a call. It is
# generous because all tests of a busy machine may run at the same time.
LIMIT_SECONDS = 240


class Ranks:
    """A process for each of `count` ranks.

    The processes meet through a shared folder, so that no port can be taken. Every rank creates the
    groups of the first 1, 2, ... `count` ranks; a function that creates other groups must run on
    all ranks. When a call fails the processes end, and the next call starts new ones.

    Args:
        count: number of ranks.
        folder: an empty folder.
        device: "cpu" uses gloo, "cuda" NCCL with a GPU for each rank.
        timeout: of the groups, in seconds.
    """

    def __init__(
        self, count: int, folder: Path, device: str = "cpu", timeout: float = LIMIT_SECONDS
    ) -> None:
        self.count, self.device, self._timeout = count, device, timeout
        self._folder, self._starts = folder, 0
        self._pipes, self._processes = [], []

    def __call__(
        self, function: Callable, *arguments, ranks: int | None = None, answering: int | None = None
    ) -> list:
        """Returns the results of function(group, *arguments) on each of the first `ranks` ranks, or
        on the first `answering` of these. Their tensors are moved to the CPU."""
        try:
            if not self._processes:
                self._start()
            pipes = self._pipes[:ranks]
            for pipe in pipes:
                pipe.send_bytes(_packed((function, len(pipes), arguments)))
            return self._collect(pipes[:answering])
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        context = copies()
        self._starts += 1
        rendezvous = f"file://{self._folder}/rendezvous{self._starts}"
        for rank in range(self.count):
            here, there = context.Pipe()
            arguments = (there, rank, self.count, rendezvous, self.device, self._timeout)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._collect(self._pipes)

    def _collect(self, pipes: Sequence) -> list:
        results, deadline = {}, time.monotonic() + LIMIT_SECONDS
        while len(results) < len(pipes):
            left = [pipe for pipe in pipes if pipe not in results]
            ready = wait(left, max(0, deadline - time.monotonic()))
            ranks = [self._pipes.index(pipe) for pipe in left]
            assert ready, f"ranks {ranks} did not answer within {LIMIT_SECONDS} s"
            for pipe in ready:
                results[pipe] = _unpacked(pipe.recv_bytes())
                assert not isinstance(results[pipe], RankError), str(results[pipe])
        return [results[pipe] for pipe in pipes]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []


class RankError(Exception):
    pass


def usable(ranks: Ranks, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Merges the steps of the ranks that do not exist into those of the last rank that does."""
    if len(lengths) <= ranks.count:
        return lengths
    return (*lengths[: ranks.count - 1], sum(lengths[ranks.count - 1 :]))


def lose_the_last(group, call: Callable[[], object]) -> str | None:
    """Ends the group's last rank; returns what a call then raises on the others, if anything."""
    dist.barrier(group)
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        os._exit(1)
    messages = raised_by([call])
    return messages[0] if messages else None


def raised_by(calls: Sequence[Callable[[], object]]) -> list[str]:
    """Returns the types and messages of the exceptions that calls raise; others add nothing."""
    messages = []
    for call in calls:
        try:
            call()
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def assert_match(messages: list[str], patterns: Sequence[str]) -> None:
    assert len(messages) == len(patterns), messages
    for message, pattern in zip(messages, patterns, strict=True):
        assert re.search(pattern, message), message


def _serve(
    pipe, rank: int, count: int, rendezvous: str, device: str, timeout_seconds: float
) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    if sys.platform == "linux":  # the interface has another name elsewhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl"}[device],
        init_method=rendezvous,
        rank=rank,
        world_size=count,
        timeout=timeout,
    )
    sizes = range(1, count + 1)
    groups = {size: dist.new_group(list(range(size)), timeout=timeout) for size in sizes}
    pipe.send_bytes(_packed(None))
    while True:
        try:
            function, size, arguments = _unpacked(pipe.recv_bytes())
        except EOFError:  # the tests are over
            os._exit(0)
        try:
            result = function(groups[size], *arguments)
        except Exception:
            result = RankError(f"rank {rank}: {traceback.format_exc()}")
        try:
            pipe.send_bytes(_packed(result))
        except BrokenPipeError:  # the caller no longer waits
            os._exit(1)


def _packed(value: object) -> bytes:
    """Serializes a value without shared memory, which must not outlive a process."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> object:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
