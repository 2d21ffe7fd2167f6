"""The binding modules that forks call below autograd, and the calls of published models."""

import copy
import importlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import published_calls
from opchecks import Ops
from selective_scan import _library, causal_conv1d_ref, mamba_inner_ref, selective_scan_ref
from selective_scan.compat import _modules, bindings


def make_scan(dtype=torch.float32, is_complex=False) -> dict:
    A = -torch.rand(8, 4) - 0.1
    A = torch.complex(A, torch.randn(8, 4)) if is_complex else A
    width = 2 * 11 if is_complex else 11
    u, delta, z, dout = torch.randn(4, 2, 8, 11).to(dtype)
    B, C = torch.randn(2, 2, 2, 4, width).to(dtype)
    D, delta_bias = torch.randn(2, 8)
    scan = {"u": u, "delta": delta, "A": A, "B": B, "C": C}
    return scan | {"D": D, "z": z, "delta_bias": delta_bias, "dout": dout}


def solve(scan: dict, has_z: bool) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Returns out, last_state and gradients of the reference in float64."""
    wide = {name: t.to(torch.promote_types(t.dtype, torch.float64)) for name, t in scan.items()}
    dout = wide.pop("dout")
    if not has_z:
        wide["z"] = None
    leaves = {name: t.requires_grad_() for name, t in wide.items() if t is not None}
    out, last = selective_scan_ref(**wide, delta_softplus=True, return_last_state=True)
    gradients = torch.autograd.grad(out, list(leaves.values()), dout)
    return out.detach(), last.detach(), dict(zip(leaves, gradients, strict=True))


def assert_near(actual, expected, rounding=1e-4):
    wide = actual.to(expected.dtype)
    assert (wide - expected).norm() <= rounding * expected.norm() + 1e-6


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("has_z", [False, True])
def test_selective_scan_cuda(compat_modules, has_z, is_complex):
    import selective_scan_cuda

    scan = make_scan(is_complex=is_complex)
    expected, last, gradients = solve(scan, has_z)
    dout, z = scan.pop("dout"), scan.pop("z")
    z = z if has_z else None
    inputs = (*[scan[name] for name in ("u", "delta", "A", "B", "C", "D")], z, scan["delta_bias"])
    out, x, *rest = selective_scan_cuda.fwd(*inputs, True)
    assert len(rest) == has_z
    assert_near(rest[0] if has_z else out, expected)
    assert x.dtype == scan["A"].dtype
    assert x.shape == (2, 8, 1, 8)
    assert_near(x[:, :, -1, 1::2], last)
    steps = F.softplus(scan["delta"].double() + scan["delta_bias"][:, None])
    assert_near(x[:, :, -1, 0::2], (steps.sum(-1, keepdim=True) * scan["A"]).exp())

    dxz = torch.zeros(2, 16, 11)
    dz = dxz[:, 8:] if has_z else None
    result = selective_scan_cuda.bwd(*inputs, dout, x, out if has_z else None, dz, True, has_z)
    order = ["u", "delta", "A", "B", "C", "D", "delta_bias", *["z"] * has_z]
    for name, gradient in zip(order, result, strict=False):
        assert gradient.dtype == scan.get(name, dout).dtype
        assert_near(gradient, gradients[name])
    assert len(result) == len(order) + has_z
    if has_z:
        assert result[7] is dz
        assert_near(dxz[:, 8:], gradients["z"])
        assert_near(result[8], expected)
    without = selective_scan_cuda.bwd(
        *inputs[:5], None, None, None, dout, None, None, None, False, False
    )
    assert [gradient is None for gradient in without] == [False] * 5 + [True] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["selective_scan_cuda_core", "selective_scan_cuda_oflex"])
@pytest.mark.parametrize("nrows", [1, 4])
def test_vmamba_bindings(compat_modules, name, dtype, nrows):
    module = importlib.import_module(name)
    scan = make_scan(dtype)
    scan["dout"] = scan["dout"].float()
    expected, last, gradients = solve(scan, has_z=False)
    dout = scan.pop("dout")
    del scan["z"]
    for flag in [(False,), (True,)] if name.endswith("oflex") else [()]:
        out, x, *_ = module.fwd(*scan.values(), True, nrows, *flag)
        is_wide = flag == (True,)
        assert out.dtype == (torch.float32 if is_wide else dtype)
        assert_near(out, expected, 1e-4 if is_wide or dtype == torch.float32 else 1e-2)
        assert_near(x[:, :, -1, 1::2], last)
    result = module.bwd(*scan.values(), dout, x, True, nrows)
    for name_of_input, gradient in zip(scan, result, strict=True):
        assert gradient.dtype == scan[name_of_input].dtype
        rounding = 1e-4 if gradient.dtype == torch.float32 else 1e-2
        assert_near(gradient, gradients[name_of_input], rounding)


def test_a_call_with_other_arguments_names_those_expected_and_got(compat_modules):
    """A call with unexpected arguments is refused with the expected and the given ones. Here it is
    that of a fork whose kernels also take another step size for A and a discretization."""
    import selective_scan_cuda

    scan = make_scan()
    inputs = [scan[name] for name in ("u", "delta", "A", "B", "C", "D")]
    with pytest.raises(TypeError) as caught:
        selective_scan_cuda.fwd(*inputs, None, scan["delta_bias"], None, True, "mamba")
    assert str(caught.value) == (
        "selective_scan: selective_scan_cuda.fwd must be called with (u, delta, A, B, C, D, z, "
        "delta_bias, delta_softplus), got 11 arguments: (Tensor(2, 8, 11), Tensor(2, 8, 11), "
        "Tensor(8, 4), Tensor(2, 2, 4, 11), Tensor(2, 2, 4, 11), Tensor(8,), None, Tensor(8,), "
        "None, True, 'mamba')"
    )
    for name in _modules.BINDINGS:
        module = importlib.import_module(name)
        for passes in _modules.MODULES[name].names:
            with pytest.raises(TypeError, match=rf"{name}\.{passes} must .*, got 1 arguments"):
                getattr(module, passes)(None)


class ScanBelowAutograd(torch.autograd.Function):
    """Calls the bindings as VMamba does."""

    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, delta_bias):
        out, x, *_ = bindings.core_fwd(u, delta, A, B, C, D, delta_bias, True, 1)
        ctx.save_for_backward(u, delta, A, B, C, D, delta_bias, x)
        return out

    @staticmethod
    def backward(ctx, dout):
        *inputs, x = ctx.saved_tensors
        return tuple(bindings.core_bwd(*inputs, dout, x, True, 1))


def scan_below_autograd(u, delta, A, B, C, D, delta_bias, delta_softplus):
    assert delta_softplus
    return ScanBelowAutograd.apply(u, delta, A, B, C, D, delta_bias)


# --- causal_conv1d --------------------------------------------------------------------------------


class ConvolutionBelowAutograd(torch.autograd.Function):
    """Calls the binding as the package's own function does, and as forks do that were written for
    one of the package's versions."""

    @staticmethod
    def forward(ctx, version, x, weight, bias, seq_idx, initial_states, silu):
        import causal_conv1d_cuda

        ctx.options = version, silu
        ctx.save_for_backward(x, weight, bias, seq_idx, initial_states)
        fwd = causal_conv1d_cuda.causal_conv1d_fwd
        if version == "1.0":
            return fwd(x, weight, bias, silu)
        if version == "1.1":
            return fwd(x, weight, bias, seq_idx, silu)
        final_states = x.new_empty(*x.shape[:2], weight.shape[1] - 1) if seq_idx is None else None
        if version == "1.2":
            out = fwd(x, weight, bias, seq_idx, initial_states, final_states, silu)
        elif version == "1.6":
            out = torch.empty_like(x)
            assert fwd(x, weight, bias, seq_idx, initial_states, out, final_states, silu) is None
        else:
            from causal_conv1d.cpp_functions import causal_conv1d_fwd_function as function

            out = function(x, weight, bias, seq_idx, initial_states, final_states, silu)
        return out, final_states

    @staticmethod
    def backward(ctx, dout, dfinal_states=None):
        import causal_conv1d_cuda

        version, silu = ctx.options
        x, weight, bias, seq_idx, initial_states = ctx.saved_tensors
        dxz = x.new_full((x.shape[0], 2 * x.shape[1], x.shape[2]), 7.0)
        dx, _ = dxz.chunk(2, dim=1)
        before = (x, weight, bias, dout)
        states = (seq_idx, initial_states, dfinal_states)
        has_initial = initial_states is not None
        bwd = causal_conv1d_cuda.causal_conv1d_bwd
        if version == "1.0":
            given, *others = bwd(*before, dx, silu)
        elif version == "1.1":
            given, *others = bwd(*before, seq_idx, dx, silu)
        elif version == "1.2":
            given, *others = bwd(*before, *states, dx, has_initial, silu)
        elif version == "1.6":
            given = dx
            others = [torch.zeros_like(t, dtype=torch.float32) for t in (weight, bias)]
            others.append(torch.empty_like(initial_states) if has_initial else None)
            assert bwd(*before, *states, dx, *others, silu) is None
        else:
            from causal_conv1d.cpp_functions import causal_conv1d_bwd_function as function

            given, *others = function(*before, *states, dx, has_initial, silu)
        assert given is dx
        assert (dxz[:, x.shape[1] :] == 7).all()
        dweight, dbias, dinitial_states = [*others, None][:3]
        return None, dx.clone(), dweight, dbias, None, dinitial_states, None


def make_convolution(case: str, dtype: torch.dtype, device: str, width: int = 4) -> dict:
    x = torch.randn(2, 11, 8).transpose(1, 2).to(dtype)
    weight, bias = torch.randn(8, width).to(dtype), torch.randn(8).to(dtype)
    states = torch.randn(2, 8, width - 1).to(dtype) if case == "states" else None
    seq_idx = torch.arange(11).div(4, rounding_mode="floor").int().expand(2, 11)
    seq_idx = seq_idx.contiguous() if case == "sequences" else None
    made = {"x": x, "weight": weight, "bias": bias, "seq_idx": seq_idx, "initial_states": states}
    made = {name: None if t is None else t.to(device) for name, t in made.items()}
    for tensor in made.values():
        if tensor is not None and tensor.is_floating_point():
            tensor.requires_grad_()
    return made


def differentiate(results, leaves, weights) -> tuple[list, list]:
    results = [
        t for t in ([results] if isinstance(results, torch.Tensor) else results) if t is not None
    ]
    loss = sum((t * w[..., : t.shape[-1]]).sum() for t, w in zip(results, weights, strict=False))
    return results, torch.autograd.grad(
        loss, [t for t in leaves if t is not None and t.requires_grad]
    )


@pytest.fixture(params=[True, False], ids=["kernels", "fallback"])
def has_kernels(request, monkeypatch) -> bool:
    if not request.param:
        monkeypatch.setattr(_library, "devices", set())
        monkeypatch.setattr(_library, "_fallback_allowed", True)
    return request.param


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("version", "case"),
    [
        ("1.0", "plain"),
        ("1.1", "plain"),
        ("1.1", "sequences"),
        *[
            (version, case)
            for version in ("1.2", "1.6", "cpp_functions")
            for case in ("plain", "sequences", "states")
        ],
    ],
)
def test_causal_conv1d_cuda(compat_modules, has_kernels, device, version, case, dtype, silu):
    made = make_convolution(case, dtype, device)
    weights = [torch.randn(2, 8, 11).to(device, dtype) for _ in range(2)]
    with Ops() as ops:
        results, gradients = differentiate(
            ConvolutionBelowAutograd.apply(version, *made.values(), silu), made.values(), weights
        )
    assert ("causal_conv1d_fwd" in ops.names) == has_kernels
    if device == "cpu":  # a GPU's backward pass runs in a thread of its own
        assert ("causal_conv1d_bwd_out" in ops.names) == has_kernels
    exact = {
        name: None
        if t is None
        else (t.detach().double().requires_grad_() if t.is_floating_point() else t)
        for name, t in made.items()
    }
    expected, exact_gradients = differentiate(
        causal_conv1d_ref(
            **exact,
            return_final_states=len(results) == 2,
            activation="silu" if silu else None,
        ),
        exact.values(),
        [w.double() for w in weights],
    )
    assert len(results) == (1 if version in ("1.0", "1.1") or case == "sequences" else 2)
    rounding = 1e-5 if dtype == torch.float32 else 1e-2
    for actual, wanted in zip((*results, *gradients), (*expected, *exact_gradients), strict=True):
        assert actual.dtype == dtype
        assert_near(actual, wanted, rounding)


def test_causal_conv1d_cuda_without_what_is_optional(compat_modules):
    import causal_conv1d_cuda

    x, dout = torch.randn(2, 2, 8, 11)
    weight = torch.randn(8, 4)
    out = causal_conv1d_cuda.causal_conv1d_fwd(x, weight, None, False)
    assert_near(out, causal_conv1d_ref(x.double(), weight.double()))
    dx, dweight, dbias = causal_conv1d_cuda.causal_conv1d_bwd(x, weight, None, dout, None, False)
    assert dbias is None
    row = (x, weight, None, dout, None, None, None, None)
    *same, dbias, dinitial = causal_conv1d_cuda.causal_conv1d_bwd(*row, False, False)
    assert torch.equal(same[0], dx)
    assert torch.equal(same[1], dweight)
    assert dbias is dinitial is None
    states = torch.zeros(2, 8, 3, dtype=torch.float64, requires_grad=True)
    exact = causal_conv1d_ref(x.double(), weight.double(), initial_states=states)
    expected = torch.autograd.grad(exact, states, dout.double())[0]
    assert_near(causal_conv1d_cuda.causal_conv1d_bwd(*row, True, False)[3], expected)
    # This form adds to the given gradients of the weights.
    total = dweight.clone()
    causal_conv1d_cuda.causal_conv1d_bwd(*row[:7], torch.empty_like(x), total, None, None, False)
    assert_near(total, 2 * dweight.double())


def test_the_binding_takes_steps(compat_modules, device):
    import causal_conv1d_cuda

    x, weight, bias = (
        torch.randn(2, 8, 5, device=device),
        torch.randn(8, 4, device=device),
        torch.randn(8, device=device),
    )
    state, update = torch.zeros(2, 8, 4, device=device), causal_conv1d_cuda.causal_conv1d_update
    pool = torch.zeros(3, 8, 4, device=device)
    indices = torch.tensor([2, 0], dtype=torch.int32, device=device)
    ring, outs = torch.zeros(2, 8, 4, device=device), []
    expected = causal_conv1d_ref(x.double(), weight.double(), bias.double(), activation="silu")
    for t in range(5):
        seen = torch.full((2,), t, dtype=torch.int32, device=device)
        outs.append(update(x[..., t], state, weight, bias, True))
        by_ring = update(x[..., t], ring, weight, bias, True, seen)
        assert_near(by_ring, expected[..., t])
        out = torch.empty(2, 8, 1, device=device)
        if t % 2 == 0:
            assert update(x[..., t : t + 1], pool, weight, bias, out, True, None, indices) is None
        else:
            out = update(x[..., t : t + 1], pool, weight, bias, True, None, indices)
        assert_near(out[..., 0], expected[..., t])
    assert_near(torch.stack(outs, -1), expected)
    assert torch.equal(pool[indices.long()], state)
    assert torch.equal(state, x[..., 1:])

    from causal_conv1d.cpp_functions import causal_conv1d_update_function

    more = torch.randn(2, 8, 3, device=device)
    out = causal_conv1d_update_function(more, state, weight, bias, False, None, None)
    whole = torch.cat([x, more], -1).double()
    assert_near(out, causal_conv1d_ref(whole, weight.double(), bias.double())[..., 5:])


def test_classes_whose_apply_is_called(compat_modules):
    from mamba_ssm.ops.selective_scan_interface import MambaInnerFn, SelectiveScanFn

    scan = make_scan()
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    arguments = [scan[name].requires_grad_() for name in names]
    out, last_state = SelectiveScanFn.apply(*arguments, True, True)
    gradients = torch.autograd.grad(out, arguments, scan["dout"])
    expected, expected_last, by_name = solve({n: t.detach() for n, t in scan.items()}, has_z=True)
    for actual, exact in zip(
        (out, last_state, *gradients),
        (expected, expected_last, *(by_name[name] for name in names)),
        strict=True,
    ):
        assert_near(actual.detach(), exact)

    weights = [(8, 1, 4), (8,), (2 + 2 * 4, 8), (8, 2), (6, 8)]
    layer = [torch.randn(2, 16, 11), *map(torch.randn, weights), None, scan["A"], None, None]
    layer += [scan["D"], scan["delta_bias"]]
    wide = [None if tensor is None else tensor.detach().double() for tensor in layer]
    assert_near(MambaInnerFn.apply(*layer).detach(), mamba_inner_ref(*wide))


def test_the_reference_takes_its_arguments_in_the_order_of_upstreams(compat_modules):
    from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn
    from causal_conv1d.causal_conv1d_interface import causal_conv1d_ref as reference

    x, states = torch.randn(2, 8, 12).split([9, 3], -1)
    weight, bias, buffer = torch.randn(8, 4), torch.randn(8), torch.empty(2, 8, 3)
    out, final_states = reference(x, weight, bias, states, True, buffer, "silu")
    assert final_states is buffer
    wanted = causal_conv1d_fn(
        x, weight, bias, initial_states=states, return_final_states=True, activation="silu"
    )
    torch.testing.assert_close((out, final_states), wanted)
    seq_idx = torch.arange(9).div(4, rounding_mode="floor").int().expand(2, 9)
    out = reference(x, weight, bias, None, False, None, None, seq_idx)
    torch.testing.assert_close(out, causal_conv1d_fn(x, weight, bias, seq_idx))
    torch.testing.assert_close(reference(x, weight, bias), causal_conv1d_fn(x, weight, bias))


def test_what_copies_of_the_scans_import(compat_modules):
    from mamba_ssm.ops.triton.layer_norm import _layer_norm_fwd, rms_norm_fn
    from mamba_ssm.utils.torch import custom_bwd, custom_fwd

    class Doubled(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @custom_bwd
        def backward(ctx, dout):
            return 2 * dout

    x, weight = torch.randn(5, 8, requires_grad=True), torch.rand(8)
    Doubled.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
    normed, *_ = _layer_norm_fwd(x, weight, None, 1e-6, None, residual_dtype=None, is_rms_norm=True)
    assert torch.equal(normed, rms_norm_fn(x, weight, None, eps=1e-6))
    assert not normed.requires_grad


def test_the_activation_is_the_fourth_argument_as_in_version_1_0(compat_modules):
    from causal_conv1d import causal_conv1d_fn

    x, weight, bias = torch.randn(2, 8, 12), torch.randn(8, 4), torch.randn(8)
    wanted = causal_conv1d_ref(x, weight, bias, activation="silu")
    torch.testing.assert_close(causal_conv1d_fn(x, weight, bias, "silu"), wanted)
    torch.testing.assert_close(causal_conv1d_fn(x, weight, seq_idx="silu", bias=bias), wanted)
    with pytest.raises(TypeError, match="activation"):
        causal_conv1d_fn(x, weight, bias, "silu", activation="silu")
    with pytest.raises(TypeError, match="seq_idx must be a Tensor or None, got str"):
        causal_conv1d_fn(x, weight, bias, "silu", x[..., :3])


@pytest.mark.parametrize("state_len", [1, 3, 6])
@pytest.mark.parametrize("lengths", [[4, 1, 0, 9], [0], [2]])
def test_states_of_packed_sequences(compat_modules, device, lengths, state_len):
    from causal_conv1d.causal_conv1d_varlen import (
        causal_conv1d_varlen_states,
        causal_conv1d_varlen_states_ref,
    )

    x = torch.randn(sum(lengths), 5, device=device, requires_grad=True)
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    states = causal_conv1d_varlen_states(x, bounds, state_len)
    assert states.shape == (len(lengths), 5, state_len)
    assert not states.requires_grad
    assert torch.equal(causal_conv1d_varlen_states_ref(x, bounds, state_len), states)
    for state, rows in zip(states, x.split(lengths), strict=True):
        assert torch.equal(state, F.pad(rows.T, (state_len, 0))[:, -state_len:])
    with pytest.raises(ValueError, match=r"x must be \(total, dim\), got \(1, "):
        causal_conv1d_varlen_states(x[None], bounds, state_len)


# --- published models -----------------------------------------------------------------------------


def train(model: nn.Module, image: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """Takes a training step; returns the output and the gradients before it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = copy.deepcopy(model.state_dict())
    out = model(image)
    out.square().mean().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    assert all(not torch.equal(before[name], after) for name, after in model.state_dict().items())
    return out.detach(), gradients


@pytest.mark.parametrize(
    ("model", "function"),
    [
        ("Vim", "mamba_inner"),
        ("VideoMamba", "mamba_inner"),
        ("VMamba", "selective_scan"),
        ("MambaVision", "selective_scan"),
        ("VMamba", "bindings"),
        ("Caduceus", "Mamba"),
    ],
)
def test_published_model_trains_one_step(compat_modules, model, function):
    interface = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    if function == "bindings":
        calls = [scan_below_autograd, interface.selective_scan_ref]
    elif function == "Mamba":
        mamba = importlib.import_module("mamba_ssm.modules.mamba_simple").Mamba
        calls = [mamba, partial(mamba, use_fast_path=False)]
    else:
        calls = [getattr(interface, f"{function}_{kind}") for kind in ("fn", "ref")]
    ours, exact = (getattr(published_calls, model)(call) for call in calls)
    exact.load_state_dict(ours.state_dict())
    image = torch.randn(2, published_calls.DIM, 3, 5)
    out, gradients = train(ours, image)
    expected, exact_gradients = train(exact.double(), image.double())
    assert out.shape == (2, 15, published_calls.DIM)
    assert_near(out, expected, 1e-5)
    for name, gradient in gradients.items():
        assert_near(gradient, exact_gradients[name], 1e-4)
