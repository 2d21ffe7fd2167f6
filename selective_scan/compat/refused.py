"""Classes that programs import beside Mamba, such as copies of mamba_ssm's mixer_seq_simple module,
but that only other configurations construct, which is refused here."""

from __future__ import annotations

from torch import nn


class _Refused(nn.Module):
    _sentence: str

    def __init__(self, *arguments: object, **options: object) -> None:
        raise NotImplementedError(f"selective_scan.compat has no {self._sentence}")


class Mamba2(_Refused):
    """Cannot be constructed, since Mamba-2 is not covered."""

    _sentence = "Mamba2: Mamba-2 and its SSD are not covered, see docs/integrations.md"


class MHA(_Refused):
    """Cannot be constructed, since attention is not covered."""

    _sentence = "MHA: attention is not covered, see docs/integrations.md"
