"""Layers computed from their parameters alone, by a recurrence in plain PyTorch."""

import copy
import io
import pickle
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from selective_scan import S6, MixerCache, S6Cache
from selective_scan._discretization import DISCRETIZATIONS


def copies_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns a copy by each way of Python and PyTorch to copy a module or to save a whole one."""
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded]


def tensors_of(cache: S6Cache | MixerCache) -> list[torch.Tensor]:
    return cache._tensors()


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the relative error in the Euclidean norm."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


def loss_of(out: torch.Tensor) -> torch.Tensor:
    """Returns a loss with gradients that depend on all parameters. The mean square of a stack's
    output would be constant, since a norm comes last: its gradients are nothing but rounding."""
    return F.softplus(out).sum()


def by_steps(module: torch.nn.Module, x: torch.Tensor, prompt: int) -> tuple[torch.Tensor, dict]:
    """Returns the results of mamba_ssm's layer, or the logits of its model, for a prompt and each
    later step, and the final states by layer."""
    params = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    parts = [module(x[:, :prompt], inference_params=params)]
    for params.seqlen_offset in range(prompt, x.shape[1]):
        step = x[:, params.seqlen_offset : params.seqlen_offset + 1]
        parts.append(module(step, inference_params=params))
    parts = [getattr(part, "logits", part) for part in parts]
    return torch.cat(parts, 1), params.key_value_memory_dict


def turned(rows: torch.Tensor) -> torch.Tensor:
    """Returns pairs of channels as complex numbers."""
    return torch.complex(rows[..., ::2], rows[..., 1::2])


def recurrence(x, delta, A, B, C, mix, turns, method) -> torch.Tensor:
    """Returns y for (batch, seqlen, ...) tensors. At each step the states are rotated by `turns`,
    and take a share of the previous step's input if there is a `mix`."""
    batch, seqlen, dim = x.shape
    if turns is not None:
        B, C = turned(B), turned(C)
    h = torch.zeros(batch, dim, B.shape[-1], dtype=B.dtype, device=B.device)
    before, outs = torch.zeros_like(h), []
    for t in range(seqlen):
        step = delta[:, t, :, None]
        now = B[:, t, None] * x[:, t, :, None]
        if mix is None:
            abar, bbar = DISCRETIZATIONS[method](step, step * A)
            share = 0
        else:
            abar, bbar = (step * A).exp(), mix[:, t, :, None] * step
            share = abar * (step - bbar)
        if turns is not None:
            turn = torch.exp(1j * turns[:, t, None])
            abar, share = abar * turn, share * turn
        h = abar * h + share * before + bbar * now
        before = now
        y = C[:, t, None].conj() * h
        outs.append((y.real if turns is not None else y).sum(-1))
    return torch.stack(outs, 1)


def by_definition(model: S6, x: torch.Tensor) -> torch.Tensor:
    """Computes a stack of layers of any kind from its definition."""
    for layer in model.layers:
        p = dict(layer.named_parameters())
        method, rotary, dstate = layer.discretization_method, layer.rotary, layer.d_state
        hidden = F.rms_norm(x, (x.shape[-1],), p["norm.weight"], 1e-5)
        u, z = F.linear(hidden, p["in_proj.weight"], p.get("in_proj.bias")).chunk(2, -1)
        width = p["conv1d.weight"].shape[-1]
        u = F.pad(u.transpose(1, 2), (width - 1, 0))
        u = F.conv1d(u, p["conv1d.weight"], p.get("conv1d.bias"), groups=u.shape[1])
        u = F.silu(u).transpose(1, 2)
        rank, pairs = layer.dt_rank, dstate // 2
        dt, B, C, *others = F.linear(u, p["x_proj.weight"]).split(
            [rank, dstate, dstate, *[rank] * (method == "trapezoid"), *[pairs] * rotary], -1
        )
        delta = F.linear(dt, p["dt_proj.weight"], p.get("dt_proj.bias"))
        delta = F.softplus(delta) if layer.dt_soft_plus else delta
        mix = turns = None
        if method == "trapezoid":
            rows = F.linear(others.pop(0), p["mix_proj.weight"], p["mix_proj.bias"])
            mix = 1 / (1 + torch.exp(-rows))
        if rotary:
            turns = torch.pi * torch.tanh(others.pop(0)) * delta.mean(-1, keepdim=True)
        if rotary or method == "trapezoid":
            B = F.rms_norm(B, (dstate,), p["B_norm.weight"], 1e-5) + p["B_bias"]
            C = F.rms_norm(C, (dstate,), p["C_norm.weight"], 1e-5) + p["C_bias"]
        A = -p["A_log"].exp()
        y = recurrence(u, delta, A, B, C, mix, turns, method)
        if layer.bidirectional:
            u_, delta_, B_, C_, mix_, turns_ = (
                None if tensor is None else tensor.flip(1)
                for tensor in (u, delta, B, C, mix, turns)
            )
            y = y + recurrence(u_, delta_, A, B_, C_, mix_, turns_, method).flip(1)
        y = (y + p["D"] * u) * F.silu(z)
        x = x + F.linear(y, p["out_proj.weight"], p.get("out_proj.bias"))
    return F.rms_norm(x, (x.shape[-1],), model.norm_f.weight, 1e-5)
