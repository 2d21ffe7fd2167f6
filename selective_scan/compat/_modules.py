"""The list of the provided modules and their contents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_HERE = "selective_scan.compat"
_SCANS = "selective_scan_fn selective_scan_ref mamba_inner_fn mamba_inner_ref"
_DIRECTED_SCANS = "mamba_inner_fn_no_out_proj bimamba_inner_fn"  # from Vim's fork
_PASSES = ("fwd", "bwd")
_NORMS = (
    "RMSNorm layer_norm_fn rms_norm_fn layer_norm_linear_fn layer_norm_ref rms_norm_ref "
    "_layer_norm_fwd"
)
_MODELS = "MambaLMHeadModel MixerModel create_block _init_weights"
_GENERATION = "GenerationMixin InferenceParams decode update_graph_cache"
_SAMPLING = (
    "sample modify_logits_for_top_k_filtering modify_logits_for_top_p_filtering "
    "modify_logits_for_min_p_filtering modify_logit_for_repetition_penalty"
)


@dataclass(frozen=True)
class Contents:
    """A module's names, each with the module that defines it and its name in that module."""

    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)


def _from(origin: str, names: str) -> dict[str, tuple[str, str]]:
    """Returns the contents of a module; "name=other" is the origin's `other` by another name."""
    pairs = (name.partition("=") for name in names.split())
    return {name: (origin, other or name) for name, _, other in pairs}


def _binding(origin: str, names: Iterable[str], before: str = "") -> Contents:
    return Contents(
        {f"{before}{name}": (f"{_HERE}.bindings", f"{origin}_{name}") for name in names}
    )


_CONVOLUTIONS = _from(f"{_HERE}.convolution", "causal_conv1d_fn") | _from(
    f"{_HERE}.steps", "causal_conv1d_update"
)
# The imports of upstream's module, which code that imports * from it relies on. Of the output
# classes, the first belongs to versions 2, and the others to versions 1; transformers 5 no longer
# has the latter.
_TAKEN_ALONG = (
    _from("collections", "namedtuple")
    | _from("dataclasses", "dataclass field")
    | _from("functools", "partial")
    | _from("typing", "Callable Optional Sequence Union")
    | _from("torch", "Tensor torch")
    | _from("torch.nn", "F=functional")
    | _from(
        f"{_HERE}.generation",
        "time TextStreamer=Streamer GenerateDecoderOnlyOutput=DecoderOnlyOutput "
        "GreedySearchDecoderOnlyOutput=DecoderOnlyOutput SampleDecoderOnlyOutput=DecoderOnlyOutput",
    )
)
_NORM_CONTENTS = Contents(_from(f"{_HERE}.layer_norm", _NORMS))
# A version before the introduction of Mamba-2, so that code which checks for Mamba-2 finds none.
_MAMBA_VERSION = {"__version__": "1.2.2+selective.scan"}
_CONVOLUTION_VERSION = {"__version__": "1.5.0+selective.scan"}

MODULES = {
    "mamba_ssm": Contents(
        _from("selective_scan", "selective_scan_fn mamba_inner_fn")
        | _from(f"{_HERE}.mamba_simple", "Mamba")
        | _from(f"{_HERE}.mixer_seq_simple", "MambaLMHeadModel"),
        _MAMBA_VERSION,
    ),
    "mamba_ssm.models": Contents(),
    "mamba_ssm.models.config_mamba": Contents(_from(f"{_HERE}.config_mamba", "MambaConfig")),
    "mamba_ssm.models.mixer_seq_simple": Contents(_from(f"{_HERE}.mixer_seq_simple", _MODELS)),
    "mamba_ssm.modules": Contents(),
    "mamba_ssm.modules.block": Contents(_from(f"{_HERE}.block", "Block")),
    "mamba_ssm.modules.mamba2": Contents(_from(f"{_HERE}.refused", "Mamba2")),
    "mamba_ssm.modules.mamba3": Contents(_from(f"{_HERE}.refused", "Mamba3")),
    "mamba_ssm.modules.mamba_simple": Contents(_from(f"{_HERE}.mamba_simple", "Mamba Block")),
    "mamba_ssm.modules.mha": Contents(_from(f"{_HERE}.refused", "MHA")),
    "mamba_ssm.modules.mlp": Contents(_from(f"{_HERE}.mlp", "GatedMLP")),
    "mamba_ssm.ops": Contents(),
    "mamba_ssm.ops.selective_scan_interface": Contents(
        _from("selective_scan", _SCANS)
        | _from(f"{_HERE}.functions", "SelectiveScanFn MambaInnerFn")
        | _from(f"{_HERE}.directions", _DIRECTED_SCANS)
    ),
    "mamba_ssm.ops.triton": Contents(),
    "mamba_ssm.ops.triton.selective_state_update": Contents(
        _from(f"{_HERE}.steps", "selective_state_update selective_state_update_ref")
    ),
    "mamba_ssm.ops.triton.layer_norm": _NORM_CONTENTS,
    "mamba_ssm.ops.triton.layernorm": _NORM_CONTENTS,  # its name in versions 1
    "mamba_ssm.utils": Contents(),
    "mamba_ssm.utils.generation": Contents(
        _TAKEN_ALONG
        | _from(f"{_HERE}.generation", _GENERATION)
        | _from(f"{_HERE}.sampling", _SAMPLING)
    ),
    "mamba_ssm.utils.torch": Contents(_from(f"{_HERE}.functions", "custom_fwd custom_bwd")),
    "mamba_ssm.utils.hf": Contents(_from(f"{_HERE}.hf", "load_config_hf load_state_dict_hf")),
    "causal_conv1d": Contents(_CONVOLUTIONS, _CONVOLUTION_VERSION),
    "causal_conv1d.causal_conv1d_interface": Contents(
        _CONVOLUTIONS
        | _from(f"{_HERE}.convolution", "causal_conv1d_ref")
        | _from(f"{_HERE}.steps", "causal_conv1d_update_ref")
    ),
    "causal_conv1d.causal_conv1d_varlen": Contents(
        _from(
            f"{_HERE}.convolution",
            "causal_conv1d_varlen_states "
            "causal_conv1d_varlen_states_ref=causal_conv1d_varlen_states",
        )
    ),
    "causal_conv1d.cpp_functions": Contents(
        _from(
            f"{_HERE}.convolution",
            "causal_conv1d_fwd_function causal_conv1d_bwd_function causal_conv1d_update_function",
        )
    ),
    "causal_conv1d_cuda": _binding("convolution", (*_PASSES, "update"), "causal_conv1d_"),
    "selective_scan_cuda": _binding("mamba", _PASSES),
    "selective_scan_cuda_core": _binding("core", _PASSES),
    "selective_scan_cuda_oflex": _binding("oflex", _PASSES),
}
PACKAGES = ("mamba_ssm", "causal_conv1d")
BINDINGS = (
    "causal_conv1d_cuda",
    "selective_scan_cuda",
    "selective_scan_cuda_core",
    "selective_scan_cuda_oflex",
)


NO_MAMBA_2 = "Mamba-2 and its SSD are not covered"
NO_MAMBA_3 = "Mamba-3 is not covered"


def why_absent(name: str, reason: str) -> str:
    return f"selective_scan.compat has no {name}: {reason}, see docs/integrations.md"


def _absent(reason: str, names: str) -> dict[str, str]:
    return {f"mamba_ssm.{name}": reason for name in names.split()}


# The parts of mamba_ssm that are absent on purpose, each with the reason. Programs that have other
# code for a package without Mamba-2 look for mamba_ssm.Mamba2 or functions of its SSD, so these are
# absent. In contrast, compat.refused has the classes that programs import without looking.
ABSENT = (
    _absent(
        NO_MAMBA_2,
        "Mamba2 modules.mamba2_simple modules.ssd_minimal ops.triton.ssd_bmm "
        "ops.triton.ssd_chunk_scan ops.triton.ssd_chunk_state ops.triton.ssd_combined "
        "ops.triton.ssd_state_passing ops.triton.layernorm_gated ops.triton.k_activations",
    )
    | _absent(NO_MAMBA_3, "Mamba3 ops.triton.mamba3 ops.cute ops.tilelang")
    | _absent("tensor parallelism is that of selective_scan.distributed", "distributed")
)
