"""Runs transformers' Mamba, FalconMamba, Jamba and Zamba with selective_scan's kernels.

    enable           replaces the functions that the models call; returns a Handle
    kernel_mapping   provides the same functions to the package kernels

The modeling files of transformers look up their functions at each call, so existing models change,
too. Calls that our kernels do not support go to the original function.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from .. import _pytorch
from .._checks import MAX_WIDTH
from .._module_arguments import check_choice, check_flag, refuse
from .._plain_mixer import (
    has_plain_weights,
    is_plain_convolution,
    is_plain_product,
    run_in_one,
)
from .._plain_stack import InnerNorms
from ..causal_conv1d import causal_conv1d_fn
from ..causal_conv1d_update import causal_conv1d_update
from ..functional import selective_scan_fn
from ..mamba_inner import LayerOptions
from ..selective_state_update import selective_state_update
from ._transformers_model import (
    ACTIVATIONS,
    Classes,
    inner_norms_of,
    mixer_alone,
    model_forward,
)

__all__ = ["Handle", "enable", "kernel_mapping"]

_TRIED = "tried with transformers 5.17.0, 5.23.0 and 5.24.0"
_MIXERS = {
    "mamba": "MambaMixer",
    "falcon_mamba": "FalconMambaMixer",
    "jamba": "JambaMambaMixer",
    "zamba": "ZambaMambaMixer",
}
_MODEL_ARGUMENTS = (
    "self input_ids inputs_embeds cache|cache_params use_cache output_hidden_states return_dict "
    "attention_mask"
)


# --- in the place of transformers' functions ------------------------------------------------------


class _Continuation(threading.local):
    """The initial states for the scans of the layer that is running; None means zeros."""

    states: Iterator[Tensor] | None = None


_continuation = _Continuation()


@contextlib.contextmanager
def _starting_from(state: Tensor) -> Iterator[None]:
    """Provides a layer's state to its scans: (batch, dim, dstate), or with heads as the second
    dimension, each of which has its own scan."""
    _continuation.states = iter(state.unbind(1) if state.dim() == 4 else (state,))
    try:
        yield
    finally:
        _continuation.states = None


def _scan(own: Callable[..., Any]) -> Callable[..., Any]:
    def selective_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **ways: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        # `ways` select one of transformers' own implementations, and have no effect here.
        states = _continuation.states
        return selective_scan_fn(
            *(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state),
            initial_state=None if states is None else next(states),
        )

    return selective_scan


def _update(own: Callable[..., Any]) -> Callable[..., Any]:
    def update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **others: object,
    ) -> Tensor:
        tensors = (state, hidden_states, dt, A, B, C, D, dt_bias, z)
        if _pytorch.is_gradient_needed(tensors):
            return own(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **others)
        return selective_state_update(
            state, hidden_states, dt, A, B, C, D, z, dt_bias=dt_bias, dt_softplus=dt_softplus
        )

    return update


def _convolve(own: Callable[..., Any]) -> Callable[..., Any]:
    def convolve(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **others: object,
    ) -> Tensor:
        # These include packed sequences, which the scan would not separate.
        has_others = any(other is not None for other in others.values())
        if has_others or not _is_convolution_ours(weight, activation):
            return own(hidden_states, weight, bias, activation, **others)
        return causal_conv1d_fn(hidden_states, weight, bias, activation=activation)

    return convolve


def _convolve_step(own: Callable[..., Any]) -> Callable[..., Any]:
    def convolve_step(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        tensors = (hidden_states, conv_state, weight, bias)
        if _pytorch.is_gradient_needed(tensors) or not _is_convolution_ours(weight, activation):
            return own(*tensors, activation)
        return causal_conv1d_update(*tensors, activation)

    return convolve_step


def _go_by_parts(*arguments: object, **options: object) -> None:
    """Replaces the operator of a whole layer. Returning None makes the layer run part by part, with
    the mask and the norms of transformers' own code."""


def _is_convolution_ours(weight: Tensor, activation: str | None) -> bool:
    return activation in (None, *ACTIVATIONS) and weight.shape[1] <= MAX_WIDTH


@dataclass(frozen=True)
class _Replacement:
    """A replacement of a function of transformers.

    Attributes:
        make: returns the replacement of the original function, which it is given.
        arguments: the names of the arguments that the original function must take.
        kernel: the function's name in the package kernels.
    """

    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    arguments: str
    kernel: str


_REPLACEMENTS = {
    "mamba_selective_scan": _Replacement(
        _scan,
        "hidden_states dt A B C D z delta_bias delta_softplus return_last_state",
        "selective_scan_fn",
    ),
    "mamba_selective_state_update": _Replacement(
        _update, "state hidden_states dt A B C D dt_bias dt_softplus z", "selective_state_update"
    ),
    "causal_conv1d_fn": _Replacement(
        _convolve, "hidden_states weight bias activation", "causal_conv1d_fn"
    ),
    "causal_conv1d_update": _Replacement(
        _convolve_step, "hidden_states conv_state weight bias activation", "causal_conv1d_update"
    ),
}


# --- in the place of the layers' forward methods --------------------------------------------------


def _is_one_operator(mixer: nn.Module) -> bool:
    """Returns whether a Mamba layer, or all of it after in_proj, can run as a single operator."""
    return (
        mixer.activation in ACTIVATIONS
        and is_plain_convolution(mixer.conv1d)
        and mixer.conv1d.kernel_size[0] <= MAX_WIDTH
        and is_plain_product(mixer.x_proj)
        and all(has_plain_weights(it, nn.Linear) for it in (mixer.dt_proj, mixer.out_proj))
    )


def _forward(
    own: Callable[..., Any], model: str, norms: InnerNorms | None, goes_on: bool
) -> Callable[..., Any]:
    """Returns a layer's forward method, which calls `own` except as follows.

    Plain layers of models other than Zamba run as a single operator, those with inner norms or a
    cache only without gradients. With `goes_on`, scans continue from the cache's state.
    """

    @functools.wraps(own)
    def forward(
        self: Any,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        *,
        cache_params: Any = None,  # its name until transformers 5.24
        **options: Any,
    ) -> Tensor:
        cache = cache_params if cache is None else cache
        has_cache = cache is not None
        if attention_mask is None and not options and model != "zamba":
            if norms is None and not has_cache and _is_one_operator(self):
                return run_in_one(self, "hidden_states", hidden_states, LayerOptions())
            out = mixer_alone(self, norms, hidden_states, cache, goes_on)
            if out is not None:
                return out
        if goes_on and has_cache and cache.has_previous_state(self.layer_idx):
            state = cache.layers[self.layer_idx].recurrent_states[0]
            with _starting_from(state):
                return own(self, hidden_states, cache, attention_mask, **options)
        return own(self, hidden_states, cache, attention_mask, **options)

    return forward


# --- enable ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Enabled:
    """A model's original functions, as (owner, name, value), and how the model was enabled."""

    before: list[tuple[Any, str, Any]]
    fix_continuation: bool


_ENABLED: dict[str, _Enabled] = {}
# Held while functions are replaced or restored: two calls at once would take one another's
# replacements for transformers' functions.
_LOCK = threading.RLock()


@dataclass(frozen=True)
class Handle(contextlib.AbstractContextManager["Handle"]):
    """The result of a call of :func:`enable`; as a context manager, it undoes the call on exit.

    Attributes:
        models: the models that the call changed, without those that were already enabled.
    """

    models: tuple[str, ...]
    # What this call put into _ENABLED; a later call puts other objects there.
    _enabled: tuple[_Enabled, ...] = field(repr=False, compare=False)

    def disable(self) -> None:
        """Restores transformers' functions for these models, if this call still enables them."""
        with _LOCK:
            for model, enabled in zip(self.models, self._enabled, strict=True):
                if _ENABLED.get(model) is enabled:
                    for owner, name, value in _ENABLED.pop(model).before:
                        setattr(owner, name, value)

    def __exit__(self, *_: object) -> None:
        self.disable()


def enable(models: Iterable[str] = tuple(_MIXERS), *, fix_continuation: bool = False) -> Handle:
    """Makes models of transformers run with selective_scan's kernels, on CPU and on CUDA.

    This replaces the functions that the models' files look up at each call: the selective scan, its
    state update, the causal convolution and its update, and the layer's forward method. Existing
    models change, too, except that a layer to which accelerate has already added its hooks keeps
    its forward method. If any of these functions is not as expected, nothing is changed. Models
    that are already enabled stay as they are.

    Results are those of transformers' own functions in PyTorch, up to rounding. This also holds if
    mamba_ssm is installed, whose operator for a whole layer ignores the padding of a mask. Without
    a cache and padding, and without adapters or hooks, a Mamba layer runs as a single operator, or
    several layers of a Mamba model do; whether a mask marks padding is read once in each call, for
    which the host waits for a GPU. For a token with a cache, all layers of a Mamba model run as a
    single operator. FalconMamba's do likewise in calls without gradients, in which each mixer of
    Jamba is a single operator. Steps that need a gradient, other activations than SiLU, and packed
    sequences are left to transformers' functions.

    Args:
        models: any of "mamba", "falcon_mamba", "jamba" and "zamba".
        fix_continuation: whether a call of several tokens with a cache continues from the cache's
            scan states. transformers starts the scan from zeros, and so forgets everything before
            the call except the convolution's last steps.

    Returns:
        A handle, which is a context manager and whose `disable` undoes this call.

    Raises:
        ImportError: transformers is missing, or its version has other functions; the message says
            which.
        ValueError: a model is unknown, or is enabled with another `fix_continuation`; or
            `fix_continuation` is not a bool.
        TypeError: `models` is a string.

    Example:
        >>> import torch
        >>> import selective_scan.integrations.transformers as integration
        >>> from transformers import MambaConfig, MambaForCausalLM
        >>> model = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=2))
        >>> with integration.enable():
        ...     tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5)
    """
    check_flag("fix_continuation", fix_continuation)
    if isinstance(models, str):
        raise TypeError(f"selective_scan: models must be names, as a tuple, got {models!r}")
    models = tuple(dict.fromkeys(models))
    for model in models:
        check_choice("models", model, tuple(_MIXERS))
    with _LOCK:
        return _enable(models, fix_continuation)


def _enable(models: tuple[str, ...], fix_continuation: bool) -> Handle:
    for model in models:
        if model in _ENABLED and _ENABLED[model].fix_continuation != fix_continuation:
            refuse("fix_continuation", f"as {model} was enabled, until disable()", fix_continuation)
    changes = {m: _changes(m, fix_continuation) for m in models if m not in _ENABLED}
    for model, bindings in changes.items():
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in bindings]
        _ENABLED[model] = _Enabled(before, fix_continuation)
        for owner, name, value in bindings:
            setattr(owner, name, value)
    return Handle(tuple(changes), tuple(_ENABLED[model] for model in changes))


def _changes(model: str, fix_continuation: bool) -> list[tuple[Any, str, Any]]:
    """Returns the replacements for a model, as (owner, name, value)."""
    module = _import(model)
    changes: list[tuple[Any, str, Any]] = []
    for name, replacement in _REPLACEMENTS.items():
        own = _found(module, name, replacement.arguments)
        changes.append((module, name, replacement.make(own)))
    if hasattr(module, "mamba_inner_fn"):
        changes.append((module, "mamba_inner_fn", _go_by_parts))
    mixer = getattr(module, _MIXERS[model], module)
    own = _found(mixer, "forward", "self hidden_states cache|cache_params attention_mask")
    changes.append(
        (mixer, "forward", _forward(own, model, inner_norms_of(module), fix_continuation))
    )
    if (classes := Classes.of(module)) is not None:
        own = _found(classes.model, "forward", _MODEL_ARGUMENTS)
        changes.append((classes.model, "forward", model_forward(own, classes)))
    return changes


def _import(model: str) -> ModuleType:
    name = f"transformers.models.{model}.modeling_{model}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"selective_scan needs {name}; {_TRIED}") from error


def _found(owner: Any, name: str, arguments: str) -> Callable[..., Any]:
    """Returns the attribute if it takes these arguments first, in this order, and if all others are
    optional; bars separate alternative names of an argument."""
    own, wanted = getattr(owner, name, None), arguments.split()
    got = "is missing"
    if own is not None:
        signature = _signature(own)
        parameters = list(signature.parameters.values())
        are_wanted = len(parameters) >= len(wanted) and all(
            parameter.name in names.split("|")
            for parameter, names in zip(parameters, wanted, strict=False)
        )
        if are_wanted and all(map(_is_optional, parameters[len(wanted) :])):
            return own
        got = f"takes {signature}"
    version = importlib.import_module("transformers").__version__
    raise ImportError(
        f"selective_scan: {owner.__name__}.{name} of transformers {version} {got}, expected "
        f"({', '.join(wanted).replace('|', ' or ')}); {_TRIED}"
    )


def _signature(own: Any) -> inspect.Signature:
    # The package kernels turns functions into modules.
    return inspect.signature(own.forward if isinstance(own, nn.Module) else own)


def _is_optional(parameter: inspect.Parameter) -> bool:
    variadic = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.kind in variadic or parameter.default is not parameter.empty


# --- the package kernels --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Repository:
    """A substitute for a repository of kernels, which loads one of our layers."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer


def kernel_mapping() -> dict[str, dict[str, dict[Any, _Repository]]]:
    """Returns the scan, the convolution and their updates in the form of the package kernels.

    The mapping is an argument of ``kernels.register_kernel_mapping``, for CPU and CUDA and for all
    modes. Models that are passed to ``kernels.kernelize`` afterwards use it. :func:`enable` does
    the same and more, without that package.

    Returns:
        The layers by kernel name and device type.

    Raises:
        ImportError: kernels or transformers is missing, or transformers has other functions.

    Example:
        >>> from kernels import Mode, kernelize, register_kernel_mapping  # doctest: +SKIP
        >>> from selective_scan.integrations.transformers import kernel_mapping
        >>> from transformers import MambaConfig, MambaForCausalLM
        >>> model = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=2))
        >>> register_kernel_mapping(kernel_mapping())  # doctest: +SKIP
        >>> model = kernelize(model, mode=Mode.INFERENCE)  # doctest: +SKIP
    """
    Mode = importlib.import_module("kernels").Mode
    modes = [Mode.INFERENCE, Mode.TRAINING]
    modes += [mode | Mode.TORCH_COMPILE for mode in modes]
    module = _import("mamba")
    mapping = {}
    for name, replacement in _REPLACEMENTS.items():
        layer = _as_layer(replacement, _found(module, name, replacement.arguments))
        by_mode = dict.fromkeys(modes, _Repository(layer))
        mapping[replacement.kernel] = dict.fromkeys(("cpu", "cuda"), by_mode)
    return mapping


def _as_layer(replacement: _Replacement, own: Callable[..., Any]) -> type[nn.Module]:
    """Returns a module class with nothing but a forward method, as the package kernels requires."""
    signature = _signature(own)
    # This does not call the module itself, since its forward method will be replaced by this one.
    function = replacement.make(
        functools.partial(type(own).forward, own) if isinstance(own, nn.Module) else own
    )

    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [itself, *signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return type(replacement.kernel, (nn.Module,), {"forward": forward, "can_torch_compile": True})
