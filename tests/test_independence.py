"""The values of one channel change no bit of another's results, whichever lanes they are in."""

import math

import pytest
import torch

from problem import METHODS, Case, generator, laid_out, make, run_on, scan

# Vectors of up to 16 channels, the last one not full; three chunks, the last one not full.
CASE = Case(batch=1, dim=21, groups=1, seqlen=70, dstate=6, B="shared", C="shared")
BROKEN = 5  # a channel in the middle of its vector


def nothing(tensors):
    pass


def set_entry(name, value):
    def change(tensors):
        tensors[name][:, BROKEN, 20] = value

    return change


def set_row(name, value):
    def change(tensors):
        tensors[name].select(-1 if tensors[name].dim() == 1 else -2, BROKEN)[...] = value

    return change


def scale_steps(factor):
    def change(tensors):
        tensors["delta"][:, BROKEN] *= factor

    return change


NEIGHBOURS = {
    **{f"{name}={value}": set_entry(name, value)
       for name in ("u", "delta", "z") for value in (math.nan, math.inf, -math.inf, 1e30)},
    **{f"A={value}": set_row("A", value) for value in (math.nan, -math.inf, -1e30, -1e-30, 0.0)},
    "D=nan": set_row("D", math.nan),
    "huge steps": scale_steps(1e4),
    "tiny steps": scale_steps(1e-8),
    "no steps": scale_steps(0.0),
    "initial_state=nan": set_row("initial_state", math.nan),
}  # fmt: skip


def results(case, change, device="cpu"):
    """Returns outputs and gradients of all channels except the changed one."""
    tensors = {name: value.clone() for name, value in make(case).tensors.items()}
    change(tensors)
    found = run_on(case, laid_out(tensors, case.layout, device))
    if case.B != "constant":
        del found["dB"], found["dC"]  # sums over channels
    healthy = [channel for channel in range(case.dim) if channel != BROKEN]
    return {
        name: value.detach()[healthy] if value.shape[0] == case.dim else value.detach()[:, healthy]
        for name, value in found.items()
    }


def check_neighbours(case, device="cpu"):
    expected = results(case, nothing, device)
    for description, change in NEIGHBOURS.items():
        for name, value in results(case, change, device).items():
            assert same_bits(value, expected[name]), f"{name} beside a channel with {description}"


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", ["shared", "constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("method", METHODS)
def test_a_channel_changes_no_bit_of_another(method, is_complex, dtype, kind):
    case = CASE.with_(
        method=method, complex=is_complex, dtype=dtype, B=kind, C=kind, delta_softplus=False
    )
    check_neighbours(case)


# Shapes for the different CUDA paths. The steps of a chunk are small, for which kernels have
# shorter forms, until a neighbor's steps are not.
SHORT = Case(dim=600, groups=1, seqlen=70, step_shift=-4.0)
CUDA_CASES = {
    "streamed": SHORT,
    "no softplus": SHORT.with_(delta_softplus=False, decay=0.5),
    "tiny increments": SHORT.with_(step_shift=-7.0, decay=0.5),
    "spent states": SHORT.with_(step_shift=1.0, decay=20.0),
    "channel_last": SHORT.with_(seqlen=64, layout="channel_last"),
    "constant": SHORT.with_(dim=60, B="constant", C="constant"),
    "complex": SHORT.with_(dim=108, groups=2, complex=True, B="grouped", C="grouped"),
    "team": SHORT.with_(dim=120, groups=2, dstate=32),
    "segments": SHORT.with_(dim=36, groups=2, seqlen=3109),
    "segments that forget": SHORT.with_(dim=36, groups=2, seqlen=3109, step_shift=1.0, decay=5.0),
    "prompt": SHORT.with_(dim=21, seqlen=76),
    "dstate 1": SHORT.with_(dim=60, dstate=1),
    "floor": SHORT.with_(dim=21, dstate=70),
    "floor, fp64": SHORT.with_(dim=21, dtype=torch.float32, projection_dtype=torch.float64),
}


@pytest.mark.parametrize("kind", list(CUDA_CASES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_a_channel_changes_no_bit_of_another_on_cuda(method, dtype, kind, cuda_device):
    check_neighbours(CUDA_CASES[kind].with_(method=method, dtype=dtype), cuda_device)


@pytest.mark.parametrize("method", METHODS)
def test_another_row_of_the_batch_changes_no_bit(method, device):
    """The lanes of rows of few channels are segments; these rows are independent, too."""
    for dim, seqlen in ((21, 70), (1, 700)):
        case = CASE.with_(method=method, batch=2, dim=dim, seqlen=seqlen)
        tensors = {name: value.to(device, copy=True) for name, value in make(case).tensors.items()}
        expected = scan(case, tensors)[0][1].clone()
        noise = torch.randn(tensors["delta"][0].shape, generator=generator(case)).to(device)
        for value in (math.nan, math.inf, 1e30):
            tensors["delta"][0] = noise.abs() * value
            assert same_bits(scan(case, tensors)[0][1], expected)
