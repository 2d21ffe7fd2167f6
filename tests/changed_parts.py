"""Replacements of a layer's parts and changes of a model, for the tests that a layer runs what its
modules compute. After each of them the weights that the model had no longer determine its
output."""

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from selective_scan import S6

# --- in the place of a linear layer ---------------------------------------------------------------


class OwnBias(nn.Module):
    """Adds its own `.bias` and is no nn.Linear, like linear layers of quantization packages."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.packed, self.bias = plain.weight, plain.bias

    def forward(self, dt: torch.Tensor) -> torch.Tensor:
        return dt @ self.packed.T + self.bias


class NoBias(nn.Module):
    """Adds a bias although it has neither `.weight` nor `.bias`."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.base_layer = plain

    def forward(self, dt: torch.Tensor) -> torch.Tensor:
        return self.base_layer(dt)


class Unbiased(nn.Module):
    """Has a `.bias` that it does not add."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, dt: torch.Tensor) -> torch.Tensor:
        return F.linear(dt, self.weight)


class Adapter(nn.Module):
    """Adds a low-rank update to the linear layer that it wraps, like the packages for LoRA."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        where = {"device": base_layer.weight.device, "dtype": base_layer.weight.dtype}
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False, **where)
        self.up = nn.Linear(2, base_layer.out_features, bias=False, **where)
        self.bias = base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class Scaled(nn.Linear):
    """Scales the product and the bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * nn.Linear.forward(self, x)


def scaled(plain: nn.Linear) -> nn.Linear:
    plain.__class__ = Scaled
    return plain


def hooked(plain: nn.Module) -> nn.Module:
    plain.register_forward_hook(lambda _module, _inputs, out: 2 * out)
    return plain


# --- changes of a model ---------------------------------------------------------------------------


class Wrapper(nn.Module):
    """A wrapper like those that FSDP and others put around a layer or a model."""

    def __init__(self, module: nn.Module, factor: float = 1) -> None:
        super().__init__()
        self.module, self.factor = module, factor

    def forward(self, *inputs: object, **options: object) -> torch.Tensor:
        return self.factor * self.module(*inputs, **options)


class Doubled(nn.Module):
    """A parametrization that doubles a weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class OtherNorm(nn.RMSNorm):
    pass


class Change(NamedTuple):
    """A change of a two-layer model, each of whose layers contributes to the output."""

    make: Callable[[S6], object]
    goes_through_modules: bool  # a call of few steps then no longer runs as one operator
    norms: int = 3  # number of norms that still run by their op in a call of many steps


def hook_of(name: str) -> Callable[[S6], object]:
    return lambda model: hooked(model.get_submodule(name))


def adapt(model: S6) -> None:
    model.layers[1].in_proj = Adapter(model.layers[1].in_proj)


def move(model: S6) -> None:
    """Replaces the forward method of a module, as accelerate does."""
    part = model.layers[1].out_proj
    part.forward = functools.partial(Scaled.forward, part)


def compile_to_double(name: str) -> Callable[[S6], None]:
    """Compiles a module with a backend whose graphs return twice the results."""

    def double(graph: torch.fx.GraphModule, _: list) -> Callable[..., list[torch.Tensor]]:
        return lambda *inputs: [2 * out for out in graph(*inputs)]

    return lambda model: model.get_submodule(name).compile(backend=double)


def add_bias(model: S6) -> None:
    bias = torch.randn_like(model.norm_f.weight)
    model.layers[1].out_proj.bias = nn.Parameter(bias, requires_grad=False)


def make_bias_a_buffer(model: S6) -> None:
    part = model.layers[1].dt_proj
    bias = part.bias.data + 1
    del part.bias
    part.register_buffer("bias", bias)


def set_data(name: str, function: Callable) -> Callable[[S6], None]:
    def change(model: S6) -> None:
        parameter = model.get_parameter(name)
        parameter.data = function(parameter.data)

    return change


def turned(weight: torch.Tensor) -> torch.Tensor:
    """Returns a view of the same memory, dtype and shape with other strides."""
    return weight.as_strided(weight.shape, (1, weight.shape[0]))


def set_norm(kind: type[nn.Module], name: str, **options: object) -> Callable[[S6], None]:
    def change(model: S6) -> None:
        parent, _, last = name.rpartition(".")
        norm = kind(model.d_model, device=model.norm_f.weight.device, **options)
        setattr(model.get_submodule(parent), last, norm)

    return change


def set_option(names: tuple[str, ...], option: str, value: object) -> Callable[[S6], None]:
    def change(model: S6) -> None:
        for name in names:
            setattr(model.get_submodule(name), option, value)

    return change


def take_bare_steps(model: S6) -> None:
    """Keeps the lengths of steps: negative ones would let states and rounding errors grow."""
    for layer in model.layers:
        layer.dt_soft_plus = False
        layer.dt_proj.bias.copy_(F.softplus(layer.dt_proj.bias))


def replace_hooks(model: S6) -> None:
    model.norm_f._forward_hooks = OrderedDict()
    hooked(model.norm_f)


def replace_weight(model: S6) -> None:
    part = model.layers[1].x_proj
    part.weight = nn.Parameter(torch.randn_like(part.weight), requires_grad=False)


def set_values(model: S6) -> None:
    for weight in model.parameters():
        weight.mul_(1.1)


def replace_parameters(model: S6) -> None:
    """Replaces all parameters of a module at once, by its dict instead of its attributes."""
    part = model.layers[0].dt_proj
    part._parameters = {
        name: nn.Parameter(value.data + 1, requires_grad=False)
        for name, value in part._parameters.items()
    }


def replace_layer(model: S6) -> None:
    model.layers[0] = copy.deepcopy(model.layers[0])
    model.layers[0].A_log.add_(1)


LAYERS = ("layers.0", "layers.1")
NORMS = ("norm_f", "layers.0.norm", "layers.1.norm")
CHANGES = {
    "an adapter": Change(adapt, True, 1),
    "another class": Change(lambda model: scaled(model.layers[1].x_proj), True),
    "a parametrization": Change(
        lambda model: register_parametrization(model.layers[0].out_proj, "weight", Doubled()), True
    ),
    "a parametrization of a norm": Change(
        lambda model: register_parametrization(model.layers[1].norm, "weight", Doubled()), True, 1
    ),
    "a forward of its own": Change(move, True),
    "a compiled layer": Change(compile_to_double("layers.1"), True, 1),
    "another dtype": Change(set_data("layers.1.A_log", torch.Tensor.bfloat16), True),
    "another dtype of a norm": Change(
        set_data("layers.1.norm.weight", lambda weight: weight.double() / 3), True, 0
    ),
    "a bias": Change(add_bias, True),
    "a bias that is no parameter": Change(make_bias_a_buffer, True),
    "hook of a layer": Change(hook_of("layers.1"), True, 2),
    "hook of a norm": Change(hook_of("layers.1.norm"), True, 1),
    "hook of in_proj": Change(hook_of("layers.0.in_proj"), True, 1),
    "hook of conv1d": Change(hook_of("layers.1.conv1d"), True),
    "hook of dt_proj": Change(hook_of("layers.1.dt_proj"), True),
    "hook of the last norm": Change(hook_of("norm_f"), True, 2),
    "hook of a layer's input": Change(
        lambda model: model.layers[1].register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],)),
        True,
        2,
    ),
    "hook among new hooks": Change(replace_hooks, True, 2),
    "another kind of norm": Change(set_norm(nn.LayerNorm, "layers.0.norm"), True, 1),
    "a norm of its own class": Change(set_norm(OtherNorm, "norm_f", eps=1e-5), True, 2),
    "a norm without a weight": Change(
        set_norm(nn.RMSNorm, "layers.0.norm", eps=1e-5, elementwise_affine=False), True, 1
    ),
    "no eps": Change(set_option(NORMS[1:2], "eps", None), True, 1),
    "another eps": Change(set_option(NORMS[2:], "eps", 0.1), True),
    "another eps of all": Change(set_option(NORMS, "eps", 0.5), False),
    "another norm": Change(set_norm(nn.RMSNorm, "norm_f", eps=1e-5), False),
    "another method": Change(set_option(LAYERS[1:], "discretization_method", "foh"), True),
    "another option of all": Change(take_bare_steps, False),
    "another weight": Change(replace_weight, False),
    "other memory": Change(set_data("layers.0.out_proj.weight", torch.randn_like), False),
    "other strides": Change(set_data("layers.0.out_proj.weight", turned), False),
    "other values": Change(set_values, False),
    "other parameters": Change(replace_parameters, False),
    "another layer": Change(replace_layer, False),
}
