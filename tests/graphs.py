"""CUDA graphs of what tests call."""

from collections.abc import Callable

import torch


def capture(step: Callable[[], tuple], **options: object) -> tuple[torch.cuda.CUDAGraph, tuple]:
    """A graph of a step, and the results that its replays write; the first steps, which choose and
    allocate, are not captured. Options are torch.cuda.graph's."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        captured = step()
    return graph, captured
