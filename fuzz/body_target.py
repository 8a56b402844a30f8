"""What must hold for every body: it is decoded in pieces that are bounded, to what it is in one piece.

An input is a recipe, ``head NUL unit NUL tail``, so that a few bytes describe a body of megabytes: the
unit is repeated until the body has a megabyte. The search is led to bodies with large pieces.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import msgspec
from hypothesis import strategies as st

from uma_trio.http.pieces import (
    PIECE_BYTES,
    PIECE_MARKS,
    Excessive,
    JsonLimits,
    NotJson,
    decoded,
)

_BYTES = 1 << 20
_LIMITS = JsonLimits(values=1 << 18)
_MARKS = (b",", b":", b"[", b"]", b"{", b"}")


class _Meter:
    """A decoder that notes the most that it was given at once."""

    def __init__(self) -> None:
        self.n_bytes = self.marks = 0

    def __call__(self, piece: bytes) -> Any:
        self.n_bytes = max(self.n_bytes, len(piece))
        value = msgspec.json.decode(piece)
        if len(piece) > PIECE_BYTES // 2 and not isinstance(value, str):
            self.marks = max(self.marks, _marks(value))
        return value


def _marks(value: Any) -> int:
    """Return the least number of commas, colons and brackets of a value as JSON."""
    if isinstance(value, dict):
        return 1 + 2 * len(value) + sum(map(_marks, value.values()))
    return 1 + len(value) + sum(map(_marks, value)) if isinstance(value, list) else 0


def body(data: bytes) -> None:
    """Pieces stay within their bounds, and give the value, or the refusal, of the whole document."""
    head, unit, tail = (*data.split(b"\0", 2), b"", b"")[:3]
    document = head + unit * (_BYTES // len(unit) if unit else 0) + tail
    meter = _Meter()
    found: Any
    try:
        found = decoded(document, _LIMITS, meter)
    except Excessive:
        return
    except NotJson:
        found = NotJson
    if meter.n_bytes > PIECE_BYTES + 2 or meter.marks > PIECE_MARKS + 2:
        raise AssertionError(f"a piece has {meter.n_bytes} bytes and {meter.marks} marks")
    if hypothesis.currently_in_test_context():
        hypothesis.target(float(meter.n_bytes), label="bytes")
        hypothesis.target(float(meter.marks), label="marks")
    try:
        whole = msgspec.json.decode(document)
    except (msgspec.DecodeError, ValueError, RecursionError):
        whole = NotJson
    if found != whole:
        raise AssertionError("in pieces it is read differently")


_UNITS = [
    b"[],",
    b"1,",
    b'"a",',
    b"{},",
    b'{"a":[1,{}]},',
    b" ",
    b"a",
    b"\\\\",
    b'\\"',
    b"\\ud83d\\ude00",
    "é".encode(),
    "\U0001f600".encode(),
    b"[[1]],",
    b"null,",
    b"1.5e3,",
    b'"x":1,',
]
bodies = st.builds(
    lambda head, unit, tail: b"\0".join((head, unit, tail)),
    st.sampled_from([b"[", b'{"a":[', b'"', b'["', b'{"', b'{"a":"', b"[[", b"{", b" ", b""]),
    st.lists(st.sampled_from(_UNITS), min_size=1, max_size=3).map(b"".join),
    st.sampled_from(
        [b"1]", b"1]}", b'"', b'"]', b'":1}', b'"}', b"1]]", b'"z":1}', b"]", b"}", b""]
    ),
)
