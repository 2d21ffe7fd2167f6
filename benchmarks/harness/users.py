"""The calls that published models make, which must not get slower.

A kernel exists because one of these calls would be noticeably slower without it;
docs/contributing.md has the rule. Every scan has a real A, variable B and C, softplus, D and
delta_bias; its variant determines the rest. Scans of plain rows have no z, since the layers apply
the gate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from harness.problems import VARIANTS, Problem, Shape


@dataclass(frozen=True)
class Call:
    name: str
    model: str  # the model that makes the call
    batch: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class ScanCall(Call):
    """A selective scan, forward and backward."""

    dim: int
    seqlen: int
    dstate: int = 16
    groups: int = 1
    dtype: str = "bfloat16"
    variant: str = "no-z"  # a name in problems.VARIANTS
    cpu_batch: int = 0  # the batch size on a CPU; 0 leaves the call out there

    kind: ClassVar = "scan"

    @property
    def problem(self) -> Problem:
        shape = Shape(self.name, self.batch, self.dim, self.seqlen, self.dstate, self.groups)
        return Problem(shape, self.dtype, VARIANTS[self.variant])

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.problem.sizes

    def shrunk(self) -> ScanCall:
        return replace(self, batch=2, dim=8 * self.groups, seqlen=min(self.seqlen, 12))


@dataclass(frozen=True)
class LayerCall(Call):
    """A model of S6 layers, forward and backward; 2-byte types mean autocast."""

    seqlen: int
    d_model: int
    layers: int
    dtype: str = "bfloat16"
    cpu_batch: int = 0

    kind: ClassVar = "layer"

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.batch, self.seqlen, self.d_model, self.layers)

    def shrunk(self) -> LayerCall:
        return replace(self, batch=2, seqlen=12, d_model=16, layers=1)


@dataclass(frozen=True)
class TokenCall(Call):
    """One token of each sequence through a language model, its head included."""

    d_model: int
    layers: int
    vocabulary: int = 50280
    dtype: str = "bfloat16"
    cpu_batch: int = 0

    kind: ClassVar = "token"

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.batch, self.d_model, self.layers)

    def shrunk(self) -> TokenCall:
        return replace(self, batch=2, d_model=16, layers=1, vocabulary=32)


_MAMBA = "Mamba, arXiv 2312.00752"
_VIM = "Vision Mamba, arXiv 2401.09417"
_VMAMBA = "VMamba, arXiv 2401.10166"
_MAMBA_VISION = "MambaVision, arXiv 2407.08083"
_U_MAMBA = "U-Mamba, arXiv 2401.04722"
_S_MAMBA = "S-Mamba, arXiv 2403.11144"
_TRANSFORMERS = "transformers, a batch with a mask, or a prompt with a cache"
_STREAM = "STREAM, arXiv 2411.12603, in the size of Mamba"
_LAYER = "a layer of this library that reads a prompt with a cache"

SCANS = (
    ScanCall("mamba-130m train", _MAMBA, 8, 1536, 2048, cpu_batch=2),
    ScanCall("mamba-2.8b train", _MAMBA, 4, 5120, 2048),
    ScanCall("falcon-mamba-7b train", "Falcon Mamba, arXiv 2410.05355", 1, 8192, 4096),
    ScanCall("130m prefill 64", _MAMBA, 1, 1536, 64, cpu_batch=1),
    ScanCall("130m prefill 512", _MAMBA, 1, 1536, 512, cpu_batch=1),
    ScanCall("2.8b prefill 2048", _MAMBA, 1, 5120, 2048, cpu_batch=1),
    ScanCall("jamba prefill 8192", "Jamba, arXiv 2403.19887", 1, 8192, 8192),
    ScanCall("vim-tiny", _VIM, 128, 384, 197, cpu_batch=4),
    ScanCall("vim-small", _VIM, 64, 768, 197, cpu_batch=4),
    ScanCall("vim-small fp16", _VIM, 64, 768, 197, dtype="float16"),
    ScanCall("vim-small image", _VIM, 1, 768, 197),
    ScanCall("vmamba-t stage 1", _VMAMBA, 64, 384, 3136, 1, 4, "float16", cpu_batch=4),
    ScanCall("vmamba-t stage 2", _VMAMBA, 64, 768, 784, 1, 4, "float16", cpu_batch=4),
    ScanCall("vmamba-t stage 3", _VMAMBA, 64, 1536, 196, 1, 4, "float16", cpu_batch=4),
    ScanCall("vmamba-t stage 4", _VMAMBA, 64, 3072, 49, 1, 4, "float16", cpu_batch=4),
    ScanCall("vmamba-t stage 3 fp32", _VMAMBA, 64, 1536, 196, 1, 4, "float32"),
    ScanCall("vmamba-t image, stage 1", _VMAMBA, 1, 384, 3136, 1, 4, "float16"),
    ScanCall("vmamba-t image, stage 2", _VMAMBA, 1, 768, 784, 1, 4, "float16"),
    ScanCall("vmamba-t image, stage 3", _VMAMBA, 1, 1536, 196, 1, 4, "float16"),
    ScanCall("vmamba-t image, stage 4", _VMAMBA, 1, 3072, 49, 1, 4, "float16"),
    ScanCall("vmamba-t segmentation, stage 1", _VMAMBA, 2, 384, 16384, 1, 4, "float16"),
    ScanCall("vmamba-t segmentation, stage 2", _VMAMBA, 2, 768, 4096, 1, 4, "float16"),
    ScanCall("vmamba-t segmentation, stage 3", _VMAMBA, 2, 1536, 1024, 1, 4, "float16"),
    ScanCall("vmamba-t detection, stage 1", _VMAMBA, 2, 384, 64000, 1, 4, "float16"),
    ScanCall("vmamba-t detection, stage 2", _VMAMBA, 2, 768, 16000, 1, 4, "float16"),
    ScanCall("vmamba N=16 stage 3", _VMAMBA, 32, 1536, 196, 16, 4, "float32", cpu_batch=4),
    ScanCall("mambavision stage 3", _MAMBA_VISION, 128, 160, 196, 8, 1, "float16", cpu_batch=4),
    ScanCall("mambavision stage 4", _MAMBA_VISION, 128, 320, 49, 8, 1, "float16", cpu_batch=4),
    ScanCall("mambavision image, stage 3", _MAMBA_VISION, 1, 160, 196, 8, 1, "float16"),
    ScanCall("mambavision image, stage 4", _MAMBA_VISION, 1, 320, 49, 8, 1, "float16"),
    ScanCall("u-mamba 3d", _U_MAMBA, 2, 128, 65536, dtype="float32", cpu_batch=1),
    ScanCall("u-mamba 3d amp", _U_MAMBA, 2, 128, 65536, dtype="float16"),
    ScanCall("segmamba", "SegMamba, arXiv 2401.13560", 1, 96, 262144, dtype="float32"),
    ScanCall("mambair", "MambaIR, arXiv 2402.15648", 4, 720, 4096, 16, 4, "float32", cpu_batch=1),
    ScanCall("caduceus 131k", "Caduceus, arXiv 2403.03234", 1, 512, 131072),
    ScanCall("semamba", "SEMamba, arXiv 2405.06573", 400, 128, 400, dtype="float32", cpu_batch=4),
    ScanCall("s-d-mamba", _S_MAMBA, 32, 512, 321, 32, 1, "float32", cpu_batch=4),
    ScanCall("s-d-mamba N=2", _S_MAMBA, 32, 1024, 96, 2, 1, "float32", cpu_batch=4),
    ScanCall("s-d-mamba N=2, one series", _S_MAMBA, 1, 1024, 96, 2, 1, "float32"),
    ScanCall(
        "pointmamba", "PointMamba, arXiv 2402.10739", 32, 768, 128, dtype="float32", cpu_batch=4
    ),
    ScanCall("small rl", "policies over few steps", 256, 128, 16, dtype="float32", cpu_batch=4),
    ScanCall(
        "transformers 130m padded", _TRANSFORMERS, 8, 1536, 512, variant="padded", cpu_batch=2
    ),
    ScanCall("130m layer prompt 61", _LAYER, 1, 1536, 61, variant="layer"),
    ScanCall("130m layer prompt 512", _LAYER, 1, 1536, 512, variant="layer"),
    ScanCall("transformers 130m prompt 64", _TRANSFORMERS, 1, 1536, 64, variant="padded"),
    ScanCall("transformers 130m prompt 512", _TRANSFORMERS, 1, 1536, 512, variant="padded"),
    ScanCall("transformers 2.8b prompt", _TRANSFORMERS, 1, 5120, 2048, variant="padded"),
    ScanCall("130m events", _STREAM, 8, 1536, 2048, variant="events", cpu_batch=2),
    ScanCall("transformers jamba autocast", _TRANSFORMERS, 4, 8192, 1024, variant="padded-normed"),
)

LAYERS = (
    LayerCall("layers-130m", _MAMBA, 8, 2048, 768, 4),
    LayerCall("layers-64k", "one layer over a long sequence", 1, 65536, 1024, 1),
    LayerCall("layers-512", _MAMBA, 2, 512, 768, 4, cpu_batch=2),
    LayerCall("layers-vision", _VIM, 64, 197, 384, 4, cpu_batch=4),
)

TOKENS = (
    TokenCall("130m token", _MAMBA, 1, 768, 24, cpu_batch=1),
    TokenCall("130m tokens", _MAMBA, 16, 768, 24, cpu_batch=4),
    TokenCall("790m token", _MAMBA, 1, 1536, 48),
    TokenCall("790m tokens", _MAMBA, 16, 1536, 48),
    TokenCall("2.8b token", _MAMBA, 1, 2560, 64),
    TokenCall("2.8b tokens", _MAMBA, 16, 2560, 64),
)


def calls(device_type: str, quick: bool = False) -> list[Call]:
    """Returns the calls for a type of device: on a CPU some of them, with smaller batches and in
    float32. With `quick`, all calls are shrunk to sizes without practical use."""
    found: list[Call] = [*SCANS, *LAYERS, *TOKENS]
    if quick:
        return [call.shrunk() for call in found]
    if device_type != "cpu":
        return found
    return [replace(c, batch=c.cpu_batch, dtype="float32") for c in found if c.cpu_batch]
