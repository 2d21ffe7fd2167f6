"""Keeps marks of parameters, which PyTorch drops when it replaces a parameter."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class MarkedModule(nn.Module):
    """A module that marks some of its parameters, for optimizers or initializations.

    The marks survive when a copy, a pickle, or a move to another device or dtype replaces the
    parameters.

    Attributes:
        _marked: the names of the parameters that have the mark.
        _mark_name: the name of the attribute that is True for these parameters.
    """

    _marked: tuple[str, ...] = ()
    _mark_name = "_no_weight_decay"

    def _mark(self) -> None:
        for name in self._marked:
            if (parameter := self._parameters.get(name)) is not None:
                setattr(parameter, self._mark_name, True)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._mark()

    def __setattr__(self, name: str, value: object) -> None:
        """Does what nn.Module does. Since this method is defined, fully_shard calls it, and thereby
        register_parameter, for each parameter; it would write to _parameters otherwise."""
        super().__setattr__(name, value)

    def _load_from_state_dict(self, *arguments: object) -> None:
        super()._load_from_state_dict(*arguments)
        self._mark()  # PyTorch may swap a parameter with the tensor that it loads

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MarkedModule:
        super()._apply(fn, recurse)
        self._mark()
        return self

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._mark()
