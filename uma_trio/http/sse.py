"""Server-sent events: how text becomes an event, in microseconds and in one piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from uma_trio.http.writing import written

CONTENT_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

# What JSON lets stand and clients that split lines as Python does would split at.
_LINE_ENDS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)

_SLICE = 262_144
_encode = msgspec.json.encode


def text(value: str) -> bytes:
    """Return `value` as a JSON string without any line end of Unicode."""
    data = written(value)
    return data if value.isascii() else unsplit(data)


def unsplit(data: bytes) -> bytes:
    """Escape the line ends of Unicode in a JSON document, a slice at a time."""
    if len(data) <= _SLICE:
        return _unsplit(data)
    parts: list[bytes] = []
    start = 0
    while start < len(data):
        end = min(len(data), start + _SLICE)
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end += 1  # behind the character
        parts.append(_unsplit(data[start:end]))
        start = end
    return b"".join(parts)


def _unsplit(data: bytes) -> bytes:
    for raw, escaped in _LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    return data


def long_event(document: object) -> bytes:
    """Return a document of any size as one event, in bounded pieces of work."""
    return b"data: " + unsplit(written(document)) + b"\n\n"


def long_named(document: Mapping[str, Any]) -> bytes:
    """Return a document of any size as an event that is called by its type."""
    return b"event: %b\n%b" % (document["type"].encode(), long_event(document))


def event(document: object) -> bytes:
    """Return a document as one event."""
    return b"data: " + unsplit(_encode(document)) + b"\n\n"


def named(document: Mapping[str, Any]) -> bytes:
    """Return a document as an event that is called by its type."""
    return b"event: %b\n%b" % (document["type"].encode(), event(document))


class Frame:
    """An event that differs from the next in one text: the rest of it is encoded once.

    `document` holds :data:`HOLE` where the text goes, and may hold :data:`NUMBER` once behind it.
    `write` makes an event of a document.
    """

    __slots__ = ("_after", "_before")

    def __init__(
        self, document: dict[str, Any], write: Callable[[dict[str, Any]], bytes] = event
    ) -> None:
        before, _, after = write(document).partition(_encode(HOLE))
        self._before, self._after = before, after.split(_encode(NUMBER))

    def fill(self, value: str, number: int = 0) -> bytes:
        """Return the event with `value` in it, and `number` where there is room for one."""
        return self._before + text(value) + (b"%d" % number).join(self._after)


NUMBER = -987_654_321_012_345
"""What no number of ours is."""

HOLE = "\x00\x01text\x01\x00"
"""What no model name and no id of ours contains."""
