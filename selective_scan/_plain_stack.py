"""Stacks of mixers that their weights fully describe: a few steps through them run as one operator.

A change of a module, a weight or a dtype is always noticed: a first call inspects all of them, and
a repeated call checks whether they are still the same (_inspected.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from . import _pytorch
from ._checks import MAX_WIDTH
from ._inspected import FORWARD_HOOKS, Inspected
from ._ops import ops
from ._plain_mixer import CONVOLUTION_OPTIONS, has_no_hooks, is_of_neighbours
from ._prepared_step import PreparedStep
from ._s6_step import MAX_STATES, S6_STEP
from .cache import MixerCache
from .mamba_inner import OPAQUE_TYPES
from .step_projection import StepProjection

if TYPE_CHECKING:
    from .mamba_mixer import MambaMixer

F64 = torch.float64

# The operator serves calls of at most MAX_STEPS steps, and at most MAX_ROWS steps of all batch
# entries together.
MAX_STEPS = 8
MAX_ROWS = {"cpu": 64, "cuda": 16}


class InnerNorms(NamedTuple):
    """The RMS norms of dt, B and C in mixers of transformers.

    Attributes:
        kind: their class.
        eps_name: the name of their attribute eps.
        NAMES: their names in a mixer.
    """

    kind: type[nn.Module]
    eps_name: str = "eps"
    NAMES = ("dt_layernorm", "b_layernorm", "c_layernorm")

    def modules_of(self, layers: Collection[nn.Module]) -> list[nn.Module]:
        return [layer._modules[name] for layer in layers for name in self.NAMES]

    def found_in(self, layers: Collection[nn.Module]) -> tuple[float, list[list]] | None:
        """Returns the norms' eps, and for dt, B and C the weights in all layers, which may be None;
        None if these do not fully describe the norms."""
        norms = self.modules_of(layers)
        values = {getattr(norm, self.eps_name) for norm in norms}
        if len(values) != 1 or not all(type(it) is self.kind and has_no_hooks(it) for it in norms):
            return None
        weights = [norm._parameters.get("weight") for norm in norms]
        return values.pop(), [weights[i :: len(self.NAMES)] for i in range(len(self.NAMES))]


class Stack(NamedTuple):
    """The modules around the mixers of a stack.

    Attributes:
        modules: for each mixer the module (itself or another) that calls its submodule `norm`
            before the mixer and adds the residual.
        norm_f: the norm after the last mixer.
        kind: the class that the modules must have for the operator to serve them.
        norm_kind: the class that the norms must have.
        eps_name: the name of the norms' attribute eps.
        options: names of attributes of the modules, and the values that they must have.
        inner_norms: the norms of dt, B and C in the mixers, if there are any.
    """

    modules: Collection[nn.Module]
    norm_f: nn.Module
    kind: type[nn.Module]
    norm_kind: type[nn.Module]
    eps_name: str = "eps"
    options: tuple[tuple[str, object], ...] = ()
    inner_norms: InnerNorms | None = None


def step_in_one(
    layers: Collection[MambaMixer],
    hidden: Tensor,
    caches: Sequence[MixerCache],
    stack: Stack | None = None,
    head: nn.Module | None = None,
) -> Tensor | None:
    """Takes the steps of hidden, (batch, steps, d_model), through all layers by one operator.

    Args:
        layers: the mixers of a stack, or a single mixer that is being called.
        hidden: the input.
        caches: the states from which each layer continues, changed in place.
        stack: the modules around the mixers, if there are any.
        head: the module to apply to the result, if any.

    Returns:
        The output. None if the operator does not compute what the modules do, does not support the
        call, or would refuse it with another error than the modules. Nothing has changed then.
    """
    if not layers or not serves(hidden):
        return None
    known = caches[0]._steps
    can_be_kept = (
        _pytorch.is_plain_call() and type(hidden) is Tensor and not torch.is_grad_enabled()
    )
    if can_be_kept:
        # Not the caches themselves: the first one holds the prepared step, which must not hold it.
        states = [state for cache in caches for state in (cache.conv_state, cache.state)]
        around = (*layers, *states, head)
        if stack is not None:
            around = (*around, *stack.modules, stack.norm_f)
        if (prepared := known.get(hidden.shape)) is not None:
            if prepared.is_of(around) and (out := prepared.take(hidden)) is not None:
                return out
            del known[hidden.shape]
    norms, eps, inner_eps = [], 0.0, -1.0
    if stack is not None:
        if (found := norms_of(stack, hidden.shape[2])) is None:
            return None
        norms, eps = found
        if stack.inner_norms is not None:
            inner = stack.inner_norms.found_in(layers)
            if inner is None or {*map(type, chain(*inner[1]))} != {type(None)}:
                return None
            inner_eps = inner[0]
    entries = [*map(_entry_of, layers, caches)]
    if None in entries:
        return None
    is_plain_head = (
        type(head) is nn.Linear
        and has_no_hooks(head)
        and head._parameters.get("bias", head) is None
        and type(head._parameters.get("weight")) in OPAQUE_TYPES
        and not (torch.is_grad_enabled() and head._parameters["weight"].requires_grad)
    )
    final = norms[0]._parameters["weight"] if norms else None
    logits = head._parameters["weight"] if is_plain_head else None
    outer = [weight for weight in (final, logits) if weight is not None]
    scales = [norm._parameters.get("weight") for norm in norms[1:]]
    columns = [list(column) for column in zip(*entries, strict=True)]
    for place in _BIASES:
        if {*map(type, columns[place])} == {type(None)}:
            columns[place] = None
    present = [column for column in columns[:_TENSORS] if column]
    kinds = {type(hidden), *map(type, chain(outer, scales, *present))}
    if not _are_of_numbers(kinds):
        return None

    options = {*zip(*columns[_TENSORS:], strict=True)}
    (is_bidirectional, softplus, method), *others = options
    dstate, width = columns[_A_LOG][0].shape[-1], columns[_CONV1D][0].shape[-1]
    if (
        others
        or is_bidirectional
        or width > MAX_WIDTH
        or dstate > MAX_STATES
        or {columns[0][0].dtype, *[weight.dtype for weight in outer]} != {hidden.dtype}
    ):
        return None
    columns = columns[:_TENSORS]
    workspace = None
    if hidden.is_cuda:
        sizes = (len(entries), columns[0][0].shape[1], *columns[_A_LOG][0].shape)
        sizes += (columns[_DT_PROJ][0].shape[1], width, 0 if logits is None else logits.shape[0])
        if not _has_room(hidden, sizes) or F64 in {it[0].dtype for it in (*present, scales) if it}:
            return None
        workspace = _workspace_of(caches[0], hidden, sizes)
    scalars = (eps, softplus, method, inner_eps)
    call = (hidden, scales or None, *columns, final, logits, None, workspace, *scalars)
    if torch.compiler.is_compiling() and not _are_alike(columns, scales, hidden):
        return None
    try:
        out = S6_STEP(*call)
    except RuntimeError:
        # The op refuses a call before it changes anything. Checking beforehand what it supports
        # would cost more than the rest of this function.
        if torch.compiler.is_compiling() or _are_alike(columns, scales, hidden):
            raise
        return None
    if can_be_kept and (head is None or is_plain_head):
        is_again = hidden.shape in known and not (hidden.is_cuda and workspace is None)
        known[hidden.shape] = None
        if is_again:
            inspected = inspect(layers, stack, FORWARD_HOOKS, () if head is None else (head,))
            known[hidden.shape] = PreparedStep(call, around, inspected, states)
    return out if head is None or is_plain_head else head(out)


def norms_of(stack: Stack, d_model: int) -> tuple[list[nn.Module], float] | None:
    """Returns a stack's norms, the last one first, and their eps; None unless their weights and one
    eps fully describe them."""
    if {*map(type, stack.modules)} != {stack.kind}:
        return None
    norms = [stack.norm_f, *[module._modules["norm"] for module in stack.modules]]
    if {*map(type, norms)} != {stack.norm_kind}:
        return None
    eps = getattr(stack.norm_f, stack.eps_name)
    shapes = {getattr(norm._parameters.get("weight"), "shape", None) for norm in norms}
    if (
        eps is None
        or {getattr(norm, stack.eps_name) for norm in norms} != {eps}
        or shapes != {(d_model,)}
        or any(norm._parameters.get("bias") is not None for norm in norms)
        or not all(map(has_no_hooks, stack.modules))
        or not all(map(has_no_hooks, norms))
        or any(
            getattr(module, name, None) != value
            for module in stack.modules
            for name, value in stack.options
        )
    ):
        return None
    return norms, eps


def inspect(
    layers: Collection[MambaMixer],
    stack: Stack | None,
    kinds_of_hooks: Collection[str],
    others: Collection[nn.Module] = (),
) -> Inspected:
    """Remembers what the functions of this module read of a stack and of other modules."""
    called = [layer._modules[name] for layer in layers for name in _PARTS]
    called += others
    read = dict.fromkeys((*called, *layers), ()) | dict.fromkeys(layers, LAYER_OPTIONS)
    convolutions = [layer._modules["conv1d"] for layer in layers]
    read |= dict.fromkeys(convolutions, CONVOLUTION_OPTIONS)
    if stack is not None:
        norms = [stack.norm_f, *[module._modules["norm"] for module in stack.modules]]
        called += [*norms, *stack.modules]
        options = [name for name, _ in stack.options]
        read = dict.fromkeys(stack.modules, options) | read
        read |= dict.fromkeys(norms, (stack.eps_name,))
        if stack.inner_norms is not None:
            inner = stack.inner_norms.modules_of(layers)
            called += inner
            read |= dict.fromkeys(inner, (stack.inner_norms.eps_name,))
    return Inspected(read, called, kinds_of_hooks)


def serves(rows: Tensor) -> bool:
    """Returns whether the operator supports so many rows, (batch, steps, …), and neither autocast,
    hooks registered for all modules nor transforms affect calls of the modules."""
    batch, steps = rows.shape[:2]
    device_type = rows.device.type
    if torch.compiler.is_exporting() and isinstance(batch * steps, torch.SymInt):
        return False  # an exported program must serve all sizes, not just those of its example
    return (
        0 < steps <= MAX_STEPS
        and S6_STEP.has_kernels_for(device_type)
        and 0 < batch * steps <= MAX_ROWS[device_type]
        and not torch.is_autocast_enabled(device_type)
        and not _pytorch.may_have_process_wide_hooks()
        and (torch.compiler.is_compiling() or not _pytorch.are_transforms_active())
    )


@_pytorch.constant_in_graphs
def _workspace_bytes(*call: int) -> int:
    """Returns the size of the workspace that a GPU's kernel keeps from call to call; -1 if the
    kernel cannot run such a call."""
    if (known := _known_bytes.get(call)) is None:
        with _pytorch.no_modes():
            known = _known_bytes[call] = ops.cuda_step_workspace_bytes(*call)
    return known


_known_bytes: dict[tuple[int, ...], int] = {}


def _bytes_for(rows: int, hidden: Tensor, sizes: tuple[int, ...]) -> int:
    return _workspace_bytes(hidden.device.index, hidden.element_size(), rows, *sizes)


def _most_rows(hidden: Tensor, sizes: tuple[int, ...]) -> int:
    """Returns the largest number of rows with which the GPU's kernel can run such a stack."""
    rows = MAX_ROWS["cuda"]
    while rows > 0 and _bytes_for(rows, hidden, sizes) < 0:
        rows -= 1
    return rows


def _has_room(hidden: Tensor, sizes: tuple[int, ...]) -> bool:
    rows = hidden.shape[0] * hidden.shape[1]
    if torch.compiler.is_compiling():  # a graph serves several numbers of rows
        return rows <= _most_rows(hidden, sizes)
    return _bytes_for(rows, hidden, sizes) >= 0


def _workspace_of(cache: MixerCache, hidden: Tensor, sizes: tuple[int, ...]) -> Tensor | None:
    """Returns the cache's workspace, None if the op should allocate one for this call.

    The workspace is large enough for any number of steps, since a CUDA graph keeps using the one
    that it captured.
    """
    if torch.compiler.is_compiling():
        return None
    workspace, (batch, steps, _) = cache._workspace, hidden.shape
    if (
        workspace is not None
        and workspace.device == hidden.device
        and workspace.numel() >= _bytes_for(batch * steps, hidden, sizes)
    ):
        return workspace
    if torch.cuda.is_current_stream_capturing():
        return None  # a new workspace would be cleared only when the graph runs
    most = min(MAX_STEPS, _most_rows(hidden, sizes) // batch)
    size = max(_bytes_for(batch * steps, hidden, sizes) for steps in range(1, most + 1))
    with torch.inference_mode(False):
        cache._workspace = torch.zeros(size, dtype=torch.uint8, device=hidden.device)
    return cache._workspace


def _are_alike(columns: list[list[Tensor] | None], scales: list[Tensor], hidden: Tensor) -> bool:
    """Returns whether all layers have the dtypes and strides of the first, d_model of hidden, and
    caches that fit hidden. If not, the modules serve the call, or refuse it with their messages."""
    conv_states, states = columns[-2:]
    d_inner, dstate = columns[_A_LOG][0].shape
    batch, width = hidden.shape[0], columns[_CONV1D][0].shape[-1]
    return (
        {weight.dtype for place in _CAST for weight in columns[place]} == {hidden.dtype}
        and {weight.shape[0] for weight in columns[_OUT_PROJ]} == {hidden.shape[2]}
        and len({scale.dtype for scale in scales}) <= 1
        and all(len({x.dtype for x in columns[place] or ()}) <= 1 for place in _OF_ANY_DTYPE)
        and {state.shape for state in states} == {(batch, d_inner, dstate)}
        and {state.shape for state in conv_states} == {(batch, d_inner, width - 1)}
        and {state.device for state in (*states, *conv_states)} == {hidden.device}
        and _have_equal_strides(states)
        and _have_equal_strides([state.mT for state in conv_states])
    )


def _have_equal_strides(tensors: list[Tensor]) -> bool:
    """Returns whether tensors of one shape have the same strides. Contiguous ones are not asked for
    them: PyTorch 2.13 fails to compile that for a tensor that a graph of any sizes has changed."""
    return (
        all(tensor.is_contiguous() for tensor in tensors)
        or len({tensor.stride() for tensor in tensors}) == 1
    )


# The parts of a layer that are inspected, and its options with the defaults for layers that lack
# them.
_PARTS = ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj")
LAYER_OPTIONS = {"bidirectional": False, "dt_soft_plus": True, "discretization_method": "zoh"}
# The types that the parts of a layer must have for the operator to serve it.
_PLAIN_PARTS = [
    [nn.Linear, nn.Conv1d, nn.Linear, dt_proj, nn.Linear] for dt_proj in (StepProjection, nn.Linear)
]
# Places in a layer's entry: the tensors of StackTensors without the norm, then the options.
_CONV1D, _X_PROJ, _DT_PROJ, _A_LOG, _OUT_PROJ, _TENSORS = 2, 4, 5, 7, 9, 13
_BIASES = (1, 3, 6, 10)
_CAST = (_CONV1D, _X_PROJ, _DT_PROJ, _OUT_PROJ)  # weights that the modules cast to hidden's dtype
_OF_ANY_DTYPE = (3, 6, 7, 8, 11, 12)


def _entry_of(layer: MambaMixer, cache: MixerCache) -> tuple | None:
    """Returns a layer's tensors and options, None if these do not fully describe the layer."""
    weights = plain_weights_of(layer)
    if weights is None or not is_of_mamba(cache):
        return None
    return *weights, cache.conv_state, cache.state, *options_of(layer)


def is_of_mamba(cache: MixerCache) -> bool:
    """Returns whether a cache holds the states of Mamba alone, not more of them as Mamba-3's."""
    return type(cache) is MixerCache and cache.last_input is None and cache.angles is None


def options_of(layer: MambaMixer) -> tuple:
    """Returns the values of LAYER_OPTIONS."""
    return tuple([getattr(layer, name, default) for name, default in LAYER_OPTIONS.items()])


def plain_weights_of(layer: MambaMixer) -> tuple | None:
    """Returns a layer's weights, None if they and LAYER_OPTIONS do not fully determine what it
    computes.

    A bias that is not among the parameters is represented by its module, which the caller refuses
    since it is no tensor.
    """
    parts = [layer._modules[name] for name in _PARTS]
    in_proj, conv1d, x_proj, dt_proj, out_proj = (
        (part._parameters.get("weight"), part._parameters.get("bias", part)) for part in parts
    )
    own = layer._parameters
    if not (
        [*map(type, parts)] in _PLAIN_PARTS
        and "B_norm" not in layer._modules  # the operator does not support Mamba-3
        and is_of_neighbours(parts[1])
        and all(map(has_no_hooks, parts))
        and x_proj[1] is None
    ):
        return None
    return *in_proj, *conv1d, x_proj[0], *dt_proj, own.get("A_log"), own.get("D"), *out_proj


def _are_of_numbers(kinds: set[type]) -> bool:
    """Returns whether all of these are types of plain tensors, and no tensor is absent."""
    return type(None) not in kinds and (
        kinds <= OPAQUE_TYPES
        or all(kind in OPAQUE_TYPES or issubclass(kind, _pytorch.TRACED) for kind in kinds)
    )
