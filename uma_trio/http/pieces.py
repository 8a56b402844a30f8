"""JSON of a client's size, decoded in pieces of a bounded size.

msgspec decodes a document in one call that holds the GIL, so every stream of the daemon waits for
that call, whatever thread it runs in. This module counts the values of a document before any is
built, and then decodes it piece by piece: the elements of a long list or object a few thousand at a
time, a long string a few ten thousand bytes at a time. Between two pieces another thread can take the
GIL. A piece is what stands between two commas of one container, or inside one string, put into
brackets or quotes of its own. So the pieces are valid JSON exactly if the document is.

The largest call takes 1 ms on a core of 2024: 64 KiB of escapes 0.4 ms, 16,384 marks 0.7 ms. Numbers have
a bound of their own, since reading and writing one takes time by the square of its digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from uma_trio.text.slices import without_lone_surrogates

PIECE_BYTES: Final = 65_536
PIECE_MARKS: Final = 16_384
"""The most commas, colons and brackets in one piece."""
MAX_DEPTH: Final = 128
MAX_DIGITS: Final = 320
"""In a row, in one number: the largest double has 309."""

_QUOTE, _COMMA, _COLON = b'",:'
_SPACE: Final = b" \t\r\n"
_CLOSING: Final = {b"[": b"]", b"{": b"}"}
_STEPS: Final = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_IS_MARK: Final = _STEPS != 0
_IS_MARK[[_COMMA, _COLON]] = True
_IS_DIGIT: Final = np.zeros(256, np.bool_)
_IS_DIGIT[list(b"0123456789")] = True
_AS_ZEROS: Final = bytes(0x30 if is_digit else 0x20 for is_digit in _IS_DIGIT)
_TOO_MANY_ZEROS: Final = b"0" * (MAX_DIGITS + 1)
_ESCAPE_CUT: Final = re.compile(rb"\\u[0-9a-fA-F]{0,3}\Z")
_FIRST_HALF: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
_PLACE: Final = re.compile(r" ?\(byte (\d+)\)")


class NotJson(Exception):
    """The document is not JSON; the message says where."""


class Excessive(Exception):
    """The document exceeds a bound; the message says which."""


class TooLong(Excessive):
    """It has a string that is too long."""


class TooDeep(Excessive):
    """It has too many containers, one inside the other."""


class TooManyDigits(Excessive):
    """It has a number with too many digits."""

    def __init__(self) -> None:
        super().__init__(f"has a number of more than {MAX_DIGITS} digits")


@frozen
class JsonLimits:
    """What one document may hold. `text` is the length of one string, in characters.

    `values` counts a value for each comma and each opening bracket, and one more.
    """

    values: int = 32_768
    text: int = 2 << 20
    depth: int = MAX_DEPTH


USUAL: Final = JsonLimits()


@frozen
class _Outline:
    """The marks of a document: its commas, colons and brackets outside of strings.

    `levels` is how many containers are open behind each mark.
    """

    places: NDArray[np.int32]
    chars: NDArray[np.uint8]
    levels: NDArray[np.int32]


def is_small(body: bytes) -> bool:
    """Whether a body is decoded, checked and translated in less than a millisecond or two."""
    return len(body) <= 32_768 and _most_marks(body) <= 1024


def is_blank(body: bytes) -> bool:
    """Whether there is nothing but white space in a body."""
    slices = (body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES))
    return all(map(bytes.isspace, slices))


def decoded(
    body: bytes, limits: JsonLimits, load: Callable[[bytes], Any] = msgspec.json.decode
) -> Any:
    """Return the value of a JSON document. `load` decodes one piece.

    Raises:
        NotJson: it is not JSON.
        Excessive: it has more values than `limits`.
        TooLong: it has a longer string.
        TooDeep: it is nested deeper.
        TooManyDigits: it has a number of more than `MAX_DIGITS` digits.
    """
    few = len(body) <= PIECE_BYTES and _most_marks(body) <= min(limits.depth, limits.values)
    if few and body.translate(_AS_ZEROS).find(_TOO_MANY_ZEROS) < 0:
        return _loaded(load, body, 0)
    outline = _outline(body, limits)
    return _Pieces(body, outline, limits, load).value(0, len(body))


def _most_marks(body: bytes) -> int:
    """Return the number of commas and opening brackets, those in strings included."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def _outline(body: bytes, limits: JsonLimits) -> _Outline:
    """Find the marks of a document, 64 KiB at a time. Raises :class:`Excessive`."""
    places, chars, levels = [], [], []
    digits = np.empty(0, np.intp)
    start, inside, level, values, marks = 0, 0, 0, 1, 0
    while start < len(body):
        # After this every quote opens or closes a string. The length stays the same.
        part = body[start : start + PIECE_BYTES].replace(rb"\\", b"__").replace(rb"\"", b"__")
        if part.endswith(b"\\") and start + len(part) < len(body):
            part = part[:-1]  # what it escapes is in the next part
        codes = np.frombuffer(part, np.uint8)
        within = (np.cumsum(codes == _QUOTE, dtype=np.uint8) + np.uint8(inside)) & 1
        found = np.flatnonzero(_IS_MARK[codes] & (within == 0))
        inside = int(within[-1])
        bare = np.flatnonzero(_IS_DIGIT[codes] & (within == 0)) + start
        digits = np.concatenate((digits[-MAX_DIGITS:], bare))
        if np.any(digits[MAX_DIGITS:] - digits[:-MAX_DIGITS] == MAX_DIGITS):
            raise TooManyDigits
        chars.append(codes[found])
        places.append((found + start).astype(np.int32))
        levels.append(level + np.cumsum(_STEPS[chars[-1]], dtype=np.int32))
        if len(found):
            level = int(levels[-1][-1])
            marks += len(found)
            values += int(np.count_nonzero(chars[-1] == _COMMA)) + int(
                np.count_nonzero(_STEPS[chars[-1]] == 1)
            )
            if int(levels[-1].max()) > limits.depth:
                raise TooDeep(f"is nested too deeply: {limits.depth} levels are allowed")
            # A value has at most a comma, a colon and two brackets of its own.
            if values > limits.values or marks > 4 * limits.values:
                raise Excessive(f"has more than {limits.values} values")
        start += len(part)
    return _Outline(np.concatenate(places), np.concatenate(chars), np.concatenate(levels))


class _Pieces:
    """Decodes one document by its outline."""

    def __init__(
        self, body: bytes, outline: _Outline, limits: JsonLimits, load: Callable[[bytes], Any]
    ) -> None:
        self._body = body
        self._outline = outline
        self._limits = limits
        self._load = load

    def value(self, start: int, end: int) -> Any:
        """Return the value that stands between two places."""
        start, end = self._trimmed(start, end)
        first, last = np.searchsorted(self._outline.places, (start, end)).tolist()
        if end - start <= PIECE_BYTES and last - first <= PIECE_MARKS:
            return _loaded(self._load, self._body[start:end], start)
        opening = self._body[start : start + 1]
        if opening in _CLOSING:
            return self._container(start, end, first, last)
        if opening == b'"' and self._body[end - 1] == _QUOTE:
            return self._text(start + 1, end - 1)
        raise self._malformed("a number or word without an end", start)

    def _container(self, start: int, end: int, first: int, last: int) -> Any:
        opening = self._body[start : start + 1]
        closing = _CLOSING[opening]
        levels = self._outline.levels[first:last]
        level = int(levels[0])
        whole = self._body[end - 1 : end] == closing and int(levels[-1]) == level - 1
        if not whole or int(levels[:-1].min()) < level:
            raise self._malformed("a bracket is closed by another one, or not at all", start)
        separates = (levels == level) & (self._outline.chars[first:last] == _COMMA)
        commas = np.flatnonzero(separates) + first
        marks = np.concatenate(([first], commas, [last - 1]))
        found: Any = [] if opening == b"[" else {}
        for left, right in self._pieces(marks):
            at, until = left + 1, right
            if until - at > PIECE_BYTES or self._n_marks(at, until) > PIECE_MARKS:
                self._add_large(found, at, until, alone=len(marks) == 2)
                continue
            part = _loaded(self._load, opening + self._body[at:until] + closing, left)
            if not part:
                raise self._malformed("a value is missing beside a comma", left)
            if isinstance(found, list):
                found += part
            else:
                found.update(part)
        return found

    def _pieces(self, marks: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Yield the places around as many elements as make one piece, or around one that is larger.

        `marks` are those around the elements of one container.
        """
        places = self._outline.places[marks]
        at = 0
        while at < len(marks) - 1:
            by_bytes = int(np.searchsorted(places, int(places[at]) + PIECE_BYTES, "right"))
            by_marks = int(np.searchsorted(marks, int(marks[at]) + PIECE_MARKS, "right"))
            after = max(at + 1, min(by_bytes, by_marks) - 1)
            yield int(places[at]), int(places[after])
            at = after

    def _add_large(self, found: Any, start: int, end: int, *, alone: bool) -> None:
        at, until = self._trimmed(start, end)
        if at == until:
            if not alone:
                raise self._malformed("a value is missing beside a comma", start)
        elif isinstance(found, list):
            found.append(self.value(at, until))
        else:
            outline = self._outline
            first, last = np.searchsorted(outline.places, (at, until)).tolist()
            if first == last or outline.chars[first] != _COLON:
                raise self._malformed("a name is not followed by a colon", at)
            colon = int(outline.places[first])
            name = self.value(at, colon)
            if not isinstance(name, str):
                raise self._malformed("a name is not a string", at)
            found[name] = self.value(colon + 1, until)

    def _text(self, start: int, end: int) -> str:
        parts: list[str] = []
        length = 0
        while start < end:
            part = self._body[start : min(end, start + PIECE_BYTES)]
            if start + len(part) < end:
                part = part[: _cut(part, self._body[start + len(part)])]
            parts.append(_loaded(self._load, b'"%b"' % part, start - 1))
            length += len(parts[-1])
            if length > self._limits.text:
                raise TooLong(f"has a text of more than {self._limits.text} characters")
            start += len(part)
        return "".join(parts)

    def _trimmed(self, start: int, end: int) -> tuple[int, int]:
        while start < end:
            part = self._body[start : min(end, start + PIECE_BYTES)]
            left = len(part.lstrip(_SPACE))
            start += len(part) - left
            if left:
                break
        while start < end:
            part = self._body[max(start, end - PIECE_BYTES) : end]
            left = len(part.rstrip(_SPACE))
            end -= len(part) - left
            if left:
                break
        return start, end

    def _n_marks(self, start: int, end: int) -> int:
        first, last = np.searchsorted(self._outline.places, (start, end)).tolist()
        return int(last - first)

    def _malformed(self, why: str, place: int) -> NotJson:
        return NotJson(f"JSON is malformed: {why} (byte {place})")


def _cut(part: bytes, following: int) -> int:
    """Return where a part of a string's inside can end: between two characters.

    `following` is the byte behind the part.
    """
    end = len(part)
    if following & 0xC0 == 0x80:  # in the middle of a character of UTF-8
        for back in range(1, 4):
            if part[-back] & 0xC0 != 0x80:
                end -= back
                break
    end -= _escapes(part, end)
    for pattern in (_ESCAPE_CUT, _FIRST_HALF):
        found = pattern.search(part[max(0, end - 6) : end])
        at = end - 6 + found.start() if found is not None and end >= 6 else 0
        if at and _escapes(part, at + 1):
            end = at
    return end or len(part)


def _escapes(part: bytes, end: int) -> bool:
    head = part[:end]
    return (len(head) - len(head.rstrip(b"\\"))) % 2 == 1


def _loaded(load: Callable[[bytes], Any], piece: bytes, base: int) -> Any:
    """Return what is in a piece; `base` is the place of its first byte in the document."""
    try:
        try:
            return load(piece)
        except (msgspec.DecodeError, ValueError):
            mended = without_lone_surrogates(piece)
            if mended == piece:
                raise
            return load(mended)
    except RecursionError:
        raise TooDeep("is nested too deeply") from None
    except UnicodeDecodeError:
        raise NotJson("it is not valid UTF-8") from None
    except (msgspec.DecodeError, ValueError) as error:
        said = _PLACE.sub(lambda found: f" (byte {int(found[1]) + base})", str(error))
        raise NotJson(said) from None
