"""Steps of the selective scan with states that stay in memory between calls, for decoding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._checks import INTEGER, REAL
from ._discretization import DISCRETIZATIONS, METHODS, Method, poles, step_size
from ._operator import Operator
from ._result import out_unless_given
from ._selective_scan import POLE_DTYPES, scan_flops
from ._state_slots import are_slots, slots_of_rows
from ._table import (
    REAL_OR_COMPLEX,
    BackendName,
    Case,
    Cases,
    DtypeOf,
    Number,
    Option,
    Shape,
    Table,
    TensorArgument,
)
from .functional import observed

# --- shapes: state's shape decides whether there are heads, x's whether there are steps -----------


_ROWS = Shape((("batch", "steps?", "heads?", "dim"),))
_CHANNELS = Shape((("heads?", "dim"),))
_POLES = Shape((("heads?", "dim", "dstate"),))
_PROJECTION = Shape(
    (("batch", "steps?", "dstate"), ("batch", "steps?", "groups", "dstate")),
    divided=("heads", "dim"),
)
_STATE = Shape((("slots", "dim", "dstate"), ("slots", "heads", "dim", "dstate")))
_X = Shape((("batch", "heads?", "dim"), ("batch", "steps", "heads?", "dim")))
_DESTINATIONS = Shape((("batch",), ("batch", "steps")), one="steps")
_POLE_DTYPES = Cases((Case(REAL, given="A_is_log"), Case(POLE_DTYPES)))


# --- the operator ---------------------------------------------------------------------------------


def _arguments(*more: Option) -> Table:
    return Table(
        TensorArgument("state", REAL_OR_COMPLEX, _STATE, is_changed=True),
        TensorArgument("x", REAL, _X),
        TensorArgument("dt", REAL, _ROWS),
        TensorArgument("A", _POLE_DTYPES, _POLES),
        TensorArgument("B", REAL_OR_COMPLEX, _PROJECTION),
        TensorArgument("C", REAL_OR_COMPLEX, _PROJECTION),
        TensorArgument("D", REAL, _CHANNELS, optional=True),
        TensorArgument("z", REAL, _ROWS, optional=True),
        TensorArgument("dt_bias", REAL, _CHANNELS, optional=True),
        Option("dt_softplus"),
        TensorArgument("state_batch_indices", INTEGER, ("batch",), optional=True),
        TensorArgument("dst_state_batch_indices", INTEGER, _DESTINATIONS, optional=True),
        Number("pad_slot_id", -1),
        TensorArgument("out", DtypeOf("x"), _ROWS, optional=True, is_changed=True),
        Option("discretization_method", METHODS),
        *more,
        TensorArgument("input_delta", REAL, _ROWS, optional=True),
        anchor="x",
        complex_by=("A",),
        # Without indices, row b has slot b.
        equal_sizes={"state_batch_indices": ("batch", "slots")},
    )


_STATE_UPDATE = Operator(
    "selective_state_update",
    _arguments(Option("A_is_log")),
    results=[out_unless_given("x", ("...",))],
    flops=scan_flops,
    function_arguments=_arguments(),
)


def selective_state_update_ref(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    dst_state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    discretization_method: Method = "zoh",
    input_delta: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Takes one or a few steps of the selective scan in plain PyTorch.

    It has the arguments, result and errors of :func:`selective_state_update`; `backend` is checked
    but has no other effect. It runs on any device. Indices of slots that do not exist are refused,
    also on CUDA.

    Example:
        >>> import torch
        >>> from selective_scan import selective_state_update_ref
        >>> state = torch.zeros(1, 1, 1)
        >>> x, dt, A, B, C = torch.ones(1, 1), torch.ones(1, 1), *torch.ones(3, 1, 1)
        >>> selective_state_update_ref(state, x, dt, -A, B, C), state
        (tensor([[1.]]), tensor([[[1.]]]))
    """
    indices = (state_batch_indices, dst_state_batch_indices, pad_slot_id)
    options = (dt_softplus, *indices, out, discretization_method, input_delta)
    call = _STATE_UPDATE.check((state, x, dt, A, B, C, D, z, dt_bias, *options, backend))
    dtype, h_dtype = call.compute_dtype, call.state_dtype
    has_heads, has_steps = state.dim() == 4, "steps" in call.sizes
    slots = state.shape[0]
    discretize = DISCRETIZATIONS[discretization_method]

    def steps_of(tensor: Tensor, dtype: torch.dtype = dtype) -> tuple[Tensor, ...]:
        """Returns the steps, each (batch, [heads,] dim)."""
        return (tensor if has_steps else tensor[:, None]).to(dtype).unbind(1)

    def projections_of(tensor: Tensor) -> list[Tensor]:
        """Returns the steps, (batch, heads, 1, dstate) each; (batch, dim, dstate) without heads."""
        size = call.sizes["heads" if has_heads else "dim"]
        steps = (step[:, None] if step.dim() == 2 else step for step in steps_of(tensor, h_dtype))
        spread = (step.repeat_interleave(size // step.shape[1], dim=1) for step in steps)
        return [step[:, :, None] if has_heads else step for step in spread]

    source, is_live = slots_of_rows(call, "state_batch_indices", state)
    xs = steps_of(x)
    destination, is_written = source, is_live
    if dst_state_batch_indices is not None:
        destination = dst_state_batch_indices
        are_named = are_slots("dst_state_batch_indices", destination, slots, pad_slot_id)
        is_written = are_named & (is_live if destination.dim() == 1 else is_live[:, None])

    if slots > 0:
        h = state[torch.where(is_live, source, 0)].to(h_dtype)
    else:  # all rows are padding
        h = state.new_zeros((call.sizes["batch"], *state.shape[1:]), dtype=h_dtype)
    poles = A.to(h_dtype)
    outs = []
    sequences = [xs, steps_of(dt), projections_of(B), projections_of(C)]
    gates, input_steps = (
        [None] * len(xs) if tensor is None else steps_of(tensor) for tensor in (z, input_delta)
    )
    for t, (x_t, delta, B_t, C_t, z_t, input_step) in enumerate(
        zip(*sequences, gates, input_steps, strict=True)
    ):
        delta = step_size(delta, None if dt_bias is None else dt_bias.to(dtype), dt_softplus)
        input_step = delta if input_step is None else input_step
        abar, bbar = discretize(input_step[..., None], delta[..., None] * poles)
        h = abar * h + bbar * B_t * x_t[..., None]
        y = observed(C_t, h)
        if D is not None:
            y = y + D.to(dtype) * x_t
        if z_t is not None:
            y = y * F.silu(z_t)
        live = is_live.view(-1, *[1] * (y.dim() - 1))
        outs.append(torch.where(live, y, 0))
        if destination.dim() == 2:
            rows = is_written[:, t]
            state[destination[rows, t]] = h[rows].to(state.dtype)
        elif t == len(xs) - 1:
            state[destination[is_written]] = h[is_written].to(state.dtype)
    result = torch.empty_like(x) if out is None else out
    if outs:
        result.copy_(torch.stack(outs, 1) if has_steps else outs[0])
    return result


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    dst_state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    discretization_method: Method = "zoh",
    input_delta: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    r"""Takes one or a few steps of the selective scan and updates its states in place.

    For every row b of the batch and channel d, with h of size N = dstate from the row's slot::

        h    = abar ⊙ h + bbar ⊙ B · x
        out  = (Σ_n C[n] h[n] + D·x) · silu(z)       2·Re Σ_n C[n] h[n] for complex A

    with Δ = dt + dt_bias, passed through softplus if `dt_softplus`, and abar and bbar as in
    :func:`selective_scan_fn`. Then h is written back to its slot, rounded to the states' dtype; out
    and further steps of the call use h before rounding. A call that continues from the last state
    of a scan returns what a longer scan would have returned.

    `state` may be a pool, of which a batch uses some slots: `state_batch_indices` gives the slot of
    each row. A row whose index is negative or `pad_slot_id` is padding: no state is read or changed
    for it, and its out is 0. With `dst_state_batch_indices`, a row's new state is written to
    another slot, and its own slot is not changed; if the indices have two dimensions, the state
    after every step is written to a separate slot, so that a speculative decoder can return to any
    of them. If such an index is padding, that state is not stored.

    If two rows write to the same slot, or one row reads a slot that another row writes, the result
    is undefined. An index of a slot that does not exist is refused on a CPU; on CUDA, where the
    host does not read the indices, it counts as padding.

    A `state` of four dimensions has heads, and an x with one dimension more than (batch, [heads,]
    dim) has steps. Tensors may have any strides, including 0: an A with one value per head is
    ``A[:, None, None].expand(heads, dim, dstate)``. Dtypes may be mixed: arithmetic is float32, or
    float64 if any tensor is float64 or complex128, also under torch.autocast. There is no
    derivative: a call that would need one is refused.

    Args:
        state: (slots, dim, dstate) or (slots, heads, dim, dstate), float32, float16, bfloat16 or
            float64; complex64 or complex128 for complex A. Changed in place. On CUDA dstate is at
            most 256.
        x: input, (batch, [steps,] [heads,] dim), float32, float16, bfloat16 or float64.
        dt: step sizes, shaped like x.
        A: poles, ([heads,] dim, dstate), float32, float64, complex64 or complex128.
        B: input projection, (batch, [steps,] dstate) or (batch, [steps,] groups, dstate), where
            groups divides heads and head h belongs to group h // (heads/groups); without heads,
            groups divides dim in the same way. Complex for complex A.
        C: output projection, like B, with the same number of groups.
        D: skip connection, ([heads,] dim).
        z: gate, shaped like x.
        dt_bias: added to dt, ([heads,] dim).
        dt_softplus: whether Δ is softplus(dt + dt_bias), the identity above 20.
        state_batch_indices: the slot of each row, (batch,), int32 or int64. None means that there
            are as many slots as rows, and row b has slot b.
        dst_state_batch_indices: the slot for each row's last state, (batch,), or for its state
            after every step, (batch, steps), int32 or int64. None means the row's own slot.
        pad_slot_id: an index that marks padding, like every negative index.
        out: a tensor that receives the result, with x's shape and dtype. None allocates one.
        discretization_method: "zoh", "foh", "bilinear", "poly", "highorder" or "rk4"; see
            :func:`selective_scan_fn`.
        input_delta: step sizes of the input, shaped like x; see :func:`selective_scan_fn`.
        backend: as in :func:`selective_scan_fn`; "reference" runs
            :func:`selective_state_update_ref`.

    Returns:
        `out` if it is given, else a new tensor with x's shape and dtype and, if x is dense, x's
        layout.

    Raises:
        TypeError, ValueError, torch.OutOfMemoryError, ImportError: see :func:`selective_scan_fn`.
        RuntimeError: the method is unknown, an argument has a wrong layout, device, dtype or shape,
            the call needs a gradient, or, on a CPU, an index names a slot that does not exist; the
            message names the argument, the expected and the actual value.

    References:
        Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
        arXiv:2312.00752, section 3.3, on the recurrence at inference. The positional arguments are
        those of ``selective_state_update`` of the package mamba_ssm.

    Example:
        >>> import torch
        >>> from selective_scan import selective_scan_fn, selective_state_update
        >>> batch, dim, dstate = 2, 64, 16
        >>> u, delta, z = torch.randn(3, batch, dim, 100)
        >>> A, D = -torch.rand(dim, dstate), torch.ones(dim)
        >>> B, C = torch.randn(2, batch, dstate, 100)
        >>> out, state = selective_scan_fn(
        ...     u, delta, A, B, C, D, z, None, True, return_last_state=True
        ... )
        >>> x, dt, gate = torch.randn(3, batch, dim)
        >>> next_out = selective_state_update(
        ...     state, x, dt, A, B[:, :, 0], C[:, :, 0], D, gate, dt_softplus=True
        ... )
        >>> next_out.shape
        torch.Size([2, 64])
    """
    indices = (state_batch_indices, dst_state_batch_indices, pad_slot_id)
    options = (dt_softplus, *indices, out, discretization_method)
    arguments = (state, x, dt, A, B, C, D, z, dt_bias, *options)
    checked = (*arguments, input_delta, backend)
    if not _STATE_UPDATE.has_kernels(checked):
        return _STATE_UPDATE.run_reference(selective_state_update_ref, checked)
    result = _STATE_UPDATE(*arguments, False, input_delta)
    return result if out is None else out


def update_by_log(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    *more: Tensor | bool | None,
    discretization_method: Method,
) -> Tensor:
    """Runs selective_state_update with A = −exp(A_log), which the kernels compute as they read it.

    Args:
        state, x, dt: as in selective_state_update.
        A_log: (dim, dstate), of any real dtype.
        more: B, C, D, z, dt_bias and dt_softplus.
        discretization_method: as in selective_state_update.
    """
    arguments = (state, x, dt, A_log, *more, None, None, -1, None, discretization_method)
    if _STATE_UPDATE.has_kernels((*arguments, None, "auto")):
        return _STATE_UPDATE(*arguments, True, None)
    method = {"discretization_method": discretization_method}
    return selective_state_update_ref(state, x, dt, poles(A_log), *more, **method)
