"""mamba_ssm's and causal_conv1d's import paths: what install puts there, and code that uses it."""

import copy
import importlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import selective_scan
from layers import by_steps, copies_of, error
from opchecks import Ops
from selective_scan import MambaMixer, _library, compat
from selective_scan.compat import _modules

FOREIGN = (*_modules.PACKAGES, *_modules.BINDINGS)


def modules_of(packages=FOREIGN) -> dict:
    return {n: m for n, m in sys.modules.items() if n.partition(".")[0] in packages}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """Starts and ends every test without the packages; real ones, if installed, are displaced."""
    before = modules_of()
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    yield
    compat.uninstall()
    assert not any(isinstance(finder, compat._Importer) for finder in sys.meta_path)


# --- install and uninstall ------------------------------------------------------------------------


def test_handle_and_context_manager():
    with compat.install(force=True) as handle:
        assert handle.packages == _modules.PACKAGES
        assert set(modules_of()) == {
            name for name in _modules.MODULES if name.partition(".")[0] in _modules.PACKAGES
        }
    assert not modules_of()
    handle.uninstall()
    assert not modules_of()


def test_a_handle_leaves_what_another_call_installed():
    first = compat.install(force=True)
    first.uninstall()
    with compat.install(force=True):
        modules = modules_of()
        first.uninstall()
        assert modules_of() == modules
    assert not modules_of()


def test_install_twice_changes_nothing():
    compat.install(force=True)
    modules, finders = modules_of(), list(sys.meta_path)
    with compat.install(force=True) as second:
        assert second.packages == ()
        assert sys.meta_path == finders
    assert modules_of() == modules
    added = compat.install(force=True, raw=True)
    assert added.packages == _modules.BINDINGS
    added.uninstall()
    assert modules_of() == modules
    compat.uninstall()
    compat.uninstall()
    assert not modules_of()


def test_a_failing_install_leaves_nothing(monkeypatch):
    wrong = _modules.Contents({"missing": ("selective_scan", "missing")})
    monkeypatch.setitem(_modules.MODULES, "causal_conv1d", wrong)
    with pytest.raises(AttributeError, match="missing"):
        compat.install(force=True)
    assert not modules_of()


def test_threads_may_install_and_uninstall():
    with ThreadPoolExecutor(4) as threads:
        calls = [lambda: compat.install(force=True), compat.uninstall] * 100
        list(threads.map(lambda call: call(), calls))


@pytest.mark.parametrize("name", ["force", "raw"])
def test_flags_are_bools(name):
    with pytest.raises(TypeError, match=f"{name} must be a bool, got int"):
        compat.install(**{name: 1})


# --- the modules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _modules.MODULES)
def test_module_has_a_spec_and_reloads(compat_modules, name):
    module = importlib.import_module(name)
    spec = importlib.util.find_spec(name)
    assert spec is module.__spec__
    assert (spec.name, spec.origin, module.__file__) == (name, *[compat.__file__] * 2)
    assert inspect.getsource(module) == inspect.getsource(compat)
    assert (spec.submodule_search_locations is not None) == hasattr(module, "__path__")
    names = _modules.MODULES[name].names
    for attribute in names:
        delattr(module, attribute)
    assert importlib.reload(module) is module
    for attribute, (origin, name_there) in names.items():
        there = getattr(importlib.import_module(origin), name_there)
        assert getattr(module, attribute) is there
    parent, _, last = name.rpartition(".")
    assert not parent or getattr(sys.modules[parent], last) is module


def test_names_are_ours(compat_modules):
    from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
    from mamba_ssm import Mamba
    from mamba_ssm.modules.mamba_simple import Mamba as SameMamba
    from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, mamba_inner_ref
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    for function in (mamba_inner_fn, mamba_inner_ref):
        assert function is getattr(selective_scan, function.__name__)
    for function in (causal_conv1d_fn, causal_conv1d_update, selective_state_update):
        assert inspect.unwrap(function) is getattr(selective_scan, function.__name__)
    assert Mamba is SameMamba
    assert issubclass(Mamba, MambaMixer)


def test_what_is_not_covered_is_absent(compat_modules):
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'mamba_ssm\.modules\.other'"):
        importlib.import_module("mamba_ssm.modules.other")
    with pytest.raises(ImportError, match="cannot import name 'Other' from 'mamba_ssm'"):
        exec("from mamba_ssm import Other")
    module = importlib.import_module("mamba_ssm")
    with pytest.raises(AttributeError, match="module 'mamba_ssm' has no attribute 'Other'"):
        module.Other  # noqa: B018
    assert int(importlib.import_module("mamba_ssm").__version__.split(".")[0]) < 2


@pytest.mark.parametrize("name", _modules.ABSENT)
def test_what_is_absent_on_purpose_says_so(compat_modules, name):
    parent, _, last = name.rpartition(".")
    sentence = rf"^selective_scan\.compat has no {name}: .+, see docs/integrations\.md$"
    with pytest.raises(ModuleNotFoundError, match=sentence):
        importlib.import_module(name)
    with pytest.raises(ImportError, match=sentence):
        exec(f"from {parent} import {last}")
    with pytest.raises(ImportError, match=sentence):
        exec(f"from {name} import Mamba2, mamba_chunk_scan_combined")
    with pytest.raises(AttributeError, match=sentence):
        getattr(importlib.import_module(parent), last)
    assert not hasattr(importlib.import_module(parent), last)


@pytest.mark.parametrize("name", ["Mamba2", "Mamba3", "MHA"])
def test_a_class_that_is_not_covered_refuses_where_it_is_constructed(compat_modules, name):
    """Copies of upstream's models import these classes beside Mamba, without a use for them."""
    refused = getattr(importlib.import_module(f"mamba_ssm.modules.{name.lower()}"), name)
    derived = type("Derived", (refused,), {})
    for cls in (refused, derived):
        assert issubclass(cls, nn.Module)
        assert not isinstance(make_mamba(), cls)
        sentence = rf"^selective_scan\.compat has no {name}: .+, see docs/integrations\.md$"
        with pytest.raises(NotImplementedError, match=sentence):
            cls(16, layer_idx=0)


# --- Mamba and Block ------------------------------------------------------------------------------


def make_mamba(d_model: int = 12, **options) -> nn.Module:
    from mamba_ssm.modules.mamba_simple import Mamba

    return Mamba(d_model, **{"d_state": 4, "layer_idx": 3} | options)


def test_flags_of_a_layer_may_be_numbers(compat_modules):
    from mamba_ssm import Mamba

    for conv_bias, bias in ((0, 1), (1, 0)):
        layer = Mamba(8, conv_bias=conv_bias, bias=bias, dt_init_floor=0)
        assert (layer.conv1d.bias is not None) == conv_bias
        assert (layer.in_proj.bias is not None) == (layer.out_proj.bias is not None) == bias
    with pytest.raises(ValueError, match="bias must be a bool, got 'no'"):
        Mamba(8, bias="no")


def test_arguments_of_mamba(compat_modules):
    mamba = make_mamba()
    names = list(inspect.signature(type(mamba)).parameters)
    assert names[12:16] == ["use_fast_path", "layer_idx", "device", "dtype"]
    forks = ["bimamba_type", "if_divide_out", "init_layer_scale", "nslices", "bimamba"]
    assert names[16:] == [*forks, "if_devide_out"]
    assert names[:12] == list(inspect.signature(MambaMixer).parameters)[:12]
    assert mamba.state_dict().keys() == MambaMixer(12, 4).state_dict().keys()
    half = make_mamba(dtype=torch.bfloat16)
    assert half.A_log.dtype == half.D.dtype == torch.float32
    assert half.in_proj.weight.dtype == torch.bfloat16
    torch.testing.assert_close(half.A_log.exp(), torch.arange(1.0, 5).expand(24, 4))
    assert half.A_log._no_weight_decay
    assert {it.device.type for it in make_mamba(device="meta").parameters()} == {"meta"}


def from_meta(mamba):
    mamba = mamba.to("meta").to_empty(device="cpu")
    mamba.reset_parameters()
    return mamba


@pytest.mark.parametrize(
    "made_again",
    [copy.copy, copy.deepcopy, lambda mamba: pickle.loads(pickle.dumps(mamba)), from_meta],
    ids=["copied", "deep-copied", "pickled", "from meta"],
)
def test_the_steps_of_a_layer_outlive_the_models_initialisation(made_again, compat_modules):
    models = importlib.import_module("mamba_ssm.models.mixer_seq_simple")
    mamba = made_again(make_mamba(bias=True))
    steps = mamba.dt_proj.bias.detach().clone()
    assert steps.all()
    with torch.no_grad():
        mamba.in_proj.bias.fill_(1)
    mamba.apply(lambda module: models._init_weights(module, n_layer=1))
    assert torch.equal(mamba.dt_proj.bias, steps)
    assert not mamba.in_proj.bias.any()


def test_mamba_computes_what_a_mixer_does(compat_modules):
    mamba, x = make_mamba(), torch.randn(2, 20, 12)
    mixer = MambaMixer.from_mamba(mamba)
    for fast in (True, False):
        mamba.use_fast_path = fast
        torch.testing.assert_close(mamba(x), mixer(x), rtol=1e-5, atol=1e-6)


def test_a_mamba_is_pickled_without_the_import_path():
    with compat.install(force=True):
        mamba = make_mamba()
    x = torch.randn(1, 5, 12)
    for twin in copies_of(mamba):
        assert torch.equal(twin(x), mamba(x))
        assert twin.layer_idx == 3


@pytest.mark.parametrize("prompt", [1, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_prefill_and_steps_give_what_one_call_gives(compat_modules, prompt, dtype):
    mamba, x = make_mamba(dtype=dtype), torch.randn(2, 12, 12, dtype=dtype)
    with torch.no_grad():
        expected = mamba(x)
        out, states = by_steps(mamba, x, prompt)
    conv_state, ssm_state = states[mamba.layer_idx]
    assert conv_state.shape == (2, 24, 4)
    assert ssm_state.shape == (2, 24, 4)
    assert conv_state.dtype == ssm_state.dtype == dtype
    rounding = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    ("option", "value"), [("dt_soft_plus", False), ("discretization_method", "foh")]
)
def test_prefill_and_steps_have_the_options_of_one_call(compat_modules, option, value):
    mamba, x = make_mamba(dtype=torch.float64), torch.randn(2, 12, 12, dtype=torch.float64)
    with torch.no_grad():
        mamba.dt_proj.bias.uniform_(1, 2)
        setattr(mamba, option, value)
        torch.testing.assert_close(by_steps(mamba, x, 9)[0], mamba(x), rtol=1e-10, atol=1e-10)


def test_steps_from_an_allocated_cache(compat_modules):
    mamba, x = make_mamba(layer_idx=None), torch.randn(2, 5, 12)
    states = mamba.allocate_inference_cache(2, 100, dtype=torch.float64)
    assert all(state.dtype == torch.float64 for state in states)
    outs = []
    for t in range(5):
        out, *after = mamba.step(x[:, t : t + 1], *states)
        assert all(one is other for one, other in zip(after, states, strict=True))
        assert not out.requires_grad
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), mamba(x).detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="hidden_states must be one step"):
        mamba.step(x, *states)
    params = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    with pytest.raises(ValueError, match="layer_idx must be given"):
        mamba(x, inference_params=params)


@pytest.mark.parametrize("d_conv", [1, 2, 4])
def test_a_step_of_one_operator_leaves_the_states_of_its_parts(compat_modules, d_conv):
    from mamba_ssm.modules.mamba_simple import Mamba

    mamba = Mamba(16, d_conv=d_conv).requires_grad_(False)
    by_parts = Mamba(16, d_conv=d_conv, use_fast_path=False, dtype=torch.float64)
    by_parts.load_state_dict(mamba.state_dict())
    states, wanted = (it.allocate_inference_cache(3, 1) for it in (mamba, by_parts))
    for _ in range(d_conv + 2):
        x = torch.randn(3, 1, 16)
        with Ops() as ops:
            out, *_ = mamba.step(x, *states)
        assert (ops.names == ["s6_step"]) == (d_conv > 1)
        expected, *_ = by_parts.step(x.double(), *wanted)
        for actual, exact in zip((out, *states), (expected, *wanted), strict=True):
            torch.testing.assert_close(actual.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("through", ["step", "forward"])
def test_a_step_in_grad_mode_warns_once(compat_modules, through, monkeypatch, caplog):
    """A step in grad mode warns once that its result has no graph, like the result of mamba_ssm."""
    monkeypatch.setattr(_library, "_warned", set())
    mamba, x = make_mamba(), torch.randn(2, 1, 12)
    params = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=1)

    def step(x):
        if through == "forward":
            return mamba(x, inference_params=params)
        return mamba.step(x, *mamba.allocate_inference_cache(2, 1))[0]

    with torch.no_grad():
        step(x)
    with torch.inference_mode():
        step(x)
    mamba.requires_grad_(False)
    step(x)
    assert not caplog.records
    for _ in range(2):
        assert not step(x.requires_grad_()).requires_grad
    mamba.requires_grad_(True)
    assert not step(x.detach()).requires_grad
    (record,) = caplog.records
    assert record.name == "selective_scan"
    assert "Mamba.step, by which a call with states goes on, gives a result without a graph" in (
        record.message
    )


def test_a_compiled_step_in_grad_mode(compat_modules):
    mamba, x = make_mamba(), torch.randn(2, 1, 12)
    states, others = (mamba.allocate_inference_cache(2, 1) for _ in range(2))
    compiled = torch.compile(mamba.step, fullgraph=True, backend="aot_eager")
    out = compiled(x, *states)[0]
    assert not out.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(out, mamba.step(x, *others)[0])
    torch.testing.assert_close(states, others)


def test_states_have_the_dtype_of_the_convolution(compat_modules):
    """The dtype does not depend on the module in place of dt_proj, which may have no weights."""
    mamba = make_mamba(dtype=torch.bfloat16)
    mamba.dt_proj = nn.Sequential(mamba.dt_proj)
    params = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    with torch.no_grad():
        mamba(torch.randn(2, 5, 12, dtype=torch.bfloat16), inference_params=params)
    assert {state.dtype for state in params.key_value_memory_dict[3]} == {torch.bfloat16}


def test_training_through_a_prefill(compat_modules):
    mamba, x = make_mamba(), torch.randn(2, 6, 12)
    params = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    mamba(x, inference_params=params).sum().backward()
    assert not any(state.requires_grad for state in params.key_value_memory_dict[3])
    gradients = [parameter.grad for parameter in mamba.parameters()]
    mamba.zero_grad()
    mamba(x).sum().backward()
    for parameter, gradient in zip(mamba.parameters(), gradients, strict=True):
        assert error(gradient, parameter.grad) < 1e-5


@pytest.mark.parametrize("has_mlp", [False, True])
def test_block_fused_and_not(compat_modules, has_mlp):
    from mamba_ssm.modules.block import Block
    from mamba_ssm.ops.triton.layer_norm import RMSNorm

    mlp = partial(nn.Linear, out_features=12) if has_mlp else nn.Identity
    blocks = [
        Block(12, partial(make_mamba, layer_idx=0), mlp, RMSNorm, fused, residual_in_fp32=True)
        for fused in (False, True)
    ]
    blocks[1].load_state_dict(blocks[0].state_dict())
    x, residual = torch.randn(2, 2, 7, 12)
    results = [block(x, residual) for block in blocks]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    hidden, total = results[0]
    if not has_mlp:
        assert torch.equal(total, x + residual)
        normed = F.rms_norm(total, (12,), eps=1e-5)
        torch.testing.assert_close(hidden, blocks[0].mixer(normed), rtol=1e-4, atol=1e-5)
    conv_state, _ = blocks[0].allocate_inference_cache(2, 10)
    assert conv_state.shape == (2, 24, 4)


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_block_passes_its_residual_on_in_float32_if_asked(compat_modules, fused, in_fp32):
    from mamba_ssm.modules.block import Block
    from mamba_ssm.ops.triton.layer_norm import RMSNorm

    block = Block(12, make_mamba, partial(nn.Linear, out_features=12), RMSNorm, fused, in_fp32)
    hidden, residual = torch.randn(2, 7, 12, dtype=torch.bfloat16), None
    for _ in range(2):
        hidden, residual = block.to(torch.bfloat16)(hidden, residual)
        assert hidden.dtype == torch.bfloat16
        assert residual.dtype == (torch.float32 if in_fp32 else torch.bfloat16)


def test_block_of_version_1(compat_modules):
    from mamba_ssm.modules.mamba_simple import Block

    block = Block(12, make_mamba, norm_cls=nn.LayerNorm)
    assert {name.split(".")[0] for name in block.state_dict()} == {"norm", "mixer"}
    x = torch.randn(2, 7, 12)
    hidden, residual = block(x)
    assert residual is x
    torch.testing.assert_close(hidden, block.mixer(F.layer_norm(x, (12,))))
    with pytest.raises(TypeError, match=r"norm_cls must make an nn\.LayerNorm or an RMSNorm"):
        Block(12, make_mamba, nn.BatchNorm1d, fused_add_norm=True)


# --- decoding steps -------------------------------------------------------------------------------


def take_step(
    name: str, requires_grad: bool = False, wrapped_by: Callable = lambda function: function
) -> torch.Tensor:
    """Takes a step by compat's function in the caller's mode; compares it with ours in no_grad."""
    if name.startswith("causal_conv1d_update"):
        module = importlib.import_module("causal_conv1d.causal_conv1d_interface")
        state, arguments = torch.randn(2, 6, 4), [torch.randn(2, 6), torch.randn(6, 4)]
        order = [1, 0, 2]
    else:
        module = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
        state, order = torch.randn(2, 6, 4), [0, 1, 2, 3, 4, 5]
        x, dt = torch.randn(2, 2, 6)
        arguments = [x, dt.exp(), -torch.rand(6, 4), *torch.randn(2, 2, 4)]
    for argument in arguments:
        argument.requires_grad_(requires_grad)
    own = state.clone()

    def call(function: Callable, state: torch.Tensor) -> torch.Tensor:
        row = [state, *arguments]
        return function(*[row[place] for place in order])

    ours = getattr(selective_scan, name)
    if requires_grad:
        with pytest.raises(RuntimeError, match="has no derivative"):
            call(ours, own)
    out = call(wrapped_by(getattr(module, name)), state)
    with torch.no_grad():
        torch.testing.assert_close(out, call(ours, own))
    torch.testing.assert_close(state, own)
    return out


STEPS = ["causal_conv1d_update", "selective_state_update"]


@pytest.mark.parametrize("name", [*STEPS, *(f"{name}_ref" for name in STEPS)])
def test_a_step_without_a_layer_in_grad_mode_warns_once(compat_modules, name, monkeypatch, caplog):
    """A step in grad mode warns once that its result has no graph, like that of the packages."""
    monkeypatch.setattr(_library, "_warned", set())
    take_step(name)
    with torch.no_grad():
        take_step(name)
    assert not caplog.records
    for _ in range(2):
        assert not take_step(name, requires_grad=True).requires_grad
    (record,) = caplog.records
    assert f"{name} gives a result without a graph in grad mode too" in record.message


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_compiled_step_without_a_layer_in_grad_mode(compat_modules, name):
    compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")
    assert not take_step(name, requires_grad=True, wrapped_by=compiled).requires_grad
