"""Decoding steps that run in grad mode without a graph, as in mamba_ssm and causal_conv1d."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor

from .. import _library, _pytorch
from ..causal_conv1d_update import causal_conv1d_update as _convolve
from ..causal_conv1d_update import causal_conv1d_update_ref as _convolve_ref
from ..selective_state_update import selective_state_update as _scan
from ..selective_state_update import selective_state_update_ref as _scan_ref

Arguments = ParamSpec("Arguments")


def warn_without_graph(name: str, needs_gradient: Callable[[], bool]) -> None:
    """Logs a warning at the first call of a step that would have needed a gradient.

    torch.compile cannot trace logging, so a call that it traces logs nothing.
    """
    if not torch.compiler.is_compiling() and needs_gradient():
        _library.warn_once(
            "%s gives a result without a graph in grad mode too; no gradient goes through it", name
        )


def _without_gradient(function: Callable[Arguments, Tensor]) -> Callable[Arguments, Tensor]:
    """Wraps a function that refuses calls which need a gradient, to run it under torch.no_grad."""

    @functools.wraps(function)
    def step(*arguments: Arguments.args, **options: Arguments.kwargs) -> Tensor:
        values = (*arguments, *options.values())
        warn_without_graph(function.__name__, lambda: _pytorch.is_gradient_needed(values))
        with torch.no_grad():
            return function(*arguments, **options)

    return step


causal_conv1d_update = _without_gradient(_convolve)
causal_conv1d_update_ref = _without_gradient(_convolve_ref)
selective_state_update = _without_gradient(_scan)
selective_state_update_ref = _without_gradient(_scan_ref)
