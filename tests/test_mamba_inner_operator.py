"""mamba_inner_fn as an op, in PyTorch's transforms, compilers and checks."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from accuracy import Error
from opchecks import QUICK, THOROUGH, gradcheck, opcheck_forward
from problem import generator
from selective_scan import mamba_inner_fn
from selective_scan._checks import HALF
from selective_scan._mamba_operators import MAMBA_INNER
from selective_scan.mamba_inner import LayerOptions, mamba_layer
from test_mamba_inner import BASE, EVERYTHING, run, tensors_of


def op_arguments(case, device="cpu", requires_grad=True, **changes):
    tensors = tensors_of(case, device) | changes
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            tensors[name] = tensor.detach().requires_grad_(requires_grad)
    names, defaults = MAMBA_INNER.arguments.names, MAMBA_INNER.arguments.defaults
    # Without softplus, steps may be negative and let states grow without bound.
    given = dict(zip(names, defaults, strict=True)) | {"delta_softplus": True} | tensors
    return tuple(given[name] for name in names)


def input_of_a_layer(case, device="cpu"):
    """Returns a layer's input in place of xz, its projection, and the logarithm in place of A."""
    random = generator(case)
    hidden = torch.randn(case.batch, case.seqlen, 3, generator=random, dtype=torch.float64)
    weight = torch.randn(2 * case.dim, 3, generator=random, dtype=torch.float64)
    bias = torch.randn(2 * case.dim, generator=random, dtype=torch.float64)
    A_log = torch.rand(case.dim, case.dstate, generator=random, dtype=torch.float64)
    tensors = {"xz": hidden, "in_proj_weight": weight, "in_proj_bias": bias, "A": A_log}
    return {
        name: tensor.to(device, case.dtype).requires_grad_() for name, tensor in tensors.items()
    }


def second_poles(case, device="cpu"):
    A = -0.2 - torch.rand(case.dim, case.dstate, generator=generator(case), dtype=torch.float64)
    single = torch.promote_types(case.dtype, torch.float32)
    return A.to(device, single).requires_grad_()


# The forms of the op, by the changes of a plain layer's arguments.
FORMS = {
    "of xz": lambda case, device: {},
    "of a layer's input": input_of_a_layer,
    "both ways": lambda case, device: {"bidirectional": True},
    "both ways, of a layer's input": (
        lambda case, device: input_of_a_layer(case, device) | {"bidirectional": True}
    ),
    "rows alone": lambda case, device: dict(NO_PROJECTION),
    "turned around": lambda case, device: NO_PROJECTION | {"reverse": True},
    "second poles": (lambda case, device: NO_PROJECTION | {"A_b": second_poles(case, device)}),
}
NO_PROJECTION = {"out_proj_weight": None, "out_proj_bias": None}
of_forms = pytest.mark.parametrize("form", FORMS)


@pytest.mark.slow
@of_forms
@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16], ids=str)
def test_opcheck(autocast_dtype, form, device):
    case = BASE.with_(seqlen=40)
    has_input = "input" in form
    for level, save_states, chosen in ((0, False, QUICK), (0, True, QUICK), (1, True, THOROUGH)):
        changes = FORMS[form](case, device)
        changes |= {"checkpoint_lvl": level, "autocast_dtype": autocast_dtype}
        if level == 1:
            channels = case.dim if changes.get("out_proj_weight", 0) is None else case.d_model
            changes["residual"] = torch.randn(case.batch, case.seqlen, channels, device=device)
        ops = torch.ops.selective_scan
        arguments = op_arguments(case, device, **changes)
        opcheck_forward(ops.mamba_inner_fwd, arguments, chosen)
        arguments = op_arguments(case, device, False, **changes)
        out, cast_input, *kept = ops.mamba_inner_fwd(*arguments, save_states)
        assert (cast_input is None) == (not save_states or not has_input or not autocast_dtype)
        torch.library.opcheck(
            ops.mamba_inner_bwd,
            (torch.ones_like(out), *arguments[:-1], *kept, arguments[0].dtype),
            test_utils=chosen,
        )


@pytest.mark.parametrize("seqlen", [0, 1])
@of_forms
def test_opcheck_of_few_steps(form, seqlen, device):
    case = BASE.with_(seqlen=seqlen, xz="contiguous", batch=1)
    arguments = op_arguments(case, device, **FORMS[form](case, device))
    opcheck_forward(torch.ops.selective_scan.mamba_inner_fwd, arguments, QUICK)


def test_opcheck_of_a_layer_with_a_logarithm_of_a_half_type(device):
    case = BASE.with_(dtype=torch.bfloat16)
    changes = input_of_a_layer(case, device)
    assert changes["A"].dtype == torch.bfloat16
    arguments = op_arguments(case, device, **changes)
    opcheck_forward(torch.ops.selective_scan.mamba_inner_fwd, arguments, QUICK)


class _SeeParts(TorchDispatchMode):
    """While it is active, a layer is composed of its parts in Python."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert "mamba_inner" not in str(op)
        return op(*args, **(kwargs or {}))


OP_CASES = [
    BASE,
    BASE.with_(dim=64, dstate=16, rank=8, d_model=32, dtype=torch.bfloat16, seqlen=200),
    BASE.with_(dtype=torch.float16, absent=(*BASE.absent, "out_proj_bias", "D")),
    BASE.with_(dtype=torch.float64, absent=(*BASE.absent, "conv1d_bias", "delta_bias")),
    *(BASE.with_(xz=xz) for xz in ("contiguous", "sliced", "expanded")),
    *(BASE.with_(batch=batch, seqlen=seqlen) for batch, seqlen in ((2, 0), (0, 5), (1, 2))),
    BASE.with_(options=(("checkpoint_lvl", 0), ("delta_softplus", False)), seqlen=9),
]


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("case", OP_CASES, ids=str)
def test_a_layer_is_what_its_parts_are(case, autocast, device):
    """The result has its parts' bits; sums of gradients are rounded at other places."""
    tensors = tensors_of(case, device)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        actual = run(mamba_inner_fn, case, tensors)
        with _SeeParts():
            expected = run(mamba_inner_fn, case, tensors)
    assert torch.equal(actual["out"], expected["out"])
    is_half = (autocast and case.dtype != torch.float64) or case.dtype in HALF
    eps = torch.finfo(torch.bfloat16 if is_half else case.dtype).eps

    def largest(name):
        value = expected[name].detach()
        return float(value.abs().amax()) if value.numel() else 0.0

    # A sum over steps may cancel: its error is that of its terms, which are as large as dxz.
    of_terms = torch.finfo(torch.promote_types(case.dtype, torch.float32)).eps * largest("dxz")
    for name, value in actual.items():
        assert value.dtype == expected[name].dtype, name
        atol = 8 * (eps * largest(name) + of_terms)
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol, msg=name)


RESIDUALS = {
    "as the product": (torch.float32, torch.float32, False),
    "of a half type": (torch.bfloat16, torch.bfloat16, False),
    "wider than the product": (torch.float32, torch.float32, True),
    "narrower than the product": (torch.float32, torch.bfloat16, False),
    "of another half type": (torch.float16, torch.float16, True),
    "of doubles": (torch.float64, torch.float64, True),
}


@pytest.mark.parametrize("strides", ["contiguous", "transposed"])
@pytest.mark.parametrize("kind", RESIDUALS)
def test_a_residual_is_added_as_behind_the_layer(kind, strides, device):
    dtype, residual_dtype, autocast = RESIDUALS[kind]
    case = BASE.with_(dtype=dtype, seqlen=33)
    tensors = tensors_of(case, device) | input_of_a_layer(case, device)
    names = ("xz", "in_proj_weight", "in_proj_bias", "conv1d_weight", "conv1d_bias",
             "x_proj_weight", "delta_proj_weight", "out_proj_weight", "out_proj_bias", "A", "D",
             "delta_bias")  # fmt: skip
    given = [tensors[name] for name in names]
    random = generator(case)
    residual = torch.randn(case.d_model, 33, case.batch, generator=random).to(residual_dtype)
    residual = residual.permute(2, 1, 0).to(device)
    if strides == "contiguous":
        residual = residual.contiguous()
    residual.requires_grad_()

    def gradients(joined):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            hidden, *weights = given
            added = residual if joined else None
            out = mamba_layer(hidden, tuple(weights), LayerOptions(), added)
            out = out if joined else residual + out
        cotangent = torch.randn(out.shape, generator=generator(case)).to(out)
        return out, *torch.autograd.grad(out, [residual, *given], cotangent)

    for actual, expected in zip(gradients(True), gradients(False), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


def gradients_of(tensors, out, cotangents, **options):
    return torch.autograd.grad(out, list(tensors.values()), cotangents, **options)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("level", [0, 1])
def test_no_pass_writes_over_what_was_kept(level, bidirectional, device):
    """Hooks of saved tensors may keep the tensors, or files of them."""
    tensors = {name: t for name, t in tensors_of(BASE, device).items() if t is not None}
    shape = (BASE.batch, BASE.seqlen, BASE.dim)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = mamba_inner_fn(**tensors, checkpoint_lvl=level, bidirectional=bidirectional)
    kept += out.grad_fn.saved_tensors
    assert sum(it is not None and it.shape == shape for it in kept) == 2 * (1 if level == 1 else 3)
    before = [None if tensor is None else tensor.clone() for tensor in kept]
    cotangent = torch.randn_like(out)
    passes = []
    for keeps in (True, True, False):
        passes.append(gradients_of(tensors, out, cotangent, retain_graph=keeps))
        assert all(it is None or torch.equal(it, x) for it, x in zip(kept, before, strict=True))
        assert all(map(torch.equal, passes[0], passes[-1]))


@of_forms
def test_gradcheck_of_the_op(form):
    case = TINY.with_(absent=BASE.absent)
    arguments = op_arguments(case, **FORMS[form](case, "cpu"))
    given = dict(zip(MAMBA_INNER.arguments.names, arguments, strict=True))
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    gradcheck(lambda **changed: MAMBA_INNER(*(given | changed).values())[0], tensors)


TINY = EVERYTHING.with_(
    batch=1, dim=2, seqlen=3, dstate=2, rank=1, d_model=2, width=2, dtype=torch.float64
)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("complex", [False, True])
def test_gradcheck(complex, bidirectional):
    tensors = tensors_of(TINY.with_(complex=complex))
    gradcheck(mamba_inner_fn, tensors, bidirectional=bidirectional)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, device):
    compiled = torch.compile(mamba_inner_fn, fullgraph=True, backend=backend)
    for autocast, seqlen in itertools.product((False, True), (70, 33)):
        case = EVERYTHING.with_(seqlen=seqlen)
        tensors = tensors_of(case, device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            expected = run(mamba_inner_fn, case, tensors)
            actual = run(compiled, case, tensors)
        if not autocast:
            torch.testing.assert_close(actual, expected)
            continue
        exact = run(mamba_inner_fn, case, tensors_of(case, device, torch.float64))
        # Values between the products may be rounded to bfloat16 at other places. A single result
        # may be accurate by chance, but not all of them.
        errors, usual = (
            {name: Error.of(it[name].to(x), x).relative_l2 for name, x in exact.items()}
            for it in (actual, expected)
        )
        most = max(usual.values())
        for name, error in errors.items():
            assert error < max(3 * usual[name] + 2**-7, most), name


def test_its_products_are_counted(device):
    case = BASE
    tensors = tensors_of(case, device)
    rows = 2 * case.batch * case.seqlen * case.dim
    products = rows * (2 * case.rank + 2 * case.dstate + case.d_model)

    def counted(counter):
        found = counter.get_flop_counts()["Global"]
        return sum(found.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))

    with FlopCounterMode(display=False) as counter:
        out = mamba_inner_fn(**tensors)
    assert counted(counter) == products
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counted(counter) == 2 * products  # each has two gradients


def test_nothing_is_kept_without_gradients():
    with torch.no_grad():
        arguments = op_arguments(BASE)
        out, *kept = torch.ops.selective_scan.mamba_inner_fwd(*arguments, False)
    assert out.shape == (2, 70, 5)
    assert all(tensor is None for tensor in kept)


# --- refusals -------------------------------------------------------------------------------------


def test_a_bad_call_after_a_good_one():
    """Arguments that were checked before are not checked again, unless they have changed."""
    tensors = tensors_of(EVERYTHING)
    for _ in range(2):
        mamba_inner_fn(**tensors)
        with pytest.raises(RuntimeError, match="out_proj_bias must be"):
            mamba_inner_fn(**tensors | {"out_proj_bias": torch.zeros(1)})


def test_the_backward_op_checks_what_it_is_given():
    ops = torch.ops.selective_scan
    arguments = op_arguments(BASE, requires_grad=False)
    out, _, *kept = ops.mamba_inner_fwd(*arguments, True)
    message = r"dout must be \(batch, seqlen, d_model\) = \(2, 70, 5\), got \(2, 70, 4\)"
    with pytest.raises(RuntimeError, match=message):
        ops.mamba_inner_bwd(torch.ones(2, 70, 4), *arguments[:-1], *kept, torch.float32)
    kept[3] = kept[3][:, :-1]
    with pytest.raises(RuntimeError, match=r"y must be \(batch, seqlen, dim\) = \(2, 70, 6\)"):
        ops.mamba_inner_bwd(torch.ones_like(out), *arguments[:-1], *kept, torch.float32)
