"""Keeps marks of parameters, which PyTorch drops when it replaces a parameter."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class MarkedModule(nn.Module):
    """A module that marks some of its parameters for optimizers.

    The marks survive when a copy, a pickle, or a move to another device or dtype replaces the
    parameters.

    Attributes:
        _marked: the names of the parameters that have ``_no_weight_decay = True``.
    """

    _marked: tuple[str, ...] = ()

    def _mark(self) -> None:
        for name in self._marked:
            if (parameter := self._parameters.get(name)) is not None:
                parameter._no_weight_decay = True

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MarkedModule:
        super()._apply(fn, recurse)
        self._mark()
        return self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._mark()
