"""Mamba layers of several directions in plain PyTorch: one step at a time, with explicit flips.

The tests of compat's directed functions and layers compare with them.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def assert_near(
    actual: list[Tensor], solve: Callable[[float], list[Tensor]], dtype: torch.dtype
) -> None:
    """Asserts that results match those of `solve` in double precision, up to a fraction of the
    largest value. If terms cancel, the bound is eight times the change of `solve`'s results when
    its inputs have relative errors of the size it is given, here roundings of `dtype`."""
    expected, nudged = solve(0.0), None
    for i, (result, exact) in enumerate(zip(actual, expected, strict=True)):
        assert result.shape == exact.shape
        if result.numel() == 0:
            continue
        allowed = ROUNDING[dtype] * max(1.0, exact.abs().max().item())
        error = (result.to(exact.dtype) - exact).abs().max().item()
        if not error <= allowed:
            nudged = nudged or [solve(torch.finfo(dtype).eps) for _ in range(3)]
            allowed = 8 * max((other[i] - exact).abs().max().item() for other in nudged)
        assert error <= allowed, f"result {i} is off by {error}, {allowed} allowed"


def nudge(tensor: Tensor, size: float) -> Tensor:
    """Returns a leaf in double precision with random relative errors of this size."""
    wide = torch.promote_types(tensor.dtype, torch.float64)
    tensor = tensor.detach().to(wide)
    return (tensor * (1 + size * torch.randn_like(tensor.real))).requires_grad_()


def plain_rows(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    A_b: Tensor | None = None,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
) -> Tensor:
    """Returns the input of the output projection, (batch, seqlen, dim)."""
    x, z = xz.chunk(2, dim=1)
    dim, _, width = conv1d_weight.shape
    x = F.silu(F.conv1d(F.pad(x, (width - 1, 0)), conv1d_weight, conv1d_bias, groups=dim))
    rank, dstate = delta_proj_weight.shape[1], A.shape[1]
    projected = x_proj_weight @ x
    delta, projected = delta_proj_weight @ projected[:, :rank], projected[:, rank:]
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = F.softplus(delta) if delta_softplus else delta

    def of_states(given: Tensor | None, bias: Tensor | None, last: bool) -> Tensor:
        """(batch, dim or 1, dstate, seqlen)"""
        if given is not None:
            return given[..., None] if given.dim() == 2 else given[:, None]
        half = projected.shape[1] if B is not None or C is not None else projected.shape[1] // 2
        part = projected[:, -half:] if last else projected[:, :half]
        part = part if bias is None else part + bias[:, None]
        if A.is_complex():
            part = torch.complex(*part.unflatten(1, (dstate, 2)).unbind(2))
        return part[:, None]

    B, C = of_states(B, B_proj_bias, last=False), of_states(C, C_proj_bias, last=True)

    def scan(poles: Tensor, turn: bool) -> Tensor:
        steps = (delta[:, :, None], B.expand(len(x), dim, -1, x.shape[2]), x[:, :, None])
        steps = (*steps, C.expand(len(x), dim, -1, x.shape[2]))
        steps = [part.flip(-1) if turn else part for part in steps]
        h, ys = x.new_zeros(len(x), dim, dstate, dtype=A.dtype), []
        for t in range(x.shape[2]):
            dt, b, u, c = (part[..., t] for part in steps)
            h = torch.exp(dt * poles) * h + dt * b * u
            y = (h * c).sum(-1)
            ys.append(2 * y.real if A.is_complex() else y)
        y = torch.stack(ys, -1)
        y = y.flip(-1) if turn else y
        return (y if D is None else y + D[:, None] * x) * F.silu(z)

    y = scan(A, turn=False)
    return (y if A_b is None else y + scan(A_b, turn=True)).transpose(1, 2)


def plain_layer(layer: torch.nn.Module, hidden: Tensor, bimamba_type: str) -> Tensor:
    """Computes a layer from its parameters alone, named as in the forks' checkpoints."""
    weights = dict(layer.named_parameters())
    xz = F.linear(hidden, weights["in_proj.weight"], weights.get("in_proj.bias")).transpose(1, 2)

    def run(xz: Tensor, suffix: str = "") -> Tensor:
        A_b_log = weights["A_b_log"] if bimamba_type == "v1" else None
        return plain_rows(
            xz,
            weights[f"conv1d{suffix}.weight"],
            weights.get(f"conv1d{suffix}.bias"),
            weights[f"x_proj{suffix}.weight"],
            weights[f"dt_proj{suffix}.weight"],
            -weights[f"A{suffix}_log"].exp(),
            None if A_b_log is None else -A_b_log.exp(),
            D=weights[f"D{suffix}"],
            delta_bias=weights[f"dt_proj{suffix}.bias"],
        )

    y = run(xz)
    if bimamba_type in ("v2", "v3"):
        y = y + run(xz.flip(2), "_b").flip(1)
    if bimamba_type == "v3":
        across = torch.stack(xz.chunk(layer.nslices, dim=2), dim=-1).flatten(2)
        steps = run(across, "_s").unflatten(1, (-1, layer.nslices)).transpose(1, 2)
        y = y + steps.flatten(1, 2)
    if layer.if_divide_out:
        y = y / {"v1": 1, "v2": 2, "v3": 3}.get(bimamba_type, 1)
    out = F.linear(y, weights["out_proj.weight"], weights.get("out_proj.bias"))
    return out * weights["gamma"] if "gamma" in weights else out
