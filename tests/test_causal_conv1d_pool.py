"""The causal convolution over a pool of states: chunks of packed sequences."""

import itertools

import pytest
import torch

from accuracy import Error
from problem import lay_out
from selective_scan import causal_conv1d_fn, causal_conv1d_ref

F32, F64, BF16, HALF = torch.float32, torch.float64, torch.bfloat16, torch.float16
BOUNDS = (1, 4, 40, 40, 42, 70, 75, 98)
INDICES = (3, -1, 0, 7, 5, 9, 2)  # -1 and 7 (pad_slot_id): no slot; 9: replaced by -5
LIVE = [i for i, slot in enumerate(INDICES) if slot not in (-1, 7, 9)]


def make(device, *, dim=20, width=4, dtype=F32, states=F32, layout="contiguous", index=torch.int32):
    def normal(*shape):
        return torch.randn(shape, device=device)

    indices = torch.tensor([-5 if slot == 9 else slot for slot in INDICES])
    x = lay_out(normal(1, dim, 100).to(dtype), layout, 0)
    pool = lay_out(normal(9, dim, width - 1).to(states), layout, 1)
    return {
        "x": x,
        "weight": normal(dim, width),
        "bias": normal(dim),
        "activation": "silu",
        "cu_seqlens": torch.tensor(BOUNDS, dtype=index, device=device),
        "conv_states": pool.contiguous() if layout == "expanded" else pool,
        "cache_indices": indices.to(device, index),
        "has_initial_state": (torch.arange(7) % 3 != 1).to(device),
        "pad_slot_id": 7,
    }


def one_by_one(arguments):
    """Computes each sequence alone in fp64, on the CPU; returns out and the pool."""
    given = {n: t.cpu().double() if torch.is_tensor(t) else t for n, t in arguments.items()}
    pool = given["conv_states"].clone()
    out = torch.zeros_like(given["x"])
    for i in LIVE:
        steps = slice(BOUNDS[i], BOUNDS[i + 1])
        state = pool[INDICES[i]].clone() if given["has_initial_state"][i] else 0 * pool[0]
        out[..., steps], last = causal_conv1d_ref(
            *(given["x"][..., steps], given["weight"], given["bias"], None, state[None], True),
            activation=arguments["activation"],
        )
        pool[INDICES[i]] = last[0]
    return out, pool


CASES = [
    {},
    {"dtype": BF16, "states": BF16, "layout": "channel_last"},
    {"dtype": HALF, "index": torch.int64},
    {"states": F64},
    {"states": BF16, "dim": 130},
    *({"width": width, "layout": "channel_last"} for width in (1, 2, 8)),
    *({"layout": layout} for layout in ("sliced", "offset", "dim_first", "expanded")),
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_matches_sequences_one_by_one(changes, device):
    arguments = make(device, **changes)
    expected_out, expected_pool = one_by_one(arguments)
    for function in (causal_conv1d_fn, causal_conv1d_ref):
        pool = arguments["conv_states"].clone()
        out = function(**(arguments | {"conv_states": pool}))
        assert out.dtype == arguments["x"].dtype
        error = Error.of(out.cpu().double(), expected_out).relative_l2
        assert error < 2e-6 + torch.finfo(out.dtype).eps, error
        before = arguments["conv_states"]
        for slot in range(len(pool)):
            if slot not in [INDICES[i] for i in LIVE]:
                assert torch.equal(pool[slot], before[slot])
        # A state holds unchanged values of x or of the pool.
        torch.testing.assert_close(pool.cpu().double(), expected_pool.to(pool.dtype).double())
        for i in set(range(7)) - set(LIVE):
            assert not out[..., BOUNDS[i] : BOUNDS[i + 1]].any()


@pytest.mark.parametrize("width", [2, 4])
def test_any_chunking_gives_what_the_whole_gives(width, device):
    lengths = (50, 1, 33)
    begins = [0, *itertools.accumulate(lengths)]
    dim, dtype = 24, F32
    x, weight = torch.randn(1, dim, sum(lengths), device=device), torch.randn(dim, width)
    weight = weight.to(device)
    whole = [causal_conv1d_fn(x[..., a:b], weight) for a, b in itertools.pairwise(begins)]
    for cuts in ((), (1,), (0, 2, 3, 20), (30, 31, 31)):
        pool = torch.full((5, dim, width - 1), torch.nan, dtype=dtype, device=device)
        outs = [[], [], []]
        for begin, end in itertools.pairwise((0, *cuts, 50)):
            parts = [
                x[..., first + min(begin, n) : first + min(end, n)]
                for first, n in zip(begins, lengths, strict=False)
            ]
            sizes = [part.shape[2] for part in parts]
            bounds = torch.tensor([0, *itertools.accumulate(sizes)], device=device)
            out = causal_conv1d_fn(
                torch.cat(parts, 2),
                weight,
                cu_seqlens=bounds,
                conv_states=pool,
                cache_indices=torch.tensor([4, 0, 2], device=device),
                has_initial_state=torch.full((3,), begin > 0, device=device),
            )
            for results, part in zip(outs, out.split(sizes, 2), strict=True):
                results.append(part)
        for expected, parts in zip(whole, outs, strict=True):
            assert Error.of(torch.cat(parts, 2).cpu(), expected.cpu()).relative_l2 < 2e-6


@pytest.mark.parametrize("changes", [{"dim": 0}, {"cu_seqlens": [5]}], ids=str)
def test_empty(changes, device):
    arguments = make(device, dim=changes.get("dim", 20))
    if "cu_seqlens" in changes:
        arguments |= {n: arguments[n][:0] for n in ("cache_indices", "has_initial_state")}
        arguments["cu_seqlens"] = torch.tensor(changes["cu_seqlens"], device=device)
    before = arguments["conv_states"].clone()
    assert not causal_conv1d_fn(**arguments).any()
    assert torch.equal(arguments["conv_states"], before)
