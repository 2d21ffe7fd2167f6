"""Which library serves a call, and what happens if one is missing."""

import ctypes
import doctest
import importlib
import json
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import programs
import selective_scan
from accuracy import assert_same_bits
from problem import Case, inputs_on
from selective_scan import (
    Backend,
    Backends,
    _library,
    allow_fallback,
    backends,
    selective_scan_fn,
    selective_scan_ref,
)

SMALL = Case(dim=4, seqlen=9, dstate=3, delta_softplus=False)


def run_beside(package: Path, code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs `code` in a process that imports the package from the folder `package`."""
    script = package / "program.py"
    script.write_text(code)
    return programs.run(script, environment=environment)


@pytest.fixture(scope="module")
def sources_only(tmp_path_factory) -> Path:
    """A folder with the package as it is before anything is built."""
    folder = tmp_path_factory.mktemp("sources")
    package = Path(selective_scan.__file__).parent
    shutil.copytree(
        package,
        folder / "selective_scan",
        ignore=shutil.ignore_patterns("*.so", "*.pyd", "*.dylib", "__pycache__"),
    )
    return folder


@pytest.fixture
def without_kernels(monkeypatch):
    """Puts this process in the state in which no library has been built."""
    monkeypatch.setattr(_library, "devices", set())
    failures = dict.fromkeys(("cpu", "cuda"), _library._Failure("not built"))
    monkeypatch.setattr(_library, "_failures", failures)
    monkeypatch.setattr(_library, "_warned", set())
    yield
    allow_fallback(False)


# --- availability ---------------------------------------------------------------------------------


def test_backends_say_what_is_there():
    status = backends()
    assert isinstance(status, Mapping)
    assert isinstance(status, Backends)
    assert all(isinstance(backend, Backend) for backend in status.values())
    assert list(status) == ["cpu", "cuda", "reference"]
    assert status["cpu"].available
    assert status["cpu"].reason is None
    assert Path(status["cpu"].path).parent == Path(selective_scan.__file__).parent
    assert {"version", "compiler", "capability"} <= set(status["cpu"].build)
    assert status["reference"].available
    assert status["reference"].path is None


def test_an_unavailable_backend_says_why():
    status = backends()["cuda"]
    assert status.available == (status.reason is None)
    if not torch.cuda.is_available():
        assert not status.available
    if torch.version.cuda is None and status.path is not None:
        reason = f"built, but torch {torch.__version__} is a build without CUDA"
        assert status.reason == f"{reason}: another build of torch serves it"


def test_cuda_library_says_what_it_was_built_for(cuda_device):
    build = backends()[cuda_device].build
    assert {"version", "compiler", "cuda", "architectures"} <= set(build)


def test_backends_print_as_a_table():
    lines = str(backends()).splitlines()
    assert [line.split()[0] for line in lines] == ["cpu", "cuda", "reference"]
    assert lines[0].split()[1].startswith("available")
    assert backends()["cpu"].path in lines[0]


def test_a_library_of_another_version_is_not_used(monkeypatch):
    monkeypatch.setattr(_library, "_build_info", lambda name: {"version": "0.0.1"})
    expected = f"was built from version 0.0.1, this is {selective_scan.__version__}"
    assert expected in _library._load("cpu").reason


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (12040, "built for CUDA 13, and the driver is of CUDA 12.4: .* the wheel for CUDA 12"),
        (13000, None),
        (14020, None),
        (0, None),  # no driver: PyTorch's own error is clearer
    ],
)
def test_a_library_of_a_newer_cuda_than_the_driver_is_not_used(monkeypatch, driver, expected):
    monkeypatch.setattr(_library, "_build_info", lambda name: {"cuda": "13.0"})
    ops = SimpleNamespace(cuda_driver_version=lambda: driver)
    monkeypatch.setattr(_library, "ops", ops)
    reason = _library._unfit_driver()
    assert reason is None if expected is None else re.match(expected, reason)


def test_module_prints_a_report(capsys):
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("selective_scan", run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0, lines
    assert lines[0] == f"selective_scan {selective_scan.__version__}, torch {torch.__version__}"
    assert [line.split()[0] for line in lines[1:4]] == ["cpu", "cuda", "reference"]
    checks = {line.split()[2].rstrip(":"): line for line in lines[4:]}
    assert set(checks) == {name for name, backend in backends().items() if backend.available}
    assert all(": ok, relative error against float64" in line for line in checks.values())


def test_a_failing_self_check_is_reported(monkeypatch, capsys):
    from selective_scan import __main__ as report

    def wrong(*tensors, **options):
        return 1.001 * selective_scan_fn(*tensors, **options)

    monkeypatch.setattr(report, "selective_scan_fn", wrong)
    assert report.main() == 1
    assert "self-check of cpu: WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    "module",
    [
        *("functional", "_library", "s6", "diagonal_scan", "adaptive_unitary", "cache"),
        *("mamba_mixer", "exponential_trapezoid", "vision"),
        *("compat.directions", "compat.generation", "compat.hf", "compat.layer_norm", "compat.mlp"),
        *("distributed.selective_scan", "distributed.causal_conv1d", "distributed.parallel"),
    ],
)
def test_docstring_examples(module):
    module = importlib.import_module(f"selective_scan.{module}")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# --- the choice -----------------------------------------------------------------------------------


def test_backend_named_after_the_device_is_the_automatic_choice(device):
    inputs = inputs_on(SMALL, device)
    expected = selective_scan_fn(**inputs)
    assert torch.equal(selective_scan_fn(**inputs, backend=device), expected)


def test_reference_backend_is_the_reference(device):
    inputs = inputs_on(SMALL, device)
    actual = selective_scan_fn(**inputs, return_last_state=True, backend="reference")
    expected = selective_scan_ref(**inputs, return_last_state=True)
    assert_same_bits(actual, expected)


def test_device_without_kernels(monkeypatch):
    monkeypatch.setattr(_library, "devices", {"cpu"})
    inputs = {name: tensor.detach().to("meta") for name, tensor in inputs_on(SMALL, "cpu").items()}
    with pytest.raises(NotImplementedError, match=r"there are no kernels for tensors on meta; "):
        selective_scan_fn(**inputs)
    assert selective_scan_fn(**inputs, backend="reference").shape == inputs["u"].shape


# --- a missing library ----------------------------------------------------------------------------

CALL = """
import json, torch, selective_scan
u, A, B = torch.ones(1, 2, 3), -torch.ones(2, 2), torch.ones(1, 2, 3)
try:
    error, message = None, str(selective_scan.selective_scan_fn(u, u, A, B, B).shape)
except Exception as caught:
    error, message = type(caught).__name__, str(caught)
reference = selective_scan.selective_scan_fn(u, u, A, B, B, backend="reference")
status = {name: [b.available, b.reason] for name, b in selective_scan.backends().items()}
print(json.dumps([error, message, list(reference.shape), status]))
"""


@pytest.mark.slow
def test_library_that_was_not_built(sources_only):
    result = run_beside(sources_only, CALL)
    error, message, reference, status = json.loads(result.stdout)
    assert error == "ImportError"
    assert message.startswith("selective_scan: the CPU library, _cpu.so, is missing: not built")
    assert "pip install . --no-build-isolation" in message
    assert reference == [1, 2, 3]
    assert status["cpu"][0] is False
    assert status["cpu"][1].startswith("not built")
    assert status["reference"] == [True, None]


@pytest.mark.parametrize("has_built", [False, True])
def test_a_source_folder_that_hides_the_installation(sources_only, has_built, tmp_path):
    sources = shutil.copytree(sources_only, tmp_path / "sources")
    installed = tmp_path / "selective_scan"
    installed.mkdir()
    (installed / "__init__.py").touch()
    files = [tmp_path / "torch_selective_scan-1.dist-info" / "METADATA"]
    if has_built:  # which pip leaves
        files.append(sources / "torch_selective_scan.egg-info" / "PKG-INFO")
    for file in files:
        file.parent.mkdir()
        file.write_text("Metadata-Version: 2.1\nName: torch-selective-scan\nVersion: 1\n")
    found = run_beside(sources, CALL, PYTHONPATH=str(tmp_path))
    message = json.loads(found.stdout)[1]
    assert f"this source folder hides the installation in {installed}" in message


def test_report_of_an_installation_without_kernels(sources_only):
    result = run_beside(sources_only, "from selective_scan.__main__ import main; exit(main())")
    assert result.returncode == 1
    assert "no kernels are installed" in result.stdout


def test_library_that_does_not_load(sources_only, tmp_path):
    shutil.copytree(sources_only, tmp_path, dirs_exist_ok=True)
    library = tmp_path / "selective_scan" / "_cpu.so"
    library.write_text("no library")
    error, message, _, status = json.loads(run_beside(tmp_path, CALL).stdout)
    assert error == "ImportError"
    with pytest.raises(
        OSError, match="_cpu"
    ) as loaders_own:  # as in "/path/_cpu.so: file too short"
        ctypes.CDLL(str(library))
    assert f"failed to load {library}: {loaders_own.value}" in message
    assert status["cpu"][1].startswith(f"failed to load {library}: ")
    assert message.startswith("selective_scan: the CPU library, _cpu.so, cannot be used: failed")
    assert "pip install" in message


@pytest.mark.slow
def test_a_wrong_instruction_set_is_no_reason_to_build():
    code = f"import os; os.environ['SELECTIVE_SCAN_CPU_CAPABILITY'] = 'sse'\n{CALL}"
    error, message, _, status = json.loads(programs.run_python("-c", code).stdout)
    assert error == "ImportError"
    wrong = "SELECTIVE_SCAN_CPU_CAPABILITY must be one of default"
    assert message.startswith(f"selective_scan: the CPU library, _cpu.so, cannot be used: {wrong}")
    assert "on this processor, got 'sse'. There is also the slow PyTorch reference" in message
    assert "pip install" not in message
    assert status["cpu"][1].startswith(wrong)
    if not status["cuda"][1].startswith("not built"):
        assert "pip install" not in status["cuda"][1]


def test_what_the_cuda_library_lacks_is_no_reason_to_build(monkeypatch, tmp_path):
    (tmp_path / "_cuda.so").touch()
    monkeypatch.setattr(_library, "_FOLDER", tmp_path)
    monkeypatch.setattr(_library, "devices", set())
    monkeypatch.setattr(_library, "_failures", {"cpu": _library._Failure("too new", False)})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    wanted = "built, but it needs the CPU library: too new"
    assert _library._load("cuda") == (wanted, False)
    monkeypatch.setattr(torch.version, "cuda", None)
    reason, needs_build = _library._load("cuda")
    assert "is a build without CUDA" in reason
    assert not needs_build
    _library._failures["cuda"] = _library._Failure(reason, needs_build)
    with pytest.raises(
        ImportError, match=r"the CUDA library, _cuda\.so, cannot be used: built"
    ) as it:
        _library.handle_missing_kernels("cuda", "auto")
    assert "pip install" not in str(it.value)


def test_a_missing_cuda_library_is_in_wheels_too(without_kernels):
    wanted = r"install the wheel \+cu12 or \+cu13 .*, or run in the source folder: USE_CUDA=1 pip"
    with pytest.raises(ImportError, match=wanted):
        _library.handle_missing_kernels("cuda", "auto")


def test_fallback_by_environment(sources_only):
    result = run_beside(sources_only, CALL, SELECTIVE_SCAN_ALLOW_FALLBACK="1")
    error, message, _, _ = json.loads(result.stdout)
    assert (error, message) == (None, "torch.Size([1, 2, 3])")
    assert "no kernels for tensors on cpu: not built" in result.stderr

    result = run_beside(sources_only, CALL, SELECTIVE_SCAN_ALLOW_FALLBACK="0")
    assert json.loads(result.stdout)[0] == "ImportError"


@pytest.mark.parametrize(
    ("value", "is_on", "told"),
    [(" ON ", True, []), ("yes", True, []), ("off", False, []), ("2", False, ["2"])],
)
def test_values_of_a_switch(value, is_on, told, monkeypatch, caplog):
    monkeypatch.setenv("SELECTIVE_SCAN_ALLOW_FALLBACK", value)
    assert _library._environment_switch("SELECTIVE_SCAN_ALLOW_FALLBACK") is is_on
    assert (
        re.findall("ALLOW_FALLBACK must be 0 or 1, got '(.*)'; it is ignored", caplog.text) == told
    )


def test_fallback_warns_once(without_kernels, caplog):
    inputs = inputs_on(SMALL, "cpu")
    with pytest.raises(ImportError, match="the CPU library"):
        selective_scan_fn(**inputs)
    allow_fallback(True)
    expected = selective_scan_ref(**inputs)
    with caplog.at_level(logging.WARNING, logger="selective_scan"):
        for _ in range(3):
            assert torch.equal(selective_scan_fn(**inputs), expected)
    messages = [r.getMessage() for r in caplog.records if r.name == "selective_scan"]
    assert len(messages) == 1
    assert messages[0].startswith("no kernels for tensors on cpu: not built; the PyTorch reference")

    with pytest.raises(ImportError, match="the CPU library"):  # requested by name
        selective_scan_fn(**inputs, backend="cpu")
    allow_fallback(False)
    with pytest.raises(ImportError, match="the CPU library"):
        selective_scan_fn(**inputs)


def test_fallback_on_another_device(without_kernels, caplog):
    inputs = {name: tensor.detach().to("meta") for name, tensor in inputs_on(SMALL, "cpu").items()}
    with pytest.raises(ImportError, match="the CPU library"):
        selective_scan_fn(**inputs)
    allow_fallback(True)
    with caplog.at_level(logging.WARNING, logger="selective_scan"):
        assert selective_scan_fn(**inputs).shape == inputs["u"].shape
    assert "no kernels for tensors on meta: not a supported device" in caplog.text


@pytest.mark.slow
def test_fallback_under_torch_compile_warns_too(without_kernels, caplog):
    inputs = inputs_on(SMALL, "cpu")
    allow_fallback()
    compiled = torch.compile(selective_scan_fn, fullgraph=True, backend="eager")
    with caplog.at_level(logging.WARNING, logger="selective_scan"):
        torch.testing.assert_close(compiled(**inputs), selective_scan_ref(**inputs))
    assert len([r for r in caplog.records if r.name == "selective_scan"]) == 1


def test_fallback_is_not_used_where_there_are_kernels(device, caplog):
    inputs = inputs_on(SMALL, device)
    expected = selective_scan_fn(**inputs)
    allow_fallback(True)
    try:
        assert torch.equal(selective_scan_fn(**inputs), expected)
    finally:
        allow_fallback(False)
    assert not caplog.records


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_fallback_is_switched_by_a_bool(value):
    with pytest.raises(TypeError, match=r"^selective_scan: allowed must be a bool, got "):
        allow_fallback(value)


# --- an import ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_import_takes_nothing_along():
    """Importing the package imports no other package than torch, and no exact numbers. For example,
    torch.utils.flop_counter would import Triton, which takes longer than everything else."""
    code = """
import json, sys, torch
before = set(sys.modules)
import selective_scan, selective_scan.compat, selective_scan.onnx
selective_scan.allow_fallback()
assert "torch._dynamo" not in set(sys.modules) - before
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    result = programs.run_python("-c", code)
    assert result.returncode == 0, result.stderr
    packages = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert packages - sys.stdlib_module_names == {"selective_scan"}
    assert packages.isdisjoint({"decimal", "fractions"})


@pytest.mark.slow
def test_modules_that_are_imported_when_they_are_used():
    code = """
import sys
import selective_scan
modules = {"compat", "distributed", "integrations", "onnx", "vision"}
assert not {f"selective_scan.{name}" for name in modules} & set(sys.modules)
for name in modules:
    assert getattr(selective_scan, name).__name__ == f"selective_scan.{name}"
assert selective_scan.integrations.transformers.enable
try:
    selective_scan.compact
except AttributeError as error:
    assert str(error) == "module 'selective_scan' has no attribute 'compact'"
else:
    raise AssertionError("there is no such module")
"""
    result = programs.run_python("-c", code)
    assert result.returncode == 0, result.stderr


# The orders in which a process may import the package and the counter.
ORDERS = {
    "before": "import torch.utils.flop_counter, selective_scan",
    "after": "import selective_scan, torch.utils.flop_counter",
    "by torch": "import selective_scan; import torch._inductor.fx_utils",
    "looked for": "import selective_scan; from importlib.util import find_spec as f; f(NAME)",
}


@pytest.mark.slow
def test_a_counter_that_refuses_the_formulas_is_imported_all_the_same():
    code = """
from selective_scan import _flops
_flops._pending.append((len, ["not an op"]))
import torch.utils.flop_counter
"""
    result = programs.run_python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("flop_counter does not count the operations of this package") == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="copies of a process are POSIX's")
def test_operations_are_counted_whoever_imports_the_counter():
    """FLOPs are counted after imports in any order. Each order runs in a fork of a process that has
    imported torch, but no counter."""
    count = """
from torch.utils.flop_counter import FlopCounterMode
assert not any(type(it).__module__.startswith("selective_scan") for it in sys.meta_path)
with FlopCounterMode(display=False) as counter:
    selective_scan.diagonal_scan_fn(torch.rand(3, 7), torch.rand(3, 7))
print(name, counter.get_total_flops(), sep=": ")
"""
    code = f"""
import multiprocessing, sys, torch
NAME = "torch.utils.flop_counter"
assert NAME not in sys.modules
for name, imports in {ORDERS!r}.items():
    names = globals() | {{"name": name}}
    context, arguments = multiprocessing.get_context("fork"), (imports + {count!r}, names)
    process = context.Process(target=exec, args=arguments)
    process.start()
    process.join()
"""
    result = programs.run_python("-c", code)
    assert result.stdout.splitlines() == [f"{name}: {2 * 3 * 7}" for name in ORDERS], result.stderr
