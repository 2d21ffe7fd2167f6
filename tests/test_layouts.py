"""Each array of a selective scan may be laid out along time or along channels on its own, also as a
slice of wider rows. A layer's projections and convolution write such different layouts."""

import itertools

import pytest
import torch

from accuracy import Error
from problem import Case, check, inputs_on, lay_out, make, op_arguments

SEQUENCES = ("u", "delta", "z")
# Aligned along time and along channels; the last chunk of steps is short. With so many channels a
# GPU runs both passes by the streamed kernels.
SIZES = {
    "cpu": {"batch": 2, "dim": 32, "groups": 2, "seqlen": 72},
    "cuda": {"batch": 36, "dim": 128, "groups": 1, "seqlen": 72},
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def subsets(names):
    """Returns all subsets except the empty and the whole one."""
    sizes = range(1, len(names))
    return [subset for size in sizes for subset in itertools.combinations(names, size)]


def case_on(device, **changes):
    return Case(initial_state=False, cotangents=("out",), **{**SIZES[device], **changes})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("names", subsets(SEQUENCES), ids="+".join)
@pytest.mark.parametrize("layout", ["channel_last", "wider_rows"])
def test_inputs(layout, names, dtype, device):
    names = names if layout == "channel_last" else (*names, "B", "C")
    check(case_on(device, dtype=dtype, layout=layout, layout_of=names), device)


@pytest.mark.parametrize(
    "changes",
    [
        {"reverse": True},
        {"reverse": True, "dtype": torch.bfloat16},
        {"z": False, "D": False, "delta_bias": False},
        {"seqlen": 71, "dtype": torch.bfloat16},  # not aligned along time
        {"seqlen": 8},
        {"dim": 36, "groups": 1, "dtype": torch.bfloat16},  # nor along channels
        {"dstate": 3, "dtype": torch.float16},
        {"dstate": 32},
        {"B": "constant", "C": "constant", "dtype": torch.bfloat16},
        {"complex": True, "B": "packed_grouped", "C": "packed_grouped"},
        {"method": "foh", "dtype": torch.bfloat16},
        {"method": "bilinear"},
        # Few channels of many steps, which the CUDA kernels cut into segments of time.
        {"batch": 1, "dim": 16, "groups": 1, "seqlen": 3112},
    ],
    ids=str,
)
@pytest.mark.parametrize("names", [("u",), ("delta", "z")], ids="+".join)
def test_inputs_of_other_calls(names, changes, device):
    check(case_on(device, layout="channel_last", layout_of=names, **changes), device)


GRADIENTS = ("dout", "du", "ddelta", "dz")


@pytest.mark.parametrize("dtype", FLOATS[::2])
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        *(("channel_last", names) for names in ((), *subsets(GRADIENTS))),
        *(("wider_rows", names) for names in (("du",), ("dout", "dz"), GRADIENTS)),
    ],
)
def test_gradients(layout, names, dtype, device):
    """The layouts of gradients and inputs are independent: of the inputs only z has `layout`."""
    case = case_on(device, dtype=dtype, layout=layout, layout_of=("z",))
    plain = case.with_(layout="contiguous")
    dout = make(case).cotangents["out"].to(device)
    ops = torch.ops.selective_scan

    def gradients(case, layouts):
        arguments = op_arguments(case, inputs_on(case, device))
        *_, states = ops.selective_scan_fwd(*arguments, True)
        u, delta, _, B, C, _, z = arguments[:7]
        made = {f"d{n}": torch.empty_like(x) for n, x in zip("BC", (B, C), strict=True)}
        for name, x in {"du": u, "ddelta": delta, "dz": z}.items():
            made[name] = lay_out(torch.full_like(x, torch.nan), layouts.get(name, "contiguous"))
        given = lay_out(dout, layouts.get("dout", "contiguous"))
        others = ops.selective_scan_bwd_out(given, None, *arguments, states, **made)
        return {**made, **dict(zip(("dA", "dD", "ddelta_bias"), others, strict=False))}

    expected = gradients(plain, {})
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for name, actual in gradients(case, dict.fromkeys(names, layout)).items():
        error = Error.of(actual.double().cpu(), expected[name].double().cpu())
        assert error.relative_l2 < limit, (name, error)
