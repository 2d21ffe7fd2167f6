"""README.md and docs/: examples run as printed, links lead somewhere, nothing public is missing."""

import re
from pathlib import Path

import pytest

import selective_scan

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(example, id=f"{path.relative_to(ROOT)}-{number}")
    for path in TEXTS
    for number, example in enumerate(
        re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
    )
]
# Of links to other files, without what follows a #.
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
PUBLIC = [name for name in selective_scan.__all__ if not name.startswith("__")]


def test_there_are_examples():
    assert any("README" in example.id for example in EXAMPLES)
    assert any("docs" in example.id for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example):
    exec(compile(example, "<example>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    for link in LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / link).exists(), link


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
