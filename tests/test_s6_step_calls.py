"""A step through a stack of layers: what is refused, with which sentence, and what PyTorch makes of
it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cases import (
    REAL,
    assert_refused,
    compiled_with_graphs,
    ones,
)
from opchecks import in_order
from refusals import Way, by_op, outcome_of
from s6_step import s6_step, s6_step_ref
from selective_scan._s6_step import StackTensors
from test_s6_step import BASE, assert_same_states, copy_of, make, states_of

pytestmark = pytest.mark.usefixtures("step_kernel")

BF16, F64, C64, INT64 = torch.bfloat16, torch.float64, torch.complex64, torch.int64
OPTIONS = {"eps": 1e-5, "delta_softplus": True, "discretization_method": "zoh"}


def of_op(arguments: dict) -> dict:
    """What the op is given, which takes the lists of the stack one by one."""
    given = OPTIONS | arguments
    return given | given.pop("stack")._asdict()


CALL_OP = Way(lambda arguments: by_op("s6_step")(of_op(arguments)))
WAYS = {
    "function": Way(lambda arguments: s6_step(**arguments)),
    "reference": Way(lambda arguments: s6_step_ref(**arguments)),
    "op": CALL_OP,
    "fake": CALL_OP.faked,
}


def assert_all_refused(way: str, bad_calls) -> None:
    """Each of the pairs of arguments and a message is refused with it."""
    failures = []
    for arguments, message in bad_calls:
        outcome = outcome_of(WAYS[way], arguments)
        if outcome != (RuntimeError, f"selective_scan: {message}"):
            failures.append(f"expected {message}\n  got {outcome}")
    assert not failures, "\n".join(failures)


POOL = {"slots": 4}
HEAD = {"vocabulary": 6}
# Changes of the case, where something is wrong, what it is, the name in the sentence and its end.
BAD = [
    ({}, "hidden", ones(2, 32), "hidden", "be (batch, steps, d_model), got (2, 32)"),
    ({}, "hidden", ones(2, 1, 32, dtype=C64), "hidden", f"have dtype {REAL}, got complex64"),
    ({}, ("norm", 1), ones(31), "norm[1]", "be (d_model,) = (32,), got (31,)"),
    ({}, ("norm", 1), ones(32, dtype=BF16), "norm[1]",
     "have dtype float32 (as norm[0]), got bfloat16"),
    ({}, ("in_proj", 0), ones(128, 33), "in_proj[0]",
     "be (2*d_inner, d_model) = (128, 32), got (128, 33)"),
    ({}, ("in_proj", 1), ones(64, 32), "in_proj[1]",
     "be (2*d_inner, d_model) = (128, 32), got (64, 32)"),
    ({}, ("in_proj", 0), ones(128, 32, dtype=INT64), "in_proj[0]",
     f"have dtype {REAL}, got int64"),
    ({}, ("conv1d", 0), ones(64, 4), "conv1d[0]",
     "be (d_inner, 1, width) = (*, 1, *), got (64, 4)"),
    ({}, ("conv1d", 1), ones(64, 1, 5), "conv1d[1]",
     "be (d_inner, 1, width) = (64, 1, 4), got (64, 1, 5)"),
    ({}, ("conv1d", 1), ones(64, 1, 4, dtype=BF16), "conv1d[1]",
     "have dtype float32 (as in_proj[0]), got bfloat16"),
    ({}, ("conv1d_bias", 0), ones(63), "conv1d_bias[0]", "be (d_inner,) = (64,), got (63,)"),
    ({}, ("x_proj", 1), ones(33, 64), "x_proj[1]",
     "be (dt_rank+2*dstate, d_inner) = (34, 64), got (33, 64)"),
    ({}, ("x_proj", 0), ones(34, 64, dtype=F64), "x_proj[0]",
     "have dtype float32 (as in_proj[0]), got float64"),
    ({}, ("dt_proj", 1), ones(64, 3), "dt_proj[1]", "be (d_inner, dt_rank) = (64, 2), got (64, 3)"),
    ({}, ("dt_proj_bias", 1), ones(64, 1), "dt_proj_bias[1]", "be (d_inner,) = (64,), got (64, 1)"),
    ({}, ("A_log", 1), ones(64, 15), "A_log[1]", "be (d_inner, dstate) = (64, 16), got (64, 15)"),
    ({}, ("A_log", 0), ones(64, 16, dtype=C64), "A_log[0]", f"have dtype {REAL}, got complex64"),
    ({}, ("D", 0), ones(1), "D[0]", "be (d_inner,) = (64,), got (1,)"),
    ({}, ("out_proj", 1), ones(32, 63), "out_proj[1]",
     "be (d_model, d_inner) = (32, 64), got (32, 63)"),
    ({"biases": ("out_proj",)}, ("out_proj_bias", 0), ones(64), "out_proj_bias[0]",
     "be (d_model,) = (32,), got (64,)"),
    ({}, ("conv_state", 1), ones(2, 64, 4), "conv_state[1]",
     "be (batch, d_inner, width-1) = (2, 64, 3), got (2, 64, 4)"),
    (POOL, ("conv_state", 1), ones(3, 64, 3), "conv_state[1]",
     "be (slots, d_inner, width-1) = (4, 64, 3), got (3, 64, 3)"),
    ({}, ("conv_state", 1), ones(2, 64, 3), "conv_state[1]",
     "have the strides of conv_state[0], (192, 1, 64), got (192, 3, 1)"),
    ({}, ("state", 0), ones(3, 64, 16), "state[0]",
     "be (batch, d_inner, dstate) = (2, 64, 16), got (3, 64, 16)"),
    ({}, ("state", 1), ones(2, 64, 16, dtype=BF16), "state[1]",
     "have dtype float32 (as state[0]), got bfloat16"),
    ({}, ("state", 1), ones(2, 16, 64).transpose(1, 2), "state[1]",
     "have the strides of state[0], (1024, 16, 1), got (1024, 1, 64)"),
    ({}, "norm_f", ones(33), "norm_f", "be (d_model,) = (32,), got (33,)"),
    (HEAD, "head", ones(6, 31), "head", "be (vocabulary, d_model) = (*, 32), got (6, 31)"),
    (HEAD, "head", ones(6, 32, dtype=BF16), "head",
     "have dtype float32 (as in_proj[0]), got bfloat16"),
    (POOL, "state_batch_indices", ones(3, dtype=INT64), "state_batch_indices",
     "be (batch,) = (2,), got (3,)"),
    (POOL, "state_batch_indices", ones(2), "state_batch_indices",
     "have dtype int32 or int64, got float32"),
    ({}, "workspace", ones(8), "workspace", "have dtype uint8, got float32"),
    ({}, "discretization_method", "euler", "discretization_method",
     "be one of zoh, foh, bilinear, poly, highorder, rk4, got 'euler'"),
]  # fmt: skip


def changed(arguments: dict, place: object, value: object, device: str) -> dict:
    if isinstance(value, torch.Tensor):
        value = value.to(device)
    if isinstance(place, str):
        return arguments | {place: value}
    name, layer = place
    entries = list(getattr(arguments["stack"], name))
    entries[layer] = value
    return arguments | {"stack": arguments["stack"]._replace(**{name: entries})}


@pytest.mark.parametrize("way", WAYS)
def test_bad_calls_are_refused_in_the_same_words(way, device):
    bad_calls = (
        (changed(make(BASE.with_(**changes), device), place, value, device), f"{name} must {end}")
        for changes, place, value, name, end in BAD
    )
    assert_all_refused(way, bad_calls)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("changes", "lists", "message"),
    [
        ({}, {"in_proj": []}, "in_proj must have at least one tensor, got none"),
        ({}, {"x_proj": []}, "x_proj must have as many tensors as in_proj, 2, got 0"),
        ({}, {"conv1d_bias": [ones(64)]},
         "conv1d_bias must have as many tensors as in_proj, 2, got 1"),
        ({}, {"state": [ones(2, 64, 16)] * 3},
         "state must have as many tensors as in_proj, 2, got 3"),
        ({"width": 9}, {}, "conv1d[0] must have width of 1 to 8, got (64, 1, 9)"),
        ({"dstate": 65}, {}, "A_log[0] must have dstate of 1 to 64, got (64, 65)"),
        ({}, {"state": [ones(2, 64, 1).expand(2, 64, 16)] * 2},
         "state[0] must have no stride of 0, got strides (64, 1, 0)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_lists_are_refused_in_the_same_words(way, changes, lists, message):
    arguments = make(BASE.with_(**changes))
    arguments["stack"] = arguments["stack"]._replace(**lists)
    assert_all_refused(way, [(arguments, message)])


@pytest.mark.parametrize("function", [s6_step, s6_step_ref])
def test_wrong_types(function, device):
    arguments = make(BASE, device)
    stack = arguments["stack"]
    for change, message in (
        ({"hidden": None}, "hidden must be a Tensor, got NoneType"),
        ({"norm_f": 1.0}, "norm_f must be a Tensor or None, got float"),
        ({"stack": stack._replace(D=None)}, "D must be a list of Tensors, got NoneType"),
        ({"stack": stack._replace(D=stack.D[0])}, "D must be a list of Tensors, got Tensor"),
        ({"stack": stack._replace(D=[stack.D[0], 1])}, "D[1] must be a Tensor, got int"),
        ({"stack": stack._replace(norm=1)}, "norm must be a list of Tensors or None, got int"),
        ({"delta_softplus": 1}, "delta_softplus must be a bool, got int"),
    ):
        assert_refused(function, arguments | change, message, TypeError)


def test_indices_of_no_slot_change_nothing():
    """On a CPU, where the host sees them."""
    arguments = make(BASE.with_(slots=3))
    arguments["state_batch_indices"] = torch.tensor([0, 3])
    before = copy_of(arguments)
    for way in ("function", "reference", "op"):
        message = "state_batch_indices must be less than slots = 3, got 3"
        assert_all_refused(way, [(arguments, message)])
    assert_same_states(arguments, before)


def test_a_workspace_that_is_too_small():
    arguments = make(BASE.with_(d_model=512, d_inner=1024, batch=8))
    workspace = torch.empty(100, dtype=torch.uint8)
    for way in ("function", "op"):
        with pytest.raises(RuntimeError, match=r"workspace must have at least \d+ bytes, got 100$"):
            WAYS[way](arguments | {"workspace": workspace})


# --- as PyTorch sees it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        BASE,
        BASE.with_(layers=1, has_norms=False, has_norm_f=False, biases=()),
        BASE.with_(**POOL, **HEAD, padding=1, steps=2, weights=BF16, states=BF16),
    ],
    ids=str,
)
def test_opcheck(case, device):
    op = torch.ops.selective_scan.s6_step
    torch.library.opcheck(op, in_order(op, of_op(make(case, device))))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_changes_the_states_in_place(backend, device):
    torch._dynamo.reset()
    arguments = make(BASE.with_(**HEAD, steps=2), device)
    copy = copy_of(arguments)

    def step(hidden, **others):
        return 2 * s6_step(hidden + 1, **others)

    result = torch.compile(step, fullgraph=True, backend=backend)(**copy)
    torch.testing.assert_close(result, step(**arguments))
    for state, expected in zip(states_of(copy), states_of(arguments), strict=True):
        torch.testing.assert_close(state, expected)


def test_compiles_for_changing_batches(device):
    compiled, graphs = compiled_with_graphs(s6_step, dynamic=True)
    for batch in (5, 7, 9):  # that no two dimensions are as large by chance
        arguments = make(BASE.with_(batch=batch), device)
        copy = copy_of(arguments)
        assert torch.equal(compiled(**copy), s6_step(**arguments))
        assert_same_states(copy, arguments)
    assert len(graphs) == 1


def test_exports(device):
    case = BASE.with_(**HEAD)

    class Step(torch.nn.Module):
        def forward(self, hidden, stack, norm_f, head):
            return s6_step(hidden, StackTensors(*stack), norm_f, head)

    arguments = make(case, device)
    copy = copy_of(arguments)
    given = [
        (it["hidden"], tuple(it["stack"]), it["norm_f"], it["head"]) for it in (arguments, copy)
    ]
    exported = torch.export.export(Step(), given[0]).module()
    assert torch.equal(exported(*given[0]), Step()(*given[1]))
    assert_same_states(arguments, copy)


def test_flops_are_two_for_each_weight(device):
    arguments = make(BASE.with_(**HEAD, layers=1, steps=3), device)
    weights = 128 * 32 + 64 * 4 + 34 * 64 + 64 * 2 + 32 * 64 + 6 * 32
    with FlopCounterMode(display=False) as counter:
        s6_step(**arguments)
    assert counter.get_total_flops() == 2 * 3 * (2 * weights + 7 * 64 * 16)
