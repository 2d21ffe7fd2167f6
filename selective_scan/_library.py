"""Finds and loads the compiled libraries, and handles calls for which one is missing.

`_cpu.so` holds the op schemas and the CPU kernels, `_cuda.so` the CUDA kernels. Importing the
package never fails because of them: the reason why a library could not be loaded is kept, for
`backends()` and for the ImportError of a call that needs it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from . import _memory, _pytorch
from ._ops import ops
from ._version import __version__

logger = logging.getLogger("selective_scan")

_FOLDER = Path(__file__).absolute().parent
_SUFFIXES = (".so", ".pyd", ".dylib")
_BUILD_COMMAND = "pip install . --no-build-isolation --no-deps --force-reinstall"
_REMEDIES = {
    "cpu": f"To build it, run in the source folder: {_BUILD_COMMAND}",
    "cuda": "To get it, install the wheel +cu12 or +cu13 of this release, or run in the source "
    f"folder: USE_CUDA=1 {_BUILD_COMMAND}",
}


@dataclass(frozen=True)
class Backend:
    """The state of one backend.

    Attributes:
        available: whether ``backend=`` with this name works here.
        reason: why the backend is unavailable, None if it is available.
        path: the library's path, None if there is no library (always None for the reference).
        build: the versions and targets of the build, as reported by the library itself.

    Example:
        >>> import selective_scan
        >>> print(selective_scan.backends()["reference"])
        available, device any
    """

    available: bool
    reason: str | None = None
    path: str | None = None
    build: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.available:
            return f"unavailable: {self.reason}"
        parts = [f"{key} {value}" for key, value in self.build.items()]
        return ", ".join(["available", *parts, *([self.path] if self.path else [])])


class Backends(dict[str, Backend]):
    """The backends by name. Prints as a table.

    Example:
        >>> import selective_scan
        >>> list(selective_scan.backends())
        ['cpu', 'cuda', 'reference']
    """

    def __repr__(self) -> str:
        width = max(map(len, self))
        return "\n".join(f"{name:<{width}}  {backend}" for name, backend in self.items())


# The device types for which the ops have kernels; "meta" stands for the fake kernels.
devices: set[str] = set()


class _Failure(NamedTuple):
    """The reason why a library cannot be used, and whether building it (again) would help."""

    reason: str
    needs_build: bool = True


# The failures of the backends whose library is not loaded.
_failures: dict[str, _Failure] = {}


def library_path(name: str) -> Path | None:
    """Returns the path of a backend's library, None if it was not built."""
    candidates = (_FOLDER / f"_{name}{suffix}" for suffix in _SUFFIXES)
    return next((path for path in candidates if path.exists()), None)


def _load(name: str) -> _Failure | None:
    """Loads the library of a backend; returns the failure, None if it succeeded."""
    path = library_path(name)
    if path is None and hasattr(ops, f"{name}_build_info"):
        return None  # _ops.py has imported a hub's module of this build, which registered its ops
    if path is None:
        return _Failure(
            f"not built (there is no _{name}{_SUFFIXES[0]} in {_FOLDER}){_shadowed_text()}"
        )
    if name == "cuda" and torch.version.cuda is None:
        reason = f"built, but torch {torch.__version__} is a build without CUDA"
        return _Failure(f"{reason}: another build of torch serves it", needs_build=False)
    if name == "cuda" and "cpu" not in devices:
        reason, needs_build = _failures["cpu"]
        return _Failure(f"built, but it needs the CPU library: {reason}", needs_build)
    try:
        torch.ops.load_library(path)
        version = _build_info(name)["version"]
    except (OSError, RuntimeError, AttributeError) as error:
        _, is_own, refusal = str(error).rpartition("selective_scan: ")
        if is_own:  # the library refused the value of an environment variable
            return _Failure(refusal, needs_build=False)
        loaders_own = error.__cause__ or error  # PyTorch 2.13 names the path alone
        return _Failure(f"failed to load {path}: {loaders_own}")
    if version not in (__version__, "unknown"):
        return _Failure(f"{path} was built from version {version}, this is {__version__}")
    reason = _unfit_driver() if name == "cuda" else None
    return None if reason is None else _Failure(reason, needs_build=False)


def _unfit_driver() -> str | None:
    """Returns a message if the driver's major version of CUDA is older than the library's.

    PyTorch's CUDA version does not matter, since the library contains its own CUDA runtime.
    """
    wanted = _build_info("cuda")["cuda"].partition(".")[0]
    driver = ops.cuda_driver_version()  # such as 12040; 0 without a driver
    if not 0 < driver // 1000 < int(wanted):
        return None
    return (
        f"built for CUDA {wanted}, and the driver is of CUDA {driver // 1000}."
        f"{driver % 1000 // 10}: a newer driver serves it, or the wheel for CUDA {driver // 1000}"
    )


def _shadowed_text() -> str:
    """Returns a remark if the source folder hides an installation, which happens when Python is
    started in that folder."""
    # The first one found may be the egg-info that pip leaves in a source folder.
    for found in metadata.distributions(name="torch-selective-scan"):
        folder = Path(str(found.locate_file(_FOLDER.name))).absolute()
        if folder != _FOLDER and (folder / "__init__.py").exists():
            return f"; this source folder hides the installation in {folder}: run Python elsewhere"
    return ""


def _build_info(name: str) -> dict[str, str]:
    return json.loads(getattr(ops, f"{name}_build_info")())


def _load_libraries() -> None:
    for name in ("cpu", "cuda"):
        failure = _load(name)
        if failure is None:
            devices.add(name)
        else:
            _failures[name] = failure
    if "cpu" in devices:  # it has the schemas, for which each Operator registers fake kernels
        devices.add("meta")
        _memory.register()
    if _environment_switch("SELECTIVE_SCAN_ALLOW_FALLBACK"):
        allow_fallback(True)


def backends() -> Backends:
    """Returns the state of this installation's backends.

    Returns:
        A mapping from ``"cpu"``, ``"cuda"`` and ``"reference"`` to a :class:`Backend`: whether it
        is available, if not why, the library's path, and the targets it was built for.

    Example:
        >>> import selective_scan
        >>> selective_scan.backends()["reference"].available
        True
    """
    result = Backends()
    for name in ("cpu", "cuda"):
        path = library_path(name)
        reason = _failures[name].reason if name in _failures else None
        build = {} if reason else _build_info(name)
        if name == "cuda" and reason is None and not torch.cuda.is_available():
            reason = "torch finds no CUDA device"
        result[name] = Backend(reason is None, reason, str(path) if path else None, build)
    result["reference"] = Backend(True, build={"device": "any"})
    return result


# --- calls whose library is missing ---------------------------------------------------------------


def _environment_switch(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value not in ("", "0", "1", "off", "on", "false", "true", "no", "yes"):
        logger.warning("%s must be 0 or 1, got %r; it is ignored", name, os.environ[name])
    return value in ("1", "on", "true", "yes")


_fallback_allowed = False
_warned: set[tuple[object, ...]] = set()


def warn_once(text: str, *arguments: object) -> None:
    """Logs a warning, unless the same one was logged before."""
    if (text, *arguments) not in _warned:
        _warned.add((text, *arguments))
        logger.warning(text, *arguments)


def allow_fallback(allowed: bool = True) -> None:
    """Lets ``backend="auto"`` use the PyTorch reference if the library for a device is missing.

    By default such a call raises an ImportError, since the reference is slower by orders of
    magnitude. The first call that falls back logs a warning to the logger ``"selective_scan"``. The
    environment variable ``SELECTIVE_SCAN_ALLOW_FALLBACK=1`` allows the fallback from the start.

    Args:
        allowed: whether calls may fall back; False restores the error.

    Raises:
        TypeError: `allowed` is not a bool.

    Example:
        >>> import selective_scan
        >>> selective_scan.allow_fallback(True)
        >>> selective_scan.allow_fallback(False)
    """
    global _fallback_allowed
    if not isinstance(allowed, bool):
        raise TypeError(f"selective_scan: allowed must be a bool, got {type(allowed).__name__}")
    _fallback_allowed = allowed


# torch.compile cannot trace logging, so it calls this function once while tracing.
@_pytorch.constant_in_graphs
def _warn_of_fallback(device: str) -> None:
    warn_once(
        "no kernels for tensors on %s: %s; the PyTorch reference runs instead, far slower",
        device,
        _failures[device].reason if device in _failures else "not a supported device",
    )


def handle_missing_kernels(device: str, backend: str) -> None:
    """Returns if the reference may serve a call whose device has no kernels; raises otherwise."""
    if backend == "auto" and _fallback_allowed:
        _warn_of_fallback(device)
        return
    if device not in _REMEDIES and "cpu" in devices:
        raise NotImplementedError(
            f"selective_scan: there are no kernels for tensors on {device}; "
            "backend='reference' runs on any device"
        )
    name = device if device in _REMEDIES else "cpu"
    failure = _failures[name]
    what_is_wrong = "cannot be used" if library_path(name) else "is missing"
    remedy = f"{_REMEDIES[name]}. Or use " if failure.needs_build else "There is also "
    raise ImportError(
        f"selective_scan: the {name.upper()} library, _{name}{_SUFFIXES[0]}, {what_is_wrong}: "
        f"{failure.reason}. {remedy}"
        "the slow PyTorch reference: backend='reference', or selective_scan.allow_fallback(True)"
    )


_load_libraries()
