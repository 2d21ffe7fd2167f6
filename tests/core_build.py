"""Compiles core_bindings.cpp, which exposes csrc/core to Python, and imports it."""

import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from pybind11.setup_helpers import Pybind11Extension
from setuptools import Distribution
from setuptools.command.build_ext import build_ext

TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc"
NAME = "core_bindings"


def load(cache: Path) -> ModuleType:
    """Builds in a folder of its own and renames, so that concurrent test processes do no harm."""
    sources = [TESTS / f"{NAME}.cpp", Path(__file__), *sorted((CSRC / "core").glob("*.h"))]
    digest = hashlib.sha256(sys.version.encode())
    for source in sources:
        digest.update(source.read_bytes())
    library = cache / f"{NAME}-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            os.replace(_compile(Path(folder)), library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(folder: Path) -> Path:
    extension = Pybind11Extension(
        NAME, [str(TESTS / f"{NAME}.cpp")], include_dirs=[str(CSRC)], cxx_std=20
    )
    command = build_ext(Distribution({"name": NAME, "ext_modules": [extension]}))
    command.build_lib = command.build_temp = str(folder)
    command.ensure_finalized()
    command.run()
    return Path(command.get_ext_fullpath(NAME))
