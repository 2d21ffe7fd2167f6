"""The gated MLP of mamba_ssm's blocks, with the signature of its mlp module."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._module_arguments import check_count


class GatedMLP(nn.Module):
    """Two projections with a gate between them: fc2(a·activation(b)), a and b being the halves of
    fc1(x).

    Args:
        in_features: size of the last dimension.
        hidden_features: size of a and of b, rounded up to a multiple of `multiple_of`; None means
            eight thirds of in_features.
        out_features: size of the last dimension of the result; None means in_features.
        activation: the gate's activation function.
        bias: whether the projections have biases.
        multiple_of: see hidden_features.
        device: the parameters' device.
        dtype: the parameters' dtype.

    Raises:
        ValueError: a size is not a positive integer.

    References:
        Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202.

    Example:
        >>> import torch
        >>> from selective_scan.compat.mlp import GatedMLP
        >>> mlp = GatedMLP(48)
        >>> mlp.fc2.in_features, mlp(torch.randn(2, 10, 48)).shape
        (128, torch.Size([2, 10, 48]))
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.silu,
        bias: bool = False,
        multiple_of: int = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("in_features", in_features)
        check_count("multiple_of", multiple_of)
        if hidden_features is None:
            hidden_features = max(1, 8 * in_features // 3)
        check_count("hidden_features", hidden_features, " or None")
        hidden = -(-hidden_features // multiple_of) * multiple_of
        where = {"bias": bias, "device": device, "dtype": dtype}
        self.fc1 = nn.Linear(in_features, 2 * hidden, **where)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, in_features if out_features is None else out_features, **where)

    def forward(self, x: Tensor) -> Tensor:
        """Runs the MLP.

        Args:
            x: (..., in_features), in the parameters' dtype.

        Returns:
            (..., out_features).

        Example:
            >>> import torch
            >>> from selective_scan.compat.mlp import GatedMLP
            >>> GatedMLP(48, out_features=5)(torch.randn(2, 10, 48)).shape
            torch.Size([2, 10, 5])
        """
        values, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(values * self.activation(gate))
