"""Generated documents say what the code says."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from uma_trio.config.options import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    [
        path
        for pattern in ("*.md", "docs/**/*.md", "*/README.md", "models/*/README.md")
        for path in ROOT.glob(pattern)
    ]
)
SCRIPTS = sorted((ROOT / "docs").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_generates_is_up_to_date(script: Path) -> None:
    """A change of an option, a metric or a state comes with its documentation."""
    command = [sys.executable, str(script), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr} Run `make docs`."


def imported(text: str) -> list[tuple[str, str]]:
    """Return what the Python of a document imports of ours: modules, and names in them."""
    found = []
    for code in re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        try:
            statements = ast.parse(code).body
        except SyntaxError:
            continue  # a part of a function, such as "async with"
        for statement in statements:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                found += [(statement.module, alias.name) for alias in statement.names]
    return [(module, name) for module, name in found if module.startswith("uma_")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_imports_is_there(document: Path) -> None:
    """Its examples can be copied; what moves takes them along."""
    for module, name in imported(document.read_text(encoding="utf-8")):
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def anchors(document: Path) -> set[str]:
    """Return what links may name in a document, as GitHub makes it of the headings."""
    text = re.sub(
        r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_link_leads_somewhere(document: Path) -> None:
    """To a file of the repository, and to a heading of it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        if "://" in name or name.startswith("mailto:"):
            continue
        found = document.parent / name if name else document
        assert found.exists(), f"{target}: there is no such file"
        assert not anchor or anchor in anchors(found), f"{target}: there is no such heading"


def test_examples_are_found_in_documents() -> None:
    """Or the test above would be about nothing."""
    found = [pair for path in DOCUMENTS for pair in imported(path.read_text(encoding="utf-8"))]
    assert ("uma_trio.client", "connect") in found
    assert len(found) > 5


def test_the_table_of_the_policys_stages_is_that_of_its_pipeline() -> None:
    """Their names in order, and the module of each."""
    from uma_trio.policy.deadline import deadline

    table = (ROOT / "docs/internals/policy.md").read_text().partition("## The stages")[2]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table.partition("\n## ")[0], re.MULTILINE)
    stages = deadline.stages
    assert [name for name, _ in rows] == list(stages)
    for name, modules in rows:
        assert f"`{stages[name].__module__.rpartition('.')[2]}`" in modules


@pytest.mark.parametrize(
    "page",
    [ROOT / "SECURITY.md", *sorted(ROOT.glob("docs/[ei]*/*.md"))],
    ids=lambda path: path.name,
)
def test_an_option_that_a_page_names_is_one_of_the_program(page: Path) -> None:
    """The manual page, which is generated, has the options of all commands."""
    manual = (ROOT / "docs/uma-trio.1").read_text(encoding="utf-8").replace("\\-", "-")
    known = {*re.findall(r"--[a-z][\w-]*", manual), *(item.flag for item in OPTIONS)}
    spans = re.findall(r"`((?:uma-trio|--)[^`\n]+)`", page.read_text(encoding="utf-8"))
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", " ".join(spans))) <= known


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("docs/internals/*.md")), ids=lambda path: path.name
)
def test_a_module_that_the_internals_name_is_there(page: Path) -> None:
    """Written as a path, or with dots as it is imported."""
    packages = "|".join(path.parent.name for path in ROOT.glob("uma_trio/*/__init__.py"))
    named = re.findall(rf"`((?:{packages})[./][a-z_]+)[`./]", page.read_text(encoding="utf-8"))
    assert page.name == "testing.md" or named
    for name in named:
        path = ROOT / "uma_trio" / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), f"there is no {name}"
