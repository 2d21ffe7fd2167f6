"""The import paths of mamba_ssm and causal_conv1d, for code that was written for those packages.

    install      provides the modules of packages that are not installed; returns a Handle
    uninstall    removes them

Nothing happens before `install` is called. This project is not affiliated with those packages.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

from .._library import logger
from .._module_arguments import refuse
from .._table import fail_on_type
from ._modules import ABSENT, BINDINGS, MODULES, PACKAGES, why_absent

__all__ = ["Handle", "install", "uninstall"]


class _Importer:
    """Finds and fills our modules, on import and on reload.

    A root is a module that is replaced together with all of its submodules, usually a package.
    """

    def __init__(self) -> None:
        # The modules of a real package that ours replace, by root.
        self.displaced: dict[str, dict[str, ModuleType]] = {}

    def covers(self, name: str) -> bool:
        # A copy, since every import of a thread comes here, also while another thread installs.
        return any(_is_under(name, root) for root in tuple(self.displaced))

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not self.covers(name):
            return None
        if name in ABSENT:
            # The error has no `name`: with one, `from package import module` would ignore it, and
            # raise its own error without this reason.
            raise ModuleNotFoundError(why_absent(name, ABSENT[name]))
        if name not in MODULES:
            return None
        is_package = any(other.startswith(f"{name}.") for other in MODULES)
        spec = ModuleSpec(name, self, origin=__file__, is_package=is_package)
        spec.has_location = True  # so that the module has a __file__, which programs look at
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Returns None, so that Python creates an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        contents = MODULES[module.__spec__.name]
        module.__doc__ = f"selective_scan's functions under the name {module.__name__}."
        module.__getattr__ = _refuse_attribute_of(module.__name__)
        module.__dict__.update(contents.constants)
        for name, (origin, name_there) in contents.names.items():
            setattr(module, name, getattr(importlib.import_module(origin), name_there))

    def add(self, root: str) -> None:
        self.displaced[root] = _take_modules(root, sys.modules)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        parent = root.rpartition(".")[0]
        if parent and parent not in sys.modules:
            return  # the real parent will be imported on demand
        for name in MODULES:
            if _is_under(name, root):
                importlib.import_module(name)

    def remove(self, root: str) -> None:
        displaced = self.displaced.pop(root)
        # A package that was replaced after this root has displaced our modules as well.
        wider = (self.displaced[other] for other in self.displaced if _is_under(root, other))
        modules = next(wider, sys.modules)
        ours = _take_modules(root, modules)
        modules.update(displaced)
        parent, _, last = root.rpartition(".")
        if parent in modules and root in ours:
            if root in displaced:
                setattr(modules[parent], last, displaced[root])
            else:
                delattr(modules[parent], last)
        if not self.displaced:
            sys.meta_path.remove(self)


def _is_under(name: str, root: str) -> bool:
    return name == root or name.startswith(f"{root}.")


def _take_modules(root: str, modules: MutableMapping[str, ModuleType]) -> dict[str, ModuleType]:
    return {name: modules.pop(name) for name in list(modules) if _is_under(name, root)}


def _refuse_attribute_of(module: str) -> Callable[[str], NoReturn]:
    def refuse(attribute: str) -> NoReturn:
        name = f"{module}.{attribute}"
        sentence = f"module {module!r} has no attribute {attribute!r}"
        if name in ABSENT:
            sentence = why_absent(name, ABSENT[name])
        raise AttributeError(sentence, name=attribute)

    return refuse


def _is_there(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


_IMPORTER = _Importer()
# Held while modules are added or removed. A finder must not wait for it: Python calls finders while
# it holds a lock of the module, for which the thread that adds modules may wait.
_LOCK = threading.RLock()


@dataclass(frozen=True)
class Handle(AbstractContextManager["Handle"]):
    """The result of a call of :func:`install`; as a context manager, it undoes the call on exit.

    Attributes:
        packages: the packages and single modules that the call installed, without those that were
            already there.
    """

    packages: tuple[str, ...]
    # What this call put into _IMPORTER.displaced; a later call puts other objects there.
    _displaced: tuple[dict[str, ModuleType], ...] = field(repr=False, compare=False)

    def uninstall(self) -> None:
        """Removes the modules that this call installed, if they are still installed."""
        with _LOCK:
            own = zip(self.packages, self._displaced, strict=True)
            _remove(root for root, it in own if _IMPORTER.displaced.get(root) is it)

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install(force: bool = False, raw: bool = False, modules: Sequence[str] | None = None) -> Handle:
    """Makes ``import mamba_ssm`` and ``import causal_conv1d`` provide selective_scan's functions.

    The modules are put into ``sys.modules``, with specs that ``importlib`` finds and reloads; no
    file is written. Without `force`, a package that is really installed is not changed, and the
    logger ``selective_scan`` warns about it. If a real mamba_ssm stays and causal_conv1d is not
    installed, the latter is not added without `raw`: mamba_ssm works without causal_conv1d, but if
    it finds that package, it also calls its bindings. A second call changes nothing.

    Names that code has already imported keep their values.

    Args:
        force: whether to replace a package that is installed, until :func:`uninstall` restores its
            modules.
        raw: whether to add the modules ``causal_conv1d_cuda``, ``selective_scan_cuda``,
            ``selective_scan_cuda_core`` and ``selective_scan_cuda_oflex``, which forks call below
            autograd.
        modules: full names of modules to replace in a package that otherwise stays, such as
            ``"mamba_ssm.ops.triton.layernorm"``, each with all of its submodules.

    Returns:
        A handle, which is a context manager and whose `uninstall` undoes this call.

    Raises:
        TypeError: an argument is not of the type above.
        ValueError: `modules` names a module that does not exist here.

    Example:
        >>> import selective_scan.compat
        >>> with selective_scan.compat.install(force=True):
        ...     from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
        >>> selective_scan_fn is selective_scan.selective_scan_fn
        True
    """
    for name, value in {"force": force, "raw": raw}.items():
        if not isinstance(value, bool):
            fail_on_type(name, "a bool", value)
    asked = _checked_modules(modules)
    with _LOCK:
        added = _add(force, raw, asked)
        return Handle(added, tuple(_IMPORTER.displaced[root] for root in added))


def _add(force: bool, raw: bool, asked: Sequence[str]) -> tuple[str, ...]:
    """Adds the modules that a call of `install` is to add, and returns their names."""
    added: list[str] = []
    try:
        for root in (*PACKAGES, *(BINDINGS if raw else ()), *asked):
            if _IMPORTER.covers(root):
                continue
            if not (force or root in asked):
                if _is_there(root):
                    logger.warning(
                        "%s is installed and is left as it is; install(force=True) replaces it",
                        root,
                    )
                    continue
                if root == "causal_conv1d" and not (raw or _IMPORTER.covers("mamba_ssm")):
                    logger.warning(
                        "causal_conv1d stays absent, since the mamba_ssm that is installed calls "
                        "bindings where it finds it; install(raw=True) adds it and them"
                    )
                    continue
            added.append(root)
            _IMPORTER.add(root)
    except BaseException:
        _remove(root for root in added if root in _IMPORTER.displaced)
        raise
    return tuple(added)


def _remove(roots: Iterable[str]) -> None:
    """Removes roots that were added in this order."""
    for root in reversed(tuple(roots)):
        _IMPORTER.remove(root)


def _checked_modules(modules: Sequence[str] | None) -> Sequence[str]:
    if modules is None:
        return ()
    if isinstance(modules, str) or not isinstance(modules, Sequence):
        fail_on_type("modules", "a sequence of names", modules)
    for name in modules:
        if name not in MODULES:
            refuse("modules", "names of modules of selective_scan.compat", name)
    return modules


def uninstall() -> None:
    """Removes all modules that :func:`install` added, and restores those that they replaced."""
    with _LOCK:
        _remove(_IMPORTER.displaced)
