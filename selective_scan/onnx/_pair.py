"""Complex numbers as pairs of real ones, since ONNX's operators support only real numbers."""

from __future__ import annotations

import torch
from torch import Tensor


class Pair:
    """The parts of a complex tensor, with the arithmetic that the discretizations use."""

    def __init__(self, re: Tensor, im: Tensor) -> None:
        self.re, self.im = re, im

    @classmethod
    def of(cls, number: Pair | Tensor | float) -> Pair:
        return number if isinstance(number, cls) else cls(number, 0)

    def __add__(self, other: Pair | Tensor | float) -> Pair:
        other = Pair.of(other)
        return Pair(self.re + other.re, self.im + other.im)

    __radd__ = __add__

    def __neg__(self) -> Pair:
        return Pair(-self.re, -self.im)

    def __sub__(self, other: Pair | Tensor | float) -> Pair:
        return self + -other

    def __rsub__(self, other: Tensor | float) -> Pair:
        return -self + other

    def __mul__(self, other: Pair | Tensor | float) -> Pair:
        if not isinstance(other, Pair):
            return Pair(self.re * other, self.im * other)
        re = self.re * other.re - self.im * other.im
        return Pair(re, self.re * other.im + self.im * other.re)

    __rmul__ = __mul__

    def __truediv__(self, other: Pair | Tensor | float) -> Pair:
        if not isinstance(other, Pair):
            return Pair(self.re / other, self.im / other)
        size = other.re * other.re + other.im * other.im
        return self * Pair(other.re / size, -other.im / size)

    def __rtruediv__(self, other: Tensor | float) -> Pair:
        return Pair.of(other) / self

    def __pow__(self, power: int) -> Pair:
        return self if power == 1 else self * self ** (power - 1)

    def exp(self) -> Pair:
        size = self.re.exp()
        return Pair(size * self.im.cos(), size * self.im.sin())

    def abs(self) -> Tensor:
        return (self.re * self.re + self.im * self.im).sqrt()

    def sum(self, dim: int) -> Pair:
        return Pair(self.re.sum(dim), self.im.sum(dim))

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        """Implements the functions of torch that the discretizations call."""
        if function is torch.where:
            condition, *others = arguments
            others = [*map(Pair.of, others)]
            parts = ([getattr(other, part) for other in others] for part in ("re", "im"))
            return Pair(*(torch.where(condition, *part) for part in parts))
        if function is torch.ones_like:
            return Pair(torch.ones_like(arguments[0].re), torch.zeros_like(arguments[0].re))
        return NotImplemented
