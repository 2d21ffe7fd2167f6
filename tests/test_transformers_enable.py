"""What the integration of transformers changes, and how it refuses what it does not expect."""

import doctest
import importlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import selective_scan.integrations.transformers as integration

pytest.importorskip("transformers", reason="needs the package transformers")

import transformers

from test_transformers import (
    KINDS,
    assert_near,
    draw,
    make,
    nothing_left,  # noqa: F401, a fixture of every test
    solve,
)


def bindings():
    """Returns everything that enable may change."""
    found = {}
    for model, mixer in integration._MIXERS.items():
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        names = (*integration._REPLACEMENTS, "mamba_inner_fn")
        found |= {(model, name): getattr(module, name, None) for name in names}
        found[model, "forward"] = getattr(module, mixer).forward
    return found


def changed(before):
    return {
        model for (model, name), value in bindings().items() if value is not before[model, name]
    }


def test_docstring_examples():
    result = doctest.testmod(integration)
    assert result.attempted > 0
    assert result.failed == 0


def test_handles():
    before = bindings()
    with integration.enable(["jamba"]) as outer:
        assert (outer.models, changed(before)) == (("jamba",), {"jamba"})
        inner = integration.enable()
        assert set(inner.models) == set(KINDS) - {"jamba"}
        assert integration.enable().models == ()
        assert changed(before) == set(KINDS)
        inner.disable()
        inner.disable()
        assert changed(before) == {"jamba"}
    assert not changed(before)


def test_a_handle_leaves_what_another_call_enabled():
    before = bindings()
    first = integration.enable(["jamba"])
    first.disable()
    with integration.enable(["jamba"]):
        first.disable()
        assert changed(before) == {"jamba"}
    assert not changed(before)


def test_threads_may_enable_and_disable(monkeypatch):
    before, find = bindings(), integration._changes

    def find_slowly(model, fix_continuation):
        changes = find(model, fix_continuation)
        time.sleep(0.1)
        return changes

    monkeypatch.setattr(integration, "_changes", find_slowly)
    with ThreadPoolExecutor(2) as threads:
        handles = list(threads.map(integration.enable, [["jamba"]] * 2))
    assert sorted(handle.models for handle in handles) == [(), ("jamba",)]
    for handle in handles:
        handle.disable()
    assert not changed(before)


def remove(monkeypatch, module):
    monkeypatch.delattr(module, "causal_conv1d_update")


def reorder(monkeypatch, module):
    monkeypatch.setattr(module, "mamba_selective_scan", lambda dt, hidden_states, A: None)


def demand(monkeypatch, module):
    class Mixer:
        def forward(self, hidden_states, cache_params, attention_mask, states):
            pass

    monkeypatch.setattr(module, "ZambaMambaMixer", Mixer)


def uninstall(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module.__name__, None)


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (remove, f"causal_conv1d_update of transformers {transformers.__version__} is missing"),
        (
            reorder,
            "mamba_selective_scan .* takes .dt, hidden_states, A., expected .hidden_states, dt",
        ),
        (
            demand,
            "Mixer.forward .* takes .self, hidden_states, cache_params, attention_mask, states",
        ),
        (uninstall, "needs transformers.models.zamba.modeling_zamba; tried with transformers 5"),
    ],
)
def test_what_is_not_as_expected_changes_nothing(monkeypatch, break_it, expected):
    break_it(monkeypatch, importlib.import_module("transformers.models.zamba.modeling_zamba"))
    before = bindings() if break_it is not uninstall else None
    with pytest.raises(ImportError, match=expected):
        integration.enable()
    assert before is None or not changed(before)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"models must be one of mamba, .*got 'mamba2'"):
        integration.enable(["mamba", "mamba2"])
    with pytest.raises(TypeError, match="models must be names"):
        integration.enable("mamba")
    with pytest.raises(ValueError, match="fix_continuation must be a bool, got 1"):
        integration.enable(fix_continuation=1)
    with integration.enable(["zamba"]), pytest.raises(ValueError, match="as zamba was enabled"):
        integration.enable(fix_continuation=True)


def test_kernel_mapping(device):
    kernels = pytest.importorskip("kernels", reason="needs the package kernels")
    model, inputs = make("mamba", device), draw(device)
    expected = solve(model, inputs)
    with kernels.use_kernel_mapping(integration.kernel_mapping(), inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device=device)
        with torch.profiler.profile() as profile:
            assert_near(solve(model, inputs), expected)
    assert "selective_scan::selective_scan_fwd" in {event.name for event in profile.events()}
