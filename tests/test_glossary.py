"""One word has one meaning: what docs/GLOSSARY.md says of the names in the code is so."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = (
    ROOT / "uma_trio",
    ROOT / "protocol" / "uma_protocol",
    ROOT / "sim" / "uma_trio_sim",
)
GLOSSARY = (ROOT / "docs" / "GLOSSARY.md").read_text(encoding="utf-8")
WORDS, _, TWICE = GLOSSARY.partition("## Names that are used twice")


def public_classes() -> Iterator[str]:
    """Yield the name of each public class of the shipped code, as often as there is one."""
    for folder in SHIPPED:
        for path in folder.rglob("*.py"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    yield node.name


def terms() -> list[str]:
    """Return the terms of the glossary's tables."""
    rows = re.findall(r"^\| ([^|]+) \|", WORDS, re.MULTILINE)
    return [term for row in rows if row != "term" for term in row.split(", ")]


def test_a_name_that_two_classes_have_is_in_the_list_of_those() -> None:
    """Nobody takes a name again without saying so, and the list keeps no name that is unique."""
    twice = {name for name, times in Counter(public_classes()).items() if times > 1}
    listed = set(re.findall(r"`([A-Z]\w+)`", TWICE))
    assert twice - listed == set(), "choose another name, or add it to docs/GLOSSARY.md"
    assert listed - twice == set(), "these are unique now: remove them from docs/GLOSSARY.md"


def test_a_term_is_explained_once() -> None:
    """Two rows for one word would be two meanings."""
    assert len(terms()) > 40
    assert [term for term, times in Counter(terms()).items() if times > 1] == []


def test_a_term_is_used() -> None:
    """A word that neither code nor documents use needs no row."""
    texts = [
        path.read_text(encoding="utf-8") for folder in SHIPPED for path in folder.rglob("*.py")
    ]
    texts += [
        path.read_text(encoding="utf-8")
        for path in ROOT.glob("docs/*.md")
        if path.name != "GLOSSARY.md"
    ]
    used = re.sub(r"[\s_-]+", " ", " ".join(texts)).lower()
    assert [term for term in terms() if re.sub(r"[\s-]", " ", term).lower() not in used] == []
