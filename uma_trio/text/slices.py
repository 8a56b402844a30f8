"""Work on texts of a client's size, a slice at a time.

A method of `str` or a regular expression holds the GIL for the whole text: 30 ms to encode 2 MiB of
emoji, 800 ms to find markers in them. Between two slices another thread can take the GIL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

SLICE: Final = 16_384
"""Characters. The slowest step takes a millisecond for so many."""
_WINDOW: Final = 2048


def slices(text: str) -> Iterator[str]:
    """Yield `text` in slices; their concatenation is `text`."""
    return (text[at : at + SLICE] for at in range(0, len(text), SLICE))


def utf8(text: str) -> bytes:
    """Return `text` in UTF-8, with `?` for halves of characters."""
    if len(text) <= SLICE:
        return text.encode("utf-8", "replace")
    return b"".join(part.encode("utf-8", "replace") for part in slices(text))


def utf8_length(text: str) -> int:
    """Return the number of bytes of `text` in UTF-8."""
    return len(text) if text.isascii() else sum(len(utf8(part)) for part in slices(text))


def consists_of(characters: re.Pattern[str], text: str) -> bool:
    """Whether a pattern that is any number of certain characters matches all of `text`."""
    return all(characters.fullmatch(part) is not None for part in slices(text))


class Forgeable:
    """Words that must not stand in a text as they are."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._reach = max(map(len, words))
        behind_first = [f"(?<={re.escape(word[0])})(?={re.escape(word[1:])})" for word in words]
        self._places = re.compile("|".join(behind_first))

    def cut(self, text: str) -> list[str]:
        """Return the parts of `text`, cut behind the first character of every word in it."""
        edges = [0]
        for start in range(0, len(text), _WINDOW):
            end = min(len(text), start + _WINDOW + self._reach)
            part = text[max(0, start - 1) : end]
            if any(word in part for word in self._words):
                found = self._places.finditer(text, start, end)
                edges += [one.start() for one in found if one.start() < start + _WINDOW]
        edges.append(len(text))
        return [text[a:b] for a, b in pairwise(edges)]
