"""Chunked prefill: what is refused, and what PyTorch sees of a call."""

import pytest
import torch
from torch.library import opcheck

from cases import assert_refused, compiled_with_graphs
from graphs import capture
from opchecks import in_order
from selective_scan import selective_scan_prefill, selective_scan_prefill_ref
from test_selective_scan_prefill import BF16, BOUNDS, C64, Case, make

OP = torch.ops.selective_scan.selective_scan_prefill

# --- what is refused ------------------------------------------------------------------------------

# Values that only the host can see, and what is said of them.
BAD_VALUES = {
    "cache_indices": ([0, 1, 2, 3, 4, 6, 6], "be less than slots = 6, got 6"),
    "first_position": ([0, 0, -1, 0, 0, 0, 0], "be at least 0, got -1"),
    "checkpoint_slots": ([[6, -1, -1, -1]] * 7, "be less than slots = 6, got 6"),
    "columns": (
        [[0]] * 7,
        "have checkpoints of at least 2 for the positions of sequence 1, got 1",
    ),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_that_name_nothing(name, device):
    """Refused where the host sees them before anything changes; padding or 0 on CUDA."""
    values, sentence = BAD_VALUES[name]
    argument = "checkpoint_slots" if name == "columns" else name
    states = torch.randn(6, 12, 5, device=device)
    changes = {
        "states": states.clone(),
        "cache_indices": [0, 1, 2, 3, 4, -1, 5],
        "first_position": [0] * 7,
        "checkpoint_slots": [[-1] * 4] * 7,
        argument: values,
    }
    changes = {n: torch.as_tensor(value, device=device) for n, value in changes.items()}
    arguments = make(Case(), device) | changes
    refusing = [selective_scan_prefill_ref]
    if device == "cpu":
        refusing.append(selective_scan_prefill)
    for function in refusing:
        assert_refused(function, arguments, f"{argument} must {sentence}")
        assert torch.equal(arguments["states"], states)
    if device == "cuda":
        good = {
            "cache_indices": lambda given: torch.where(given >= 6, -1, given),
            "first_position": lambda given: given.clamp(min=0),
            "checkpoint_slots": lambda given: torch.where(given >= 6, -1, given),
            "columns": lambda given: torch.cat([given, torch.full_like(given, -1).expand(7, 9)], 1),
        }[name](arguments[argument])
        other = arguments | {"states": states.clone(), argument: good}
        expected = selective_scan_prefill(**other)
        assert torch.equal(selective_scan_prefill(**arguments), expected)
        assert torch.equal(arguments["states"], other["states"])


@pytest.mark.parametrize("every", [1, 3, 64])
def test_bad_values_do_no_harm(every, cuda_device):
    """What comes out has no meaning, but the call ends, and memory is left alone."""
    bad = torch.tensor([0, -9, 2**40, 149, 75, 30, 2**62, -(2**62)], device=cuda_device)
    for roll in range(len(bad)):
        values = bad.roll(roll)
        arguments = make(Case(every=every), cuda_device) | {
            "cu_seqlens": values,
            "cache_indices": values[1:],
            "first_position": values[:-1],
            "checkpoint_slots": values[None].expand(7, -1),
        }
        selective_scan_prefill(**arguments)
    torch.cuda.synchronize()


# --- as PyTorch sees it ---------------------------------------------------------------------------


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize(
    "case",
    [Case(), Case(optional=(), states=C64, every=0), Case(optional=("input_delta",))],
    ids=str,
)
def test_opcheck(case, with_out, device):
    arguments = make(case, device)
    if with_out:
        arguments["out"] = torch.empty_like(arguments["u"])
    opcheck(OP.default, in_order(OP, arguments))


def test_other_lengths_and_boundaries_do_not_compile_again(device):
    def step(arguments, out=None):
        return selective_scan_prefill(**arguments, out=out)

    compiled, graphs = compiled_with_graphs(step, dynamic=True)
    for total, bounds in ((150, BOUNDS), (149, BOUNDS), (201, (0, 7, 8, 9, 10, 180, 190, 199))):
        arguments = make(Case(total=total, bounds=bounds, every=0), device)
        copy = arguments | {"states": arguments["states"].clone()}
        assert torch.equal(compiled(copy), step(arguments))
        assert torch.equal(copy["states"], arguments["states"])
    assert len(graphs) == 1


def test_a_captured_call_takes_other_values(cuda_device):
    case = Case(u=BF16, states=BF16, layout="channel_last")
    arguments = make(case, cuda_device)
    before = arguments["states"].clone()
    graph, out = capture(lambda: selective_scan_prefill(**arguments))
    for shift in (0, 3):
        arguments["cu_seqlens"].copy_(torch.tensor(BOUNDS).clamp(min=shift))
        arguments["first_position"].add_(shift)
        arguments["cache_indices"].copy_(arguments["cache_indices"].roll(shift))
        arguments["has_initial_state"].logical_not_()
        arguments["states"].copy_(before)
        other = arguments | {"states": before.clone()}
        graph.replay()
        assert torch.equal(out, selective_scan_prefill(**other))
        assert torch.equal(arguments["states"], other["states"])
