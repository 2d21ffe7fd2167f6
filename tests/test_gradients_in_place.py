"""Gradients that overwrite what they are computed from: du over dout, ddelta over delta."""

import pytest
import torch

import test_dstate1 as dstate1
import test_packed as packed
import test_paths as paths
import test_prompt as prompt
import test_streamed_backward as streamed
from accuracy import assert_same_bits
from problem import Case, inputs_on, lay_out, make, op_arguments

LONG = streamed.REAL.with_(batch=1, dim=16, groups=1, seqlen=1100)
BASES = [
    *streamed.KINDS.values(),
    LONG,
    streamed.REAL.with_(seqlen=64, reverse=True),
    streamed.REAL.with_(B="constant"),
    dstate1.BASE,
    prompt.BASE,
    prompt.LONG,
    paths.SLICES[0],
    Case(dtype=torch.float64, dstate=33),
    packed.BASE,
    packed.LONG,
    packed.LONG.with_(**packed.MANY_CHANNELS, reverse=True),
]
CASES = [
    *BASES,
    *(
        base.with_(layout="channel_last", dtype=torch.bfloat16)
        for base in BASES
        if not base.is_double
    ),
    *paths.COPIES,
]


@pytest.mark.parametrize("case", list(dict.fromkeys(CASES)), ids=str)
def test_gradients_have_the_bits_they_have_elsewhere(case, device):
    u, delta, *others = op_arguments(case, inputs_on(case, device))
    ops = torch.ops.selective_scan
    *_, states = ops.selective_scan_fwd(u, delta, *others, True)
    cotangent = make(case).cotangents["out"].to(device)
    dout = lay_out(cotangent, "channel_last" if case.layout == "channel_last" else "contiguous")

    def gradients(dout, delta, du, ddelta):
        _, B, C, _, z = others[:5]
        made = {"du": du, "ddelta": ddelta, "dB": torch.empty_like(B), "dC": torch.empty_like(C)}
        made["dz"] = None if z is None else torch.empty_like(z)
        rest = ops.selective_scan_bwd_out(dout, None, u, delta, *others, states, **made)
        return (*made.values(), *rest)

    expected = gradients(dout, delta, torch.empty_like(dout), torch.empty_like(delta))
    dout, delta = (tensor.clone(memory_format=torch.preserve_format) for tensor in (dout, delta))
    assert_same_bits(expected, gradients(dout, delta, dout, delta))
