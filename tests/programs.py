"""Runs programs for tests, each in its own process.

The processes are forked from one that has imported the packages whose import takes seconds. It has
not imported selective_scan, so that a program imports the one under test.
"""

import importlib
import importlib.util
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType

# The longest that a program may run. It is generous because all tests of a busy machine may run at
# the same time.
LIMIT_SECONDS = 300
PRELOADED = ("matplotlib.pyplot", "torch._dynamo", "torch.distributed.fsdp")
PRELOADED += ("torch.testing._internal.optests",)


def copies() -> ForkServerContext:
    """Returns the context whose processes have already imported PRELOADED."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def run(
    script: Path, *arguments: object, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a script as `python script arguments` would."""
    command = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = copies().Process(
            target=_run, args=(command, os.environ | (environment or {}), files)
        )
        process.start()
        process.join(LIMIT_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        status, (out, err) = process.exitcode, (file.read_text() for file in files)
    return subprocess.CompletedProcess([sys.executable, *command], status, out, err)


def run_python(
    *arguments: object,
    paths: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    limit: float | None = LIMIT_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Runs `python arguments` in a process that has imported nothing yet. It finds the package
    under test, and modules in the folders `paths`."""
    package = Path(importlib.import_module("selective_scan").__file__).resolve().parents[1]
    folders = {"PYTHONPATH": os.pathsep.join(map(str, (package, *paths)))}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=package,  # -c searches there first
        env=os.environ | folders | (environment or {}),
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def load(path: Path) -> ModuleType:
    """Imports a program as a module, which does not run it."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up the types of their fields
    spec.loader.exec_module(module)
    return module


def _run(command: list[str], environment: dict[str, str], files: list[Path]) -> None:
    for file, stream in zip(files, (sys.stdout, sys.stderr), strict=True):
        with file.open("w") as opened:
            os.dup2(opened.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(command[0]).parent), *filter(None, folders)]
    runpy.run_path(command[0], run_name="__main__")
