"""Memory kept for the backward pass, or allocated besides inputs and results, is bounded.

The unit is the states at the chunk boundaries: batch·dim·dstate·seqlen / 32 values. The states of
every step would be 32 times as many.
"""

import ctypes
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import programs
from gpu_kernels import skip_without_path
from problem import Case, detached, inputs_on, make, op_arguments
from selective_scan import selective_scan_fn

CHUNK = 32
CASES = [
    Case(batch=2, dim=128, seqlen=1024, dstate=16, groups=1),
    Case(batch=2, dim=128, seqlen=1024, dstate=16, groups=1, complex=True),
    Case(batch=1, dim=128, seqlen=1024, groups=1, dtype=torch.bfloat16, layout="channel_last"),
    Case(batch=1, dim=128, seqlen=1000, groups=1, B="constant", C="constant", reverse=True),
]


def states_bytes(case):
    size = (2 if case.complex else 1) * (8 if case.is_double else 4)
    return size * case.batch * case.dim * case.dstate * -(-case.seqlen // CHUNK)


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_saved_for_backward(case, device):
    inputs = inputs_on(case, device)
    known = {tensor.data_ptr() for tensor in inputs.values()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        outputs = selective_scan_fn(**inputs, **make(case).options, return_last_state=True)
    assert len(saved) == len(inputs) + 1
    new = {tensor.data_ptr(): tensor for tensor in saved if tensor.data_ptr() not in known}
    for tensor in outputs:
        assert tensor.data_ptr() not in new, "outputs are recomputed, not saved"
    assert bytes_of(new.values()) <= states_bytes(case)


def test_nothing_is_saved_where_no_gradient_is_wanted(device):
    inputs = detached(inputs_on(CASES[0], device))
    *_, states = torch.ops.selective_scan.selective_scan_fwd(
        *(inputs[name] for name in ("u", "delta", "A", "B", "C"))
    )
    assert states is None


def peak_on_cpu(function):
    """Returns the peak of allocated bytes above those at the start, and the function's result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    assert events
    current = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        current += size
        peak = max(peak, current)
    return peak, result


def peak_on_cuda(function):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    return torch.cuda.max_memory_allocated() - before, result


@pytest.mark.parametrize("case", CASES, ids=str)
def test_peak_beside_inputs_and_results(case, device):
    """Saved states, transposes and workspaces together take a few units at most. The floor takes
    more, so GPUs that have no other path are skipped."""
    if device == "cuda":
        skip_without_path("streamed")
    peak_of = {"cpu": peak_on_cpu, "cuda": peak_on_cuda}[device]
    inputs = inputs_on(case, device)
    arguments = op_arguments(case, inputs)
    cotangents = [make(case).cotangents[name].to(device) for name in ("out", "last_state")]
    ops = torch.ops.selective_scan
    ops.selective_scan_fwd(*arguments, True)  # allocates what is kept for all calls
    slack = 2**20

    peak, outputs = peak_of(lambda: ops.selective_scan_fwd(*arguments, True))
    assert peak <= bytes_of(outputs[:2]) + 2 * states_bytes(case) + slack

    peak, gradients = peak_of(lambda: ops.selective_scan_bwd(*cotangents, *arguments, outputs[2]))
    # On a GPU, segments may hold as many states as are saved for chunks, and small tiles leave more
    # partial sums.
    units = 4 if device == "cuda" else 2
    assert peak <= bytes_of(gradients) + units * states_bytes(case) + slack


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of_memory(address):
    """Returns Linux's flags for the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(number, 16) for number in found.groups())
            inside = begin <= address < end
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise ValueError(f"no mapping holds {address:#x}")


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="needs Linux with transparent huge pages")
def test_large_results_ask_for_huge_pages(seeded):
    case = Case(batch=1, dim=512, seqlen=4096, groups=1, dtype=torch.bfloat16)
    inputs = detached(inputs_on(case, "cpu"))
    out = selective_scan_fn(**inputs, **make(case).options)
    middle = out.data_ptr() + out.numel() * out.element_size() // 2
    assert "hg" in flags_of_memory(middle)


@pytest.mark.parametrize(
    ("batch", "dim", "seqlen", "dstate", "tile_channels"),
    [(8, 1280, 128, 256, 12), (44, 168, 304, 64, 24)],
)
def test_partial_sums_of_many_states(batch, dim, seqlen, dstate, tile_channels, cuda_device):
    """With many states a block has few channels, but successive tiles share partial sums."""
    case = Case(batch=batch, dim=dim, seqlen=seqlen, dstate=dstate, groups=1)
    inputs = inputs_on(case, cuda_device)
    arguments = op_arguments(case, inputs)
    cotangents = [make(case).cotangents[name].to(cuda_device) for name in ("out", "last_state")]
    ops = torch.ops.selective_scan
    outputs = ops.selective_scan_fwd(*arguments, True)
    peak, gradients = peak_on_cuda(
        lambda: ops.selective_scan_bwd(*cotangents, *arguments, outputs[2])
    )
    multiprocessors = torch.cuda.get_device_properties(cuda_device).multi_processor_count
    partial_sum = 4 * case.seqlen * 2 * case.dstate
    in_all = 2 * multiprocessors * partial_sum
    assert in_all < batch * dim // tile_channels * partial_sum
    assert peak <= bytes_of(gradients) + states_bytes(case) + in_all


# Prints by how many bytes the heap grows per call of each operator. PyTorch converts the arguments
# of a call for the library, and a conversion that frees too little shows in every round of calls.
GROWTH = """
import ctypes, gc, itertools, sys
sys.path.insert(0, sys.argv[1])
import torch
import operator_calls

CALLS, ROUNDS = 20, 4
Figures = type("Figures", (ctypes.Structure,), {"_fields_": [
    (name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks "
    "uordblks fordblks keepcost".split()
]})
figures = ctypes.CDLL(None).mallinfo2
figures.restype = Figures
torch.set_num_threads(1)
gc.freeze()  # makes collections fast

def used():
    gc.collect()
    return figures().uordblks

for name in (*operator_calls.DIFFERENTIABLE, *operator_calls.IN_PLACE):
    function, arguments = operator_calls.make(name, "cpu")
    can_differ = name in operator_calls.DIFFERENTIABLE
    if can_differ:
        arguments = [x.requires_grad_() if x.is_floating_point() else x for x in arguments]

    def call():
        out = function(*arguments)
        if can_differ:
            out = out[0] if isinstance(out, (tuple, list)) else out
            torch.autograd.grad(out.abs().sum(), [x for x in arguments if x.requires_grad],
                                allow_unused=True)

    marks = []
    for _ in range(1 + ROUNDS):
        for _ in range(CALLS):
            call()
        marks.append(used())
    print(f"{name}: {min(later - mark for mark, later in itertools.pairwise(marks)) / CALLS}")
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc"
)
def test_calls_keep_no_memory(tmp_path):
    (script := tmp_path / "growth.py").write_text(GROWTH)
    done = programs.run(script, Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    growth = dict(line.rsplit(": ", 1) for line in done.stdout.splitlines())
    assert len(growth) > 20
    assert {name: bytes for name, bytes in growth.items() if float(bytes) >= 8} == {}
