"""README.md and docs/: examples run as printed, links lead to files, everything public is
documented. Files that documents and sources mention exist by these names."""

import ast
import fnmatch
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import get_args

import pytest

import selective_scan
from selective_scan._discretization import METHODS, Method
from selective_scan.compat._modules import MODULES

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(
        example,
        id=f"{path.relative_to(ROOT)}-{number}",
        marks=[pytest.mark.slow] * ("torch.export" in example),
    )
    for path in TEXTS
    for number, example in enumerate(
        re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
    )
]
# Matches the targets of links to other files, without the part after a #.
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
FOLDERS = (
    *("benchmarks", "csrc", "docs", "examples", "packaging", "selective_scan", "tests", "tools"),
)
FILES = sorted(
    path
    for path in (
        *ROOT.glob("*"),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")),
    )
    if path.is_file() and "__pycache__" not in path.parts
)
CXX = (".cpp", ".cu", ".cuh", ".h")
# Matches file names, possibly with folders; * stands for anything. Excludes parts of links and
# <system.h>.
FILE_NAME = re.compile(
    r"(?<![\w./*<-])[\w.*/-]*[\w*]\.(?:cpp|cuh?|h|json|md|py|sh|toml|yaml)\b(?![\w(])"
)
# Names of files that are not here: of the method that contributing.md adds, and of a model.
# llama.cpp and mamba.py are programs.
FOREIGN = {
    "csrc/core/discretization/midpoint.h",
    "config.json",
    "llama.cpp",
    "alxndrTL/mamba.py",
    "mamba.py",
}
PUBLIC = [name for name in selective_scan.__all__ if not name.startswith("__")]


def test_there_are_examples():
    assert any("README" in example.id for example in EXAMPLES)
    assert any("docs" in example.id for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the files that it writes
    for package in ("transformers", "onnxruntime"):
        if f"from {package}" in example or f"import {package}" in example:
            pytest.importorskip(package, reason=f"needs the package {package}")
    exec(compile(example, "<example>", "exec"), {"__name__": "__main__"})


TYPE_CHECKERS = {
    "mypy": ("--strict", "--follow-imports=silent", "--untyped-calls-exclude=torch"),
    "basedpyright": ("--level=error",),
}
# Calls whose types depend on an overload, and a name that checkers must not accept.
TYPED_CALLS = """
import selective_scan
import torch
from selective_scan import Backend, adaptive_unitary_scan_fn, adaptive_unitary_scan_ref, backends
from selective_scan import causal_conv1d_fn, causal_conv1d_ref
from selective_scan import selective_scan_fn, selective_scan_ref
from selective_scan.compat.config_mamba import MambaConfig
from selective_scan.compat.generation import GenerationOutput
from selective_scan.compat.mixer_seq_simple import MambaLMHeadModel
from typing_extensions import assert_type

selective_scan.compat.install().uninstall()  # a module that is imported when it is used
selective_scan.no_such_name  # type: ignore[attr-defined]
model, tokens = MambaLMHeadModel(MambaConfig(d_model=16, n_layer=1, vocab_size=9)), torch.ones(1, 4)
assert_type(model.generate(tokens, 8, top_k=5), torch.Tensor)
assert_type(model.generate(tokens, 8, return_dict_in_generate=True), GenerationOutput)
u, A, B = torch.randn(2, 4, 8), -torch.rand(4, 3), torch.randn(2, 3, 8)
for function in (selective_scan_fn, selective_scan_ref):
    assert_type(function(u, u, A, B, B), torch.Tensor)
    assert_type(function(u, u, A, B, B, return_last_state=None), torch.Tensor)
    out, last_state = function(u, u, A, B, B, return_last_state=True, backend="reference")
    assert_type(last_state, torch.Tensor)
b, x, D = torch.ones(3, dtype=torch.complex64), torch.randn(4, 3, 4), torch.ones(4)
for rotate in (adaptive_unitary_scan_fn, adaptive_unitary_scan_ref):
    out, last_state = rotate(u, u, x, x[0].T, b, b, D, return_last_state=True)
assert_type(backends()["cpu"], Backend)
for convolve in (causal_conv1d_fn, causal_conv1d_ref):
    assert_type(convolve(u, A, activation="silu"), torch.Tensor)
    out, states = convolve(u, A, return_final_states=True)
    assert_type(states, torch.Tensor)
"""


@pytest.mark.slow
@pytest.mark.parametrize("checker", TYPE_CHECKERS)
def test_types_of_examples(checker, tmp_path, bindings_folder):
    # The target of an editable installation, which the checkers do not follow.
    package = Path(selective_scan.__file__).resolve().parent.parent
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.basedpyright]\ntypeCheckingMode = "standard"\nextraPaths = ["{package}"]\n'
    )
    (tmp_path / "typed_calls.py").write_text(TYPED_CALLS)
    for number, example in enumerate(EXAMPLES):
        (tmp_path / f"example_{number}.py").write_text(*example.values)
    # Modules that a checker cannot find, since they exist only at run time, or must not read.
    for name in (*MODULES, "onnxruntime", "transformers"):
        stub = tmp_path.joinpath(*name.split("."), "__init__.pyi")
        stub.parent.mkdir()
        stub.write_text("from typing import Any\ndef __getattr__(name: str) -> Any: ...\n")
    command = (sys.executable, "-m", checker, *TYPE_CHECKERS[checker], ".")
    # The next run reuses mypy's cache of PyTorch.
    environment = os.environ | {
        "MYPYPATH": str(package),
        "MYPY_CACHE_DIR": str(bindings_folder / "mypy"),
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_list_the_methods():
    assert get_args(Method) == METHODS


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    for link in LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / link).exists(), link


def said(path: Path) -> str:
    """Returns a text, or a source's comments and docstrings, without values of command options."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in CXX:
        text = "\n".join(re.findall(r"//[^\n]*|/\*.*?\*/", text, re.S))
    elif path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
        text = "\n".join((*comments, *(ast.get_docstring(node) or "" for node in nodes)))
    return re.sub(r"--[\w-]+ \S+", "", text)


def is_file_of(path: Path, name: str) -> bool:
    """Returns whether `path` may refer to a file by this name: relative to its folder or to one
    above, or as the only file of that name in all folders. In a document the context tells which of
    several files is meant."""
    if any((folder / name).exists() for folder in path.parents if folder.is_relative_to(ROOT)):
        return True
    pattern = "*/" + re.sub(r"^(\.\./)+", "", name).replace("NAME", "*")
    found = [file for file in FILES if fnmatch.fnmatchcase(file.as_posix(), pattern)]
    return len(found) == 1 or (bool(found) and ("*" in pattern[2:] or path.suffix == ".md"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "suffixes", [(".md",), (".py",), CXX], ids=lambda suffixes: " ".join(suffixes)
)
def test_files_are_called_by_their_names(suffixes):
    speakers = [path for path in FILES if path.suffix in suffixes]
    assert speakers
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in speakers
        for name in sorted(set(FILE_NAME.findall(said(path))) - FOREIGN)
        if not is_file_of(path, name)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_is_documented_with_an_example(name):
    documented = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert re.search(rf"^\.\. auto(function|class):: {name}$", documented, re.M)
    assert ">>> " in getattr(selective_scan, name).__doc__


def test_pre_commit_has_the_linters_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    linters = re.search(r"^LINTERS := (.*)$", makefile, re.M)[1].split()
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r'additional_dependencies: \["(.*)"\]', hooks)) == set(linters)


def test_the_citation_names_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", citation, re.M)[1] == selective_scan.__version__
