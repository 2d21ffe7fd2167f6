"""MambaMixer, and PyTorch's tools for modules applied to it and to S6."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from accuracy import assert_same_bits
from layers import error, loss_of
from problem import lay_out
from selective_scan import S6, MambaMixer, adaptive_unitary_scan_fn, diagonal_scan_fn

BATCH, SEQLEN, DIM = 2, 11, 8


def sequence(device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(BATCH, SEQLEN, DIM, device=device, dtype=dtype)


def gradients_of(module: nn.Module, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss_of(module(*inputs)).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


# --- the mixer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"bias": True, "expand": 1.5}])
def test_a_layer_is_a_mixer_with_norm_and_residual(options, device):
    layer = S6(DIM, **options, device=device).layers[0]
    mixer = MambaMixer(DIM, **options, device=device)
    state = layer.state_dict()
    del state["norm.weight"]
    assert list(mixer.state_dict()) == list(state)
    mixer.load_state_dict(state)
    x = sequence(device)
    torch.testing.assert_close(layer(x), x + mixer(layer.norm(x)))


def test_positional_arguments_are_those_of_mamba_ssm():
    mixer = MambaMixer(DIM, 3, 2, 3, 5, 0.01, 0.2, "constant", 2.0, 0.001, False, True)
    assert mixer.A_log.shape == (24, 3)
    assert mixer.conv1d.weight.shape == (24, 1, 2)
    assert mixer.conv1d.bias is None
    assert mixer.in_proj.bias.shape == (48,)
    assert mixer.dt_proj.weight.shape == (24, 5)
    assert torch.all(mixer.dt_proj.weight == 5**-0.5 * 2)


# --- as one call and in parts ---------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_one_call_has_the_bits_of_its_parts(bias, dtype, autocast, device):
    """A hook makes in_proj a part that is called, so that the layer runs in parts."""
    mixer = MambaMixer(DIM, bias=bias, conv_bias=not bias, dt_proj_bias=not bias, device=device)
    mixer.to(dtype)
    hidden = torch.randn(BATCH, SEQLEN, DIM, device=device, dtype=dtype).requires_grad_()
    leaves = [hidden, *mixer.parameters()]

    def run():
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            out = mixer(hidden)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    one_call = run()
    mixer.in_proj.register_forward_hook(lambda *_: None)
    rounded = []  # PyTorch's linear layer rounds their gradients to the half type
    if autocast:
        rounded.append(mixer.in_proj.bias)
        rounded += [hidden, mixer.in_proj.weight] if device == "cuda" else []
    for value, expected, leaf in zip(one_call, run(), [None, *leaves], strict=True):
        assert leaf is None or value.dtype == leaf.dtype
        if any(leaf is it for it in rounded):
            torch.testing.assert_close(value, expected, rtol=0.01, atol=1e-3)
        else:
            assert torch.equal(value, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", ["offset", "sliced"])
def test_weights_and_input_of_any_layout_are_cast(layout, dtype, device):
    mixer = MambaMixer(64, bias=True, device=device).to(dtype)
    mixer.A_log.data = mixer.A_log.data.double()
    hidden = torch.randn(BATCH, 200, 64, device=device, dtype=dtype).requires_grad_()
    leaves = [hidden, *mixer.parameters()]

    def run(x):
        with torch.autocast(device, torch.bfloat16):
            out = mixer(x)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    expected = run(hidden)
    for parameter in mixer.parameters():
        parameter.data = lay_out(parameter.data, layout)
    assert_same_bits(run(lay_out(hidden, layout)), expected)


def test_one_call_keeps_no_cast_weight(device):
    """A layer as one call keeps no cast weight and, of its input, only the cast copy."""
    mixer = MambaMixer(DIM, device=device)
    hidden = torch.randn(BATCH, SEQLEN, DIM, device=device).requires_grad_()
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        ),
        torch.autocast(device, torch.bfloat16),
    ):
        mixer(hidden)
    halves = [tuple(tensor.shape) for tensor in kept if tensor.dtype == torch.bfloat16]
    rows = [DIM, 4 * DIM, 2 * DIM, mixer.dt_rank + 2 * mixer.d_state]
    assert sorted(halves) == sorted((BATCH, SEQLEN, channels) for channels in rows)
    assert all(tensor is not hidden for tensor in kept)


def test_boundaries_that_are_no_tensor_are_refused():
    with pytest.raises(TypeError, match=r"^selective_scan: cu_seqlens must be a Tensor or None"):
        MambaMixer(DIM)(sequence(), cu_seqlens=[0, 3])


# --- tracing and counting -------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True])
def test_symbolic_trace(bidirectional, device):
    model = S6(DIM, depth=2, bidirectional=bidirectional, device=device)
    traced = torch.fx.symbolic_trace(model)
    traced.graph.lint()
    for seqlen in (SEQLEN, 0, 1):
        x = torch.randn(BATCH, seqlen, DIM, device=device)
        torch.testing.assert_close(traced(x), model(x))  # the traced model calls PyTorch's norms
    with pytest.raises(ValueError, match=r"^selective_scan: x must be"):
        traced(torch.zeros(2, 9, 7))


def test_every_operator_with_a_derivative_has_its_count():
    ops = torch.ops.selective_scan
    for name in ("causal_conv1d", "selective_scan", "diagonal_scan", "adaptive_unitary_scan"):
        assert getattr(ops, f"{name}_fwd") in flop_registry
        assert getattr(ops, f"{name}_bwd") in flop_registry


def test_operations_of_a_model_are_counted(device):
    dstate, width, inner, rank = 5, 3, 2 * DIM, 4
    model = S6(DIM, dstate, width, dt_rank=rank, device=device)
    x = sequence(device).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        out = model(x)
    steps = BATCH * SEQLEN
    weights = 2 * inner * DIM + (rank + 2 * dstate) * inner + inner * rank + inner * DIM
    scan = 7 * steps * inner * dstate
    counts = counter.get_flop_counts()["Global"]
    assert counts.pop(torch.ops.selective_scan.selective_scan_fwd) == scan
    assert counts.pop(torch.ops.selective_scan.causal_conv1d_fwd) == 2 * steps * inner * width
    assert sum(counts.values()) == 2 * steps * weights
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.selective_scan.selective_scan_bwd] == 22 * steps * inner * dstate
    assert counts[torch.ops.selective_scan.causal_conv1d_bwd] == 4 * steps * inner * width


def test_operations_of_the_other_scans_are_counted(device):
    a, b = torch.rand(3, 1, device=device), torch.rand(2, 3, 7, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        diagonal_scan_fn(a, b).sum().backward()
    assert counter.get_total_flops() == (2 + 3) * b.numel()
    with FlopCounterMode(display=False) as counter:
        diagonal_scan_fn(a.to(torch.complex64), b).abs().sum().backward()
    assert counter.get_total_flops() == 4 * (2 + 3) * b.numel()

    u, dt = torch.rand(2, 2, 3, 7, device=device)
    x, x_bias = torch.rand(3, 5, 3, device=device), torch.rand(3, 5, device=device)
    B, C = torch.randn(2, 5, dtype=torch.complex64, device=device)
    with FlopCounterMode(display=False) as counter:
        adaptive_unitary_scan_fn(
            u.requires_grad_(), dt, x, x_bias, B, C, x[:, 0, 0]
        ).sum().backward()
    assert counter.get_total_flops() == (1 + 3) * 2 * 2 * 7 * 3 * 3 * 5


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant, device):
    model = S6(DIM, depth=2, device=device)
    x = sequence(device).requires_grad_()
    expected = gradients_of(model, x)
    x_grad, x.grad = x.grad, None

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.model.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return self.model.norm_f(x)

    actual = gradients_of(Checkpointed(), x)
    # The last norm is PyTorch's in the checkpointed model.
    assert error(x.grad, x_grad) < 1e-5
    for name, gradient in expected.items():
        assert error(actual[f"model.{name}"], gradient) < 1e-5, name


# --- process groups of one process ----------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path):
    """A mesh of this process only."""
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(model: S6, mesh, policy: MixedPrecisionPolicy | None = None) -> S6:
    policy = policy or MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fully_sharded(dtype, process_group):
    model, x = S6(DIM, depth=2, dtype=dtype), sequence(dtype=dtype)
    expected = model(x).detach(), gradients_of(model, x)
    model.zero_grad()
    sharded(model, process_group)
    marked = {n for n, p in model.named_parameters() if hasattr(p, "_no_weight_decay")}
    assert marked == {f"layers.{i}.{name}" for i in range(2) for name in ("A_log", "D")}
    # Layers that are called one by one round their sums, and the last norm is PyTorch's here.
    bound = 0.1 if dtype == torch.bfloat16 else 1e-5
    assert error(model(x), expected[0]) < bound / 10
    for name, gradient in gradients_of(model, x).items():
        assert error(gradient.full_tensor(), expected[1][name]) < bound, name
    torch.optim.AdamW(model.parameters()).step()
    assert not torch.equal(model(x), expected[0])


def test_fully_sharded_from_meta_in_mixed_precision(process_group):
    model = S6(DIM, depth=2, device="meta")
    sharded(model, process_group, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.to_empty(device="cpu")
    model.reset_parameters()
    torch.testing.assert_close(model.layers[1].A_log.full_tensor(), S6(DIM).layers[0].A_log)
    x, plain = sequence(), S6(DIM, depth=2)
    plain.load_state_dict({name: p.full_tensor() for name, p in model.state_dict().items()})
    plain.to(torch.bfloat16)
    expected = gradients_of(plain, x.bfloat16())
    assert model(x).dtype == torch.bfloat16
    for name, gradient in gradients_of(model, x).items():
        assert model.get_parameter(name).dtype == gradient.dtype == torch.float32, name
        assert error(gradient.full_tensor(), expected[name]) < 0.1, name


def test_distributed_data_parallel(process_group):
    model, x = S6(DIM, depth=2), sequence()
    expected = gradients_of(model, x)
    for name, gradient in gradients_of(DistributedDataParallel(model), x).items():
        assert torch.equal(gradient, expected[name.removeprefix("module.")]), name
