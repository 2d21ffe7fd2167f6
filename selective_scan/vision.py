"""Scans of maps: images and other data with rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from . import _pytorch
from ._checks import COMPLEX, REAL, SINGLE_OR_DOUBLE, Call, check_dims, fail
from ._cross_scan import cross_scan, is_one_node
from ._discretization import METHODS, Method
from ._table import (
    BACKEND,
    REAL_OR_COMPLEX,
    BackendName,
    Option,
    Table,
    TensorArgument,
    TensorList,
    check_backend,
    fail_on_type,
)
from .functional import selective_scan_fn, selective_scan_ref

DIRECTIONS = 4
"""Rows, columns, rows from the end, columns from the end."""

Maps = Tensor | Sequence[Tensor]


def cross_scan_fn(
    x: Tensor,
    delta: Maps,
    A: Tensor,
    B: Maps,
    C: Maps,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    discretization_method: Method = "zoh",
    backend: BackendName = "auto",
) -> Tensor:
    """Scans a map in four directions and adds the results, as VMamba's blocks do.

    The directions are, in this order: along the rows, starting with the first row; along the
    columns; and these two from the last position to the first. Each has its own parameters::

        out = Σ_k selective_scan(x in the order of k, delta[k], A[k], B[k], C[k], D[k], …)

    Every result is added at the map's positions. The scans along the rows, forward and reverse,
    read x in place; the two scans along the columns share one transposed copy of x. VMamba copies
    x, and its results, four times.

    All arguments are indexed by positions of the map, not by steps of a sequence. A tensor that is
    dense in the order of its direction is read without a copy: along the rows if it is contiguous,
    along the columns if it is a transposed view of maps (…, width, height). The projections of a
    block are the same for all positions, so they can be computed in the desired order::

        low = x_proj(x).chunk(4, 1)           # each (batch, rank + 2·dstate, height, width)
        turned = low[1].mT.contiguous()       # of direction 1, few channels
        delta = dt_proj[1](turned[:, :rank]).mT

    The result can be differentiated once with respect to every tensor.

    Args:
        x: input, (batch, dim, height, width), of a real dtype, in any layout.
        delta: step sizes, (batch, 4, dim, height, width), or four of (batch, dim, height, width).
        A: poles, (4, dim, dstate), float32, float64, complex64 or complex128.
        B: input projections, (batch, 4, dstate, height, width), or with groups of channels
            (batch, 4, groups, dstate, height, width); or four tensors without the second dimension.
            Complex if A is complex.
        C: output projections, like B.
        D: skip connections, (4, dim).
        delta_bias: added to delta, (4, dim).
        delta_softplus: whether the step is softplus(delta + delta_bias).
        discretization_method: see :func:`selective_scan.selective_scan_fn`, which also describes
            the other shared arguments.
        backend: as in :func:`selective_scan.selective_scan_fn`; "reference" runs
            :func:`cross_scan_ref`.

    Returns:
        out, (batch, dim, height, width) in x's dtype. The result of each direction is rounded to
        this dtype before the sum.

    Raises:
        TypeError, ValueError, torch.OutOfMemoryError, ImportError: see
            :func:`selective_scan.selective_scan_fn`.
        RuntimeError: the method is unknown, or an argument has a wrong layout, device, dtype or
            shape; the message names the argument, the expected and the actual value. Also raised
            when the result is differentiated twice.

    References:
        Liu et al., "VMamba: Visual State Space Model", 2024, arXiv:2401.10166: SS2D, section 4.2.

    Example:
        >>> import torch
        >>> from selective_scan.vision import cross_scan_fn
        >>> batch, dim, dstate, height, width = 2, 8, 4, 5, 7
        >>> x = torch.randn(batch, dim, height, width, requires_grad=True)
        >>> delta = torch.randn(batch, 4, dim, height, width)
        >>> B, C = torch.randn(2, batch, 4, dstate, height, width)
        >>> out = cross_scan_fn(x, delta, -torch.rand(4, dim, dstate), B, C, delta_softplus=True)
        >>> out.shape
        torch.Size([2, 8, 5, 7])
        >>> out.sum().backward()
    """
    if backend == "reference":
        return cross_scan_ref(
            *(x, delta, A, B, C, D, delta_bias, delta_softplus),
            discretization_method=discretization_method,
        )
    parameters, options = (A, D, delta_bias), (delta_softplus, discretization_method)
    maps = _checked_maps(x, delta, B, C, *parameters, *options)
    _check_backend(backend, x)
    if is_one_node(x, *parameters, *chain(*maps)):
        return cross_scan(_compose, x, maps, parameters, options)
    return _compose(x, maps, parameters, options, backend)


def _compose(
    x: Tensor,
    maps: Sequence[Sequence[Tensor]],
    parameters: tuple[Tensor, Tensor | None, Tensor | None],
    options: tuple[bool, Method],
    backend: BackendName = "auto",
) -> Tensor:
    """Computes the result from four scans, each of which is an autograd node."""
    delta_softplus, discretization_method = options
    # The two directions along the columns share one copy of x, and its gradient is copied once.
    rows, columns = _along_rows(x), _along_columns(x)
    # The gradients of unbound parameters are stacked once. Indexing four times would instead add
    # four gradients of full size.
    As, Ds, biases = ([None] * DIRECTIONS if it is None else it.unbind() for it in parameters)

    def scan(k: int) -> Tensor:
        order = _along_columns if k % 2 else _along_rows
        delta, B, C = (order(of_directions[k]) for of_directions in maps)
        return selective_scan_fn(
            columns if k % 2 else rows,
            delta,
            As[k],
            B,
            C,
            Ds[k],
            None,
            biases[k],
            delta_softplus,
            discretization_method=discretization_method,
            reverse=k >= DIRECTIONS // 2,
            backend=backend,
        )

    height, width = x.shape[-2:]
    along_rows = (scan(0) + scan(2)).unflatten(-1, (height, width))
    return along_rows + (scan(1) + scan(3)).unflatten(-1, (width, height)).mT


def cross_scan_ref(
    x: Tensor,
    delta: Maps,
    A: Tensor,
    B: Maps,
    C: Maps,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    discretization_method: Method = "zoh",
    backend: BackendName = "auto",
) -> Tensor:
    """Computes :func:`cross_scan_fn` in plain PyTorch, each direction as a separate sequence.

    It has the arguments, result and errors of :func:`cross_scan_fn`; `backend` is checked but has
    no other effect. It runs on any device and can be differentiated any number of times.

    Example:
        >>> import torch
        >>> from selective_scan.vision import cross_scan_fn, cross_scan_ref
        >>> x, delta = torch.randn(2, 6, 5, 7), torch.rand(2, 4, 6, 5, 7)
        >>> A, (B, C) = -torch.rand(4, 6, 3), torch.randn(2, 2, 4, 3, 5, 7)
        >>> out = cross_scan_ref(x, delta, A, B, C)
        >>> torch.allclose(out, cross_scan_fn(x, delta, A, B, C), atol=1e-5)
        True
    """
    parameters = (A, D, delta_bias, delta_softplus, discretization_method)
    maps = _checked_maps(x, delta, B, C, *parameters)
    _check_backend(backend, x)
    places = torch.arange(x.shape[-2] * x.shape[-1], device=x.device).view(x.shape[-2:])
    out = torch.zeros_like(x).flatten(-2)
    for k, order in enumerate((places, places.T, places.flip(0, 1), places.T.flip(0, 1))):
        order = order.flatten()
        u, delta, B, C = (value.flatten(-2)[..., order] for value in (x, *(m[k] for m in maps)))
        y = selective_scan_ref(
            *(u, delta, A[k], B, C, None if D is None else D[k], None),
            *(None if delta_bias is None else delta_bias[k], delta_softplus),
            discretization_method=discretization_method,
        )
        out = out.index_add(-1, order, y)
    return out.unflatten(-1, x.shape[-2:])


def _along_rows(maps: Tensor) -> Tensor:
    return maps.flatten(-2)


def _along_columns(maps: Tensor) -> Tensor:
    return maps.mT.flatten(-2)


# --- checks ---------------------------------------------------------------------------------------


def _check_backend(backend: str, x: Tensor) -> None:
    if backend != "auto":
        BACKEND.check_type(backend)
        check_backend(backend, x.device)


def _checked_maps(
    x: Tensor,
    delta: Maps,
    B: Maps,
    C: Maps,
    A: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    discretization_method: str,
) -> tuple[Sequence[Tensor], ...]:
    """Checks all arguments and returns delta, B and C by direction."""
    maps = tuple(_by_directions(*pair) for pair in (("delta", delta), ("B", B), ("C", C)))
    values = (x, maps[0], A, *maps[1:], D, delta_bias, delta_softplus, discretization_method)
    is_plain = _pytorch.is_plain_call()  # other calls may have symbolic sizes
    kind = tuple(map(_kind, values)) if is_plain else None
    if kind not in _known_kinds:
        _ARGUMENTS.check_types(values)
        _ARGUMENTS.check_values(values)
        if is_plain:
            if len(_known_kinds) == _MOST_KINDS:
                _known_kinds.clear()
            _known_kinds.add(kind)
    return maps


# The kinds of calls that passed the checks, which take longer than the calls themselves.
_known_kinds: set[tuple] = set()
_MOST_KINDS = 1024


def _kind(value: object) -> object:
    """Returns everything that the checks depend on, as a hashable value."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device, value.layout
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    is_simple = value is None or isinstance(value, bool | str)
    return (type(value), value) if is_simple else object()  # never known, so it is checked


def _by_directions(name: str, maps: Maps) -> Maps:
    """Returns four maps; a tensor is unbound for the same reason as the parameters in _compose."""
    if not isinstance(maps, Tensor):
        if not isinstance(maps, list | tuple):
            fail_on_type(name, "a Tensor or a list of Tensors", maps)
        if len(maps) != DIRECTIONS:
            fail(f"{name} must have {DIRECTIONS} maps, one for each direction, got {len(maps)}")
        return maps
    if maps.dim() < 2 or maps.shape[1] != DIRECTIONS:
        fail(f"{name} must be (batch, {DIRECTIONS}, ...), got {tuple(maps.shape)}")
    return maps.unbind(1)


def _of_directions(*dims: str) -> Callable[[str, Tensor, Call], None]:
    def check(name: str, tensor: Tensor, call: Call) -> None:
        check_dims(name, tensor, ("4", *dims), call.sizes | {"4": DIRECTIONS})

    return check


def _check_map(name: str, tensor: Tensor, call: Call, dims: tuple[str, ...] = ("dim",)) -> None:
    wanted = ("batch", *dims, "height", "width")
    check_dims(name, tensor, wanted, call.sizes, limits={})  # width is not a convolution's here


def _check_projection(name: str, tensor: Tensor, call: Call) -> None:
    _check_map(name, tensor, call, ("groups", "dstate") if tensor.dim() == 5 else ("dstate",))


_ARGUMENTS = Table(
    TensorArgument("x", REAL, _check_map),
    TensorList("delta", REAL, _check_map),
    TensorArgument("A", (*SINGLE_OR_DOUBLE, *COMPLEX), _of_directions("dim", "dstate")),
    TensorList("B", REAL_OR_COMPLEX, _check_projection),
    TensorList("C", REAL_OR_COMPLEX, _check_projection),
    TensorArgument("D", REAL, _of_directions("dim"), optional=True),
    TensorArgument("delta_bias", REAL, _of_directions("dim"), optional=True),
    Option("delta_softplus"),
    Option("discretization_method", METHODS),
    anchor="x",
    complex_by=("A",),
    counted_by="delta",
)
