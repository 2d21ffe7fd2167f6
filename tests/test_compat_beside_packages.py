"""selective_scan.compat beside installed packages that stay in place, such as models' forks."""

import importlib
import importlib.util
import logging
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from selective_scan import compat, selective_scan_fn
from selective_scan.compat import _modules

FOREIGN = (*_modules.PACKAGES, *_modules.BINDINGS)
# Modules that contain Triton kernels, on a machine without Triton.
WITHOUT_TRITON = {
    f"ops/triton/{name}.py": 'raise ImportError("no triton")' for name in ("layernorm", "other")
}
# How mamba_ssm imports causal_conv1d if it is installed: versions 1 to 2.2.4, and later ones.
WAYS = {
    "binding": """
        try:
            from causal_conv1d import causal_conv1d_fn
            import causal_conv1d_cuda
            fwd = causal_conv1d_cuda.causal_conv1d_fwd
        except ImportError:
            fwd = None
        """,
    "cpp_functions": """
        try:
            from causal_conv1d import causal_conv1d_fn
            from causal_conv1d.cpp_functions import causal_conv1d_fwd_function as fwd
        except ImportError:
            fwd = None
        """,
}
MIXER = """
    import torch.nn.functional as F
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        causal_conv1d_fn = None
    from mamba_ssm.ops.interface import fwd

    def convolve(x, weight):
        if causal_conv1d_fn is None:
            out = F.conv1d(x, weight[:, None], padding=weight.shape[1] - 1, groups=weight.shape[0])
            return F.silu(out[..., : x.shape[2]])
        assert fwd is not None, "causal_conv1d_cuda is not available"
        return fwd(x, weight, None, None, None, None, True)
    """


def foreign_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in FOREIGN]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a package mamba_ssm onto the path, and removes all traces of it after the test."""
    for name in foreign_modules():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)

    def write_files(files: dict[str, str]) -> Path:
        for path, text in {"__init__.py": "", **files}.items():
            file = tmp_path / "mamba_ssm" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return tmp_path / "mamba_ssm"

    yield write_files
    compat.uninstall()
    assert not any(isinstance(finder, compat._Importer) for finder in sys.meta_path)
    for name in foreign_modules():
        del sys.modules[name]


# --- whole packages -------------------------------------------------------------------------------

REAL = {"__init__.py": "from . import real", "real.py": "Mamba = 'real'"}


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_real_package_is_left_alone(write, is_imported, caplog):
    write(REAL)
    if is_imported:
        importlib.import_module("mamba_ssm")
    before = foreign_modules()
    with caplog.at_level(logging.WARNING, "selective_scan"):
        handle = compat.install()
    assert "mamba_ssm" not in handle.packages
    assert [name for name in foreign_modules() if name.startswith("mamba_ssm")] == before
    assert "mamba_ssm is installed and is left as it is" in caplog.text
    assert importlib.import_module("mamba_ssm").real.Mamba == "real"


def test_force_stands_for_a_real_package_and_gives_it_back(write):
    folder = write(REAL)
    real = importlib.import_module("mamba_ssm")
    with compat.install(force=True):
        ours = importlib.import_module("mamba_ssm")
        assert ours.selective_scan_fn is selective_scan_fn
        assert "mamba_ssm.real" not in sys.modules
        assert importlib.util.find_spec("mamba_ssm.real") is None
    assert sys.modules["mamba_ssm"] is real
    assert sys.modules["mamba_ssm.real"].Mamba == "real"
    assert importlib.util.find_spec("mamba_ssm").origin == str(folder / "__init__.py")


def test_a_module_without_spec_counts_as_installed(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm", type(sys)("mamba_ssm"))
    assert "mamba_ssm" not in compat.install().packages


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in _modules.PACKAGES),
    reason="needs a machine without these packages",
)
def test_all_packages_are_ours_where_none_is_installed():
    with compat.install() as handle:
        assert handle.packages == _modules.PACKAGES


# --- a mamba_ssm that works without causal_conv1d -------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("causal_conv1d") is not None,
    reason="needs a machine without causal_conv1d",
)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_what_works_without_causal_conv1d_works_after_install(write, way, raw, caplog):
    write({"ops/__init__.py": "", "ops/interface.py": WAYS[way], "mixer.py": MIXER})
    with caplog.at_level(logging.WARNING, "selective_scan"):
        handle = compat.install(raw=raw)
    assert handle.packages == (("causal_conv1d", *_modules.BINDINGS) if raw else ())
    assert ("causal_conv1d stays absent, since the mamba_ssm" in caplog.text) != raw
    mixer = importlib.import_module("mamba_ssm.mixer")
    assert (mixer.fwd is not None) == raw
    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
    padded = torch.nn.functional.pad(x.double(), (3, 0)).unfold(2, 4, 1)
    expected = torch.nn.functional.silu((padded * weight.double()[:, None]).sum(-1))
    torch.testing.assert_close(mixer.convolve(x, weight).double(), expected, rtol=1e-5, atol=1e-5)


def test_causal_conv1d_alone_beside_a_real_mamba_ssm(write):
    write({})
    assert compat.install(modules=["causal_conv1d"]).packages == ("causal_conv1d",)
    assert importlib.import_module("mamba_ssm").__file__
    assert callable(
        importlib.import_module("causal_conv1d.cpp_functions").causal_conv1d_fwd_function
    )


# --- single modules -------------------------------------------------------------------------------


def test_a_forks_norms_are_ours(write):
    """Only a fork's norms are replaced; the fork's mixer, which imports them by path, stays."""
    write({"mixer.py": "from mamba_ssm.ops.triton.layernorm import RMSNorm", **WITHOUT_TRITON})
    with pytest.raises(ImportError, match="no triton"):
        importlib.import_module("mamba_ssm.mixer")
    names = ("mamba_ssm.ops.triton.layernorm", "mamba_ssm.ops.triton.layer_norm")
    with compat.install(modules=names) as handle:
        assert handle.packages == names
        mixer = importlib.import_module("mamba_ssm.mixer")
        assert Path(mixer.__file__).name == "mixer.py"
        assert mixer.RMSNorm is importlib.import_module(names[1]).RMSNorm
        with pytest.raises(ImportError, match="no triton"):
            importlib.import_module("mamba_ssm.ops.triton.other")
        parent = importlib.import_module("mamba_ssm.ops.triton")
        assert parent.layernorm is sys.modules[names[0]]
        assert compat.install(modules=names).packages == ()
    assert not hasattr(parent, "layernorm")
    with pytest.raises(ImportError, match="no triton"):
        importlib.import_module(names[0])
    with pytest.raises(ModuleNotFoundError, match=names[1]):
        importlib.import_module(names[1])


def test_a_real_package_is_imported_on_demand(write):
    name = "mamba_ssm.ops.triton.layernorm"
    write({"ops/triton/layernorm.py": "RMSNorm = 'real'"})
    with compat.install(modules=[name]):
        assert not foreign_modules()
        parent = importlib.import_module("mamba_ssm.ops.triton")
    assert not hasattr(parent, "layernorm")
    assert importlib.import_module(name).RMSNorm == "real"


@pytest.mark.parametrize("first", ["module", "package"])
def test_a_module_that_was_imported_comes_back(write, first):
    """A module that had been imported comes back on uninstall, also if the whole package was
    installed later, and in either order of uninstalling."""
    name = "mamba_ssm.ops.triton.layernorm"
    write({"ops/triton/layernorm.py": "RMSNorm = 'real'"})
    real, parent = (importlib.import_module(it) for it in (name, "mamba_ssm.ops.triton"))
    module = compat.install(modules=[name])
    ours = sys.modules[name]
    assert ours.RMSNorm is not real.RMSNorm
    assert parent.layernorm is ours
    package = compat.install(force=True)
    assert "mamba_ssm" in package.packages
    assert sys.modules["mamba_ssm.ops.triton"] is not parent
    for handle in (module, package) if first == "module" else (package, module):
        handle.uninstall()
        if handle is module and first == "module":
            assert sys.modules[name].__spec__.origin == compat.__file__
    assert sys.modules[name] is real
    assert sys.modules["mamba_ssm.ops.triton"] is parent
    assert parent.layernorm is real


def test_modules_of_a_package_that_is_ours_are_there_already(compat_modules):
    assert compat.install(modules=["mamba_ssm.ops.triton.layernorm"]).packages == ()


@pytest.mark.parametrize(
    ("modules", "error", "match"),
    [
        ("mamba_ssm", TypeError, "modules must be a sequence of names, got str"),
        (3, TypeError, "modules must be a sequence of names, got int"),
        (["mamba_ssm.other"], ValueError, r"modules must be names of .*, got 'mamba_ssm\.other'"),
        (["mamba_ssm", 3], ValueError, "modules must be names of .*, got 3"),
    ],
)
def test_other_modules_are_refused(modules, error, match):
    before = foreign_modules()
    with pytest.raises(error, match=match):
        compat.install(modules=modules)
    assert foreign_modules() == before
