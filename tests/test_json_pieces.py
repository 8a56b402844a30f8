"""A document of any size is decoded in pieces that are bounded, and to the same value as in one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma_trio.http import pieces
from uma_trio.http.pieces import (
    MAX_DEPTH,
    MAX_DIGITS,
    PIECE_BYTES,
    PIECE_MARKS,
    Excessive,
    JsonLimits,
    NotJson,
    TooDeep,
    TooLong,
    TooManyDigits,
    decoded,
    is_blank,
)

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ['x,[]{}:"' * 4, "\\" * 21, '\\"' * 9, "\U0001f600" * 9, "é\u2028" * 9, "\\u00" * 5]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | _TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(_TEXTS, inner, max_size=6),
    max_leaves=60,
)


class Counted:
    """A decoder that notes the size of what it is given."""

    def __init__(self) -> None:
        self.sizes = [0]
        self.marks = [0]

    def __call__(self, piece: bytes) -> Any:
        """Decode a piece."""
        self.sizes.append(len(piece))
        self.marks.append(sum(map(piece.count, (b",", b":", b"[", b"]", b"{", b"}"))))
        return msgspec.json.decode(piece)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every document of more than a few bytes come in pieces."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 32)
    monkeypatch.setattr(pieces, "PIECE_MARKS", 4)


def _read(document: bytes, load: Any = msgspec.json.decode) -> Any:
    try:
        return decoded(document, JsonLimits(), load)
    except (NotJson, Excessive):
        return NotJson


@pytest.mark.usefixtures("small_pieces")
@given(
    _VALUES, st.booleans(), st.sampled_from([None, 3]), st.lists(st.binary(min_size=1), max_size=2)
)
def test_pieces_give_what_the_whole_gives(
    value: Any, ascii_only: bool, indent: int | None, dirt: list[bytes]
) -> None:
    """The value of a document that is JSON; an error for any other, wherever it is broken."""
    document = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    for each in dirt:
        at = each[0] * len(document) // 256
        document = document[:at] + each[1:] + document[at + len(each) % 3 :]
    try:
        whole = msgspec.json.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        whole = NotJson
    assert _read(document) == whole


_BIG = [
    pytest.param(b"[" + b",".join([b"[]"] * 15_000) + b"]", id="lists"),
    pytest.param(b'{"a":{"b":' + b"[" + b",".join([b"5"] * 30_000) + b"]}}", id="numbers"),
    pytest.param(b"{%b}" % b",".join(b'"%x":1' % i for i in range(30_000)), id="names"),
    pytest.param(b'{"%b":1}' % (b"n" * 300_000), id="a long name"),
    pytest.param(b'["%b"]' % (b"\\ud83d\\ude00" * 100_000), id="escapes"),
    pytest.param(b'["%b"]' % ("\U0001f600".encode() * 100_000), id="emoji"),
    pytest.param(b'["%b"]' % (b"\\\\" * 200_000), id="backslashes"),
    pytest.param(b" " * 300_000 + b"[" + b" " * 300_000 + b"]" + b" " * 300_000, id="space"),
    pytest.param(b"[" * 100 + b'"%b"' % (b"x" * 300_000) + b"]" * 100, id="deep"),
    pytest.param(b"[%b]" % b",".join([b'"%b"' % (b"y" * 60_000)] * 20), id="long texts"),
]


@pytest.mark.parametrize("document", _BIG)
def test_no_piece_is_larger_than_is_said(document: bytes) -> None:
    """Neither in bytes nor in marks: a piece is what one call of the decoder holds the GIL for."""
    load = Counted()
    assert decoded(document, JsonLimits(), load) == msgspec.json.decode(document)
    assert max(load.sizes) <= PIECE_BYTES + 2
    assert max(load.marks) <= PIECE_MARKS + 2


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        (b"[" + b",".join([b"1"] * 32_769) + b"]", Excessive),
        (b"[" + b",".join([b"[]"] * 16_400) + b"]", Excessive),
        (b"{%b}" % b",".join(b'"%x":1' % i for i in range(40_000)), Excessive),
        (b"{" + b":" * 8_000_000 + b"}", Excessive),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), TooDeep),
        (b'["' + b"x" * ((2 << 20) + 1) + b'"]', TooLong),
        (b"[" + b"7" * (MAX_DIGITS + 1) + b"]", TooManyDigits),
        (b" " * (PIECE_BYTES - 200) + b"[" + b"7" * (MAX_DIGITS + 1) + b"]", TooManyDigits),
    ],
    ids=["numbers", "lists", "names", "colons", "depth", "text", "digits", "digits in two parts"],
)
def test_what_exceeds_a_bound_is_refused_early(document: bytes, fault: type[Exception]) -> None:
    """Values and levels are counted before anything is built, and a text while it is."""
    load = Counted()
    with pytest.raises(fault):
        decoded(document, JsonLimits(), load)
    assert sum(load.marks) == 0
    assert sum(load.sizes) <= (2 << 20) + 100


def test_as_many_digits_as_are_allowed_are_read() -> None:
    """In a number; a text may have any number of them."""
    number, text = b"7" * MAX_DIGITS, b"7" * (2 * MAX_DIGITS)
    document = b'[%b, -%b.5, "%b"]' % (number, number[:300], text)
    assert decoded(document, JsonLimits()) == json.loads(document)


def test_as_many_values_as_are_allowed_are_read() -> None:
    """A value is counted for each comma and each opening bracket, and one more."""
    assert len(decoded(b"[" + b",".join([b"1"] * 32_767) + b"]", JsonLimits())) == 32_767
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert decoded(deep, JsonLimits()) == json.loads(deep)


def test_an_error_names_the_place_in_the_whole_document() -> None:
    """Not in the piece that it was found in."""
    document = b"[" + b",".join([b"1"] * 30_000) + b",2 3]"
    with pytest.raises(NotJson, match=rf"\(byte {document.index(b'3]')}\)"):
        decoded(document + b" " * PIECE_BYTES, JsonLimits())


def test_a_blank_body_is_told_apart() -> None:
    """However long it is."""
    assert is_blank(b"")
    assert is_blank(b" \n" * PIECE_BYTES)
    assert not is_blank(b" " * PIECE_BYTES + b"x")
