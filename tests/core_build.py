"""Compiles the pybind11 modules that expose parts of csrc to the tests, and imports them."""

import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from filelock import FileLock
from pybind11.setup_helpers import Pybind11Extension
from setuptools import Distribution
from setuptools.command.build_ext import build_ext

TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc"


def load(
    cache: Path,
    name: str = "core_bindings",
    headers: Sequence[str] = ("core",),
    flags: Sequence[str] = (),
    sources: Sequence[str] = (),
) -> ModuleType:
    """Returns the module of `name`.cpp, compiled together with these `sources` of csrc. It is built
    again when a header in these folders of csrc changes.

    The first of several test processes builds it; the others wait.
    """
    compiled = [TESTS / f"{name}.cpp", *(CSRC / source for source in sources)]
    read = [*compiled, Path(__file__)]
    for folder in headers:
        read += sorted((CSRC / folder).rglob("*.h"))
    digest = hashlib.sha256(" ".join([sys.version, *flags]).encode())
    for path in read:
        digest.update(path.read_bytes())
    library = cache / f"{name}-{digest.hexdigest()[:16]}.so"
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                os.replace(_compile(name, compiled, flags, Path(folder)), library)
    # A unique name, since pybind11 returns the existing module for a name it has already seen.
    spec = importlib.util.spec_from_file_location(f"{library.stem}.{name}", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(name: str, sources: Sequence[Path], flags: Sequence[str], folder: Path) -> Path:
    extension = Pybind11Extension(
        name,
        [str(source) for source in sources],
        include_dirs=[str(CSRC)],
        cxx_std=20,
        # Python's own flags are -O3 -g, which take half as long again.
        extra_compile_args=[*([] if sys.platform == "win32" else ["-O1", "-g0"]), *flags],
    )
    command = build_ext(Distribution({"name": name, "ext_modules": [extension]}))
    command.build_lib = command.build_temp = str(folder)
    command.ensure_finalized()
    command.run()
    return Path(command.get_ext_fullpath(name))
