"""Steps of the causal convolution with a state in place, against its reference and one call."""

from dataclasses import dataclass

import pytest
import torch

from accuracy import Error
from cases import Axes
from in_place import in_float64
from problem import Draws, generator, laid_out
from selective_scan import (
    causal_conv1d_fn,
    causal_conv1d_ref,
    causal_conv1d_update,
    causal_conv1d_update_ref,
)

F32, F64, HALF, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
UPDATES = [causal_conv1d_update, causal_conv1d_update_ref]


@dataclass(frozen=True)
class Case(Axes):
    batch: int = 3
    dim: int = 21
    steps: int | None = None
    width: int = 4
    state_len: int = 3
    activation: str | None = "silu"
    bias: bool = True
    ring: bool = False
    slots: int | None = None  # size of a pool
    dtype: torch.dtype = F32
    state_dtype: torch.dtype = F32
    layout: str = "contiguous"


def make(case: Case, device: str) -> dict:
    draws = Draws(case.with_(layout="contiguous"))
    normal = draws.normal
    steps = () if case.steps is None else (case.steps,)
    tensors = {
        "x": normal(case.batch, case.dim, *steps, dtype=case.dtype),
        "conv_state": normal(
            case.slots or case.batch, case.dim, case.state_len, dtype=case.state_dtype
        ),
        "weight": normal(case.dim, case.width, dtype=F32) / case.width**0.5,
        "bias": normal(case.dim, dtype=F32) if case.bias else None,
    }
    arguments = laid_out(tensors, case.layout, device, requires_grad=False)
    arguments["activation"] = case.activation
    if case.ring:
        arguments["cache_seqlens"] = torch.tensor([0, 2, 1001][: case.batch], dtype=torch.int32)
    if case.slots is not None:
        slots = torch.randperm(case.slots, generator=draws.generator)[: case.batch]
        slots[1] = -1
        arguments["conv_state_indices"] = slots
    for name in ("cache_seqlens", "conv_state_indices"):
        if name in arguments:
            arguments[name] = arguments[name].to(device)
    return arguments


BASE = Case()
CASES = [
    BASE,
    *(BASE.with_(width=width, state_len=max(width - 1, 0)) for width in (1, 2, 8)),
    *(BASE.with_(state_len=state_len, ring=ring) for state_len in (4, 7, 8, 9)
      for ring in (False, True)),
    BASE.with_(ring=True),
    BASE.with_(width=1, state_len=0, ring=True),
    *(BASE.with_(steps=steps, ring=ring, state_len=5) for steps in (1, 2, 5, 70)
      for ring in (False, True)),
    BASE.with_(steps=0),
    BASE.with_(slots=7),
    BASE.with_(slots=7, ring=True, steps=2, state_len=6),
    BASE.with_(activation=None, bias=False),
    BASE.with_(batch=0),
    BASE.with_(dim=0),
    BASE.with_(dim=300, batch=70, state_len=4),
    BASE.with_(dim=300, steps=1000, state_len=700),
    *(BASE.with_(layout=layout, steps=steps, state_len=5)
      for layout in ("channel_last", "dim_first", "sliced", "offset") for steps in (None, 3)),
    *(BASE.with_(dtype=dtype, state_dtype=state, dim=64)
      for dtype, state in ((BF16, BF16), (HALF, F32), (F32, BF16), (BF16, F64), (F64, F64))),
]  # fmt: skip


def check(case: Case, device: str) -> None:
    arguments = make(case, device)
    state, before = arguments["conv_state"], arguments["conv_state"].clone()
    exact = {name: in_float64(value) for name, value in arguments.items()}
    expected = causal_conv1d_update_ref(**exact)
    out = causal_conv1d_update(**arguments)
    assert out.dtype == case.dtype
    if case.layout in ("contiguous", "channel_last", "dim_first"):
        assert out.stride() == arguments["x"].stride()
    for got, wanted in ((out, expected), (state, exact["conv_state"])):
        assert got.shape == wanted.shape
        if got.numel() > 0:
            error = Error.of(got.double().cpu(), wanted)
            allowed = torch.finfo(got.dtype).eps + 4 * torch.finfo(F32).eps
            assert error.relative_l2 < allowed, error
    if case.slots is not None:
        assert not out[1].any()
        used = set(arguments["conv_state_indices"].tolist())
        others = [slot for slot in range(case.slots) if slot not in used]
        assert torch.equal(state[others], before[others])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, device):
    check(case, device)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("update", UPDATES)
def test_steps_go_on_where_a_convolution_ended(update, ring, device):
    random = generator("steps")
    x, weight, bias = (
        torch.randn(shape, generator=random).to(device) for shape in ((2, 9, 40), (9, 4), (9,))
    )
    whole = causal_conv1d_ref(x, weight, bias, activation="silu")
    _, state = causal_conv1d_fn(
        x[..., :20], weight, bias, return_final_states=True, activation="silu"
    )
    if ring:  # a ring of five, which holds steps 17 to 19
        longer = torch.full((2, 9, 5), torch.nan, device=device)
        longer[..., [2, 3, 4]] = state
        state = longer
    outs, done = [], 20
    for part in x[..., 20:].split([1, 3, 1, 7, 8], dim=2):
        seqlens = torch.full((2,), done, device=device, dtype=torch.int64) if ring else None
        outs.append(update(part, state, weight, bias, "silu", seqlens))
        done += part.shape[2]
    torch.testing.assert_close(torch.cat(outs, 2), whole[..., 20:])
