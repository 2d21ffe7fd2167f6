"""mamba_ssm's and causal_conv1d's import paths, for code that was written for those packages.

    install      puts the modules where the packages are absent; returns a Handle
    uninstall    takes them away

Nothing happens before `install` is called. This project is not affiliated with those packages.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType

from .._library import logger
from ._modules import BINDINGS, MODULES, PACKAGES

__all__ = ["Handle", "install", "uninstall"]


class _Importer:
    """Finds and fills the modules of the installed packages, on import and on reload."""

    def __init__(self) -> None:
        # The modules of a real package that each of ours stands for.
        self.displaced: dict[str, dict[str, ModuleType]] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in MODULES or _package_of(name) not in self.displaced:
            return None
        is_package = any(other.startswith(f"{name}.") for other in MODULES)
        return ModuleSpec(name, self, origin="selective_scan.compat", is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> None:
        """None has Python make an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        contents = MODULES[module.__spec__.name]
        module.__doc__ = f"selective_scan's functions under the name {module.__name__}."
        module.__dict__.update(contents.constants)
        for name, (origin, name_there) in contents.names.items():
            setattr(module, name, getattr(importlib.import_module(origin), name_there))

    def add(self, package: str) -> None:
        self.displaced[package] = _take_modules(package)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name in MODULES:
            if _package_of(name) == package:
                importlib.import_module(name)

    def remove(self, package: str) -> None:
        displaced = self.displaced.pop(package)
        _take_modules(package)
        sys.modules.update(displaced)
        if not self.displaced:
            sys.meta_path.remove(self)


def _package_of(name: str) -> str:
    return name.partition(".")[0]


def _take_modules(package: str) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if _package_of(name) == package]
    return {name: sys.modules.pop(name) for name in names}


def _is_there(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


_IMPORTER = _Importer()


@dataclass(frozen=True)
class Handle:
    """What one call of :func:`install` did; as a context manager it undoes that at its end.

    Attributes:
        packages: the packages that the call put there, none that was there before.
    """

    packages: tuple[str, ...]

    def uninstall(self) -> None:
        """Takes away what this call put there, as far as it is still there."""
        for package in self.packages:
            if package in _IMPORTER.displaced:
                _IMPORTER.remove(package)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.uninstall()


def install(force: bool = False, raw: bool = False) -> Handle:
    """Makes ``import mamba_ssm`` and ``import causal_conv1d`` give selective_scan's functions.

    The modules are put into ``sys.modules``, with specs that ``importlib`` finds and reloads; no
    file is written. A package that is really installed is left as it is, and a warning of the
    logger ``selective_scan`` says so, unless `force`. A second call changes nothing.

    Code that has imported a name before keeps what it has.

    Args:
        force: whether to stand for a package that is installed, until :func:`uninstall` puts its
            modules back.
        raw: whether to add the modules ``selective_scan_cuda``, ``selective_scan_cuda_core``
            and ``selective_scan_cuda_oflex``, which forks call below autograd.

    Returns:
        A handle, whose `uninstall` undoes what this call did, and which is a context manager.

    Raises:
        TypeError: an argument is not a bool.

    Example:
        >>> import selective_scan.compat
        >>> with selective_scan.compat.install(force=True):
        ...     from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
        >>> selective_scan_fn is selective_scan.selective_scan_fn
        True
    """
    for name, value in {"force": force, "raw": raw}.items():
        if not isinstance(value, bool):
            got = type(value).__name__
            raise TypeError(f"selective_scan: {name} must be a bool, got {got}")
    added: list[str] = []
    try:
        for package in (*PACKAGES, *(BINDINGS if raw else ())):
            if package in _IMPORTER.displaced:
                continue
            if not force and _is_there(package):
                logger.warning(
                    "%s is installed and is left as it is; install(force=True) replaces it", package
                )
                continue
            added.append(package)
            _IMPORTER.add(package)
    except BaseException:
        Handle(tuple(added)).uninstall()
        raise
    return Handle(tuple(added))


def uninstall() -> None:
    """Takes away all that :func:`install` put there, and puts back what that displaced."""
    Handle(tuple(_IMPORTER.displaced)).uninstall()
