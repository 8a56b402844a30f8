"""The list of what llama.cpp's server tests and the daemon do not have in common, against the documents."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = tomllib.loads((ROOT / "scripts/foreign_server_tests.toml").read_text(encoding="utf-8"))


def test_every_difference_is_a_row_of_the_document() -> None:
    """By its topic, the first cell."""
    text = (ROOT / "docs/reference/http.md").read_text(encoding="utf-8")
    (section,) = re.findall(
        r"^## Where llama-server differs\n(.*?)^## ", text, re.MULTILINE | re.DOTALL
    )
    rows = {row.split(" | ")[0].removeprefix("| ") for row in section.splitlines()}
    topics = [difference["topic"] for difference in LIST["differences"]]
    assert rows.issuperset(topics)
    assert len(topics) == len(set(topics))


def test_no_test_is_in_two_lists() -> None:
    """A test is run, or expected to fail, or not run."""
    patterns = [
        pattern
        for kind in ("differences", "not_served")
        for entry in LIST[kind]
        for pattern in entry["tests"]
    ]
    assert len(patterns) == len(set(patterns))
