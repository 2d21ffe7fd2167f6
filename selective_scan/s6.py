"""S6: a stack of Mamba's selective state space layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn

from . import _mamba_weights
from ._add_norm import JoinedNorms, join_norms
from ._discretization import LayerMethod
from ._layer_input import checked_sequence
from ._layer_stack import StackStates, run_stack
from ._module_arguments import check_count, refuse
from ._plain_mixer import has_no_hooks
from ._plain_stack import Stack, is_of_mamba, step_in_one
from ._table import fail_on_type
from .cache import MixerCache, S6Cache, check_cache, refuse_gradient, refuse_other_cache
from .mamba_mixer import MambaMixer
from .step_projection import DT_INIT_FLOOR, DT_MAX, DT_MIN

fx.wrap("checked_sequence")
fx.wrap("refuse_other_cache")


class S6(nn.Module):
    """A stack of selective state space layers, from (batch, seqlen, d_model) to the same shape.

    Each layer is a :class:`MambaMixer` with a norm and a residual::

        output = input + mixer(RMSNorm(input))

    A final RMSNorm follows the last layer. Output t depends on inputs 0 to t only, unless
    `bidirectional`. The mixer's documentation on parameters, on weight decay and on training in
    half precision applies here, too.

    Args:
        d_model: number of channels of input and output.
        d_state, d_conv, expand, dt_rank: see :class:`MambaMixer`.
        dt_min, dt_max, dt_init, dt_scale, dt_init_floor: see :class:`MambaMixer`.
        dt_proj_bias, dt_soft_plus, conv_bias, bias: see :class:`MambaMixer`.
        depth: number of layers.
        bidirectional: whether a second scan runs from the last step to the first.
        discretization_method: see :func:`selective_scan_fn`; "trapezoid" takes the input at both
            ends of a step, see :class:`MambaMixer`.
        rotary: whether states rotate by input-dependent angles, see :class:`MambaMixer`.
        device: the parameters' device.
        dtype: the parameters' dtype, float32, float16, bfloat16 or float64.

    Raises:
        ValueError: an argument is of the wrong type, out of range, or would have no effect.

    References:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
        arXiv:2312.00752.

    Example:
        >>> import torch
        >>> from selective_scan import S6
        >>> model = S6(d_model=32, depth=2)
        >>> x = torch.randn(4, 100, 32)
        >>> model(x).shape
        torch.Size([4, 100, 32])
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | str = "auto",
        dt_min: float = DT_MIN,
        dt_max: float = DT_MAX,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = DT_INIT_FLOOR,
        dt_proj_bias: bool = True,
        dt_soft_plus: bool = True,
        conv_bias: bool = True,
        bias: bool = False,
        depth: int = 1,
        bidirectional: bool = False,
        *,
        discretization_method: LayerMethod = "zoh",
        rotary: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("depth", depth)
        sizes = (d_model, d_state, d_conv, expand, dt_rank)
        steps = (dt_min, dt_max, dt_init, dt_scale, dt_init_floor)
        options = {
            "dt_proj_bias": dt_proj_bias,
            "dt_soft_plus": dt_soft_plus,
            "bidirectional": bidirectional,
            "discretization_method": discretization_method,
            "rotary": rotary,
        }
        where = {"device": device, "dtype": dtype}
        self.layers = nn.ModuleList(
            S6Layer(*sizes, *steps, conv_bias, bias, **options, **where) for _ in range(depth)
        )
        self.layers[0]._input_name = "x"  # the first layer refuses what the model was passed
        self.d_model = d_model
        self.norm_f = nn.RMSNorm(d_model, eps=_mamba_weights.NORM_EPS, **where)

    @property
    def depth(self) -> int:
        """The current number of layers, also after some were removed from `layers` or added."""
        return len(self.layers)

    def reset_parameters(self) -> None:
        """Initializes all parameters again."""
        for module in (*self.layers, self.norm_f):
            if hasattr(module, "reset_parameters"):  # modules without parameters lack it
                module.reset_parameters()

    def allocate_cache(
        self,
        batch_size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> S6Cache:
        """Allocates a cache, with which each call continues where the previous one ended.

        The new cache is at the start of its sequences.

        Args:
            batch_size, dtype, device: see :meth:`MambaMixer.allocate_cache`.

        Raises:
            ValueError: an argument is of the wrong type or out of range, the model is
                bidirectional, or one of its layers neither is nor wraps a Mamba layer.

        Example:
            >>> from selective_scan import S6
            >>> len(S6(d_model=32, depth=2).allocate_cache(4).layers)
            2
        """
        mixers = [_mixer_in(layer) for layer in self.layers]
        return S6Cache(tuple(it.allocate_cache(batch_size, dtype, device) for it in mixers))

    def forward(
        self,
        x: Tensor,
        *,
        cache: S6Cache | None = None,
        cu_seqlens: Tensor | None = None,
        head: nn.Module | None = None,
    ) -> Tensor:
        """Runs all layers and the final norm.

        With a cache, a call of at most 8 steps and few rows runs as a single operator, another one
        by an operator for four layers at a time, provided that all layers consist of nothing but
        their weights (no hooks, adapters or replaced modules); see docs/serving.md.

        Args:
            x: (batch, seqlen, d_model), in the parameters' dtype. Under torch.autocast, x and the
                parameters may each be float32, float16 or bfloat16; float64 needs float64 in both.
            cache: a cache from :meth:`allocate_cache`, for x's batch: the call continues from its
                states, with any number of steps, and changes it in place.
            cu_seqlens: the boundaries of packed sequences, see :func:`selective_scan_fn`; batch is
                then 1, and a cache is not supported. Each layer treats every sequence separately.
            head: a module that is called with the result. A language model's ``nn.Linear`` without
                bias becomes part of the single operator. If a head that is called raises an error,
                the cache has advanced nevertheless.

        Returns:
            (batch, seqlen, d_model), empty if seqlen is 0; with a head, the head's result.

        Raises:
            TypeError: x or cu_seqlens is not a tensor, cache is not a cache, or head no module.
            ValueError: x has a wrong shape; the cache is for another batch, device or model; a
                cache is given together with cu_seqlens, or to a bidirectional model; or cu_seqlens
                is given and a convolution is wider than 8, has a hook or is not a plain layer.
            RuntimeError: x or the cache has a wrong dtype, a call with a cache needs a gradient, or
                :func:`selective_scan_fn` refuses cu_seqlens.
        """
        x = checked_sequence("x", x, self.d_model, cu_seqlens)
        if head is not None and not callable(head):
            fail_on_type("head", "a Module or None", head)
        parts = self._modules  # attributes that are modules take a microsecond each
        layers = parts["layers"]._modules.values()
        depth = len(layers)
        caches = [None] * depth
        stack = Stack(layers, parts["norm_f"], S6Layer, nn.RMSNorm)
        if isinstance(cache, S6Cache):
            refuse_gradient(self, x)
            caches = cache.layers
            if len(caches) != depth:
                refuse("cache", f"of depth = {depth} layers", len(caches))
            if cu_seqlens is None:
                out = step_in_one(layers, x, caches, stack, head)
                if out is not None:
                    return out
                for layer, part in zip(self.layers, caches, strict=True):
                    if isinstance(layer, MambaMixer):  # no cache changes unless all fit
                        check_cache(layer, part, x.shape[0], None)
                if all(map(is_of_mamba, caches)):
                    states = StackStates.of(caches)
                    out = run_stack(self, layers, x, stack, None, x.dtype, x.dtype, states)
                    if out is not None:
                        return _called(head, out)
        else:
            refuse_other_cache(cache, "S6Cache")
            out = run_stack(self, layers, x, stack, cu_seqlens, x.dtype, x.dtype)
            if out is not None:
                return _called(head, out)
        norms = self._join_norms(x)
        if norms is None:
            for layer, part in zip(self.layers, caches, strict=True):
                # Another module among the layers, such as nn.Dropout, may take x alone.
                options = {"cache": part, "cu_seqlens": cu_seqlens}
                x = layer(x, **{name: it for name, it in options.items() if it is not None})
            return _called(head, self.norm_f(x))
        residual = None
        for place, (layer, part) in enumerate(zip(self.layers, caches, strict=True)):
            normed, residual = norms.in_front(place, x, residual)
            x = layer._run(normed, None, part, cu_seqlens)
        return _called(head, norms.behind(x, residual))

    def _join_norms(self, x: Tensor) -> JoinedNorms | None:
        """Joins each norm with the preceding layer's residual addition; None unless all is plain.

        A layer with hooks or its own forward must be called as a module instead.
        """
        layers = self.layers._modules.values()
        if not all(type(it).forward is S6Layer.forward and has_no_hooks(it) for it in layers):
            return None
        norms = [layer._modules["norm"] for layer in layers]
        return join_norms([*norms, self.norm_f], [it._modules["in_proj"] for it in layers], x)

    @classmethod
    def from_mamba(
        cls,
        source: Mapping[str, Tensor] | nn.Module,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> S6:
        """Creates an S6 with the weights of a Mamba model; it computes what that model's layers do.

        Args:
            source: mamba_ssm's ``MixerModel`` or ``MambaLMHeadModel``, transformers' ``MambaModel``
                or ``MambaForCausalLM``, or the state dict of one of them. Embeddings and a language
                model's head are left out: the input of S6 is the output of the embeddings.
                mamba_ssm's ``Mamba`` becomes one layer, with norm weights of 1; see
                :meth:`MambaMixer.from_mamba` for the mixer alone. A state dict does not say which
                model it belongs to: FalconMamba's has the same names, although its layers contain
                further norms, and is refused only as a module.
            device: the parameters' device; by default that of the weights.
            dtype: the parameters' dtype; by default that of the weights.

        Returns:
            The model, with copies of the weights.

        Raises:
            TypeError: source is neither a module nor a mapping.
            ValueError: source is another model, lacks a weight, or contains one with a wrong shape
                or dtype, or one that S6 does not have; the message names it.

        Example:
            >>> import torch
            >>> from selective_scan import S6
            >>> state = {f"backbone.{name}": w for name, w in S6(8).to_mamba().items()}
            >>> state["backbone.embedding.weight"] = torch.randn(100, 8)
            >>> S6.from_mamba(state)(torch.randn(2, 9, 8)).shape
            torch.Size([2, 9, 8])
        """
        weights = _mamba_weights.as_stack(_mamba_weights.read_weights(source))
        options = _mamba_weights.mixer_options(weights, "layers.0.mixer.")
        model = cls(**options, depth=_mamba_weights.depth_of(weights))
        _mamba_weights.assign_weights(model, weights, device, dtype)
        return model

    def to_mamba(self) -> dict[str, Tensor]:
        """Returns the state dict under the names that other implementations of Mamba use.

        ``load_state_dict(…, strict=False)`` of mamba_ssm's ``MixerModel`` and of transformers'
        ``MambaModel`` accepts it, and does not change their embeddings.

        Returns:
            ``layers.{i}.mixer.*``, ``layers.{i}.norm.weight`` and ``norm_f.weight``, which share
            memory with the parameters.

        Raises:
            ValueError: the model computes something that Mamba does not.

        Example:
            >>> from selective_scan import S6
            >>> S6(d_model=32).to_mamba()["layers.0.mixer.A_log"].shape
            torch.Size([64, 16])
        """
        for layer in self.layers:
            if not hasattr(layer, "A_log"):
                refuse("layers", "Mamba's for Mamba", type(layer).__name__)
            _mamba_weights.check_is_mamba(layer)
        return {_mamba_weights.name_elsewhere(n): w for n, w in self.state_dict().items()}

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, depth={self.depth}"


class S6Layer(MambaMixer):
    """A mixer with its norm and residual; takes the arguments of :class:`MambaMixer`.

    It derives from the mixer, rather than containing one, to keep the names of its parameters.
    """

    _input_name = "a layer's input"  # since the caller of a stack passes no argument `hidden`

    def __init__(
        self,
        d_model: int,
        *arguments: object,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: object,
    ) -> None:
        super().__init__(d_model, *arguments, device=device, dtype=dtype, **options)
        norm = nn.RMSNorm(d_model, eps=_mamba_weights.NORM_EPS, device=device, dtype=dtype)
        # The norm comes first, since the state dicts of optimizers depend on the order.
        self._modules = {"norm": norm, **self._modules}
        self.register_load_state_dict_pre_hook(_ignore_legacy_buffer)

    def forward(
        self, hidden: Tensor, *, cache: MixerCache | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        norms = join_norms([self._modules["norm"]], [self._modules["in_proj"]], hidden)
        if norms is None:
            return self._run(self.norm(hidden), hidden, cache, cu_seqlens)
        normed, residual = norms.in_front(0, hidden, None)
        return self._run(normed, residual, cache, cu_seqlens)


def _mixer_in(layer: nn.Module) -> MambaMixer:
    """Returns a layer itself, or the one inside a wrapper such as an adapter's."""
    mixers = [module for module in layer.modules() if isinstance(module, MambaMixer)]
    if len(mixers) != 1:
        refuse("layers", "Mamba layers where there is a cache", type(layer).__name__)
    return mixers[0]


@fx.wrap
def _called(head: nn.Module | None, x: Tensor) -> Tensor:
    return x if head is None else head(x)


def _ignore_legacy_buffer(module: nn.Module, state_dict: dict, prefix: str, *_: object) -> None:
    """Drops A = -exp(A_log), which state dicts of older implementations contain besides A_log."""
    state_dict.pop(f"{prefix}A_negexp", None)
