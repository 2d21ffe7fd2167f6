"""Plain layers of a stack with their norms as one call of an op, and as one autograd node.

On small inputs the GPU waits for the host. The call of one op and one node for several layers take
less time than two of each for every layer, and the modules are inspected once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from . import _library, _memory, _pytorch
from ._add_norm import add_rms_norm, is_one_node
from ._checks import MAX_WIDTH, REAL
from ._function import differentiate
from ._inspected import ALL_HOOKS, Inspected, are_the_same
from ._layer_input import autocast_dtype_of
from ._ops import ops
from ._plain_stack import InnerNorms, Stack, inspect, norms_of, options_of, plain_weights_of
from .mamba_inner import OPAQUE_TYPES, LayerOptions, mamba_layer

if TYPE_CHECKING:
    from .cache import MixerCache
    from .mamba_mixer import MambaMixer

# The attribute in which a module remembers what was inspected.
KNOWN_ATTRIBUTE = "_known_stack"
# The most elements of a layer's inner rows, batch·seqlen·d_inner. Beyond them kernels take longer
# than the host, so that nothing is gained, and nodes of single layers free memory earlier.
MOST_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
# The most layers of one op. A node hands over the gradients of its weights when its backward pass
# ends: only then does DDP send them, and is the memory of what was saved freed.
MOST_LAYERS = 4

# The kinds of a layer's weights in the order of csrc/torch/layer_stack.h, and their places in the
# arguments of `mamba_layer`.
_KINDS = (
    *("norm", "in_proj", "in_proj_bias", "conv1d", "conv1d_bias", "x_proj"),
    *("dt_proj", "dt_proj_bias", "A_log", "D", "out_proj", "out_proj_bias"),
    *("dt_norm", "B_norm", "C_norm"),
)
_OF_MAMBA_LAYER = [
    *map(_KINDS.index, ("in_proj", "in_proj_bias", "conv1d", "conv1d_bias", "x_proj", "dt_proj")),
    *map(_KINDS.index, ("out_proj", "out_proj_bias", "A_log", "D", "dt_proj_bias")),
]
_OPTIONAL = {it for it in _KINDS if it.endswith(("_bias", "norm"))} | {"D"}


class _Options(NamedTuple):
    """The ops' arguments besides the tensors."""

    kinds: list[int]
    eps: float
    inner_eps: float
    delta_softplus: bool
    discretization_method: str
    bidirectional: bool
    autocast_dtype: torch.dtype | None = None
    stream_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None

    def behind_norm_f(self, cu_seqlens: Tensor | None) -> tuple:
        """Returns the arguments that the ops take behind norm_f."""
        return (*self[1:6], cu_seqlens, *self[6:])


class _Known(NamedTuple):
    """What a stack's modules were found to be.

    Attributes:
        around: the modules that were inspected, and the values of their options, as the caller
            lists them.
        inspected: their state.
        norm_f: the last norm's weight.
        weights: the other weights of the layers of each op, kind by kind.
        options: the options of all layers.
        sizes: d_inner, d_state and the convolutions' width.
        of_one_dtype: the weights that must have the dtype of the input.
    """

    around: tuple[object, ...]
    inspected: Inspected
    norm_f: Tensor
    weights: list[list[Tensor]]
    options: _Options
    sizes: tuple[int, int, int]
    of_one_dtype: list[Tensor]

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of the owner, or what is pickled of it, inspects anew


class StackStates(NamedTuple):
    """The states of the layers, which a call without gradients replaces by those behind its steps.

    Attributes:
        conv_states: the last inputs of the convolutions, each (batch, d_inner, length), where
            length is at least width - 1.
        states: each (batch, d_inner, d_state).
        begins: whether the sequences begin with the call, whatever the states hold.
    """

    conv_states: Sequence[Tensor] = ()
    states: Sequence[Tensor] = ()
    begins: bool = False

    @classmethod
    def of(cls, caches: Sequence[MixerCache]) -> StackStates:
        return cls([it.conv_state for it in caches], [it.state for it in caches])

    def of_layers(self, first: int, end: int) -> StackStates:
        return StackStates(self.conv_states[first:end], self.states[first:end], self.begins)

    def mark_changed(self) -> None:
        """Tells autograd that the op has changed the tensors."""
        for changed in chain(self.conv_states, self.states):
            increment_version(changed)

    def take_one_step(self, x: Tensor) -> bool:
        """Returns whether the states take one step."""
        return bool(self.states) and x.shape[1] == 1 and not self.begins

    def fit(self, x: Tensor, d_inner: int, d_state: int, width: int) -> bool:
        """Returns whether all are plain tensors on the device of x, with the sizes of a call, that
        may be changed."""
        if not self.states:
            return True
        rows, all_states = (x.shape[0], d_inner), (*self.conv_states, *self.states)
        return (
            {*map(type, all_states)} <= OPAQUE_TYPES
            and {it.device for it in all_states} == {x.device}
            and {it.dtype for it in all_states} <= {*REAL}
            and {it.shape for it in self.states} == {(*rows, d_state)}
            and {it.shape[:-1] for it in self.conv_states} == {rows}
            and min([it.shape[-1] for it in self.conv_states]) >= width - 1
            and (
                torch.is_inference_mode_enabled() or not any(it.is_inference() for it in all_states)
            )
        )


_NO_STATES = StackStates()


def run_stack(
    owner: nn.Module,
    layers: Collection[MambaMixer],
    x: Tensor,
    stack: Stack,
    cu_seqlens: Tensor | None,
    stream_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    states: StackStates = _NO_STATES,
) -> Tensor | None:
    """Runs a stack from its input to its last norm by ops of several layers each.

    Args:
        owner: the module that remembers what was inspected.
        layers: the mixers.
        x: (batch, seqlen, d_model).
        stack: the modules around the mixers.
        cu_seqlens: as in :func:`selective_scan_fn`.
        stream_dtype: the dtype of the residual stream.
        out_dtype: the dtype of the result; None for that of the products, autocast's if there is.
        states: the states from which a call that needs no gradient goes on, changed in place.

    Mixers with inner norms have no backward pass.

    Returns:
        (batch, seqlen, d_model); None if the ops do not compute what the modules do, or if they
        would not be faster. Nothing has changed then.
    """
    if not (
        layers
        and is_one_node(x, None, stack.norm_f._parameters.get("weight"))
        and x.dim() == 3
        and (cu_seqlens is None or (type(cu_seqlens) is Tensor and x.shape[0] == 1))
        and not _pytorch.may_have_process_wide_hooks()
    ):
        return None
    around = (*layers, stack.norm_f, *stack.modules, *chain(*stack.options))
    known = vars(owner).get(KNOWN_ATTRIBUTE)
    if known is None or not (are_the_same(around, known.around) and known.inspected.is_unchanged()):
        known = _inspect(layers, x.shape[2], stack, around)
        if known is None:
            return None
        # Tensors that others computed are not kept, since they would keep their graph.
        if all(type(weight) is nn.Parameter for weight in (known.norm_f, *chain(*known.weights))):
            vars(owner)[KNOWN_ATTRIBUTE] = known
    if (
        not _is_small(x, known.sizes[0])
        or not states.fit(x, *known.sizes)
        or not _do_dtypes_fit(x, known.of_one_dtype, states)
        or (known.options.inner_eps >= 0 and _needs_gradient(x, known))
    ):
        return None
    autocast_dtype = autocast_dtype_of(x.device)
    options = known.options._replace(
        autocast_dtype=autocast_dtype,
        stream_dtype=stream_dtype,
        out_dtype=out_dtype or autocast_dtype or x.dtype,
    )
    hidden, stream = x, None
    for number, weights in enumerate(known.weights):
        norm_f = known.norm_f if weights is known.weights[-1] else None
        tensors = (hidden, stream, cu_seqlens, norm_f, *weights)
        if _pytorch.is_gradient_needed(tensors):
            hidden, stream = _apply(options, *tensors)
        else:
            own = states.of_layers(number * MOST_LAYERS, (number + 1) * MOST_LAYERS)
            hidden, stream, _ = _run(options, *tensors, states=own, saves=False)
    states.mark_changed()
    return hidden


def _is_small(x: Tensor, d_inner: int) -> bool:
    return 0 < x.shape[0] * x.shape[1] * d_inner <= MOST_ELEMENTS[x.device.type]


def _do_dtypes_fit(x: Tensor, of_one_dtype: Collection[Tensor], states: StackStates) -> bool:
    """Returns whether the weights have the dtype of x, and autocast, if it is enabled, casts x and
    would not keep weights. It keeps those that it has cast from step to step, but the op would
    cast them in every step."""
    is_cast = autocast_dtype_of(x.device) is not None
    return {it.dtype for it in of_one_dtype} == {x.dtype} and not (
        is_cast and (x.dtype != torch.float32 or states.take_one_step(x))
    )


def _needs_gradient(x: Tensor, known: _Known) -> bool:
    return _pytorch.is_gradient_needed((x, known.norm_f, *chain(*known.weights)))


def _inspect(
    layers: Collection[MambaMixer], d_model: int, stack: Stack, around: tuple[object, ...]
) -> _Known | None:
    """Returns None if the weights and one set of options do not fully describe the stack."""
    if (found := norms_of(stack, d_model)) is None:
        return None
    (norm_f, *norms), eps = found
    own = [*takewhile(bool, map(plain_weights_of, layers))]  # ends at once if all have adapters
    options = {*map(options_of, layers)}
    if len(own) < len(layers) or len(options) != 1:
        return None
    if (inner := _inner_norms_in(layers, stack.inner_norms)) is None:
        return None
    scales = [norm._parameters["weight"] for norm in norms]
    columns = [scales, *map(list, zip(*own, strict=True)), *inner[1]]
    if (kinds := _kinds_of(columns)) is None:
        return None
    width = columns[_KINDS.index("conv1d")][0].shape[-1]
    if width > MAX_WIDTH:
        return None
    bidirectional, softplus, method = options.pop()
    last = norm_f._parameters["weight"]
    return _Known(
        around,
        inspect(layers, stack, ALL_HOOKS),
        last,
        [
            [weight for kind in kinds for weight in columns[kind][first : first + MOST_LAYERS]]
            for first in range(0, len(scales), MOST_LAYERS)
        ],
        _Options(kinds, eps, inner[0], softplus, method, bidirectional),
        (*columns[_KINDS.index("A_log")][0].shape, width),
        [last, *scales, *columns[_KINDS.index("in_proj")]],
    )


def _inner_norms_in(
    layers: Collection[nn.Module], norms: InnerNorms | None
) -> tuple[float, list[list[Tensor | None]]] | None:
    """Does what InnerNorms.found_in does. If there are no norms, eps is negative."""
    if norms is None:
        return -1.0, len(InnerNorms.NAMES) * [len(layers) * [None]]
    return norms.found_in(layers)


def _kinds_of(columns: list[list[Tensor | None]]) -> list[int] | None:
    """Returns the kinds that the columns of all kinds have; None if some layers alone have a
    weight of a kind, or if weights are no plain tensors."""
    kinds = []
    for kind, (name, column) in enumerate(zip(_KINDS, columns, strict=True)):
        types = {*map(type, column)}
        if types == {type(None)} and name in _OPTIONAL:
            continue
        if type(None) in types or not types <= OPAQUE_TYPES:
            return None
        kinds.append(kind)
    return kinds


def run_mixer(
    mixer: nn.Module, x: Tensor, norms: InnerNorms | None, states: StackStates = _NO_STATES
) -> Tensor | None:
    """Runs a mixer by the op of several layers, without a norm in front of it.

    Args:
        mixer: a mixer whose parts and parameters have mamba_ssm's names.
        x: (batch, seqlen, d_model).
        norms: its inner norms, if it has any.
        states: as in run_stack, of this layer.

    Returns:
        (batch, seqlen, d_model); None if a gradient is needed or if the op does not compute what
        the mixer does. Nothing has changed then.
    """
    if not (
        _pytorch.is_plain_call()
        and type(x) is Tensor
        and x.dim() == 3
        and x.device.type in _library.devices
        and not _pytorch.may_have_process_wide_hooks()
        and (weights := plain_weights_of(mixer)) is not None
        and (inner := _inner_norms_in((mixer,), norms)) is not None
        and (kinds := _kinds_of([[None], *[[it] for it in weights], *inner[1]])) is not None
    ):
        return None
    all_kinds = dict(zip(_KINDS, (None, *weights, *chain(*inner[1])), strict=True))
    given = [all_kinds[_KINDS[kind]] for kind in kinds]
    width = all_kinds["conv1d"].shape[-1]
    if (
        width > MAX_WIDTH
        or not _is_small(x, all_kinds["A_log"].shape[0])
        or _pytorch.is_gradient_needed((x, *given))
        or not states.fit(x, *all_kinds["A_log"].shape, width)
        or not _do_dtypes_fit(x, (all_kinds["in_proj"],), states)
    ):
        return None
    bidirectional, *of_scan = options_of(mixer)
    dtypes = (autocast_dtype_of(x.device), x.dtype, x.dtype)
    options = _Options(kinds, 0.0, inner[0], *of_scan, bidirectional, *dtypes)
    out, _, _ = _run(options, x, None, None, None, *given, states=states, saves=False)
    states.mark_changed()
    return out


def _run(
    options: _Options,
    x: Tensor,
    residual: Tensor | None,
    cu_seqlens: Tensor | None,
    norm_f: Tensor | None,
    *weights: Tensor,
    states: StackStates = _NO_STATES,
    saves: bool,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Returns the output, the stream if other layers follow, and the tensors for the backward
    pass."""
    of_layers = (x, residual, weights, options.kinds, norm_f)
    given = (*of_layers, *options.behind_norm_f(cu_seqlens), *states, saves)
    return _memory.call(_pytorch.shortest_call(ops.layer_stack_fwd.default), given)


class _LayerStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, *inputs):
        out, stream, kept = _run(options, *inputs, saves=True)
        ctx.save_for_backward(*inputs, *kept)
        ctx.options, ctx.num_inputs = options, len(inputs)
        return out, stream

    @staticmethod
    def backward(ctx, dout, dstream):
        saved = ctx.saved_tensors
        inputs, kept = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
        x, residual, cu_seqlens, norm_f, *weights = inputs
        cotangents = (dout,) if dstream is None else (dout, dstream)
        if _pytorch.needs_composition(*cotangents):
            return None, *differentiate(_Composition(ctx.options), inputs, *cotangents)
        of_layers = (x, residual, weights, ctx.options.kinds, norm_f)
        given = (dout, dstream, kept, *of_layers, *ctx.options.behind_norm_f(cu_seqlens))
        needs_dx = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        op = _pytorch.shortest_call(ops.layer_stack_bwd.default)
        dx, dresidual, dweights, dnorm_f = _memory.call(op, (*given, needs_dx))
        return None, dx, dresidual, None, dnorm_f, *dweights


_apply = _pytorch.apply_outside_transforms(_LayerStack)


class _Composition(NamedTuple):
    """The op as a norm and a mixer after another, with an autograd node each."""

    options: _Options

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        cu_seqlens: Tensor | None,
        norm_f: Tensor | None,
        *weights: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        kinds, eps, _, softplus, method, bidirectional, autocast_dtype, *dtypes = self.options
        stream_dtype, out_dtype = dtypes
        depth = len(weights) // len(kinds)
        columns = [[None] * depth for _ in _KINDS]
        for i, kind in enumerate(kinds):
            columns[kind] = weights[i * depth : (i + 1) * depth]
        options = LayerOptions(softplus, method, bidirectional, cu_seqlens)
        in_products = (eps, autocast_dtype or x.dtype, stream_dtype)
        hidden, stream = x, residual
        with torch.autocast(x.device.type, autocast_dtype, autocast_dtype is not None):
            for place, scale in enumerate(columns[0]):
                normed, stream = add_rms_norm(hidden, stream, scale, *in_products)
                own = tuple(columns[kind][place] for kind in _OF_MAMBA_LAYER)
                hidden = mamba_layer(normed, own, options, None)
            if norm_f is None:
                return hidden, stream
            return add_rms_norm(hidden, stream, norm_f, eps, out_dtype, None)[0]
