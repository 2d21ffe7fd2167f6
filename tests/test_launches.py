"""The number of kernels that a training step and a token launch on a GPU: it may fall, not rise.

Matrix products are not counted, since PyTorch decides by their sizes how many kernels they take.
"""

import os

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gpu_kernels import skip_without_path
from selective_scan import S6

BF16 = torch.bfloat16


def launches(call) -> tuple[int, int]:
    """Counts this library's kernels, and PyTorch's except for matrix products; copies count."""
    call()  # allocates, and chooses kernels
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    names = [
        event.name
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    ours = sum("selective_scan::" in name for name in names)
    others = sum("at::native" in name or name.startswith("Mem") for name in names)
    assert ours > 0, names
    return ours, others


@pytest.fixture
def make_model(cuda_device):
    if "CUDA_INJECTION64_PATH" in os.environ:
        pytest.skip("another tool looks at launches, and CUPTI serves one at a time")
    skip_without_path("streamed")  # other GPUs run other paths

    def make(dtype=torch.float32):
        return S6(64, depth=2, device=cuda_device, dtype=dtype)

    return make


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("autocast", "most"), [(False, (31, 2)), (True, (35, 2))], ids=["float32", "autocast"]
)
def test_a_training_step(autocast, most, make_model):
    model = make_model()
    x = torch.randn(2, 100, 64, device="cuda", requires_grad=True)
    cotangent = torch.randn(2, 100, 64, device="cuda")

    def step():
        with torch.autocast("cuda", BF16, enabled=autocast):
            out = model(x)
        torch.autograd.grad(out, [x, *model.parameters()], cotangent.to(out.dtype))

    ours, others = launches(step)
    assert ours <= most[0]
    assert others <= most[1]


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("batch", "most"),
    [(1, (1, 0)), (16, (1, 0)), (17, (7, 0))],  # the last: norms, convolutions, states
)
def test_a_token(batch, most, make_model):
    model = make_model(BF16)
    cache = model.allocate_cache(batch)
    x = torch.randn(batch, 1, 64, device="cuda", dtype=BF16)
    with torch.no_grad():
        ours, others = launches(lambda: model(x, cache=cache))
    assert ours <= most[0]
    assert others <= most[1]
