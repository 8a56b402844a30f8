"""Server-sent events: how text becomes an event, in microseconds and in one piece."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

# What JSON lets stand and clients that split lines as Python does would split at.
_LINE_ENDS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)

_encode = msgspec.json.encode


def text(value: str) -> bytes:
    """Return `value` as a JSON string without any line end of Unicode."""
    data = _encode(value)
    return data if value.isascii() else unsplit(data)


def unsplit(data: bytes) -> bytes:
    """Escape the line ends of Unicode in a JSON document."""
    for raw, escaped in _LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    return data


def event(document: object) -> bytes:
    """Return a document as one event."""
    return b"data: " + unsplit(_encode(document)) + b"\n\n"


class Frame:
    """An event that differs from the next in one text: the rest of it is encoded once.

    `document` holds :data:`HOLE` where the text goes.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, document: object) -> None:
        before, _, after = event(document).partition(_encode(HOLE))
        self._before, self._after = before, after

    def fill(self, value: str) -> bytes:
        """Return the event with `value` in it."""
        return self._before + text(value) + self._after


HOLE = "\x00\x01text\x01\x00"
"""What no model name and no id of ours contains."""
