"""Models that are timed as a whole: layers for training, and language models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from harness.checks import relative_l2
from selective_scan import S6, MambaMixer, mamba_inner_fn, mamba_inner_ref

PASSES = ("forward", "forward + backward")
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class LanguageModel(nn.Module):
    """S6 layers between an embedding and a head, which are omitted if the vocabulary is 0."""

    def __init__(
        self,
        vocabulary: int,
        d_model: int,
        depth: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.embedding, self.head = nn.Identity(), None
        if vocabulary:
            self.embedding = nn.Embedding(vocabulary, d_model, **where)
        self.layers = S6(d_model, depth=depth, **where)
        if vocabulary:
            self.head = nn.Linear(d_model, vocabulary, bias=False, **where)

    def forward(self, tokens: Tensor, cache: object) -> Tensor:
        """Returns the logits of the token after the last one."""
        hidden = self.embedding(tokens)
        if tokens.shape[1] == 1:
            return self.layers(hidden, cache=cache, head=self.head)[:, -1]
        out = self.layers(hidden, cache=cache)[:, -1]
        return out if self.head is None else self.head(out)


class Step:
    """The two passes of a function of leaves that require gradients."""

    def __init__(self, function: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor]) -> None:
        self._function = function
        self._leaves = list(leaves)
        with torch.no_grad():
            self._cotangents = [torch.randn_like(out) for out in function()]

    def forward(self) -> Sequence[Tensor]:
        with torch.no_grad():
            return self._function()

    def forward_backward(self) -> Sequence[Tensor]:
        return torch.autograd.grad(self._function(), self._leaves, self._cotangents)

    def passes(self) -> dict[str, Callable[[], Sequence[Tensor]]]:
        return dict(zip(PASSES, (self.forward, self.forward_backward), strict=True))


def model_step(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Step:
    """Returns a model's two passes; half precision means autocast over its float32 parameters."""

    def run() -> Sequence[Tensor]:
        with _autocast(x.device, dtype):
            return (model(x),)

    return Step(run, [x, *model.parameters()])


def graphed_step(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Step:
    """Returns the two passes of a copy of the model, each of which is a CUDA graph."""
    with _autocast(x.device, dtype):
        graphed = torch.cuda.make_graphed_callables(copy.deepcopy(model), (x,))
    return model_step(graphed, x, dtype)


def _autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    is_half = dtype != torch.float32
    # Without autocast's cache every call casts anew, so that CUDA graphs can capture it.
    return torch.autocast(
        device.type, dtype if is_half else None, enabled=is_half, cache_enabled=False
    )


def check_layer(layer: MambaMixer, dtype: torch.dtype) -> float:
    """Returns the error of the part of a layer between its projections, for one short sequence,
    against the reference in float64.

    Raises:
        RuntimeError: the error is above its tolerance.
    """
    weights = (
        *(layer.conv1d.weight, layer.conv1d.bias, layer.x_proj.weight, layer.dt_proj.weight),
        *(layer.out_proj.weight, None, -torch.exp(layer.A_log)),
    )
    options = {"D": layer.D, "delta_bias": layer.dt_proj.bias}
    with torch.no_grad():
        xz = torch.randn(1, 64, 2 * layer.d_inner, device=layer.D.device).to(dtype).transpose(1, 2)
        out = mamba_inner_fn(xz, *weights, **options)
        exact = mamba_inner_ref(
            xz.double(),
            *(tensor if tensor is None else tensor.double() for tensor in weights),
            **{name: tensor.double() for name, tensor in options.items()},
        )
    error = relative_l2(out, exact)
    if not error <= _TOLERANCE[dtype]:
        raise RuntimeError(f"the layer is off by {error:.1e}")
    return error
