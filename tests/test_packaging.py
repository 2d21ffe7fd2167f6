"""setup.py: the sources that it compiles, and the properties of the libraries and the wheel."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools

from selective_scan._discretization import METHODS

ROOT = Path(__file__).resolve().parent.parent
SETUP = ROOT / "setup.py"


def test_every_source_is_compiled(setup):
    cpu, cuda = setup.cpu_sources(), setup.cuda_sources()
    assert {path for path in cpu if path.endswith("_cuda.cpp") or "/cuda/" in path} == set()
    assert {path for path in cuda if path.endswith("_cpu.cpp") or "/cpu/" in path} == set()
    compiled = {path for suffix in ("cpp", "cu") for path in ROOT.glob(f"csrc/**/*.{suffix}")}
    assert {ROOT / path for path in cpu + cuda} == compiled


def test_methods_are_those_of_the_package(setup):
    assert setup.instantiations.method_names() == list(METHODS)


def test_instantiations_are_written_where_they_changed(setup, tmp_path):
    write = setup.instantiations.write
    folder = tmp_path / "instantiations"
    paths = write(folder, METHODS)
    assert sorted(folder.iterdir()) == paths
    sources = setup.instantiations.SOURCES
    assert len(paths) == len({source.file(name) for source in sources for name in METHODS})
    changed, *others = write(folder, ["foh", "zoh"])
    assert sorted(folder.iterdir()) == [changed, *others]
    assert {path.stem.rpartition("_")[2] for path in {*paths} - {changed, *others}} == {
        "bilinear",
        "series",
    }
    changed.write_text("another text")
    for path in others:
        os.utime(path, ns=(0, 0))
    assert write(folder, ["zoh", "foh"]) == [changed, *others]
    assert changed.read_text() != "another text"
    assert {path.stat().st_mtime_ns for path in others} == {0}


@pytest.mark.slow
def test_tables_of_arguments_are_written_where_they_changed(setup, tmp_path):
    header = setup.argument_tables.write(tmp_path)
    assert all(name in header.read_text() for name in setup.argument_tables.TABLES)
    before = header.stat().st_mtime_ns
    assert setup.argument_tables.write(tmp_path).stat().st_mtime_ns == before
    header.write_text("")
    assert "kSelectiveScan" in setup.argument_tables.write(tmp_path).read_text()


def test_the_methods_that_share_kernels_are_those_of_the_launchers(setup):
    header = (ROOT / "csrc/core/discretization/method.h").read_text(encoding="utf-8")
    function = header[header.index("constexpr Method kernel_method") :]
    names = re.findall(r"method == Method::k(\w+)", function)
    assert sorted(map(str.lower, names)) == sorted(setup.instantiations.SERIES)


def test_instantiations_include_what_there_is(setup, tmp_path):
    for path in setup.instantiations.write(tmp_path, ["zoh"]):
        included = re.findall(r'#include "(.+)"', path.read_text())
        assert included
        assert [header for header in included if not (ROOT / "csrc" / header).exists()] == []
        assert "METHOD" not in path.read_text()


@pytest.mark.parametrize(
    ("text", "expected", "flags"),
    [
        ("", METHODS, []),
        ("rk4,foh", ("foh", "rk4"), ["34u"]),
        (" ZOH ; foh ", ("zoh", "foh"), ["3u"]),
        (",".join(METHODS), METHODS, []),
    ],
)
def test_chosen_methods(setup, monkeypatch, text, expected, flags):
    monkeypatch.setenv("SELECTIVE_SCAN_METHODS", text)
    assert tuple(setup.chosen_methods()) == expected
    found = setup.method_flags(setup.chosen_methods())
    assert [flag.rpartition("=")[2] for flag in found] == flags


def test_chosen_methods_refuse_an_unknown_one(setup, monkeypatch):
    monkeypatch.setenv("SELECTIVE_SCAN_METHODS", "zoh,euler")
    with pytest.raises(SystemExit, match=r"must be some of zoh, foh, .*, got 'zoh,euler'"):
        setup.chosen_methods()


def test_sources_with_one_object_file_are_refused(setup, monkeypatch, tmp_path):
    for name in ("scan.cpp", "scan.cu"):
        (tmp_path / name).touch()
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="share the object file name scan"):
        setup.sources("*.cpp", "*.cu")


def test_wheel_serves_every_python(setup):
    distribution = setuptools.Distribution(
        {"name": "x", "version": "1", "ext_modules": [setuptools.Extension("x", [])]}
    )
    command = setup.make_bdist_wheel()(distribution)
    command.ensure_finalized()
    python, abi, platform = command.get_tag()
    assert (python, abi) == ("py3", "none")
    assert platform != "any"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        ("sys.modules['torch'] = None", "building needs PyTorch 2.10 or later in this environment"),
        ("import torch; torch.__version__ = '2.9.1'", "building needs PyTorch .* got 2.9.1"),
        ("import setuptools; setuptools.__version__ = '65.5'", "building needs setuptools 77"),
        ("import os; os.environ['CXX'] = 'no-c++ -O2'", "building needs a C.* no no-c.. on PATH"),
    ],
    ids=["no torch", "old torch", "old setuptools", "no compiler"],
)
def test_what_is_missing_is_said_in_one_sentence(prepare, expected):
    code = (
        f"import runpy, sys; {prepare}; sys.argv[1:] = ['build_ext']; "
        f"runpy.run_path({str(SETUP)!r}, run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    line = result.stderr.splitlines()[-1]
    assert re.match(f"selective_scan: {expected}", line)
    assert "install" in line


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("script", sorted((ROOT / "tools").glob("*.sh")), ids=lambda it: it.name)
def test_a_script_without_arguments_prints_its_usage(script):
    result = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith(f"{script.name} ")
    assert "unbound variable" not in result.stderr


@pytest.mark.parametrize("compiler", ["", "cl", r"C:\mingw64\bin\g++.exe"])
def test_msvc_is_refused(setup, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(SystemExit, match=r"Windows needs clang-cl, .* got '"):
        setup.check_compiler(windows=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ELF files are Linux's")
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
@pytest.mark.parametrize("name", ["_cpu", "_cuda"])
def test_what_the_libraries_need(name):
    """libtorch.so must be needed, or its symbols are not found at load time. Anything of Python or
    of PyTorch's C++ ABI would tie the library to one version."""
    import selective_scan

    library = Path(selective_scan.__file__).with_name(f"{name}.so")
    if name == "_cuda" and not library.exists():
        pytest.skip("the CUDA library is not built")
    command = ["readelf", "--dynamic", "--dyn-syms", "--wide", str(library)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", output))
    assert "libtorch.so" in needed
    foreign = ("libpython", "libtorch_python", "libtorch_cuda", "libc10", "libcudart")
    assert not [entry for entry in needed if entry.startswith(foreign)]
    missing = re.findall(r"\bUND (\S+)", output)
    assert not [symbol for symbol in missing if "14selective_scan" in symbol]
