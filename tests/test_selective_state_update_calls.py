"""The state update: what is refused, and with which sentence, and what PyTorch makes of it."""

import pytest
import torch

from cases import (
    assert_all_refused,
    assert_refused,
    bad_calls_of,
    compiled_with_graphs,
    ones,
    ways_into,
)
from selective_scan import selective_state_update, selective_state_update_ref
from test_selective_state_update import Case, make

BF16, C64, INT64 = torch.bfloat16, torch.complex64, torch.int64
# In the order of the op.
ORDER = (
    *("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus"),
    *("state_batch_indices", "dst_state_batch_indices", "pad_slot_id", "out"),
    *("discretization_method", "A_is_log", "input_delta"),
)


def op_arguments(arguments: dict) -> tuple:
    defaults = {"pad_slot_id": -1, "A_is_log": False}
    return tuple((defaults | arguments).get(name) for name in ORDER)


OP = torch.ops.selective_scan.selective_state_update
WAYS = ways_into(OP, op_arguments, selective_state_update, selective_state_update_ref)


STEPS = {"steps": 2}
HEADS = {"heads": 4, "dim": 6}
# Changes of the case, the name of what is wrong, what it is, and the sentence behind "must ".
BAD = [
    ({}, "state", ones(3, 20),
     "be (slots, dim, dstate) or (slots, heads, dim, dstate), got (3, 20)"),
    ({}, "state", ones(3, 20, 0), "have dstate of at least 1, got (3, 20, 0)"),
    ({}, "state", ones(3, 20, 16, dtype=INT64),
     "have dtype float32, float16, bfloat16 or float64, got int64"),
    ({}, "state", ones(3, 20, 16, dtype=C64),
     "have dtype float32, float16, bfloat16 or float64, got complex64"),
    ({"state": C64}, "state", ones(3, 20, 16),
     "have dtype complex64 or complex128 (complex A), got float32"),
    ({}, "x", ones(3, 20, 1, 1), "be (batch, dim) or (batch, steps, dim), got (3, 20, 1, 1)"),
    (HEADS, "x", ones(3, 6), "be (batch, heads, dim) or (batch, steps, heads, dim), got (3, 6)"),
    ({}, "x", ones(3, 21), "be (batch, dim) = (3, 20), got (3, 21)"),
    ({}, "x", ones(2, 20), "be (batch, dim) = (3, 20), got (2, 20)"),
    ({"indices": torch.int32}, "x", ones(2, 21), "be (batch, dim) = (*, 20), got (2, 21)"),
    (STEPS, "x", ones(3, 2, 21), "be (batch, steps, dim) = (3, *, 20), got (3, 2, 21)"),
    ({}, "dt", ones(3, 1), "be (batch, dim) = (3, 20), got (3, 1)"),
    ({}, "input_delta", ones(3, 1), "be (batch, dim) = (3, 20), got (3, 1)"),
    ({}, "input_delta", ones(3, 20, dtype=C64),
     "have dtype float32, float16, bfloat16 or float64, got complex64"),
    (STEPS, "dt", ones(3, 3, 20), "be (batch, steps, dim) = (3, 2, 20), got (3, 3, 20)"),
    ({}, "A", ones(20, 15), "be (dim, dstate) = (20, 16), got (20, 15)"),
    (HEADS, "A", ones(6, 16), "be (heads, dim, dstate) = (4, 6, 16), got (6, 16)"),
    ({}, "A", ones(20, 16, dtype=BF16),
     "have dtype float32, float64, complex64 or complex128, got bfloat16"),
    ({}, "B", ones(3), "be (batch, dstate) or (batch, groups, dstate), got (3,)"),
    (STEPS, "B", ones(3, 16),
     "be (batch, steps, dstate) or (batch, steps, groups, dstate), got (3, 16)"),
    ({}, "B", ones(3, 15), "be (batch, dstate) = (3, 16), got (3, 15)"),
    ({}, "B", ones(3, 3, 16), "have a number of groups that divides dim = 20, got 3"),
    (HEADS, "B", ones(3, 3, 16), "have a number of groups that divides heads = 4, got 3"),
    ({"groups": 2}, "C", ones(3, 4, 16), "have as many groups as B, 2, got 4"),
    ({"state": C64}, "C", ones(3, 16),
     "have dtype complex64 or complex128 (complex A), got float32"),
    ({}, "D", ones(1), "be (dim,) = (20,), got (1,)"),
    (HEADS, "D", ones(6), "be (heads, dim) = (4, 6), got (6,)"),
    ({}, "z", ones(3, 20, 1), "be (batch, dim) = (3, 20), got (3, 20, 1)"),
    ({}, "dt_bias", ones(20, dtype=C64),
     "have dtype float32, float16, bfloat16 or float64, got complex64"),
    ({}, "state_batch_indices", ones(2, dtype=INT64), "be (batch,) = (3,), got (2,)"),
    ({}, "state_batch_indices", ones(3), "have dtype int32 or int64, got float32"),
    ({}, "dst_state_batch_indices", ones(3, 2, dtype=INT64),
     "be (batch, steps) = (3, 1), got (3, 2)"),
    (STEPS, "dst_state_batch_indices", ones(3, 3, dtype=INT64),
     "be (batch, steps) = (3, 2), got (3, 3)"),
    ({}, "dst_state_batch_indices", ones(3, 1, 1, dtype=INT64),
     "be (batch,) or (batch, steps), got (3, 1, 1)"),
    ({}, "out", ones(3, 21), "be (batch, dim) = (3, 20), got (3, 21)"),
    ({}, "out", ones(3, 20, dtype=BF16), "have dtype float32, got bfloat16"),
    ({}, "out", ones(20).expand(3, 20), "have no stride of 0, got strides (0, 1)"),
    ({}, "state", ones(3, 20, 1).expand(3, 20, 16), "have no stride of 0, got strides (20, 1, 0)"),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_bad_calls_are_refused_in_the_same_words(way, device):
    assert_all_refused(WAYS[way], bad_calls_of(make, Case, BAD, device))


@pytest.mark.parametrize("function", [selective_state_update, selective_state_update_ref])
def test_wrong_types(function, device):
    arguments = make(Case(), device)
    for name, value, wanted, got in (
        ("state", None, "a Tensor", "NoneType"),
        ("out", 1.0, "a Tensor or None", "float"),
        ("dt_softplus", 1, "a bool", "int"),
        ("pad_slot_id", True, "an int", "bool"),
        ("pad_slot_id", 1.0, "an int", "float"),
        ("discretization_method", None, "a str", "NoneType"),
    ):
        message = f"{name} must be {wanted}, got {got}"
        assert_refused(function, arguments | {name: value}, message, TypeError)
    other = "cuda" if device == "cpu" else "cpu"
    with pytest.raises(ValueError, match=f"backend '{other}' needs tensors on {other}"):
        function(**arguments, backend=other)


@pytest.mark.parametrize("name", ["state_batch_indices", "dst_state_batch_indices"])
def test_indices_of_no_slot(name, device):
    """Refused where the host sees them before anything changes; taken for padding on CUDA."""
    arguments = make(Case(), device)
    indices = torch.tensor([0, 3, 2], device=device)
    arguments["state_batch_indices"] = torch.arange(3, device=device)
    arguments[name] = indices
    before = arguments["state"].clone()
    refusing = [selective_state_update_ref]
    if device == "cpu":
        refusing.append(selective_state_update)
    for function in refusing:
        assert_refused(function, arguments, f"{name} must be less than slots = 3, got 3")
        assert torch.equal(arguments["state"], before)
    if device == "cuda":
        padded = arguments | {"state": before.clone(), name: torch.where(indices == 3, -1, indices)}
        expected = selective_state_update(**padded)
        assert torch.equal(selective_state_update(**arguments), expected)
        assert torch.equal(arguments["state"], padded["state"])


# --- as PyTorch sees it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(optional=(), state=C64, groups=2),
        Case(heads=2, steps=2, indices=torch.int32, destinations=2, state=BF16),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_out", [False, True])
def test_opcheck(case, with_out, device):
    arguments = make(case, device)
    if with_out:
        arguments["out"] = torch.empty_like(arguments["x"])
    torch.library.opcheck(OP.default, op_arguments(arguments))


def test_compiles_for_changing_batches(device):
    def step(arguments, out=None):
        return selective_state_update(**arguments, out=out)

    compiled, graphs = compiled_with_graphs(step, dynamic=True)
    for batch in (5, 7, 9):  # that no two dimensions are as large by chance
        arguments = make(Case(batch=batch, indices=torch.int32), device)
        copy = arguments | {"state": arguments["state"].clone()}
        assert torch.equal(compiled(copy), step(arguments))
        assert torch.equal(copy["state"], arguments["state"])
    assert len(graphs) == 1


@pytest.mark.parametrize("with_out", [False, True])
def test_inductor_changes_the_state_in_place(with_out, device):
    torch._dynamo.reset()
    arguments = make(Case(batch=2, dim=8, dstate=4), device)
    state = arguments["state"].clone()
    out = torch.empty_like(arguments["x"]) if with_out else None

    def step(arguments, out):
        return 2 * selective_state_update(**(arguments | {"x": arguments["x"] + 1}), out=out)

    result = torch.compile(step, fullgraph=True)(arguments | {"state": state}, out)
    expected = step(arguments, None if out is None else out.clone())
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(state, arguments["state"])
    assert out is None or torch.equal(2 * out, result)


@pytest.mark.cuda
def test_in_a_cuda_graph_with_changing_indices(cuda_device):
    arguments = make(Case(batch=4, dim=1536, indices=torch.int32), cuda_device)
    copy = arguments | {
        name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)
    }
    selective_state_update(**arguments)
    arguments["state"].copy_(copy["state"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = selective_state_update(**arguments)
    arguments["state"].copy_(copy["state"])
    for shift in range(3):
        indices = copy["state_batch_indices"].roll(shift)
        for one in (arguments, copy):
            one["state_batch_indices"].copy_(indices)
        graph.replay()
        assert torch.equal(selective_state_update(**copy), out)
        assert torch.equal(arguments["state"], copy["state"])
