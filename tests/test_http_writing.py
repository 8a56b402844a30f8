"""An answer of any size is written as JSON in bounded calls, and to the same bytes as in one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.http import writing
from uma_trio.http.writing import joined, kept, written
from uma_trio.text import slices

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(-1e9, 1e9) | _TEXTS,
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(_TEXTS, inner, max_size=9),
    max_leaves=60,
)


@given(_VALUES)
def test_pieces_give_what_the_whole_gives(value: Any) -> None:
    """Whatever the document is, and with the parts of it that are written already."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slices, "SLICE", 8)
        patched.setattr(slices, "_FEW_VALUES", 3)
        patched.setattr(writing, "RUN", 2)
        patched.setattr(slices, "RUN", 2)
        assert written(value) == msgspec.json.encode(value)
        assert written({"a": kept(value), "b": [1]}) == msgspec.json.encode({"a": value, "b": [1]})


@pytest.mark.parametrize(
    "value",
    [
        "\x00" * 300_000,
        ["token"] * 50_000,
        {f"n{i}": -1.5e-7 for i in range(30_000)},
        [{"top": {f"t{i}": -1.0 for i in range(20)}}] * 3000,
    ],
    ids=["a text", "texts", "numbers", "probabilities"],
)
def test_no_call_gets_more_than_is_said(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither values nor characters: a call is what holds the GIL."""
    sizes: list[int] = []

    def counted(part: Any) -> bytes:
        assert slices.is_short(part)
        sizes.append(len(msgspec.json.encode(part)))
        return msgspec.json.encode(part)

    monkeypatch.setattr(writing, "_encode", counted)
    assert written(value) == msgspec.json.encode(value)
    assert len(sizes) > 1
    assert max(sizes) <= 6 * slices.SLICE + 2


def test_parts_are_written_when_they_are_wanted() -> None:
    """In their order; at once, if none of them is to be written in a helper thread."""
    assert joined([b"a", b"b"]) == b"ab"
    later = joined([b"a", lambda: b"b", b"c"])
    assert callable(later)
    assert later() == b"abc"
