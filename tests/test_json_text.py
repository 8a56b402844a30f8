"""JSON of a client's size is written in pieces that one call of the encoder may have."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.text import slices
from uma_trio.text.slices import json_text

_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_VALUES = st.recursive(_LEAVES, lambda s: st.lists(s) | st.dictionaries(st.text(), s))


@given(_VALUES)
def test_pieces_are_the_same_text_as_one_call_writes(value: Any) -> None:
    """Whatever the value is, with bounds so small that it is cut everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "_FEW_VALUES", 1)
        patch.setattr(slices, "SLICE", 2)
        assert json_text(value) == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(
    "value",
    [
        [1] * 30_000,
        {f"n{n}": {"type": "string"} for n in range(15_000)},
        [[[n] for n in range(100)] for _ in range(100)],
        {"a": "\n" * 1_000_000},
        ["x" * 500] * 2000,
        {"k" * 100_000: 1},
    ],
    ids=["numbers", "schema", "lists", "one text", "texts", "a name"],
)
def test_no_call_of_the_encoder_gets_more_than_its_bound(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GIL is held for one call, so its work is what another thread waits for."""
    written: list[int] = []
    dumps = json.dumps

    def counted(part: Any, **options: Any) -> str:
        written.append(len(text := dumps(part, **options)))
        return text

    monkeypatch.setattr(slices.json, "dumps", counted)
    assert json_text(value) == dumps(value, ensure_ascii=False)
    assert max(written) <= 6 * slices.SLICE + 8 * 1024
