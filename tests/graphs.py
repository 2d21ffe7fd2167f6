"""Captures test calls in CUDA graphs."""

from collections.abc import Callable

import torch


def capture(step: Callable[[], tuple], **options: object) -> tuple[torch.cuda.CUDAGraph, tuple]:
    """Returns a graph of a step, and the results that its replays write. Two steps run before the
    capture, since the first ones choose kernels and allocate. The options are
    torch.cuda.graph's."""
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
