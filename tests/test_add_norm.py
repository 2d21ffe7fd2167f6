"""The RMS norm with a residual: kernels against the formula in float64, and its use by stacks."""

import copy
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from accuracy import Error
from cases import Axes
from changed_parts import CHANGES, Change
from problem import DTYPES, generator, lay_out
from selective_scan import S6, MambaMixer, _layer_stack
from selective_scan._add_norm import add_rms_norm
from selective_scan._ops import ops
from selective_scan._plain_mixer import has_no_hooks
from selective_scan.compat.mixer_seq_simple import MixerModel

F32, F64, HALF, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
EPS = 1e-5


@dataclass(frozen=True)
class Case(Axes):
    shape: tuple[int, ...] = (3, 7, 96)
    dtype: torch.dtype = F32
    residual_dtype: torch.dtype | None = F32  # None: no residual
    weight_dtype: torch.dtype = F32
    out_dtype: torch.dtype = F32
    total_dtype: torch.dtype | None = F32  # None: the sum is not returned
    layout: str = "contiguous"


BASE = Case()
AUTOCAST = BASE.with_(dtype=BF16, out_dtype=BF16)
CASES = [
    BASE,
    AUTOCAST,
    # Sizes around a thread's vectors, a team's warps, a block's teams, two vectors, leftover
    # channels.
    *(case.with_(shape=(5, channels)) for case in (BASE, AUTOCAST)
      for channels in (1, 7, 8, 77, 256, 264, 768, 1000, 2048, 2056, 4100, 8192)),
    *(AUTOCAST.with_(shape=shape)
      for shape in ((70,), (0, 16), (2, 0, 16), (1, 1, 32), (3000, 40))),
    *(BASE.with_(dtype=dtype, residual_dtype=residual, out_dtype=out, total_dtype=residual or dtype)
      for dtype, residual, out in itertools.product((HALF, BF16), (None, F32, BF16), (F32, BF16))),
    *(BASE.with_(dtype=dtype, residual_dtype=dtype, weight_dtype=dtype, out_dtype=dtype,
                 total_dtype=dtype) for dtype in (HALF, BF16, F64)),
    BASE.with_(dtype=F64, residual_dtype=F64, weight_dtype=F64, out_dtype=F64, total_dtype=F64,
               shape=(6, 3001)),
    BASE.with_(weight_dtype=F64, residual_dtype=BF16),
    BASE.with_(residual_dtype=None),
    BASE.with_(residual_dtype=None, total_dtype=F64),
    AUTOCAST.with_(total_dtype=None),
    BASE.with_(residual_dtype=None, total_dtype=None),
    *(case.with_(layout=layout, shape=(3, 7, channels)) for case in (BASE, AUTOCAST)
      for channels in (96, 77)
      for layout in ("channel_last", "dim_first", "sliced", "offset", "expanded", "wide")),
]  # fmt: skip


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "wide":  # rows are halves of wider rows, read in place
        wide = tensor.new_empty(*tensor.shape[:-1], 2 * tensor.shape[-1])
        return wide[..., : tensor.shape[-1]].copy_(tensor)
    return lay_out(tensor, layout)


def make(case: Case, device: str) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Returns hidden, residual and weight, and the gradients of the results."""
    random = generator(case.with_(layout="contiguous"))

    def normal(dtype, *shape):
        if dtype is None:
            return None
        values = torch.randn(shape, generator=random, dtype=F64).to(dtype).to(device)
        return laid_out(values, case.layout)

    rows = [normal(dtype, *case.shape) for dtype in (case.dtype, case.residual_dtype)]
    weight = normal(case.weight_dtype, case.shape[-1]).contiguous()
    cotangents = [normal(dtype, *case.shape) for dtype in (case.out_dtype, case.total_dtype)]
    return [*rows, weight], cotangents


def call(case: Case, tensors, cotangents, kernels=True):
    """Returns the results that have cotangents, their gradients, and the leaves."""
    leaves = [None if it is None else it.detach().requires_grad_() for it in tensors]
    if kernels:
        results = add_rms_norm(*leaves, EPS, case.out_dtype, case.total_dtype)
    else:
        hidden, residual, weight = (None if it is None else it.to(F64) for it in leaves)
        total = hidden if residual is None else hidden + residual
        scale = (total.square().mean(-1, keepdim=True) + EPS).rsqrt()
        results = total * scale * weight, total
    used = [(r, c.to(r.dtype)) for r, c in zip(results, cotangents, strict=True) if c is not None]
    given = [leaf for leaf in leaves if leaf is not None]
    outputs, upstream = zip(*used, strict=True)
    gradients = torch.autograd.grad(outputs, given, upstream)
    return [result for result, _ in used], gradients, given


def check(case: Case, device: str) -> None:
    tensors, cotangents = make(case, device)
    results, gradients, leaves = call(case, tensors, cotangents)
    exact_results, exact_gradients, _ = call(case, tensors, cotangents, kernels=False)
    dtypes = [case.out_dtype, case.total_dtype][: len(results)]
    assert [it.dtype for it in results] == dtypes
    assert [it.dtype for it in gradients] == [it.dtype for it in leaves]
    # The backward pass recomputes the scale from the rounded sum.
    narrowest = max(torch.finfo(case.total_dtype or case.dtype).eps, 1e-15)
    arithmetic = max(2e-15 if F64 in map(dtype_of, tensors) else 3e-7, narrowest)
    for actual, exact in zip(
        (*results, *gradients), (*exact_results, *exact_gradients), strict=True
    ):
        assert actual.shape == exact.shape
        error = Error.of(actual.to(F64), exact.to(F64))
        bound = 2 * torch.finfo(actual.dtype).eps + 4 * arithmetic
        if case.shape[-1] == 1 and any(actual is it for it in gradients):
            # With one channel nearly all of the gradient through the norm cancels, and the weight
            # has no other channels whose sums do not cancel.
            terms = terms_of(actual.shape == case.shape, tensors, cotangents)
            bound *= max(1.0, (terms / exact.norm()).item())
        assert error.relative_l2 <= bound, f"{error}"
        assert error.max_abs <= 20 * bound, f"{error}"


def terms_of(rows: bool, tensors, cotangents) -> torch.Tensor:
    """Returns the size of the terms of the gradient of rows of one channel, or of the weight."""
    hidden, residual, weight = (0.0 if it is None else it.to(F64) for it in tensors)
    dnormed = cotangents[0].to(F64)
    total = hidden + residual
    scale = (total.square() + EPS).rsqrt()
    return (scale * weight * dnormed).norm() if rows else (scale * total * dnormed).abs().sum()


def ops_of(call, x: torch.Tensor | None, monkeypatch) -> int:
    """Returns how often a call runs the norm's op."""
    from selective_scan import _add_norm

    calls = []
    run = _add_norm._run_forward
    with monkeypatch.context() as patch:
        patch.setattr(_add_norm, "_run_forward", lambda *given: calls.append(0) or run(*given))
        call(x)
    return len(calls)


def dtype_of(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_formula(case, device):
    check(case, device)


@pytest.mark.parametrize("layout", ["contiguous", "wide"])
@pytest.mark.parametrize("channels", [1, 16, 77, 1000, 4100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_weight(dtype, channels, layout, device):
    rows = laid_out(torch.randn(2, 5, channels, device=device, dtype=dtype), layout)
    normed, _ = ops.add_rms_norm_fwd(rows, None, None, EPS, dtype, None)
    ones = torch.ones(channels, device=device, dtype=dtype)
    assert torch.equal(normed, ops.add_rms_norm_fwd(rows, None, ones, EPS, dtype, None)[0])
    assert normed.dtype == dtype
    assert normed.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_and_rows_alone(dtype, device):
    """Runs give the same bits, and a row's results do not depend on the other rows."""
    case = BASE.with_(shape=(301, 264), dtype=dtype, residual_dtype=dtype, total_dtype=dtype)
    tensors, cotangents = make(case, device)
    results, gradients, _ = call(case, tensors, cotangents)
    again, gradients_again, _ = call(case, tensors, cotangents)
    assert all(map(torch.equal, (*results, *gradients), (*again, *gradients_again)))

    def of_row(tensors):
        return [None if it is None or it.dim() == 1 else it[77:78].clone() for it in tensors]

    hidden, residual, _ = of_row(tensors)
    alone, gradients_alone, _ = call(case, (hidden, residual, tensors[2]), of_row(cotangents))
    assert all(map(torch.equal, of_row((*results, *gradients[:2])), (*alone, *gradients_alone[:2])))


@pytest.mark.parametrize("needed", itertools.product([False, True], repeat=3), ids=str)
@pytest.mark.parametrize("used", ["both", "normed", "total"])
def test_gradients_that_are_wanted(needed, used, device):
    tensors, cotangents = make(AUTOCAST, device)
    _, expected, _ = call(
        AUTOCAST, tensors, [c if used in ("both", name) else torch.zeros_like(c)
                            for c, name in zip(cotangents, ("normed", "total"), strict=True)],
    )  # fmt: skip
    leaves = [
        it.clone().requires_grad_(is_needed) for it, is_needed in zip(tensors, needed, strict=True)
    ]
    results = add_rms_norm(*leaves, EPS, BF16, F32)
    picked = [k for k, name in enumerate(("normed", "total")) if used in ("both", name)]
    if not any(needed):
        assert not any(result.requires_grad for result in results)
        return
    torch.autograd.backward([results[k] for k in picked], [cotangents[k] for k in picked])
    for leaf, gradient, is_needed in zip(leaves, expected, needed, strict=True):
        if is_needed and leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, gradient)
        else:
            assert leaf.grad is None
            assert not is_needed or (used == "total" and leaf is leaves[2])


@pytest.mark.parametrize("has_residual", [False, True])
def test_gradcheck(has_residual, device):
    options = {"dtype": F64, "device": device, "requires_grad": True}
    hidden, residual = (torch.randn(2, 3, 5, **options) for _ in range(2))
    weight = torch.randn(5, **options)
    given = (hidden, residual if has_residual else None, weight)

    def norm(*tensors):
        return add_rms_norm(*tensors, 0.1, F64, F64)

    assert torch.autograd.gradcheck(norm, given, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(norm, given)


def test_the_sum_is_hidden_where_nothing_is_added(device):
    x, weight = torch.randn(2, 9, device=device), torch.ones(9, device=device)
    assert add_rms_norm(x, None, weight, EPS, F32, F32)[1] is x
    _, total = add_rms_norm(x.requires_grad_(), None, weight, EPS, BF16, F32)
    assert total.data_ptr() == x.data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled(fullgraph):
    tensors, cotangents = make(AUTOCAST, "cpu")
    expected, gradients, _ = call(AUTOCAST, tensors, cotangents)

    @torch.compile(fullgraph=fullgraph, backend="aot_eager")
    def norm(*tensors):
        return add_rms_norm(*tensors, EPS, BF16, F32)

    leaves = [it.detach().requires_grad_() for it in tensors]
    actual = norm(*leaves)
    torch.testing.assert_close(actual, tuple(expected))
    found = torch.autograd.grad(actual, leaves, cotangents)
    torch.testing.assert_close(found, gradients, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_transforms_and_modes_see_parts(device, monkeypatch):
    x, weight = torch.randn(4, 3, 9, device=device), torch.randn(9, device=device)

    def norm(x):
        return add_rms_norm(x, x, weight, EPS, F32, F32)[0]

    def formula(x):
        return 2 * x * (4 * x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()

    def by_jvp(function, x):
        return torch.func.jvp(function, (x,), (direction.to(x),))

    direction = torch.randn_like(x)
    expected, of_direction = by_jvp(formula, x.double())
    found = {}
    assert ops_of(lambda x: found.update(called=norm(x)), x, monkeypatch) == 1
    with FlopCounterMode(display=False):
        assert ops_of(lambda x: found.update(counted=norm(x)), x, monkeypatch) == 0
    assert ops_of(lambda x: found.update(mapped=torch.vmap(norm)(x)), x, monkeypatch) == 0
    assert ops_of(lambda x: found.update(jvp=by_jvp(norm, x)), x, monkeypatch) == 0
    found["primal"], tangent = found.pop("jvp")
    for value in found.values():
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tangent.double(), of_direction, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [8192, 8200])
def test_rows_that_are_too_long_go_by_parts(channels, device, monkeypatch):
    case = AUTOCAST.with_(shape=(2, channels))
    has_kernel = device == "cpu" or channels <= 8192
    assert ops_of(lambda _: check(case, device), None, monkeypatch) == has_kernel


# --- where stacks use it --------------------------------------------------------------------------


@pytest.fixture
def layer_by_layer(monkeypatch) -> None:
    """Makes every stack too large to run as one op."""
    monkeypatch.setattr(_layer_stack, "MOST_ELEMENTS", {"cpu": 0, "cuda": 0})


def by_modules(model: S6, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        is_plain = isinstance(layer, MambaMixer) and has_no_hooks(layer)
        x = x + MambaMixer.forward(layer, layer.norm(x)) if is_plain else layer(x)
    return model.norm_f(x)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64", "autocast", "bidirectional"])
@pytest.mark.parametrize("depth", [1, 3])
def test_stack_is_its_modules(kind, depth, device, layer_by_layer, monkeypatch):
    model = S6(24, d_state=4, depth=depth, bidirectional=kind == "bidirectional", device=device)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter)
    x = torch.randn(2, 40, 24, device=device)
    if kind in ("bfloat16", "float64"):
        model, x = model.to(getattr(torch, kind)), x.to(getattr(torch, kind))
    x.requires_grad_()
    leaves = [x, *model.parameters()]
    with torch.autocast(device, torch.bfloat16, enabled=kind == "autocast"):
        assert ops_of(model, x, monkeypatch) == depth + 1
        actual, expected = model(x), by_modules(model, x)
    assert actual.dtype == expected.dtype == x.dtype
    found, wanted = (torch.autograd.grad(it.square().sum(), leaves) for it in (actual, expected))
    half = kind in ("bfloat16", "autocast")
    for one, other in zip((actual, *found), (expected, *wanted), strict=True):
        error = Error.of(one.detach().to(F64), other.detach().to(F64))
        assert error.relative_l2 < (0.04 if half else 1e-12 if kind == "float64" else 2e-5), error


def test_norms_without_gradients_keep_bits(device, layer_by_layer):
    model = S6(24, d_state=4, depth=2, device=device)
    x = torch.randn(2, 40, 24, device=device)
    with torch.no_grad():
        alone = model(x)
    assert torch.equal(alone, model(x))


class Passing(nn.Module):
    def forward(self, x, cache=None, cu_seqlens=None):
        return x


NOT_PLAIN = {name: it for name, it in CHANGES.items() if it.goes_through_modules} | {
    "backward hook of the last norm": Change(
        lambda model: model.norm_f.register_full_backward_hook(lambda *_: None), True, 2
    ),
    "another dtype of a norm": Change(lambda model: model.layers[1].norm.double(), True, 1),
    "a layer of one's own": Change(
        lambda model: model.layers.register_module("0", Passing()), True, 1
    ),
}


@pytest.mark.parametrize("change", NOT_PLAIN)
def test_what_is_not_plain_is_called(change, device, layer_by_layer, monkeypatch):
    model = S6(24, d_state=4, depth=2, device=device)
    x = torch.randn(2, 40, 24, device=device)
    NOT_PLAIN[change].make(model)
    assert ops_of(model, x, monkeypatch) == NOT_PLAIN[change].norms
    torch.testing.assert_close(model(x), by_modules(model, x))


def test_hooks_for_all_modules_see_the_norms(device, monkeypatch):
    model, x = S6(24, d_state=4, device=device), torch.randn(2, 40, 24, device=device)
    seen = []
    with nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m))):
        assert ops_of(model, x, monkeypatch) == 0
    assert seen.count(nn.RMSNorm) == 2


def test_published_models_use_it(device, layer_by_layer, monkeypatch):
    options = {"ssm_cfg": {"d_state": 4}, "rms_norm": True, "residual_in_fp32": True}
    tokens = torch.randint(50, (2, 40), device=device)
    model = MixerModel(24, 2, vocab_size=50, **options, fused_add_norm=True, device=device)
    other = MixerModel(24, 2, vocab_size=50, **options, device=device)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert ops_of(model, tokens, monkeypatch) == ops_of(other, tokens, monkeypatch) == 3
    torch.testing.assert_close(model(tokens), other(tokens), rtol=1e-4, atol=1e-4)
