"""Classes that programs import beside Mamba, such as copies of mamba_ssm's mixer_seq_simple module,
but that only other configurations construct, which is refused here."""

from __future__ import annotations

from torch import nn

from ._modules import NO_MAMBA_2, NO_MAMBA_3, why_absent


class _Refused(nn.Module):
    _why: str

    def __init__(self, *arguments: object, **options: object) -> None:
        raise NotImplementedError(self._why)


class Mamba2(_Refused):
    """Cannot be constructed, since Mamba-2 is not covered."""

    _why = why_absent("Mamba2", NO_MAMBA_2)


class Mamba3(_Refused):
    """Cannot be constructed, since Mamba-3 is not covered."""

    _why = why_absent("Mamba3", NO_MAMBA_3)


class MHA(_Refused):
    """Cannot be constructed, since attention is not covered."""

    _why = why_absent("MHA", "attention is not covered")
