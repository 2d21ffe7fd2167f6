"""mamba_ssm's language model in plain PyTorch, and random weights shaped like its checkpoints."""

import torch
import torch.nn.functional as F
from torch import nn

from selective_scan import mamba_inner_ref

VOCAB, PADDED, DIM, INNER, STATES, RANK, LAYERS = 37, 40, 24, 48, 16, 2, 3


def parts_of_layers(dim: int, inner: int, states: int, rank: int, width: int = 4) -> dict:
    """Returns the shapes of a layer's weights by their names in a checkpoint."""
    return {
        "mixer.A_log": (inner, states),
        "mixer.D": (inner,),
        "mixer.in_proj.weight": (2 * inner, dim),
        "mixer.conv1d.weight": (inner, 1, width),
        "mixer.conv1d.bias": (inner,),
        "mixer.x_proj.weight": (rank + 2 * states, inner),
        "mixer.dt_proj.weight": (inner, rank),
        "mixer.dt_proj.bias": (inner,),
        "mixer.out_proj.weight": (dim, inner),
        "norm.weight": (dim,),
    }


def published_config() -> dict:
    """Returns the configuration of a checkpoint of version 1, with all keys that it has."""
    return {
        "d_model": DIM,
        "n_layer": LAYERS,
        "vocab_size": VOCAB,
        "ssm_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
    }


def published_weights() -> dict[str, torch.Tensor]:
    """Returns random weights with the names and shapes of a checkpoint."""
    shapes = {"backbone.embedding.weight": (PADDED, DIM), "backbone.norm_f.weight": (DIM,)}
    parts = parts_of_layers(DIM, INNER, STATES, RANK)
    for layer in range(LAYERS):
        shapes |= {f"backbone.layers.{layer}.{name}": shape for name, shape in parts.items()}
    weights = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    return weights | {"lm_head.weight": weights["backbone.embedding.weight"]}


def reference_logits(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Computes logits in float64 from the named weights alone, with MLPs and biases if present."""
    weights = {name: weight.double() for name, weight in weights.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        if bias is not None:
            return F.layer_norm(x, weight.shape, weight, bias, 1e-5)
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def mix(x: torch.Tensor, name: str) -> torch.Tensor:
        names = ("conv1d.weight", "conv1d.bias", "x_proj.weight", "dt_proj.weight")
        parts = [weights[f"{name}.{part}"] for part in (*names, "out_proj.weight")]
        xz = F.linear(x, weights[f"{name}.in_proj.weight"]).transpose(1, 2)
        A, D = -weights[f"{name}.A_log"].exp(), weights[f"{name}.D"]
        return mamba_inner_ref(xz, *parts, None, A, D=D, delta_bias=weights[f"{name}.dt_proj.bias"])

    def gated_mlp(x: torch.Tensor, name: str) -> torch.Tensor:
        values, gate = F.linear(x, weights[f"{name}.fc1.weight"]).chunk(2, -1)
        return F.linear(values * F.silu(gate), weights[f"{name}.fc2.weight"])

    hidden = weights["backbone.embedding.weight"][tokens]
    layer = 0
    while f"backbone.layers.{layer}.norm.weight" in weights:
        name = f"backbone.layers.{layer}"
        hidden = hidden + mix(norm(hidden, f"{name}.norm"), f"{name}.mixer")
        if f"{name}.norm2.weight" in weights:
            hidden = hidden + gated_mlp(norm(hidden, f"{name}.norm2"), f"{name}.mlp")
        layer += 1
    return F.linear(norm(hidden, "backbone.norm_f"), weights["lm_head.weight"])


def make_model(device="cpu", dtype=None, weights=None, **options) -> nn.Module:
    """Creates a model by compat's import paths, which must be installed. The options are those of
    its configuration."""
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    config = MambaConfig(**published_config() | options)
    model = MambaLMHeadModel(config, device=device, dtype=dtype)
    if weights is not None:
        model.load_state_dict(weights)
    return model
