"""Mamba's language model with the signatures of mamba_ssm's mixer_seq_simple module.

Code for version 1 of that module, which did not have MLPs, runs if it passes its arguments by name.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._discretization import at_least_single
from .._layer_stack import StackStates, run_stack
from .._module_arguments import check_choice, check_count, refuse
from .._plain_mixer import can_be_called_in_vain, has_no_hooks
from .._plain_stack import Stack, serves
from .._wider_states import steps_in_one
from ..cache import needs_gradient
from .block import Block, add_norm
from .config_mamba import MambaConfig
from .generation import GenerationMixin
from .hf import CONFIG_NAME, WEIGHTS_NAME, load_config_hf, load_state_dict_hf
from .layer_norm import RMSNorm
from .mamba_simple import InferenceParams, Mamba
from .mlp import GatedMLP

# The kinds of layers by their names in ssm_cfg.
LAYERS = {"Mamba1": Mamba}
States = dict[int, tuple[Tensor, ...]]


class CausalLMOutput(NamedTuple):
    """The result of a language model.

    Attributes:
        logits: (batch, seqlen, vocab_size), with the padded vocab_size.
    """

    logits: Tensor


def create_block(
    d_model: int,
    d_intermediate: int = 0,
    ssm_cfg: dict[str, Any] | None = None,
    attn_layer_idx: Sequence[int] | None = None,
    attn_cfg: dict[str, Any] | None = None,
    norm_epsilon: float = 1e-5,
    rms_norm: bool = False,
    residual_in_fp32: bool = False,
    fused_add_norm: bool = False,
    layer_idx: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Block:
    """Creates a block of a norm and a :class:`Mamba`, followed by an MLP if d_intermediate > 0.

    Args:
        d_model: number of channels.
        d_intermediate: hidden size of the :class:`GatedMLP`; 0 for none.
        ssm_cfg: arguments of the mixer, and under "layer" its kind, which must be "Mamba1".
        attn_layer_idx: must be empty or None, since attention is not part of this package.
        attn_cfg: belongs to attn_layer_idx.
        norm_epsilon: eps of the norms.
        rms_norm: whether the norms are RMS norms.
        residual_in_fp32: see :class:`Block`.
        fused_add_norm: see :class:`Block`.
        layer_idx: the mixer's key in the states of `inference_params`.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: an argument has an unsupported or invalid value.

    Example:
        >>> from selective_scan.compat.mixer_seq_simple import create_block
        >>> block = create_block(16, ssm_cfg={"d_state": 8}, rms_norm=True, layer_idx=0)
        >>> block.mixer.d_state, block.mlp
        (8, None)
    """
    check_count("d_intermediate", d_intermediate, minimum=0)
    if attn_layer_idx:
        refuse(
            "attn_layer_idx", "empty, since attention is not part of this package", attn_layer_idx
        )
    options = dict(ssm_cfg or {})
    layer = options.pop("layer", "Mamba1")
    if layer == "Mamba2":
        refuse("ssm_cfg['layer']", "'Mamba1', since Mamba-2 is not part of this package", layer)
    check_choice("ssm_cfg['layer']", layer, tuple(LAYERS))
    where = {"device": device, "dtype": dtype}
    mlp_cls = nn.Identity
    if d_intermediate > 0:
        mlp_cls = partial(GatedMLP, hidden_features=d_intermediate, out_features=d_model, **where)
    block = Block(
        d_model,
        partial(LAYERS[layer], layer_idx=layer_idx, **options, **where),
        mlp_cls,
        _norm_class(rms_norm, norm_epsilon, **where),
        fused_add_norm,
        residual_in_fp32,
    )
    block.layer_idx = layer_idx
    return block


def _norm_class(rms_norm: bool, epsilon: float, **where: Any) -> partial[nn.Module]:
    return partial(RMSNorm if rms_norm else nn.LayerNorm, eps=epsilon, **where)


@torch.no_grad()
def _init_weights(
    module: nn.Module,
    n_layer: int,
    initializer_range: float = 0.02,
    rescale_prenorm_residual: bool = True,
    n_residuals_per_layer: int = 1,
) -> None:
    """Initializes the weights of a single module again, for ``nn.Module.apply``.

    Biases of linear modules become 0, unless marked `_no_reinit`; embeddings are drawn from a
    normal distribution. Weights whose results are added to the residual stream are scaled down by
    the number of additions, so that the sum has the same magnitude in deep models as in shallow
    ones.

    Args:
        module: the module.
        n_layer: number of the model's blocks.
        initializer_range: standard deviation of embeddings.
        rescale_prenorm_residual: whether `out_proj` and `fc2` are initialized again and scaled.
        n_residuals_per_layer: how often a block adds to the residual stream.

    References:
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.
    """
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=initializer_range)
    bias = module.bias if isinstance(module, nn.Linear) else None
    if bias is not None and not getattr(bias, "_no_reinit", False):
        nn.init.zeros_(bias)
    if rescale_prenorm_residual:
        for name, parameter in module.named_parameters():
            if name in ("out_proj.weight", "fc2.weight"):
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
                parameter /= math.sqrt(n_residuals_per_layer * n_layer)


class MixerModel(nn.Module):
    """Embeddings, blocks and a norm, from tokens to the input of a head.

    Args:
        d_model: number of channels.
        n_layer: number of blocks.
        d_intermediate: hidden size of every block's MLP; 0 for none.
        vocab_size: number of embeddings.
        ssm_cfg: see :func:`create_block`; likewise the following arguments up to `rms_norm`.
        initializer_cfg: arguments of `_init_weights`.
        fused_add_norm: see :class:`Block`.
        residual_in_fp32: see :class:`Block`.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: an argument has an unsupported or invalid value.

    Example:
        >>> import torch
        >>> from selective_scan.compat.mixer_seq_simple import MixerModel
        >>> model = MixerModel(16, n_layer=2, vocab_size=100, rms_norm=True)
        >>> model(torch.randint(100, (2, 10))).shape
        torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        d_model: int,
        n_layer: int,
        d_intermediate: int = 0,
        vocab_size: int | None = None,
        ssm_cfg: dict[str, Any] | None = None,
        attn_layer_idx: Sequence[int] | None = None,
        attn_cfg: dict[str, Any] | None = None,
        norm_epsilon: float = 1e-5,
        rms_norm: bool = False,
        initializer_cfg: dict[str, Any] | None = None,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("n_layer", n_layer)
        check_count("vocab_size", vocab_size)
        self.residual_in_fp32 = residual_in_fp32
        self.fused_add_norm = fused_add_norm
        where = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(vocab_size, d_model, **where)
        sizes, attention = (d_model, d_intermediate, ssm_cfg), (attn_layer_idx, attn_cfg)
        norms = (norm_epsilon, rms_norm, residual_in_fp32, fused_add_norm)
        self.layers = nn.ModuleList(
            create_block(*sizes, *attention, *norms, layer_idx, **where)
            for layer_idx in range(n_layer)
        )
        self.norm_f = _norm_class(rms_norm, norm_epsilon, **where)(d_model)
        self.apply(_initializer(n_layer, d_intermediate, initializer_cfg))

    def forward(
        self,
        input_ids: Tensor,
        inference_params: InferenceParams | None = None,
        **mixer_kwargs: Any,
    ) -> Tensor:
        """Runs the model.

        Args:
            input_ids: (batch, seqlen), integers.
            inference_params: see :meth:`Mamba.forward`.
            mixer_kwargs: passed to every mixer: `cu_seqlens`.

        Returns:
            (batch, seqlen, d_model).
        """
        if inference_params is not None and not mixer_kwargs:
            out = self._step_in_one(input_ids, inference_params)
            if out is not None:
                return out
        hidden, residual = self.embedding(input_ids), None
        if self.fused_add_norm:
            out = self._run_in_one(hidden, inference_params, **mixer_kwargs)
            if out is not None:
                return out
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, inference_params, **mixer_kwargs)
        hidden, _ = add_norm(
            self.norm_f, hidden, residual, self.fused_add_norm, self.residual_in_fp32
        )
        return hidden

    def _step_in_one(
        self, input_ids: Tensor, params: InferenceParams, head: nn.Module | None = None
    ) -> Tensor | None:
        """Takes a step through all blocks, and calls `head` with the result, as a single operator.

        Returns None if that operator does not support the call.
        """
        if (
            params.seqlen_offset == 0
            or input_ids.shape[1] != 1
            or not serves(input_ids)
            or not can_be_called_in_vain(self.embedding)
            or needs_gradient(self, input_ids)
        ):
            return None
        if (mixers := self._mixers_alone()) is None:
            return None
        states = [params.key_value_memory_dict.get(mixer.layer_idx) for mixer in mixers]
        if None in states:
            return None
        stack = Stack(self.layers._modules.values(), self.norm_f, Block, RMSNorm)
        hidden = self.embedding(input_ids)
        return steps_in_one(mixers, hidden, states, stack, head, owner=params)

    def _run_in_one(
        self,
        hidden: Tensor,
        params: InferenceParams | None,
        cu_seqlens: object = None,
        **others: Any,
    ) -> Tensor | None:
        """Runs all blocks and the last norm by the ops of several layers; None if these do not
        support the call."""
        if others or (mixers := self._mixers_alone()) is None:
            return None
        states = StackStates()
        if params is not None:
            begins = params.seqlen_offset == 0
            if (
                not (begins or hidden.shape[1] == 1)
                or cu_seqlens is not None
                or not all(mixer.takes_steps_in_one() for mixer in mixers)
                or needs_gradient(self, hidden)
            ):
                return None
            pairs = [mixer._get_states_from_cache(params, hidden.shape[0]) for mixer in mixers]
            states = StackStates(*map(list, zip(*pairs, strict=True)), begins=begins)
        stack = Stack(
            self.layers._modules.values(),
            self.norm_f,
            Block,
            RMSNorm,
            options=(("fused_add_norm", True), ("residual_in_fp32", self.residual_in_fp32)),
        )
        dtype = hidden.dtype
        stream_dtype = at_least_single(dtype) if self.residual_in_fp32 else dtype
        return run_stack(self, mixers, hidden, stack, cu_seqlens, stream_dtype, None, states)

    def _mixers_alone(self) -> list[Mamba] | None:
        """Returns the mixers; None if anything but them, their norms and their weights determines
        what the blocks compute."""
        blocks = self.layers._modules.values()
        mixers = [block._modules.get("mixer") for block in blocks]
        is_plain = {*map(type, mixers)} == {Mamba} and all(map(_is_mixer_and_norm, blocks, mixers))
        return mixers if is_plain else None

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> States:
        """Returns the layers' states before the first step, by layer_idx."""
        return {
            index: layer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)
            for index, layer in enumerate(self.layers)
        }


def _is_mixer_and_norm(block: nn.Module, mixer: Mamba) -> bool:
    """Returns whether a block has no MLP, and its mixer no hooks and only MambaMixer's options."""
    return (
        block._modules.get("mlp") is None
        and mixer.takes_steps_in_one()
        and mixer.bimamba_type == "none"
        and mixer.init_layer_scale is None
        and has_no_hooks(mixer)
    )


def _initializer(
    n_layer: int, d_intermediate: int, initializer_cfg: dict[str, Any] | None
) -> partial[None]:
    additions = 1 if d_intermediate == 0 else 2
    options = {"n_residuals_per_layer": additions} | (initializer_cfg or {})
    return partial(_init_weights, n_layer=n_layer, **options)


class MambaLMHeadModel(nn.Module, GenerationMixin):
    """A :class:`MixerModel` with a head, from tokens to the logits of the next token.

    The parameters are named as in mamba_ssm, so that its checkpoints can be loaded.

    Args:
        config: the model's configuration.
        initializer_cfg: arguments of `_init_weights`.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: the configuration has an unsupported or invalid value.

    Example:
        >>> import torch
        >>> from selective_scan.compat.config_mamba import MambaConfig
        >>> from selective_scan.compat.mixer_seq_simple import MambaLMHeadModel
        >>> model = MambaLMHeadModel(MambaConfig(d_model=16, n_layer=2, vocab_size=100))
        >>> tokens = torch.randint(100, (2, 10))
        >>> model(tokens).logits.shape, model.generate(tokens, max_length=15).shape
        (torch.Size([2, 10, 104]), torch.Size([2, 15]))
    """

    def __init__(
        self,
        config: MambaConfig,
        initializer_cfg: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        check_count("vocab_size", config.vocab_size)
        multiple = config.pad_vocab_size_multiple
        check_count("pad_vocab_size_multiple", multiple)
        vocab_size = -(-config.vocab_size // multiple) * multiple
        where = {"device": device, "dtype": dtype}
        self.backbone = MixerModel(
            config.d_model,
            config.n_layer,
            config.d_intermediate,
            vocab_size,
            config.ssm_cfg,
            config.attn_layer_idx,
            config.attn_cfg,
            rms_norm=config.rms_norm,
            initializer_cfg=initializer_cfg,
            fused_add_norm=config.fused_add_norm,
            residual_in_fp32=config.residual_in_fp32,
            **where,
        )
        self.lm_head = nn.Linear(config.d_model, vocab_size, bias=False, **where)
        if config.d_intermediate > 0:
            # Upstream initializes the weights once more here, as if blocks had no MLPs.
            self.apply(_initializer(config.n_layer, 0, initializer_cfg))
        self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the head share the embedding's weight, if the configuration says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.backbone.embedding.weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        inference_params: InferenceParams | None = None,
        num_last_tokens: int = 0,
        **mixer_kwargs: Any,
    ) -> CausalLMOutput:
        """Runs the model.

        Args:
            input_ids: (batch, seqlen), integers.
            position_ids: ignored; other models have position embeddings.
            inference_params: see :meth:`Mamba.forward`.
            num_last_tokens: the number of last tokens to compute logits for; 0 for all tokens.
            mixer_kwargs: passed to every mixer: `cu_seqlens`, the boundaries of packed sequences.

        Returns:
            A named tuple of the logits.
        """
        backbone = self.backbone
        if (
            inference_params is not None
            and not mixer_kwargs
            and type(backbone).forward is MixerModel.forward
            and has_no_hooks(backbone)
        ):
            logits = backbone._step_in_one(input_ids, inference_params, self.lm_head)
            if logits is not None:
                return CausalLMOutput(logits)
        hidden = backbone(input_ids, inference_params, **mixer_kwargs)
        last = hidden[:, -num_last_tokens:] if num_last_tokens > 0 else hidden
        return CausalLMOutput(self.lm_head(last))

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> States:
        """Returns the layers' states before the first step, by layer_idx."""
        return self.backbone.allocate_inference_cache(batch_size, max_seqlen, dtype, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name: str | os.PathLike[str],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> MambaLMHeadModel:
        """Creates a model from a checkpoint.

        Args:
            pretrained_model_name: a folder, as :meth:`save_pretrained` writes it, or a name on
                Hugging Face's hub, for which the package huggingface_hub must be installed.
            device: the parameters' device.
            dtype: the parameters' dtype; A_log and D are float32 for half types.
            kwargs: arguments of the constructor.

        Raises:
            FileNotFoundError: a file is missing in the folder.
            ImportError: the folder does not exist, and huggingface_hub is not installed.
            RuntimeError: a weight is missing, unexpected, or has a wrong shape.
        """
        config = MambaConfig(**load_config_hf(pretrained_model_name))
        model = cls(config, device=device, dtype=dtype, **kwargs)
        # The loaded weights are neither cast nor moved here: A_log and D do not have `dtype`, and
        # the device may have room for one copy only.
        model.load_state_dict(load_state_dict_hf(pretrained_model_name))
        return model

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Writes the configuration and the weights to a folder, which is created if necessary."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), folder / WEIGHTS_NAME)
        text = json.dumps(vars(self.config), indent=4)
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
