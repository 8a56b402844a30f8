"""Tokens in, text out: incremental UTF-8 and stop strings over token borders.

One :class:`TokenText` belongs to one sequence. What a token costs depends on the bytes of
that token and never on what came before it.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

_REMEMBERED_STOP_STRINGS: Final = 64  # applications send the same ones with every request


class TokenText:
    """The text of one sequence, token by token.

    What `push` and `finish` return, joined, is the decoded bytes of all tokens (invalid ones
    become U+FFFD) up to the first stop string. "First" is the one that is complete first; of
    several that end at the same character the longest, so nothing of a stop string is ever
    sent. Whatever may still become part of one, and bytes that end inside a character, are
    held back. How bytes are spread over tokens changes nothing.
    """

    __slots__ = ("_bytes", "_held_back", "_matcher", "_pieces", "_states", "stopped")

    def __init__(self, pieces: Sequence[bytes], stop: Sequence[str] = ()) -> None:
        self._pieces = pieces
        self._bytes = b""  # at most 3: the beginning of a character
        self._held_back = ""  # the beginning of a stop string, shorter than the longest one
        self._matcher = _matcher(tuple(stop)) if stop else None
        self._states = self._matcher.start if self._matcher else ()
        #: The stop string that was found; from then on nothing more comes out.
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        """Take one token; return the text that may be sent now, often "" or one piece."""
        data = self._pieces[token_id]
        if self._bytes:
            data = self._bytes + data
        text, used = utf_8_decode(data, "replace", False)
        self._bytes = data[used:]
        return self._pass(text) if self._matcher is not None else text

    def stops_with(self, token_id: int) -> bool:
        """Whether a stop string would be complete with this token, which is not taken yet."""
        if self._matcher is None or self.stopped is not None:
            return self.stopped is not None
        text, _ = utf_8_decode(self._bytes + self._pieces[token_id], "replace", False)
        return self._matcher.advance(self._states, text)[1] > 0

    def finish(self) -> str:
        """Return what is still held back; after the end, and after a stop string, ""."""
        data, self._bytes = self._bytes, b""
        text = self._pass(utf_8_decode(data, "replace", True)[0])
        held, self._held_back = self._held_back, ""
        return text + held

    def _pass(self, text: str) -> str:
        """Send `text` through the stop strings."""
        if self._matcher is None:
            return text
        if self.stopped is not None:
            return ""
        known = self._held_back + text
        end, length, self._states = self._matcher.advance(self._states, text)
        if length:
            end += len(known) - len(text)
            self.stopped = known[end - length : end]
            self._held_back = ""
            return known[: end - length]
        keep = len(known) - max(self._states)
        self._held_back = known[keep:]
        return known[:keep]


class _Matcher:
    """Finds several strings in a text that comes in parts (Knuth, Morris, Pratt; 1977).

    Its state is, for each string, how many of its characters the text so far ends with.
    """

    __slots__ = ("_borders", "_first", "_stops", "start")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._first = re.compile("|".join(sorted({re.escape(stop[0]) for stop in stops})))
        self.start: tuple[int, ...] = (0,) * len(stops)

    def advance(self, states: tuple[int, ...], text: str) -> tuple[int, int, tuple[int, ...]]:
        """Return where in `text` the first match ends, its length (0: none), the new state."""
        position = 0
        now = list(states)
        while position < len(text):
            if not any(now):  # nothing has begun: skip to where something may
                begin = self._first.search(text, position)
                if begin is None:
                    break
                position = begin.start()
            length = self._step(now, text[position])
            position += 1
            if length:
                return position, length, self.start
        return position, 0, tuple(now)

    def _step(self, now: list[int], char: str) -> int:
        """Move every string on by one character; return the longest that is complete, or 0."""
        complete = 0
        for index, stop in enumerate(self._stops):
            state = now[index]
            while state and stop[state] != char:
                state = self._borders[index][state]
            state += stop[state] == char
            now[index] = state
            if state == len(stop):
                complete = max(complete, state)
        return complete


@lru_cache(maxsize=_REMEMBERED_STOP_STRINGS)
def _matcher(stops: tuple[str, ...]) -> _Matcher | None:
    """Return the matcher of these strings; an empty one can stop nothing and is left out."""
    wanted = tuple(stop for stop in dict.fromkeys(stops) if stop)
    return _Matcher(wanted) if wanted else None


def _borders(text: str) -> list[int]:
    """Return, for each length, how long the longest border of that beginning of `text` is."""
    borders = [0] * (len(text) + 1)
    border = 0
    for length in range(2, len(text) + 1):
        while border and text[border] != text[length - 1]:
            border = borders[border]
        border += text[border] == text[length - 1]
        borders[length] = border
    return borders
