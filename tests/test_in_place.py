"""Common behavior of the operators that change states in place: padding, indices of no slot, given
outputs, opcheck, torch.compile, export and graph capture."""

import itertools

import pytest
import torch
from torch.utils._pytree import tree_map_only

from accuracy import Error, assert_same_bits
from cases import assert_refused, compiled_with_graphs
from graphs import capture
from operator_calls import IN_PLACE, OPERATORS_IN_PLACE, in_place, make
from test_selective_scan_prefill import BOUNDS

BF16, C64 = torch.bfloat16, torch.complex64
I32, I64 = torch.int32, torch.int64
HEADS = {"heads": 2, "steps": 2, "indices": I32, "destinations": 2}
ROWS = {"dtype": BF16, "states": BF16, "layout": "channel_last"}
STACK = {"slots": 4, "padding": 1}
# Changes of a call. All of these calls have indices of slots, some of which mean padding.
CASES = {
    "update": [
        {"indices": I64},
        {"indices": I32, "dim": 64, "state": BF16, "x": BF16},
        {"indices": I64, "dim": 64, "steps": 2},
        {"indices": I64, "optional": (), "state": C64, "groups": 2},
        {"destinations": 1, "dim": 64, "batch": 4},
        HEADS | {"state": BF16},
    ],
    "convolution's update": [
        {"slots": 7},
        {"slots": 7, "ring": True, "steps": 2},
        {"slots": 7, "state_len": 5, "steps": 600},
    ],
    "prefill": [
        {},
        {"states": BF16, "is_wide": True},
        {"states": C64, "optional": (), "every": 0},
        {"optional": ("input_delta",)},
    ],
    "convolution over a pool": [{}, ROWS],
    "step": [
        STACK,
        STACK | {"layers": 1, "has_norms": False, "has_norm_f": False, "biases": ()},
        STACK | {"vocabulary": 6, "steps": 2, "weights": BF16, "states": BF16},
    ],
}
# Changes of a call in which every row has its own slot.
OWN_SLOTS = {
    "update": [{}, {"optional": (), "state": C64, "groups": 2}],
    "convolution's update": [{}],
    "prefill": [{"has_indices": False, "every": 0}],
    "step": [{"vocabulary": 6, "steps": 2}],
}


def each_of(cases):
    rows = [(name, changes) for name, several in cases.items() for changes in several]
    ids = [", ".join([name, *(f"{k}={v}" for k, v in changes.items())]) for name, changes in rows]
    ids = [it.replace("torch.", "") for it in ids]
    return pytest.mark.parametrize(("name", "changes"), rows, ids=ids)


def call_of(name, changes, device):
    """Returns the operator and a call's arguments by name."""
    operator, _ = in_place(name, device)
    return operator, operator.make(device, **changes)


def copy_of(arguments):
    return tree_map_only(torch.Tensor, torch.clone, arguments)


def rows_of(tensor, arguments):
    """Returns a tensor's parts that have one slot each: rows of a batch or packed sequences."""
    if "cu_seqlens" not in arguments:
        return tensor.unbind()
    bounds = itertools.pairwise(arguments["cu_seqlens"].tolist())
    return [tensor[..., begin:end] for begin, end in bounds]


# --- slots ----------------------------------------------------------------------------------------


@each_of(CASES)
def test_padding_is_left_alone(name, changes, device):
    """With a negative index or pad_slot_id no state is touched, x is not read and out is 0."""
    operator, arguments = call_of(name, changes, device)
    slots = [arguments[it] for it in operator.slots if it in arguments]
    count, rows = len(operator.states_of(arguments)[0]), slots[0]
    pad = -1
    if name != "step":  # a step only knows negative indices
        old = arguments.get("pad_slot_id")
        pad = min({*range(count)} - {slot for it in slots for slot in it.flatten().tolist()})
        for it in slots:
            it[it == (pad if old is None else old)] = pad
        rows[((rows >= 0) & (rows != pad)).nonzero()[0]] = arguments["pad_slot_id"] = pad
    is_padding = ((rows < 0) | (rows == pad)).tolist()
    read = {slot for slot, it in zip(rows.tolist(), is_padding, strict=True) if not it}
    written = read | {slot for it in slots[1:] for slot in it.flatten().tolist()} - {pad}
    assert any(is_padding)

    before, other = copy_of(arguments), copy_of(arguments)
    for row, it in zip(rows_of(other[operator.x], other), is_padding, strict=True):
        row.masked_fill_(torch.tensor(it, device=device), torch.nan)
    for state in operator.states_of(other):
        state[[slot for slot in range(count) if slot not in read]] = torch.nan
    out = operator.function(**arguments)
    assert out.isfinite().all()
    assert torch.equal(operator.function(**other), out)
    for row, it in zip(rows_of(out, arguments), is_padding, strict=True):
        assert not it or not row.any()
    states = [operator.states_of(it) for it in (before, arguments, other)]
    for old, new, among_nans in zip(*states, strict=True):
        changed = {slot for slot in range(count) if not torch.equal(old[slot], new[slot])}
        assert changed
        assert changed <= written
        for slot in range(count):
            if slot in changed | read:
                assert torch.equal(among_nans[slot], new[slot])
            else:
                assert among_nans[slot].isnan().all()


@each_of(CASES)
def test_indices_of_no_slot(name, changes, device):
    """An index past the slots is refused before anything changes or, on CUDA, means padding."""
    operator, arguments = call_of(name, changes, device)
    count = len(operator.states_of(arguments)[0])
    for argument in operator.slots:
        if argument not in arguments:
            continue
        indices = arguments[argument]
        place = ((indices >= 0) & (indices < count)).flatten().nonzero()[-1]

        def with_index(slot, name=argument, place=place):
            given = copy_of(arguments)
            given[name].view(-1)[place] = slot
            return given

        refusing = [operator.reference, *([operator.function] if device == "cpu" else [])]
        for function in refusing:
            given = with_index(count)
            message = f"{argument} must be less than slots = {count}, got {count}"
            assert_refused(function, given, message)
            assert_same_bits(*map(operator.states_of, (given, arguments)))
        for slot in (count, min(2**40, torch.iinfo(indices.dtype).max)) if device == "cuda" else ():
            given, padded = with_index(slot), with_index(-1)
            assert torch.equal(operator.function(**given), operator.function(**padded))
            assert_same_bits(*map(operator.states_of, (given, padded)))


# --- rounding, threads ----------------------------------------------------------------------------


@each_of({"update": [{"steps": 3, "dim": 40}], "prefill": [{}]})
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_states_are_rounded_as_they_are_stored_alone(dtype, name, changes, device):
    """out, and the steps after a state that is stored, are computed from unrounded states."""
    operator, arguments = call_of(name, changes, device)
    rounded = arguments[operator.states].to(dtype)
    arguments[operator.states] = rounded.float()
    expected = operator.function(**arguments)
    out = operator.function(**arguments | {operator.states: rounded})
    assert Error.of(out.cpu(), expected.cpu()).relative_l2 < 1e-6
    # Rounding errors of the arithmetic seldom change the number that a state is rounded to.
    assert (rounded == arguments[operator.states].to(dtype)).double().mean() > 0.99


LARGE_STACK = {"d_model": 200, "d_inner": 400, "layers": 3, "vocabulary": 700, "rank": 13}
LARGE = {
    "update": [{"batch": 5, "dim": 700}],
    "convolution's update": [{"batch": 70, "dim": 300, "state_len": 4}],
    "prefill": [{"dim": 300, "groups": 1}],
    "convolution over a pool": [{"dim": 300}],
    "step": [LARGE_STACK, LARGE_STACK | {"batch": 5, "steps": 2, "weights": BF16}],
}


@each_of(LARGE)
def test_same_bits_for_any_number_of_threads(name, changes, check_threads):
    operator, arguments = call_of(name, changes, "cpu")

    def results():
        given = copy_of(arguments)
        return dict(enumerate([operator.function(**given), *operator.states_of(given)]))

    check_threads(results, (1, 2, 3, 5, 7))


# --- given results --------------------------------------------------------------------------------


@each_of({name: it for name, it in CASES.items() if OPERATORS_IN_PLACE[name].takes_out})
def test_out_is_written_and_returned(name, changes, device):
    """out may have any strides, and may be x if a call reads a row before it writes it."""
    operator, arguments = call_of(name, changes, device)
    x = arguments[operator.x]
    strided = x.transpose(0, -1).contiguous().transpose(0, -1)
    # On CUDA one step of one head may run by another kernel if out has other strides.
    has_one_kernel = device == "cpu" or name != "update" or "heads" in changes
    for function in (operator.function, operator.reference):
        plain = copy_of(arguments)
        expected = function(**plain)
        for out in (torch.zeros_like(x), strided.zero_(), x.clone()):
            given = copy_of(arguments) | {"out": out}
            if torch.equal(out, x):
                if name == "prefill":
                    continue
                given[operator.x] = out
            assert function(**given) is out
            if has_one_kernel and name != "prefill":
                assert torch.equal(out, expected)
            else:
                torch.testing.assert_close(out, expected)
            assert_same_bits(*map(operator.states_of, (given, plain)))


# --- opcheck, compilation, export, capture --------------------------------------------------------


@pytest.mark.slow
@each_of({name: it + OWN_SLOTS.get(name, []) for name, it in CASES.items()})
def test_opcheck(name, changes, device):
    operator, arguments = call_of(name, changes, device)
    if operator.takes_out and changes in CASES[name]:
        arguments = operator.into_a_tensor(arguments)
    torch.library.opcheck(operator.op.default, operator.op_arguments(arguments))


# Sizes such that no two dimensions are equal by chance.
BATCHES = [{"batch": count} for count in (5, 7, 9)]
SIZES = {
    "update": [it | {"indices": I32} for it in BATCHES],
    "convolution's update": [it | {"slots": 30} for it in BATCHES],
    "prefill": [
        {"total": total, "bounds": bounds, "every": 0}
        for total, bounds in (
            (150, BOUNDS),
            (149, BOUNDS),
            (201, (0, 7, 8, 9, 10, 180, 190, 199)),
        )
    ],
    "convolution over a pool": [{"dim": dim} for dim in (30, 50, 34)],
    "step": BATCHES,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_other_sizes_do_not_compile_again(name, device):
    operator, _ = in_place(name, device)

    def step(arguments):
        return operator.function(**arguments)

    compiled, graphs = compiled_with_graphs(step, dynamic=True)
    for changes in SIZES[name]:
        arguments = operator.make(device, **changes)
        other = copy_of(arguments)
        assert torch.equal(compiled(other), step(arguments))
        assert_same_bits(*map(operator.states_of, (other, arguments)))
    assert len(graphs) == 1


OFTEN = ("update", "update into a tensor", "step")
BACKENDS = [(name, "aot_eager") for name in IN_PLACE]
BACKENDS += [
    pytest.param(name, "inductor", marks=[pytest.mark.slow] * (name not in OFTEN))
    for name in IN_PLACE
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_compiled_code_changes_the_states_in_place(name, backend, device):
    operator, arguments = in_place(name, device)
    other = copy_of(arguments)

    def step(arguments):
        x = arguments[operator.x] + 1
        return 2 * operator.function(**arguments | {operator.x: x})

    result = torch.compile(step, fullgraph=True, backend=backend)(other)
    torch.testing.assert_close(result, step(arguments))
    torch.testing.assert_close(*map(operator.states_of, (other, arguments)))
    if "out" in other:
        assert torch.equal(2 * other["out"], result)


@pytest.mark.parametrize("name", IN_PLACE)
def test_exported(name, device):
    function, tensors = make(name, device)

    class Call(torch.nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    others = [tensor.clone() for tensor in tensors]
    exported = torch.export.export(Call(), tuple(tensors)).module()
    assert torch.equal(exported(*tensors), function(*others))
    assert all(map(torch.equal, tensors, others))


CHANGED = {
    "cu_seqlens": lambda it: it.clamp(min=3),
    "first_position": lambda it: it + 3,
    "cache_seqlens": lambda it: it + 3,
    "has_initial_state": torch.logical_not,
}


@each_of(CASES)
def test_a_captured_call_takes_other_values(name, changes, cuda_device):
    operator, arguments = call_of(name, changes, cuda_device)
    before = copy_of(arguments)
    graph, out = capture(lambda: operator.function(**arguments))
    for shift in range(3):
        for argument, change in CHANGED.items():
            if shift and argument in arguments:
                arguments[argument].copy_(change(before[argument]))
        rows = operator.slots[0]
        arguments[rows].copy_(before[rows].roll(shift))
        for state, old in zip(
            operator.states_of(arguments), operator.states_of(before), strict=True
        ):
            state.copy_(old)
        other = copy_of(arguments)
        graph.replay()
        assert torch.equal(operator.function(**other), out)
        assert_same_bits(*map(operator.states_of, (arguments, other)))
