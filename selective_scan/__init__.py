"""Selective scan for PyTorch: kernels for CPU and CUDA, six discretizations, real and complex.

    selective_scan_fn     the selective scan
    selective_scan_ref    its reference: the same in plain PyTorch, written to be read
    adaptive_unitary_scan_fn  a scan whose states rotate by input-dependent angles; and its _ref
    causal_conv1d_fn      the depthwise causal convolution of a Mamba layer; and its _ref
    causal_conv1d_update  one step of that convolution, with its state in place; and its _ref
    diagonal_scan_fn      the recurrence h[t] = a[t]·h[t-1] + b[t] alone; and its _ref
    exponential_trapezoid_fn  a scan that takes the input at both ends of a step; and its _ref
    mamba_inner_fn        everything between the projections of a Mamba layer; and its _ref
    rotate_states         rotates B and C, and so pairs of states, by input-dependent angles
    selective_scan_prefill  scans chunks of packed sequences over a pool of states; and its _ref
    selective_state_update  one or a few steps of states in place, for decoding; and its _ref
    MambaMixer            a Mamba layer without norm and residual
    S6                    a stack of Mamba layers with norms and residuals
    MixerCache, S6Cache   the states of a layer and of a stack, from which the next call continues
    backends              says which kernels are available, and why others are not
    Backend, Backends     what it returns
    allow_fallback        runs the reference if a library is missing, instead of an ImportError

``python -m selective_scan`` prints what is installed and checks it. The modules ``compat``,
``distributed``, ``integrations``, ``onnx`` and ``vision`` are imported when they are first used.
"""

from typing import TYPE_CHECKING

from ._lazy import importer
from ._library import Backend, Backends, allow_fallback, backends
from ._version import __version__
from .adaptive_unitary import adaptive_unitary_scan_fn, adaptive_unitary_scan_ref
from .cache import MixerCache, S6Cache
from .causal_conv1d import causal_conv1d_fn, causal_conv1d_ref
from .causal_conv1d_update import causal_conv1d_update, causal_conv1d_update_ref
from .diagonal_scan import diagonal_scan_fn, diagonal_scan_ref
from .exponential_trapezoid import exponential_trapezoid_fn, exponential_trapezoid_ref
from .functional import selective_scan_fn, selective_scan_ref
from .mamba_inner import mamba_inner_fn, mamba_inner_ref
from .mamba_mixer import MambaMixer
from .rotation import rotate_states
from .s6 import S6
from .selective_scan_prefill import selective_scan_prefill, selective_scan_prefill_ref
from .selective_state_update import selective_state_update, selective_state_update_ref

__all__ = [
    "S6",
    "Backend",
    "Backends",
    "MambaMixer",
    "MixerCache",
    "S6Cache",
    "__version__",
    "adaptive_unitary_scan_fn",
    "adaptive_unitary_scan_ref",
    "allow_fallback",
    "backends",
    "causal_conv1d_fn",
    "causal_conv1d_ref",
    "causal_conv1d_update",
    "causal_conv1d_update_ref",
    "diagonal_scan_fn",
    "diagonal_scan_ref",
    "exponential_trapezoid_fn",
    "exponential_trapezoid_ref",
    "mamba_inner_fn",
    "mamba_inner_ref",
    "rotate_states",
    "selective_scan_fn",
    "selective_scan_prefill",
    "selective_scan_prefill_ref",
    "selective_scan_ref",
    "selective_state_update",
    "selective_state_update_ref",
]

if TYPE_CHECKING:
    from . import compat, distributed, integrations, onnx, vision  # noqa: F401
else:  # a type checker that saw it would accept any attribute
    __getattr__ = importer(__name__, "compat", "distributed", "integrations", "onnx", "vision")
