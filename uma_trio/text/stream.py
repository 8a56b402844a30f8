"""Tokens in, text out: incremental UTF-8 and stop strings across token borders."""

from __future__ import annotations

from bisect import bisect_left
from codecs import utf_8_decode
from collections.abc import Sequence


class StopStrings:
    """Ends a text that arrives in parts before the first of several stop strings.

    The first one is the one that is complete first, and the longest of those that end together, so that
    no part of a stop string is sent. What may become one is held back. Takes amortised constant time per
    character, and one pass in C over the strings only while one may have begun.
    """

    __slots__ = ("_firsts", "_held_back", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted({stop for stop in stops if stop}))
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._held_back = ""  # the longest end of the text so far that begins a stop string
        #: The stop string that was found; after it no text is returned.
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Take the next part; return the text that may be sent now."""
        if self.stopped is not None:
            return ""
        known = self._held_back + text
        end, self._held_back, self.stopped = self._search(text)
        if self.stopped is not None:
            end += len(known) - len(text)
            return known[: end - len(self.stopped)]
        return known[: len(known) - len(self._held_back)]

    def stops_with(self, text: str) -> bool:
        """Whether a stop string would be complete with this part, which is not taken yet."""
        return self.stopped is not None or self._search(text)[2] is not None

    def finish(self) -> str:
        """Return what is held back: no stop string spans this place."""
        held, self._held_back = self._held_back, ""
        return held

    def _search(self, text: str) -> tuple[int, str, str | None]:
        """Return the end of the first match in `text`, the text to hold back, and the match."""
        begun = self._held_back
        for end, char in enumerate(text, 1):
            if not begun and char not in self._firsts:
                continue
            begun += char
            while begun and not self._begins(begun):  # each round undoes one character
                begun = begun[1:]
            if begun.endswith(self._stops):
                return end, "", max(filter(begun.endswith, self._stops), key=len)
        return len(text), begun, None

    def _begins(self, text: str) -> bool:
        """Whether a stop string begins with `text`: the first one that is not sorted before it does."""
        at = bisect_left(self._stops, text)
        return at < len(self._stops) and self._stops[at].startswith(text)


class TokenText:
    """The text of one sequence, token by token, up to the first stop string. Invalid bytes become U+FFFD."""

    __slots__ = ("_bytes", "_pieces", "_stops")

    def __init__(self, pieces: Sequence[bytes], stop: Sequence[str] = ()) -> None:
        self._pieces = pieces
        self._bytes = b""  # at most 3: the beginning of a character
        self._stops = StopStrings(stop) if any(stop) else None

    @property
    def stopped(self) -> str | None:
        return None if self._stops is None else self._stops.stopped

    def push(self, token_id: int) -> str:
        """Take one token; return the text that may be sent now."""
        data = self._pieces[token_id]
        if self._bytes:
            data = self._bytes + data
        text, used = utf_8_decode(data, "replace", False)
        self._bytes = data[used:]
        return text if self._stops is None else self._stops.push(text)

    def stops_with(self, token_id: int) -> bool:
        """Whether a stop string would be complete with this token, which is not taken yet."""
        if self._stops is None:
            return False
        text, _ = utf_8_decode(self._bytes + self._pieces[token_id], "replace", False)
        return self._stops.stops_with(text)

    def finish(self) -> str:
        """Return what is held back; after a stop string ""."""
        data, self._bytes = self._bytes, b""
        text = utf_8_decode(data, "replace", True)[0]
        return text if self._stops is None else self._stops.push(text) + self._stops.finish()
