"""Sequences and models that are split over the ranks of torch.distributed.

    selective_scan_fn   the scan of a sequence whose steps lie on several ranks
    causal_conv1d_fn    the convolution that precedes it
    parallelize         splits the steps, the channels, or both of an S6 over ranks

The package does not import this module; programs that need it import it themselves.
"""

import torch

if not torch.distributed.is_available():
    raise ImportError("selective_scan.distributed needs a PyTorch that has torch.distributed")

from .causal_conv1d import causal_conv1d_fn
from .parallel import parallelize
from .selective_scan import selective_scan_fn

__all__ = ["causal_conv1d_fn", "parallelize", "selective_scan_fn"]
