"""Calls every function without memory for its results; test_out_of_memory.py runs this program.

    out_of_memory.py cpu|cuda

It is a process of its own because the memory limits apply to a whole process.
"""

import contextlib
import gc
import resource
import sys
import time
from pathlib import Path

import torch

from selective_scan import (
    S6,
    adaptive_unitary_scan_fn,
    diagonal_scan_fn,
    selective_scan_fn,
    selective_state_update,
)

BATCH, DIM, SEQLEN, DSTATE = 2, 64, 40960, 2  # 20 MiB per sequence
SLACK = 2**24  # less than one sequence takes
WORDS = {"cpu": "can't allocate memory", "cuda": "CUDA out of memory"}
TYPES = {"cpu": RuntimeError, "cuda": torch.OutOfMemoryError}
device = sys.argv[1]


@contextlib.contextmanager
def limit_of_processor():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SLACK, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def limit_of_gpu():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    taken = []
    for size in (SLACK, SLACK // 8):  # free blocks first, then the gaps between tensors
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device=device))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


no_memory = {"cpu": limit_of_processor, "cuda": limit_of_gpu}[device]


def tensors_alive():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def assert_fails(function, kind):
    with no_memory():
        try:
            function()
        except RuntimeError as error:
            caught = type(error), str(error)
        else:
            raise AssertionError("there was memory")
    assert caught[0] is kind, caught
    assert WORDS[device] in caught[1], caught
    assert "API call failed" not in caught[1], caught


def assert_goes_on(function, leaves, kind):
    """Asserts that forward and backward fail as they should, and that later calls work."""
    for leaf in leaves:
        leaf.requires_grad_()
    out = function()
    cotangent = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, cotangent)
    out = function().detach()

    assert_fails(function, kind)
    again = function()
    torch.testing.assert_close(again, out)
    assert_fails(
        lambda: torch.autograd.grad(again, leaves, cotangent, retain_graph=True), TYPES[device]
    )
    gradients = torch.autograd.grad(again, leaves, cotangent)
    for gradient, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-3, atol=1e-3 * float(right.abs().max()))


def check(name, function, leaves, kind=TYPES[device]):
    """Runs a check and asserts that no tensor is kept: whoever catches the error may need the
    memory."""
    alive = tensors_alive()
    assert_goes_on(function, leaves, kind)
    until = time.monotonic() + 5  # autograd's thread may still have to release a failed pass
    while tensors_alive() != alive and time.monotonic() < until:
        time.sleep(0.01)
    assert tensors_alive() == alive, name
    print(name)


def main():
    gc.disable()  # memory that it frees during a call would be available to the call
    u, delta, z = (torch.randn(BATCH, DIM, SEQLEN, device=device) for _ in range(3))
    steps = torch.rand(BATCH, DIM, SEQLEN, device=device) * 0.1
    A = -torch.rand(DIM, DSTATE, device=device) - 0.5
    B, C = (torch.randn(DIM, DSTATE, device=device) for _ in range(2))
    arguments = (u, steps, A, B, C, None, z)
    check("selective_scan_fn", lambda: selective_scan_fn(*arguments), [u, steps, A, B, C, z])
    check(
        "selective_scan_fn, other strides",
        lambda: selective_scan_fn(u.mT.contiguous().mT, *arguments[1:]),
        [u, steps, A, B, C, z],
    )
    op = torch.ops.selective_scan.selective_scan_fwd
    check("the op", lambda: op(*arguments, save_states=True)[0], [u, steps, A], RuntimeError)
    decay = 1 - steps.detach()
    check("diagonal_scan_fn", lambda: diagonal_scan_fn(decay, delta), [decay, delta])
    x = torch.randn(DIM, DSTATE, DIM, device=device) / DIM
    x_bias = torch.randn(DIM, DSTATE, device=device)
    b, c = (torch.randn(DSTATE, dtype=torch.complex64, device=device) for _ in range(2))
    D = torch.randn(DIM, device=device)
    leaves = [u, steps, x, x_bias, b, c, D, z]
    unitary = (u, steps, x, x_bias, b, c, D, z)
    check("adaptive_unitary_scan_fn", lambda: adaptive_unitary_scan_fn(*unitary), leaves)
    state = torch.zeros(BATCH, DIM, DSTATE, device=device)
    rows = [tensor.detach().mT for tensor in (u, steps)]
    projections = torch.randn(2, BATCH, SEQLEN, DSTATE, device=device)
    with torch.no_grad():
        assert_fails(lambda: selective_state_update(state, *rows, A, *projections), TYPES[device])
        assert not state.any()
        selective_state_update(state, *rows, A, *projections)
    print("selective_state_update")
    model = S6(d_model=DIM, d_state=DSTATE, device=device)
    sequence = u.detach().mT.contiguous()
    check("S6", lambda: model(sequence), [sequence, *model.parameters()])


if __name__ == "__main__":
    main()
