"""The autograd functions of mamba_ssm's selective_scan_interface module, whose ``apply`` some
programs call directly, and the decorators for such functions of its module utils.torch."""

from __future__ import annotations

import functools

import torch

from ..functional import selective_scan_fn
from ..mamba_inner import mamba_inner_fn


class SelectiveScanFn:
    """:func:`selective_scan.selective_scan_fn` as the `apply` of a class.

    Example:
        >>> import torch
        >>> from selective_scan.compat.functions import SelectiveScanFn
        >>> u, delta = torch.randn(2, 2, 8, 20)
        >>> B, C = torch.randn(2, 2, 4, 20)
        >>> SelectiveScanFn.apply(u, delta, -torch.rand(8, 4), B, C).shape
        torch.Size([2, 8, 20])
    """

    apply = staticmethod(selective_scan_fn)


class MambaInnerFn:
    """:func:`selective_scan.mamba_inner_fn` as the `apply` of a class."""

    apply = staticmethod(mamba_inner_fn)


custom_fwd = functools.partial(torch.amp.custom_fwd, device_type="cuda")
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type="cuda")
