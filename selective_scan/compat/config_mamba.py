"""The configuration of a language model, with the fields of mamba_ssm's config_mamba module."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class MambaConfig:
    """The configuration of a :class:`selective_scan.compat.mixer_seq_simple.MambaLMHeadModel`.

    The fields are the keys of a checkpoint's configuration.

    Attributes:
        d_model: number of channels.
        d_intermediate: hidden size of every block's MLP; 0 for none.
        n_layer: number of blocks.
        vocab_size: number of tokens.
        ssm_cfg: arguments of the mixers, and under "layer" their kind.
        attn_layer_idx: indices of attention layers; must be empty.
        attn_cfg: arguments of attention layers.
        rms_norm: whether norms are RMS norms.
        residual_in_fp32: whether blocks pass the residual on in float32.
        fused_add_norm: whether the residual addition and the norm are one operation.
        pad_vocab_size_multiple: the number of embeddings is rounded up to a multiple of this.
        tie_embeddings: whether the head shares the embedding's weight.
    """

    d_model: int = 2560
    d_intermediate: int = 0
    n_layer: int = 64
    vocab_size: int = 50277
    ssm_cfg: dict = field(default_factory=dict)
    attn_layer_idx: list = field(default_factory=list)
    attn_cfg: dict = field(default_factory=dict)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True
