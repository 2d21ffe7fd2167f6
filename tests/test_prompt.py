"""Few sequences, which the CUDA library scans in one launch, against the reference."""

import pytest
import torch

import test_capabilities as capabilities
from gpu_kernels import skip_without_path
from problem import LAYOUTS, METHODS, Case, check, check_results, inputs_on, options_on
from selective_scan import selective_scan_fn

# Short enough for the plan to choose these kernels, whatever the number of channels.
BASE = Case(batch=2, dim=18, groups=2, seqlen=200)
# More channels than are scanned at a time by one warp of each multiprocessor of most devices.
WIDE = Case(batch=1, dim=1090, groups=2, seqlen=336)
# Many chunks.
LONG = Case(batch=1, dim=300, groups=1, seqlen=1360)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def along_channels():
    """Layouts of a layer: rows along channels, B and C along states, of any number of steps."""
    base = BASE.with_(dim=24, layout="channel_last")
    for dtype in FLOATS:
        yield from (base.with_(method=method, dtype=dtype, seqlen=61) for method in METHODS)
        yield from (base.with_(dtype=dtype, seqlen=seqlen) for seqlen in (2, 31, 33, 64, 65, 129))
        yield base.with_(dtype=dtype, dstate=8, reverse=True)
    # Warps and blocks that are not full.
    yield from (base.with_(dim=dim, groups=1) for dim in (2, 6, 40, 150))
    yield from (base.with_(**{name: False}) for name in ("D", "z", "delta_bias", "initial_state"))


def cases():
    for dtype in FLOATS:
        yield from (BASE.with_(method=method, dtype=dtype) for method in METHODS)
        # About a chunk's steps and those of a saved state.
        yield from (BASE.with_(dtype=dtype, seqlen=seqlen) for seqlen in (8, 32, 40, 64, 72, 256))
        # Rows that begin anywhere, as those of images and a token for their class do.
        yield from (BASE.with_(dtype=dtype, seqlen=seqlen) for seqlen in (1, 49, 63, 65, 129, 197))
        yield BASE.with_(dtype=dtype, seqlen=1000, dstate=11)
    yield from (BASE.with_(dstate=dstate) for dstate in (5, 8, 15))
    # Warps and blocks that are not full.
    yield from (BASE.with_(dim=dim, groups=1) for dim in (1, 3, 40, 150))
    yield from (BASE.with_(dim=dim, groups=1, seqlen=131) for dim in (1, 3, 40, 150))
    yield from (BASE.with_(**{name: False}) for name in ("D", "z", "delta_bias", "initial_state"))
    yield BASE.with_(channel_dtype=torch.bfloat16)
    yield from along_channels()
    yield BASE.with_(delta_softplus=False, method="bilinear")
    yield from (BASE.with_(cotangents=(name,)) for name in ("out", "last_state"))
    yield BASE.with_(decay=1e-3, seqlen=2000)


def large_cases():
    """Those whose reference takes gigabytes."""
    for base in (WIDE, LONG):
        yield from (base.with_(dtype=dtype) for dtype in FLOATS)
        yield from (base.with_(method=method) for method in METHODS)
        yield base.with_(reverse=True)
        yield base.with_(seqlen=base.seqlen + 1, reverse=True, dtype=torch.bfloat16)
        yield base.with_(layout="channel_last", dstate=13)
        yield base.with_(layout="channel_last", dtype=torch.bfloat16)
    # Twice as many states a lane.
    yield from (WIDE.with_(batch=3, seqlen=200, dtype=dtype) for dtype in FLOATS)
    yield LONG.with_(decay=1e-3, seqlen=3000)


# Longer sequences, fewer states and more channels; most of it is left to other kernels otherwise.
OTHERS = (
    BASE.with_(seqlen=2056),
    BASE.with_(seqlen=2056, decay=1e-3, dtype=torch.bfloat16, dim=300, groups=3, batch=1),
    *(BASE.with_(dstate=dstate, dtype=torch.float16) for dstate in (1, 2, 4)),
    *(
        BASE.with_(dim=5000, groups=1, batch=1, dtype=dtype, layout=layout)
        for dtype in FLOATS
        for layout in ("contiguous", "channel_last")
    ),
    BASE.with_(seqlen=2051, dim=300, groups=3, batch=1, layout="channel_last"),
)

# What these kernels leave to others: rows that are no vectors or lie backwards, arrays of several
# layouts or dtypes.
REFUSED = (
    *(BASE.with_(dtype=dtype, reverse=True) for dtype in FLOATS),
    *(BASE.with_(dtype=dtype, layout=layout) for dtype in FLOATS for layout in LAYOUTS),
    BASE.with_(dtype=torch.bfloat16, projection_dtype=torch.float32),
    BASE.with_(projection_dtype=torch.float16),
    BASE.with_(dim=24, layout="channel_last", dstate=15),
    BASE.with_(dim=24, layout="channel_last", layout_of=("u", "delta", "z")),
)


def check_outputs(case: Case, device: str) -> None:
    """Of a forward pass alone."""
    inputs = inputs_on(case, device)
    with torch.no_grad():
        out, last_state = selective_scan_fn(
            **inputs, **options_on(case, device), return_last_state=True
        )
    actual = {"out": out, "last_state": last_state}
    check_results(case, actual, device, names=actual)


def check_others() -> None:
    """Kernels are of one method."""
    for case in (*cases(), *OTHERS):
        if case.method == "zoh":
            check_outputs(case, "cuda")


@pytest.mark.parametrize("case", [*dict.fromkeys(cases()), *REFUSED], ids=str)
def test_outputs_and_gradients(case, device):
    check(case, device)


@pytest.mark.parametrize("case", list(dict.fromkeys(large_cases())), ids=str)
def test_large_calls(case, cuda_device):
    check(case, cuda_device)


def test_outputs_of_other_calls(cuda_device):
    skip_without_path("prompt")
    capabilities.run_on_path("prompt", "import test_prompt; test_prompt.check_others()")
