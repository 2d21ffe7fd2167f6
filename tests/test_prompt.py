"""Few sequences, which the CUDA library scans in one launch, against the reference."""

import pytest
import torch

import test_capabilities as capabilities
from gpu_kernels import skip_without_path
from path_cases import FLOATS, one_axis
from problem import LAYOUTS, METHODS, Case, check, check_results, inputs_on, scan

# Short enough for the plan to choose these kernels, whatever the number of channels.
BASE = Case(batch=2, dim=18, groups=2, seqlen=200)
# More channels than one warp per multiprocessor scans at a time on most devices.
WIDE = Case(batch=1, dim=1090, groups=2, seqlen=336)
# Many chunks.
LONG = Case(batch=1, dim=300, groups=1, seqlen=1360)
F32, F16, BF16 = FLOATS


def along_channels():
    """Yields the layouts of a layer: rows along channels, B and C along states, of any length."""
    base = BASE.with_(dim=24, layout="channel_last")
    yield from base.each(method=METHODS, dtype=FLOATS, seqlen=(61,))
    yield from base.each(dtype=FLOATS, seqlen=(2, 31, 33, 64, 65, 129))
    yield from base.each(dtype=FLOATS, dstate=(8,), reverse=(True,))
    # Warps and blocks that are not full.
    yield from base.each(dim=(2, 6, 40, 150), groups=(1,))
    yield from (base.with_(**{name: False}) for name in ("D", "z", "delta_bias", "initial_state"))


def cases():
    yield from BASE.each(method=METHODS, dtype=FLOATS)
    # Lengths around those of a chunk and of a saved state.
    yield from BASE.each(dtype=FLOATS, seqlen=(8, 32, 40, 64, 72, 256))
    # B and C of 2-byte types in vectors of four steps, like those of images of 14 by 14 tokens.
    yield from BASE.each(dtype=FLOATS, seqlen=(4, 60, 196))
    # Rows that begin at any address, like those of images with a class token.
    yield from BASE.each(dtype=FLOATS, seqlen=(1, 49, 63, 65, 129, 197))
    yield from BASE.each(dtype=FLOATS, seqlen=(1000,), dstate=(11,))
    yield from BASE.each(dstate=(5, 8, 15))
    # Warps and blocks that are not full.
    yield from BASE.each(dim=(1, 3, 40, 150), groups=(1,), seqlen=(BASE.seqlen, 131))
    yield BASE.with_(channel_dtype=BF16)
    yield from along_channels()
    yield from one_axis(BASE)
    yield BASE.with_(decay=1e-3, seqlen=2000)


def large_cases():
    """Yields cases whose reference takes gigabytes."""
    for base in (WIDE, LONG):
        yield from base.each(dtype=FLOATS)
        yield from base.each(method=METHODS)
        yield base.with_(reverse=True)
        yield base.with_(seqlen=base.seqlen + 1, reverse=True, dtype=BF16)
        yield base.with_(layout="channel_last", dstate=13)
        yield base.with_(layout="channel_last", dtype=BF16)
    # Twice as many states per lane.
    yield from WIDE.each(batch=(3,), seqlen=(196, 200), dtype=FLOATS)
    yield LONG.with_(decay=1e-3, seqlen=3000)


# Longer sequences, fewer states and more channels, for most of which other kernels are chosen.
MANY = BASE.with_(dim=5000, groups=1, batch=1)
FEW = BASE.with_(seqlen=2051, dim=300, groups=3, batch=1)
OTHERS = (
    BASE.with_(seqlen=2056),
    FEW.with_(seqlen=2056, decay=1e-3, dtype=BF16),
    *BASE.each(dstate=(1, 2, 4), dtype=(F16,)),
    *MANY.each(dtype=FLOATS, layout=("contiguous", "channel_last")),
    FEW.with_(layout="channel_last"),
)

# Calls that these kernels do not take: rows that are not vectors or run backwards, arrays of
# several layouts or dtypes.
REFUSED = (
    *BASE.each(dtype=FLOATS, reverse=(True,)),
    *BASE.each(dtype=FLOATS, layout=LAYOUTS),
    BASE.with_(dtype=BF16, projection_dtype=F32),
    BASE.with_(projection_dtype=F16),
    BASE.with_(dim=24, layout="channel_last", dstate=15),
    BASE.with_(dim=24, layout="channel_last", layout_of=("u", "delta", "z")),
)


def check_outputs(case: Case, device: str) -> None:
    """Checks a forward pass only."""
    with torch.no_grad():
        out, last_state = scan(case, inputs_on(case, device))
    actual = {"out": out, "last_state": last_state}
    check_results(case, actual, device, names=actual)


def check_others() -> None:
    """Checks calls by zoh, the only method that these kernels support."""
    for case in (*cases(), *OTHERS):
        if case.method == "zoh":
            check_outputs(case, "cuda")


@pytest.mark.parametrize("case", list(dict.fromkeys((*cases(), *REFUSED))), ids=str)
def test_outputs_and_gradients(case, device):
    check(case, device)


@pytest.mark.parametrize("case", list(dict.fromkeys(large_cases())), ids=str)
def test_large_calls(case, cuda_device):
    check(case, cuda_device)


def test_outputs_of_other_calls(cuda_device):
    skip_without_path("prompt")
    capabilities.run_on_path("prompt", "import test_prompt; test_prompt.check_others()")
