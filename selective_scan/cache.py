"""The states of layers between calls, from which the next call continues, for decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from . import _module_arguments, _pytorch
from ._checks import MAX_WIDTH, REAL, check_changed, check_dtype
from ._discretization import Method, at_least_single, poles
from ._layer_convolution import convolve_by, convolve_widely
from ._module_arguments import check_count, refuse
from ._ops import add_op_namespace_prefix, ops
from ._prepared_step import PreparedStep
from ._table import fail_on_type
from .causal_conv1d import causal_conv1d_fn
from .causal_conv1d_update import causal_conv1d_update
from .functional import selective_scan_fn
from .selective_state_update import update_by_log

if TYPE_CHECKING:
    from .mamba_mixer import MambaMixer

# Indices of rows of a batch.
Rows = Tensor | Sequence[int]

# Inductor 2.13 inlines index_select. If the same graph has changed the tensor before, the copy then
# reads rows from the memory that it writes. A custom op's result is always a separate tensor.
_ROWS_OF = add_op_namespace_prefix("_rows_of")
torch.library.define(_ROWS_OF, "(Tensor tensor, int dim, Tensor rows) -> Tensor")
torch.library.impl(_ROWS_OF, "default", Tensor.index_select)


class _Cache:
    """Tensors whose first dimension is the batch, which are changed in place."""

    def _tensors(self) -> list[Tensor]:
        raise NotImplementedError

    def reset(self, rows: Rows | None = None) -> None:
        """Resets rows of the batch to the start of a sequence.

        Args:
            rows: any number of row indices, or a mask (batch,); None for all rows.

        Raises:
            TypeError: rows are neither integers nor bools.
            ValueError: rows are not one-dimensional, or are on the host and out of range; for the
                latter, compiled code raises a RuntimeError.
        """
        tensors = self._tensors()
        if not tensors:  # a stack without layers has no states, nor a batch
            return
        chosen = None if rows is None else self._rows(rows, masks=True)
        for tensor in tensors:
            if chosen is None:
                tensor.zero_()
            elif chosen.dtype == torch.bool:
                tensor.masked_fill_(chosen[:, None, None], 0)
            else:
                tensor.index_fill_(0, chosen, 0)

    def reorder(self, rows: Rows) -> None:
        """Replaces every row i of the batch by row ``rows[i]``, as beam search does.

        Args:
            rows: (batch,), each from 0 to batch - 1; a row may occur any number of times.

        Raises:
            TypeError: rows are not integers.
            ValueError: rows are not (batch,), or are on the host and out of range; for the latter,
                compiled code raises a RuntimeError.
        """
        tensors = self._tensors()
        if not tensors:  # as in reset
            return
        chosen = self._rows(rows, masks=False)
        batch = tensors[0].shape[0]
        if chosen.shape != (batch,):
            refuse("rows", f"(batch,) = ({batch},)", tuple(chosen.shape))
        is_compiling = torch.compiler.is_compiling()
        select = ops._rows_of.default if is_compiling else Tensor.index_select
        for tensor in tensors:
            tensor.copy_(select(tensor, 0, chosen))

    def _rows(self, rows: Rows, *, masks: bool) -> Tensor:
        """Returns rows as a tensor on the states' device, int64, or bool for a mask."""
        wanted = "integers or a mask of bools" if masks else "integers"
        try:
            # A list becomes a host tensor whatever the default device is, so it can be checked.
            given = torch.as_tensor(rows, device=None if isinstance(rows, Tensor) else "cpu")
        except (RuntimeError, TypeError, ValueError) as error:
            got = type(rows).__name__
            raise TypeError(f"selective_scan: rows must be {wanted}, got {got}") from error
        if given.numel() == 0 and not isinstance(rows, Tensor):
            given = given.long()  # an empty list has no element type
        place, is_mask = self._tensors()[0], given.dtype == torch.bool
        batch = place.shape[0]
        if given.is_floating_point() or given.is_complex() or (is_mask and not masks):
            raise TypeError(f"selective_scan: rows must be {wanted}, got {given.dtype}")
        if given.dim() != 1 or (is_mask and given.shape[0] != batch):
            wanted = f"a mask (batch,) = ({batch},)" if is_mask else "one-dimensional"
            refuse("rows", wanted, tuple(given.shape))
        if not is_mask:
            given = given.long()  # PyTorch computes little with unsigned integers
        # On a GPU the values are not read back to the host.
        if not is_mask and given.device.type == "cpu" and given.numel() > 0:
            low, high = given.aminmax()
            if torch.compiler.is_compiling():  # a graph cannot branch on values
                is_right = (low >= 0) & (high < batch)
                _pytorch.assert_async(is_right, "selective_scan: rows must be from 0 to batch - 1")
            elif low < 0 or high >= batch:
                got = (low if low < 0 else high).item()
                refuse("rows", f"from 0 to batch - 1 = {batch - 1}", got)
        return given.to(place.device)


@dataclass(eq=False)
class MixerCache(_Cache):
    """The states of a batch of sequences in one layer, from :meth:`MambaMixer.allocate_cache`.

    The tensors are always changed in place, so that CUDA graphs and compiled code find them at the
    same addresses.

    Attributes:
        conv_state: the convolution's inputs at the last d_conv - 1 steps, the latest at the end,
            (batch, d_inner, d_conv - 1), with channels adjacent in memory.
        state: the scan's state, (batch, d_inner, d_state).
        last_input: B·u of the last step, a share of which enters the trapezoid's next step, (batch,
            d_inner, d_state); None for other methods.
        angles: the angles by which pairs of states have been rotated, (batch, d_state/2, 1) in
            float64; None for states that do not rotate.

    Example:
        >>> import torch
        >>> from selective_scan import MambaMixer
        >>> mixer = MambaMixer(d_model=32)
        >>> cache = mixer.allocate_cache(batch_size=2)
        >>> cache.conv_state.shape, cache.state.shape
        (torch.Size([2, 64, 3]), torch.Size([2, 64, 16]))
        >>> with torch.no_grad():
        ...     out = mixer(torch.randn(2, 100, 32), cache=cache)
        ...     next_out = mixer(torch.randn(2, 1, 32), cache=cache)
    """

    conv_state: Tensor
    state: Tensor
    last_input: Tensor | None = None
    angles: Tensor | None = None
    # The workspace of the stack's single operator on a GPU, kept between calls in the cache of the
    # first layer.
    _workspace: Tensor | None = field(default=None, init=False, repr=False)
    # Prepared calls of the single operator, by hidden's shape; None after a shape's first call.
    _steps: dict[torch.Size, PreparedStep | None] = field(
        default_factory=dict, init=False, repr=False
    )

    def __getstate__(self) -> dict[str, object]:
        """Leaves out what belongs to this cache's calls, which copies and pickles do without."""
        return {**vars(self), "_workspace": None, "_steps": {}}

    def _tensors(self) -> list[Tensor]:
        tensors = (self.conv_state, self.state, self.last_input, self.angles)
        return [tensor for tensor in tensors if tensor is not None]

    def convolve(self, x: Tensor, conv1d: nn.Module, width: int, *, is_called: bool) -> Tensor:
        """Computes silu of the depthwise convolution, continuing from conv_state.

        Args:
            x: (batch, d_inner) for one step, else (batch, d_inner, steps).
            conv1d: the layer's convolution.
            width: the layer's d_conv.
            is_called: whether conv1d must be called, because it does more than apply its weights.

        Returns:
            A tensor shaped like x.
        """
        if width > MAX_WIDTH or is_called:
            _refuse_other_steps(conv1d, width)
            new = x.unsqueeze(-1) if x.dim() == 2 else x
            steps = new.shape[-1]
            seen = torch.cat([self.conv_state.to(x.dtype), new], -1)
            self.conv_state.copy_(seen[..., steps:])
            seen = seen[..., seen.shape[-1] - (width - 1 + steps) :]
            if is_called:
                return convolve_by(conv1d, seen, width - 1).view(x.shape)
            return convolve_widely(seen, conv1d.weight, conv1d.bias).view(x.shape)
        taps, bias = conv1d.weight.squeeze(1), conv1d.bias
        if x.dim() == 2:
            return causal_conv1d_update(x, self.conv_state, taps, bias, "silu")
        out, last = causal_conv1d_fn(
            *(x, taps, bias),
            initial_states=self.conv_state,
            return_final_states=True,
            activation="silu",
        )
        self.conv_state.copy_(last)
        return out

    def scan(
        self,
        x: Tensor,
        delta: Tensor,
        A_log: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        z: Tensor,
        delta_bias: Tensor | None,
        *,
        delta_softplus: bool,
        discretization_method: Method,
    ) -> Tensor:
        """Runs the selective scan, continuing from state.

        Args:
            x, delta, z: (batch, d_inner) for one step, else (batch, d_inner, steps).
            B, C: (batch, d_state) or (batch, d_state, steps).
            A_log: A = −exp(A_log).
            D, delta_bias, delta_softplus, discretization_method: see selective_scan_fn.

        Returns:
            A tensor shaped like x.
        """
        more = (B, C, D, z, delta_bias, delta_softplus)
        method = {"discretization_method": discretization_method}
        if x.dim() == 2:
            return update_by_log(self.state, x, delta, A_log, *more, **method)
        out, last = selective_scan_fn(
            *(x, delta, poles(A_log), *more),
            return_last_state=True,
            initial_state=self.state.to(at_least_single(self.state.dtype)),
            **method,
        )
        self.state.copy_(last)
        return out


@dataclass(eq=False)
class S6Cache(_Cache):
    """The states of a batch of sequences in every layer, from :meth:`S6.allocate_cache`.

    Attributes:
        layers: the cache of each layer.

    Raises:
        TypeError: one of the layers' caches is no MixerCache.
        ValueError: a cache is given for two layers, both of which would advance it.

    Example:
        >>> import torch
        >>> from selective_scan import S6
        >>> model = S6(d_model=32, depth=2)
        >>> cache = model.allocate_cache(batch_size=2)
        >>> with torch.no_grad():
        ...     prompt = model(torch.randn(2, 100, 32), cache=cache)
        ...     for _ in range(3):
        ...         out = model(torch.randn(2, 1, 32), cache=cache)
        >>> cache.reset(rows=[1])  # row 1 begins a new sequence
        >>> cache.reorder([0, 0])  # both rows go on from row 0
    """

    layers: tuple[MixerCache, ...]

    def __post_init__(self) -> None:
        for layer in self.layers:
            if not isinstance(layer, MixerCache):
                fail_on_type("layers", "MixerCaches", layer)
        depth, count = len(self.layers), len({*map(id, self.layers)})
        if count != depth:
            refuse("layers", f"{depth} different caches", count)

    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in layer._tensors()]


torch.serialization.add_safe_globals([MixerCache, S6Cache])  # which torch.load may construct


def allocate_cache(
    layer: MambaMixer,
    batch_size: int,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> MixerCache:
    """Returns a new cache, as :meth:`MambaMixer.allocate_cache` describes it."""
    _refuse_bidirectional(layer)
    check_count("batch_size", batch_size, minimum=0)
    _module_arguments.check_dtype(dtype)
    weight = layer._weight_like_states()
    device = weight.device if device is None else device
    conv_dtype, dtype = dtype or weight.dtype, dtype or at_least_single(weight.dtype)
    channels, history = layer.d_inner, layer.d_conv - 1
    # Tensors created in torch.inference_mode could not be changed in place outside of it.
    with torch.inference_mode(False):
        conv_state = torch.zeros(batch_size, history, channels, dtype=conv_dtype, device=device)
        state = torch.zeros(batch_size, channels, layer.d_state, dtype=dtype, device=device)
        cache = MixerCache(conv_state.transpose(1, 2), state)
        if layer.sizes.mix:
            cache.last_input = torch.zeros_like(state)
        if pairs := layer.sizes.turns:
            cache.angles = state.new_zeros(batch_size, pairs, 1, dtype=torch.float64)
        return cache


# --- what a call with a cache must be -------------------------------------------------------------


def _refuse_other_steps(conv1d: nn.Module, width: int) -> None:
    """Raises a ValueError if the convolution declares that it sees other steps than the last
    `width`."""
    if (dilation := getattr(conv1d, "dilation", (1,))) != (1,):
        refuse("conv1d", "without dilation where there is a cache", dilation)
    kernel_size = getattr(conv1d, "kernel_size", (width,))
    if kernel_size[0] > width:
        wanted = f"of kernel_size at most d_conv = {width} where there is a cache"
        refuse("conv1d", wanted, kernel_size)
    zeros = (kernel_size[0] - 1,)
    padding = getattr(conv1d, "padding", zeros), getattr(conv1d, "padding_mode", "zeros")
    if padding != (zeros, "zeros"):
        refuse("conv1d", f"padded by {zeros[0]} zeros where there is a cache", padding)


@fx.wrap
def refuse_other_cache(cache: object, kind: str) -> None:
    """Raises a TypeError unless cache is None."""
    if cache is not None:
        fail_on_type("cache", f"None or the {kind} of allocate_cache", cache)


def needs_gradient(module: nn.Module, x: Tensor) -> bool:
    return torch.is_grad_enabled() and (
        x.requires_grad or any(parameter.requires_grad for parameter in module.parameters())
    )


def refuse_gradient(module: nn.Module, x: Tensor) -> None:
    """Raises a RuntimeError if a gradient would have to pass through a cache."""
    if needs_gradient(module, x):
        raise RuntimeError(
            "selective_scan: cache takes no gradient; call the model under torch.no_grad() or "
            "torch.inference_mode()"
        )


def _refuse_bidirectional(layer: MambaMixer) -> None:
    if layer.bidirectional:
        refuse("bidirectional", "False where there is a cache, for lack of the steps to come", True)


def check_cache(
    layer: MambaMixer, cache: MixerCache, batch: int, device: torch.device | None
) -> None:
    """Raises an error unless the cache fits the layer and an input of this batch and device, where
    None stands for any device."""
    _refuse_bidirectional(layer)
    d_inner, d_state, d_conv = layer.A_log.shape[0], layer.d_state, layer.d_conv
    num_angles = layer.sizes.turns
    of_states = ("(batch, d_inner, d_state)", (batch, d_inner, d_state))
    of_angles = ("(batch, d_state/2, 1)", (batch, num_angles, 1))
    wanted = {
        "conv_state": ("(batch, d_inner, d_conv - 1)", (batch, d_inner, d_conv - 1)),
        "state": of_states,
        "last_input": of_states if layer.sizes.mix else None,
        "angles": of_angles if num_angles else None,
    }
    for name, layout in wanted.items():
        tensor = getattr(cache, name)
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
        if layout is None:
            if tensor is not None:
                refuse(f"{name} of cache", "None for this layer", shape)
            continue
        dims, size = layout
        if shape != size:
            refuse(f"{name} of cache", f"{dims} = {size}", shape)
        if device is not None and tensor.device != device:
            refuse("cache", f"on {device}, as the input is", str(tensor.device))
        # The checks' own time is noticeable. A compiler may not know a changed tensor's strides.
        has_zeros = not torch.compiler.is_compiling() and 0 in tensor.stride()
        if tensor.dtype not in REAL or has_zeros:
            check_dtype(f"{name} of cache", tensor, REAL)
            check_changed(f"{name} of cache", tensor)
