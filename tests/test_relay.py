"""Few channels, for which the CUDA library's warps take turns in time, against the reference."""

import pytest
import torch

import test_capabilities as capabilities
import test_prompt as prompt
from gpu_kernels import skip_without_path
from problem import LAYOUTS, METHODS, Case, check

# Tiles of eight channels, the last one of a group not full.
BASE = Case(batch=2, dim=18, groups=2, seqlen=200, dstate=16)
# Tiles of eight channels, more of them than multiprocessors on most devices.
WIDE = Case(batch=1, dim=1090, groups=2, seqlen=336, dstate=16)
# Several turns of every warp.
LONG = Case(batch=1, dim=300, groups=1, seqlen=1360, dstate=16)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def kinds(base: Case):
    yield from (base.with_(dtype=dtype) for dtype in FLOATS)
    yield from (base.with_(method=method) for method in METHODS)
    yield base.with_(reverse=True)
    yield base.with_(seqlen=base.seqlen + 1, reverse=True, dtype=torch.bfloat16)
    yield base.with_(layout="channel_last", dstate=13)


def cases():
    yield from kinds(BASE)
    for dtype in FLOATS:
        yield from (BASE.with_(dtype=dtype, seqlen=seqlen) for seqlen in (1, 16, 31, 32, 33, 1000))
        # Some warps of a block; two turns of all warps, and a chunk more; several turns backwards.
        yield from (BASE.with_(dtype=dtype, seqlen=seqlen) for seqlen in (96, 512, 520))
        yield BASE.with_(dtype=dtype, seqlen=1000, reverse=True, dstate=11)
        yield from (BASE.with_(dtype=dtype, layout=layout) for layout in LAYOUTS)
    yield from (BASE.with_(dstate=dstate) for dstate in (5, 8, 15))
    yield from (BASE.with_(dim=dim, groups=1) for dim in (1, 2, 3, 40, 150))
    yield BASE.with_(dtype=torch.bfloat16, projection_dtype=torch.float32)
    yield BASE.with_(projection_dtype=torch.float16)
    yield from (BASE.with_(**{name: False}) for name in ("D", "z", "delta_bias", "initial_state"))
    yield BASE.with_(delta_softplus=False, method="bilinear")
    yield from (BASE.with_(cotangents=(name,)) for name in ("out", "last_state"))
    yield BASE.with_(decay=1e-3, seqlen=2000)


def cases_of_many_tiles():
    for base in (WIDE, LONG):
        yield from kinds(base)
    yield LONG.with_(decay=1e-3, seqlen=4000)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_outputs_and_gradients(case, device):
    check(case, device)


@pytest.mark.cuda
@pytest.mark.parametrize("case", list(dict.fromkeys(cases_of_many_tiles())), ids=str)
def test_many_tiles(case, cuda_device):
    """The references of which take gigabytes."""
    check(case, cuda_device)


# What is left to other kernels otherwise.
OTHERS = (
    BASE.with_(seqlen=1100),
    BASE.with_(dstate=5, seqlen=40, batch=70, dim=130),
    BASE.with_(seqlen=2048, batch=1, dim=8, dtype=torch.bfloat16),
    BASE.with_(seqlen=4000, decay=1e-3, dtype=torch.float16, reverse=True),
)


def check_others() -> None:
    for case in OTHERS:
        prompt.check_outputs(case, "cuda")


@pytest.mark.cuda
def test_outputs_of_other_calls(cuda_device):
    skip_without_path("relay")
    capabilities.run_on_path("relay", "import test_relay; test_relay.check_others()")
