"""Reads weights of Mamba models under the names that mamba_ssm and transformers give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from ._checks import REAL
from ._module_arguments import check_dtype, refuse
from ._plain_mixer import is_of_neighbours
from ._table import fail_on_type

if TYPE_CHECKING:
    from .mamba_mixer import MambaMixer

NORM_EPS = 1e-5  # the eps of S6's norms, and the default of mamba_ssm and transformers
# The parameters that a layer of S6 may have, whose names are the same in those packages.
LAYER_NAMES = frozenset(
    (
        *("norm.weight", "in_proj.weight", "in_proj.bias", "conv1d.weight", "conv1d.bias"),
        *("x_proj.weight", "dt_proj.weight", "dt_proj.bias", "out_proj.weight", "out_proj.bias"),
        *("A_log", "D"),
    )
)
# The options with which this package's mixer computes the same as Mamba.
_OPTIONS = {
    "discretization_method": "zoh",
    "rotary": False,
    "bidirectional": False,
    "dt_soft_plus": True,
}
# The weights of a language model outside its layers.
_NOT_OF_LAYERS = ("embedding.weight", "embeddings.weight", "lm_head.weight")


def read_weights(source: Mapping[str, Tensor] | nn.Module) -> dict[str, Tensor]:
    """Returns the weights of a state dict, or of a module after checking that it is a Mamba."""
    if isinstance(source, nn.Module):
        _check_module(source)
        source = source.state_dict()
    if not isinstance(source, Mapping):
        fail_on_type("source", "a Module or a state dict", source)
    weights = {name.removeprefix("backbone."): weight for name, weight in source.items()}
    return {name: weight for name, weight in weights.items() if name not in _NOT_OF_LAYERS}


def _check_module(module: nn.Module) -> None:
    """Checks the properties of a module that its weights do not show."""
    config = getattr(module, "config", None)
    model_type = getattr(config, "model_type", "mamba")
    if model_type != "mamba":
        _fail(f"be a Mamba model, got one of type {model_type!r}")
    activation = getattr(config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        _fail(f"have the activation 'silu', got {activation!r}")
    for name, part in module.named_modules():
        eps = getattr(part, "variance_epsilon", getattr(part, "eps", None))
        if eps not in (None, NORM_EPS):
            _fail(f"have norms of eps = {NORM_EPS}, got {eps} in {name!r}")
        if isinstance(part, nn.Conv1d) and not is_of_neighbours(part):
            _fail(f"have convolutions as Mamba's, got {part} in {name!r}")
        for option in _OPTIONS if hasattr(part, "dt_soft_plus") else ():
            if (given := getattr(part, option)) != _OPTIONS[option]:
                _fail(f"have {option} {_OPTIONS[option]!r}, got {given!r} in {name!r}")


def name_elsewhere(name: str) -> str:
    """Returns the name that mamba_ssm and transformers give a parameter of S6."""
    return re.sub(r"^(layers\.\d+\.)(?!norm\.)", r"\1mixer.", name)


def as_stack(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turns the weights of a single mixer into those of a model of one layer."""
    if "in_proj.weight" not in weights:
        return weights
    weight = _get(weights, "in_proj.weight")
    norm = weight.new_ones(weight.shape[-1:])
    return {
        "layers.0.norm.weight": norm,
        **{f"layers.0.mixer.{name}": weight for name, weight in weights.items()},
        "norm_f.weight": norm,
    }


def depth_of(weights: Mapping[str, Tensor]) -> int:
    layers = [re.match(r"layers\.(\d+)\.", name) for name in weights]
    return 1 + max((int(match[1]) for match in layers if match), default=0)


def mixer_options(weights: Mapping[str, Tensor], prefix: str = "") -> dict[str, object]:
    """Returns the constructor's arguments for a mixer of these sizes, on the device meta."""

    def sizes(name: str, dims: int) -> torch.Size:
        weight = _get(weights, f"{prefix}{name}")
        if weight.dim() != dims:
            _fail(f"have {prefix}{name} of {dims} dimensions, got {tuple(weight.shape)}")
        return weight.shape

    rows, d_model = sizes("in_proj.weight", 2)
    if rows == 0 or rows % 2 or d_model == 0:
        got = (rows, d_model)
        _fail(f"have {prefix}in_proj.weight of shape (2·d_inner, d_model), got {got}")
    return {
        "d_model": d_model,
        "d_state": sizes("A_log", 2)[1],
        "d_conv": sizes("conv1d.weight", 3)[2],
        "expand": rows / (2 * d_model),
        "dt_rank": sizes("dt_proj.weight", 2)[1],
        "conv_bias": f"{prefix}conv1d.bias" in weights,
        "bias": f"{prefix}in_proj.bias" in weights,
        "device": "meta",
    }


def assign_weights(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """Assigns copies of weights to a module on the device meta."""
    check_dtype(dtype)
    expected = {name_elsewhere(own): (own, size.shape) for own, size in module.state_dict().items()}
    state = {}
    for name, (own, shape) in expected.items():
        weight = _get(weights, name)
        if weight.shape != shape:
            _fail(f"have {name} of shape {tuple(shape)}, got {tuple(weight.shape)}")
        if (dtype or weight.dtype) not in REAL:
            _fail(f"have {name} of dtype float32, float16, bfloat16 or float64, got {weight.dtype}")
        state[own] = weight.detach().to(device=device, dtype=dtype, copy=True)
    if unknown := [name for name in weights if name not in expected]:
        _fail(f"hold nothing but Mamba's weights, got {', '.join(unknown[:3])}")
    module.load_state_dict(state, assign=True)


def check_is_mamba(mixer: MambaMixer) -> None:
    """Raises a ValueError unless Mamba computes the same from such parameters."""
    for name, value in _OPTIONS.items():
        if getattr(mixer, name) != value:
            refuse(name, f"{value!r} for Mamba", getattr(mixer, name))
    conv1d = mixer.conv1d
    if isinstance(conv1d, nn.Conv1d) and not is_of_neighbours(conv1d):
        refuse("conv1d", "as Mamba's for Mamba", str(conv1d))
    names = mixer.state_dict().keys()
    if others := sorted(names - LAYER_NAMES):
        refuse("parameters", "those of Mamba alone", others[0])
    if "dt_proj.bias" not in names:
        refuse("dt_proj_bias", "True for Mamba", False)


def _get(weights: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in weights:
        _fail(f"hold {name}, got {', '.join(list(weights)[:3]) or 'nothing'} and so on")
    if not isinstance(weights[name], Tensor):
        _fail(f"hold Tensors, got {type(weights[name]).__name__} for {name}")
    return weights[name]


def _fail(wanted: str) -> NoReturn:
    raise ValueError(f"selective_scan: source must {wanted}")
