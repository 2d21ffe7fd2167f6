"""The state update: what is refused, and with which sentence, and what PyTorch makes of it."""

import pytest
import torch

from cases import assert_refused, compiled_with_graphs
from graphs import capture
from opchecks import in_order
from selective_scan import selective_state_update, selective_state_update_ref
from test_selective_state_update import Case, make

BF16, C64 = torch.bfloat16, torch.complex64
OP = torch.ops.selective_scan.selective_state_update


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


@pytest.mark.parametrize("function", [selective_state_update, selective_state_update_ref])
def test_a_state_of_no_rows_may_have_strides_of_0(function, device):
    """No elements share memory where there are none."""
    arguments = make(Case(), device)
    for name in ("state", "x", "dt", "B", "C", "z"):
        arguments[name] = arguments[name][:0]
    arguments["state"] = arguments["state"][..., :1].expand(*arguments["state"].shape)
    assert arguments["state"].stride(-1) == 0
    assert function(**arguments).shape == arguments["x"].shape


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
    torch.library.opcheck(OP.default, in_order(OP, arguments))


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


def test_in_a_cuda_graph_with_changing_indices(cuda_device):
    arguments = make(Case(batch=4, dim=1536, indices=torch.int32), cuda_device)
    copy = arguments | {
        name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)
    }
    graph, out = capture(lambda: selective_state_update(**arguments))
    arguments["state"].copy_(copy["state"])
    for shift in range(3):
        indices = copy["state_batch_indices"].roll(shift)
        for one in (arguments, copy):
            one["state_batch_indices"].copy_(indices)
        graph.replay()
        assert torch.equal(selective_state_update(**copy), out)
        assert torch.equal(arguments["state"], copy["state"])
