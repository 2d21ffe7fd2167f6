"""packaging/hub: the sources that a hub of kernels gets, and the namespace of a build's ops."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import programs

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def hub():
    return programs.load(ROOT / "packaging" / "hub" / "make.py")


@pytest.fixture(scope="module")
def made(hub, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "made"
    hub.make(folder)
    return folder


@pytest.fixture(scope="module")
def package(made) -> dict[Path, ast.Module]:
    """The shipped Python files, parsed by the grammar of Python 3.9."""
    folder = made / "torch-ext" / "selective_scan"
    return {
        path.relative_to(folder): ast.parse(path.read_text("utf-8"), feature_version=(3, 9))
        for path in folder.rglob("*.py")
    }


@pytest.mark.slow
def test_every_source_is_compiled_for_its_backends(made):
    text = (made / "build.toml").read_text("utf-8")
    assert "@" not in re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    parts = re.split(r"^\[(\S+)\]$", text, flags=re.MULTILINE)
    listed = {
        name: re.findall(r'^    "(.+)",$', part, re.MULTILINE)
        for name, part in zip(parts[1::2], parts[2::2], strict=True)
    }
    assert listed["kernel.cpu"] == listed["kernel.cpu_beside_cuda"]
    files = [*listed["torch"], *listed["kernel.cpu"], *listed["kernel.cuda"]]
    assert len(set(files)) == len(files)
    suffixes = {".cpp", ".cu", ".h", ".cuh"}
    there = {path for path in made.rglob("*") if path.suffix in suffixes}
    assert {made / path for path in files} == there
    assert not [path for path in listed["torch"] if re.search(r"_(cpu|cuda)\.cpp|\.cu", path)]
    assert any(path.endswith("/prompt.cu") for path in listed["kernel.cuda"])


def executed(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the nodes that are not for type checkers alone."""
    conditions = (it for it in ast.walk(tree) if isinstance(it, ast.If))
    for_checkers = [it for it in conditions if ast.unparse(it.test) == "TYPE_CHECKING"]
    hidden = {id(node) for it in for_checkers for node in ast.walk(it)}
    return (node for node in ast.walk(tree) if id(node) not in hidden)


@pytest.mark.slow
def test_what_is_shipped_imports_itself_relatively(package):
    """The hub loads the package by another name, and every file that is imported must be
    shipped."""
    shipped = {path.with_suffix("").as_posix() for path in package}
    shipped |= {path.parent.as_posix() for path in package} | {"_ops"}
    for path, tree in package.items():
        for node in executed(tree):
            if isinstance(node, ast.Import):
                assert not [it.name for it in node.names if it.name.startswith("selective_scan")]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert not node.module.startswith("selective_scan"), path
            elif isinstance(node, ast.ImportFrom):
                folder = path.parents[node.level - 1].as_posix()
                base = Path(folder, node.module.replace(".", "/")) if node.module else Path(folder)
                if node.module:
                    assert base.as_posix() in shipped, (path, node.module)
                else:
                    names = {Path(base, it.name).as_posix() for it in node.names}
                    assert names <= shipped, (path, names - shipped)


def test_the_namespace_of_ops_is_named_once():
    """Python and C++ name the namespace once each, so that a build can choose another."""
    in_python = re.compile(r"torch\.ops\.selective_scan\b|[\"']selective_scan::|Library\([\"']")
    files = [p for p in (ROOT / "selective_scan").rglob("*.py") if in_python.search(p.read_text())]
    assert [path.name for path in files] == ["_ops.py"]
    in_cpp = re.compile(r"STABLE_TORCH_LIBRARY|\"selective_scan::")
    paths = [p for p in (ROOT / "csrc/torch").iterdir() if p.is_file()]  # skips bytecode
    files = [p for p in paths if in_cpp.search(p.read_text("utf-8"))]
    assert [path.name for path in files] == ["op_namespace.h"]
