"""Work on texts of a client's size in slices, so that other threads get the GIL between two of them.

One call holds it for the whole text: 30 ms to encode 2 MiB of emoji, 800 ms to find markers in them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

SLICE: Final = 16_384
"""Characters. The slowest step takes a millisecond for so many."""
_FEW_VALUES: Final = 1024
_SCALARS: Final = frozenset({int, float, bool, type(None)})
RUN: Final = 256
"""Members of a long list or object that are written at once, if they are short together."""


def slices(text: str) -> Iterator[str]:
    """Yield `text` in slices; their concatenation is `text`."""
    return (text[at : at + SLICE] for at in range(0, len(text), SLICE))


def utf8(text: str) -> bytes:
    """Return `text` in UTF-8, with `?` for halves of characters."""
    if len(text) <= SLICE:
        return text.encode("utf-8", "replace")
    return b"".join(part.encode("utf-8", "replace") for part in slices(text))


def digest(kind: str, text: str) -> bytes:
    """Return a digest of a text and its kind."""
    found = hashlib.sha256(f"{kind} ".encode())
    for part in slices(text):
        found.update(part.encode("utf-8", "surrogatepass"))
    return found.digest()


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else sum(len(utf8(part)) for part in slices(text))


def is_blank(text: str) -> bool:
    return not text or all(map(str.isspace, slices(text)))


def stripped(text: str, left: str | None = None, right: str | None = None) -> str:
    """Return ``text.lstrip(left).rstrip(right)``: None is white space."""
    start, end = 0, len(text)
    while start < end:
        part = text[start : min(end, start + SLICE)]
        kept = len(part.lstrip(left))
        start += len(part) - kept
        if kept:
            break
    while start < end:
        part = text[max(start, end - SLICE) : end]
        kept = len(part.rstrip(right))
        end -= len(part) - kept
        if kept:
            break
    return text[start:end]


def json_text(value: Any) -> str:
    """Return ``json.dumps(value, ensure_ascii=False)`` in calls of at most 0.3 ms. Raises RecursionError."""
    if is_short(value):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        inside = (json.dumps(part, ensure_ascii=False)[1:-1] for part in slices(value))
        return f'"{"".join(inside)}"'
    if isinstance(value, Mapping):
        return f"{{{', '.join(_inside(runs_of(value)))}}}"
    return f"[{', '.join(_inside(value[at : at + RUN] for at in range(0, len(value), RUN)))}]"


def json_value(text: str, otherwise: Any = None) -> Any:
    """Return what a JSON text means, or something else if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def _inside(runs: Iterable[Any]) -> Iterator[str]:
    for run in runs:
        if is_short(run):
            yield json.dumps(run, ensure_ascii=False)[1:-1]
        elif isinstance(run, Mapping):
            yield from (f"{json_text(name)}: {json_text(part)}" for name, part in run.items())
        else:
            yield from map(json_text, run)


def runs_of(value: Mapping[Any, Any]) -> Iterator[dict[Any, Any]]:
    members = iter(value.items())
    while run := dict(islice(members, RUN)):
        yield run


def is_short(value: Any) -> bool:
    """Whether one call of the encoder may write a value."""
    values, characters, left = 0, 0, [value]
    while left:
        found = left.pop()
        if type(found) in _SCALARS:
            continue
        if isinstance(found, str):
            characters += len(found)
        elif isinstance(found, Mapping | list | tuple):
            values += len(found)
            if values > _FEW_VALUES:
                return False
            if isinstance(found, Mapping):
                left += found
                left += found.values()
            else:
                left += found
        if characters > SLICE:
            return False
    return True


_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH, _LOW))
_LONE_IN_TEXT = re.compile("[\ud800-\udfff]")
# Takes the place of an escaped backslash, so that each backslash begins an escape. No UTF-8 has it.
_ESCAPED = b"\xff\xff"


def without_lone_surrogates(document: bytes) -> bytes:
    """Return a JSON document of the same length with U+FFFD for each escaped half of a surrogate pair."""
    if (rb"\ud" not in document and rb"\uD" not in document) or b"\xff" in document:
        return document
    plain = document.replace(rb"\\", _ESCAPED)
    return _LONE.sub(rb"\\ufffd", plain).replace(_ESCAPED, rb"\\")


def in_utf8(text: str) -> str:
    """Return `text` with U+FFFD for each half of a surrogate pair."""
    return text if text.isascii() else _LONE_IN_TEXT.sub("\ufffd", text)
