"""Calls of transformers' Mamba and FalconMamba in which several or all layers run as a single
operator: whole sequences and prompts, and a token with a cache."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _pytorch
from .._discretization import at_least_single
from .._layer_input import autocast_dtype_of
from .._layer_stack import StackStates, run_mixer, run_stack
from .._plain_mixer import can_be_called_in_vain, has_no_hooks
from .._plain_stack import InnerNorms, Stack
from .._wider_states import States, steps_in_one
from ..cache import needs_gradient

ACTIVATIONS = ("silu", "swish")


class Classes(NamedTuple):
    """The classes of a file of transformers that has Mamba's layers.

    Attributes:
        inner_norms: those of the mixers.
    """

    model: type[nn.Module]
    block: type[nn.Module]
    mixer: type[nn.Module]
    norm: type[nn.Module]
    inner_norms: InnerNorms | None
    output: type
    cache: type

    @classmethod
    def of(cls, module: ModuleType) -> Classes | None:
        """Returns the classes of a file, None if it has other models."""
        for prefix in ("Mamba", "FalconMamba"):
            if hasattr(module, f"{prefix}Model"):
                names = ("Model", "Block", "Mixer", "RMSNorm")
                found = [getattr(module, f"{prefix}{name}") for name in names]
                output = getattr(module, f"{prefix}Output")
                return cls(*found, inner_norms_of(module), output, module.DynamicCache)
        return None


def inner_norms_of(module: ModuleType) -> InnerNorms | None:
    """Returns the norms of dt, B and C in the mixers of a file; None if they have none."""
    if hasattr(module, "FalconMambaWeightlessRMSNorm"):
        return InnerNorms(module.FalconMambaWeightlessRMSNorm)
    if hasattr(module, "JambaMambaMixer"):
        return InnerNorms(module.JambaRMSNorm, "variance_epsilon")
    return None


def model_forward(own: Callable[..., Any], classes: Classes) -> Callable[..., Any]:
    """Returns the forward method of the model; it calls `own` if several layers cannot run as a
    single operator."""
    names = inspect.signature(classes.output).parameters
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
        if self.training and use_cache is None:
            wanted["use_cache"] = False
        out, given = None, input_ids if inputs_embeds is None else inputs_embeds
        has_gradient = given is not None and needs_gradient(self, given)
        is_whole = cache is None and not wanted["use_cache"]
        if has_gradient and classes.inner_norms is not None:
            is_whole = False  # the operator has no backward pass for inner norms
        is_prompt = False
        if wanted["use_cache"] and given is not None and not self.training:
            if cache is None:
                cache = classes.cache(config=self.config)
            is_prompt = _is_new(cache, len(self.layers)) and not has_gradient
        if (is_whole or is_prompt) and not _marks_padding(attention_mask, given):
            attention_mask = None
        if attention_mask is None and not wanted["output_hidden_states"] and wanted["return_dict"]:
            if (is_whole or is_prompt) and (input_ids is None) != (inputs_embeds is None):
                if inputs_embeds is None:
                    input_ids, inputs_embeds = None, self.embeddings(input_ids)
                out = _sequence(self, classes, inputs_embeds, cache)
            elif wanted["use_cache"] and inputs_embeds is None:
                out = _token(self, classes, input_ids, cache)
        if out is not None:
            return classes.output(last_hidden_state=out, **{cache_name: cache})
        flags[cache_name] = cache
        return own(
            self, input_ids, inputs_embeds, attention_mask=attention_mask, **flags, **options
        )

    return forward


def _token(model: Any, classes: Classes, input_ids: Tensor | None, cache: Any) -> Tensor | None:
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
    if (mixers := _plain_mixers(model, classes)) is None:
        return None
    states = _states_of(cache)
    if states is None or len(states) != len(mixers):
        return None
    hidden, stack = model.embeddings(input_ids), _stack_of(model, classes)
    out = steps_in_one(mixers, hidden, states, stack, owner=cache)
    if out is None:
        return _run(model, mixers, hidden, stack, StackStates(*zip(*states, strict=True)))
    return out.to(_stream_dtype(stack, hidden))


def _sequence(model: Any, classes: Classes, hidden: Tensor, cache: Any) -> Tensor | None:
    """Returns the model's result for sequences from their first step on, given the embeddings, and
    fills the cache if there is one; None if a call of the blocks might do something else."""
    if not _pytorch.is_plain_call() or (mixers := _plain_mixers(model, classes)) is None:
        return None
    stack = _stack_of(model, classes)
    if cache is None:
        return _run(model, mixers, hidden, stack)
    states = _new_states(mixers, hidden)
    out = _run(model, mixers, hidden, stack, states)
    if out is not None:
        _keep(states, mixers, cache)
    return out


def mixer_alone(
    mixer: Any, norms: InnerNorms | None, hidden: Tensor, cache: Any, goes_on: bool
) -> Tensor | None:
    """Returns the result of a mixer that is called alone, without a mask; None if the operator does
    not support the call.

    Args:
        mixer: a mixer of Mamba, FalconMamba or Jamba.
        norms: its inner norms.
        hidden: (batch, seqlen, hidden_size).
        cache: the cache, changed like by the mixer itself, or None.
        goes_on: whether several steps go on from the cache's state.
    """
    # Checked first, so that calls that are traced or observed allocate no states.
    if not _pytorch.is_plain_call() or mixer.activation not in ACTIVATIONS:
        return None
    if cache is None:
        return run_mixer(mixer, hidden, norms)
    layer = cache.layers[mixer.layer_idx]
    if getattr(layer, "record_past", True):
        return None
    if layer.has_previous_state[0]:
        if hidden.shape[1] > 1 and not goes_on:
            return None
        states = StackStates([layer.conv_states[0]], [layer.recurrent_states[0]])
        return run_mixer(mixer, hidden, norms, states)
    states = _new_states([mixer], hidden)
    out = run_mixer(mixer, hidden, norms, states)
    if out is not None:
        _keep(states, [mixer], cache)
    return out


def _new_states(mixers: list[Any], hidden: Tensor) -> StackStates:
    """Returns states, not yet filled, for sequences that begin."""
    first, batch = mixers[0], hidden.shape[0]
    rows = (len(mixers), batch, first.intermediate_size)
    dtype = autocast_dtype_of(hidden.device) or hidden.dtype
    conv_states = hidden.new_empty(*rows, first.conv_kernel_size, dtype=dtype)
    states = hidden.new_empty(*rows, first.ssm_state_size, dtype=at_least_single(dtype))
    return StackStates(conv_states.unbind(), states.unbind(), begins=True)


def _keep(states: StackStates, mixers: list[Any], cache: Any) -> None:
    """Stores new states in a cache."""
    for mixer, conv_state, state in zip(mixers, states.conv_states, states.states, strict=True):
        cache.update_conv_state(conv_state, mixer.layer_idx)
        cache.update_recurrent_state(state, mixer.layer_idx)


def _stack_of(model: Any, classes: Classes) -> Stack:
    """Returns the modules around the mixers. All blocks must have the options of the first."""
    blocks = model.layers._modules.values()
    options = (("residual_in_fp32", next(iter(blocks)).residual_in_fp32),)
    if model.training:
        options += (("gradient_checkpointing", False),)
    kinds = (classes.block, classes.norm, "variance_epsilon")
    return Stack(blocks, model.norm_f, *kinds, options, classes.inner_norms)


def _run(
    model: Any, mixers: list[nn.Module], hidden: Tensor, stack: Stack, *states: StackStates
) -> Tensor | None:
    """Runs the stack by ops of several layers; None if they do not compute what the blocks do."""
    if hidden.dtype == torch.float64:  # whose residual may be rounded to float32
        return None
    dtype = _stream_dtype(stack, hidden)
    return run_stack(model, mixers, hidden, stack, None, dtype, dtype, *states)


def _stream_dtype(stack: Stack, hidden: Tensor) -> torch.dtype:
    in_fp32 = dict(stack.options)["residual_in_fp32"]
    return at_least_single(hidden.dtype) if in_fp32 else hidden.dtype


def _is_new(cache: Any, depth: int) -> bool:
    """Returns whether a cache has seen no steps, and keeps only the last inputs of convolutions."""
    layers = getattr(cache, "layers", ())
    return len(layers) == depth and not any(
        getattr(layer, "record_past", True) or layer.has_previous_state[0] for layer in layers
    )


def _marks_padding(mask: Tensor | None, steps: Tensor | None) -> bool:
    """Returns whether some of the steps may be padding. The values of a mask are read once for all
    layers, as transformers reads them for models with attention."""
    if mask is None:
        return False
    if (
        type(mask) is not Tensor
        or steps is None
        or mask.shape != steps.shape[:2]
        or mask.is_meta
        or not _pytorch.is_plain_call()
        or (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return True
    return not bool((mask == 1).all())


def _plain_mixers(model: Any, classes: Classes) -> list[nn.Module] | None:
    """Returns the blocks' mixers; None if their weights do not fully describe what they compute."""
    mixers = [block._modules.get("mixer") for block in model.layers._modules.values()]
    is_plain = {*map(type, mixers)} == {classes.mixer} and all(map(_is_plain, mixers))
    return mixers if is_plain else None


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
