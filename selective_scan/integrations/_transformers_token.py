"""A token of transformers' Mamba with a cache: all layers run as a single operator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .._discretization import at_least_single
from .._plain_mixer import can_be_called_in_vain, has_no_hooks
from .._plain_stack import Stack
from .._wider_states import States, steps_in_one
from ..cache import needs_gradient

ACTIVATIONS = ("silu", "swish")


def model_forward(own: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    """Returns the forward method of the file's MambaModel; it calls `own` unless it is given a
    single token with a cache."""
    Output = module.MambaOutput
    names = inspect.signature(Output).parameters
    cache_name = "cache" if "cache" in names else "cache_params"  # until transformers 5.24

    @functools.wraps(own)
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        attention_mask: Tensor | None = None,
        *,
        cache_params: Any = None,
        **options: Any,
    ) -> Any:
        cache = cache_params if cache is None else cache
        flags = {
            "use_cache": use_cache,
            "output_hidden_states": output_hidden_states,
            "return_dict": return_dict,
        }
        wanted = {n: getattr(self.config, n) if flag is None else flag for n, flag in flags.items()}
        out = None
        if (
            inputs_embeds is None
            and attention_mask is None
            and not (self.training and use_cache is None)  # such calls return no cache
            and wanted == {"use_cache": True, "output_hidden_states": False, "return_dict": True}
        ):
            out = _token(self, module, input_ids, cache)
        if out is not None:
            return Output(last_hidden_state=out, **{cache_name: cache})
        flags[cache_name] = cache
        return own(
            self, input_ids, inputs_embeds, attention_mask=attention_mask, **flags, **options
        )

    return forward


def _token(model: Any, module: ModuleType, input_ids: Tensor | None, cache: Any) -> Tensor | None:
    """Returns the model's result for the next token of each row; None for other calls."""
    if (
        cache is None
        or input_ids is None
        or input_ids.dim() != 2
        or input_ids.shape[1] != 1
        or torch.compiler.is_compiling()
        or not can_be_called_in_vain(model.embeddings)
        or needs_gradient(model, input_ids)
    ):
        return None
    blocks = model.layers._modules.values()
    mixers = [block._modules.get("mixer") for block in blocks]
    if {*map(type, mixers)} != {module.MambaMixer} or not all(map(_is_plain, mixers)):
        return None
    states = _states_of(cache)
    if states is None or len(states) != len(mixers):
        return None
    norm = model.norm_f
    stack = Stack(blocks, norm, module.MambaBlock, module.MambaRMSNorm, "variance_epsilon")
    out = steps_in_one(mixers, model.embeddings(input_ids), states, stack, owner=cache)
    if out is not None and any(block.residual_in_fp32 for block in blocks):
        return out.to(at_least_single(out.dtype))
    return out


def _is_plain(mixer: nn.Module) -> bool:
    return has_no_hooks(mixer) and mixer.activation in ACTIVATIONS


def _states_of(cache: Any) -> States | None:
    """Returns a cache's states; None unless every layer has seen steps and keeps only the last."""
    states = []
    for layer in cache.layers:
        if not layer.has_previous_state[0] or layer.record_past:
            return None
        states.append((layer.conv_states[0], layer.recurrent_states[0]))
    is_whole = all(conv_state.shape[-1] > 1 for conv_state, _ in states)
    return states if is_whole else None
