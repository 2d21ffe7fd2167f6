"""Writes the input of the builder of Hugging Face's `kernels` package from this source tree.

    make.py FOLDER

FOLDER gets build.toml, flake.nix, CARD.md and the tests of this folder, the C++ and CUDA sources
including the generated ones, and as torch-ext/ the Python package without the parts that only an
installed package can use. The builder replaces the package's _ops.py by its own.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGE = "selective_scan"
# Other packages' import paths and models are used by the package's name, and __main__.py is run by
# it, but a kernel from the hub has no such name. _ops.py is the builder's.
LEFT_OUT = ("compat", "integrations", "__main__.py", "_ops.py")
# The ops' namespace is the builder's name of the library, which is unique to each build.
CXX_FLAGS = (
    "-std=c++20",
    "-fvisibility=hidden",
    "-DSELECTIVE_SCAN_NAMESPACE=TORCH_EXTENSION_NAME",
)
# The builder has an old system's libraries, so it needs no stand-ins for them.
NOT_COMPILED = "older_runtime.cpp"

sys.path[:0] = [str(ROOT / "csrc" / part) for part in ("cuda", "torch")]
import argument_tables  # noqa: E402
import instantiations  # noqa: E402
import toolkit  # noqa: E402


def python_files() -> list[Path]:
    """Returns the files of the package to ship, relative to the package's folder."""
    package = ROOT / PACKAGE
    files = [path.relative_to(package) for path in package.rglob("*") if path.suffix == ".py"]
    return sorted(path for path in files if path.parts[0] not in LEFT_OUT)


def sources(folder: Path) -> dict[str, list[str]]:
    """Returns the files of each list of build.toml, relative to `folder`."""
    result: dict[str, list[str]] = {"LIBRARY": [], "CPU": [], "CUDA": []}
    for path in sorted(folder.glob("csrc/**/*")):
        if path.suffix not in (".cpp", ".cu", ".h", ".cuh") or path.name == NOT_COMPILED:
            continue
        backend = re.search(r"csrc/(cpu|cuda)/|_(cpu|cuda)\.cpp$", path.as_posix())
        name = (backend[1] or backend[2]).upper() if backend else "LIBRARY"
        result[name].append(path.relative_to(folder).as_posix())
    return result


def fill(text: str, lists: dict[str, Iterable[str]]) -> str:
    """Replaces each line or entry "@NAME" by the entries of a list."""
    for name, entries in lists.items():
        text = re.sub(rf'^( *)"@{name}",\n', _lines(entries), text, flags=re.MULTILINE)
        text = text.replace(f'"@{name}"', ", ".join(f'"{entry}"' for entry in entries))
    return text


def _lines(entries: Iterable[str]):
    return lambda match: "".join(f'{match[1]}"{entry}",\n' for entry in entries)


def make(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.md", "*.py", "*.map", "__pycache__", NOT_COMPILED)
    shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=ignored)
    instantiations.write(folder / "csrc/cuda/instantiations", instantiations.method_names())
    with tempfile.TemporaryDirectory() as temporary:
        shutil.copy(argument_tables.write(Path(temporary)), folder / "csrc/torch")
    for name in ("flake.nix", "CARD.md"):
        shutil.copy(HERE / name, folder)
    shutil.copy(ROOT / "LICENSE", folder)
    for name in ("tests", "torch-ext"):
        shutil.copytree(HERE / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in python_files():
        target = folder / "torch-ext" / PACKAGE / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / PACKAGE / path, target)
    lists = {**sources(folder), "ARCHITECTURES": toolkit.ALL_ARCHITECTURES, "CXX_FLAGS": CXX_FLAGS}
    text = fill((HERE / "build.toml").read_text(encoding="utf-8"), lists)
    (folder / "build.toml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
