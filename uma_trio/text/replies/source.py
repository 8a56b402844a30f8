"""The text of a reply as it arrives, for readers that are generators: they yield when they need more."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeVar

from attrs import define

Result = TypeVar("Result")
Steps = Generator[None, None, Result]

_NOT_SPACE: Final = re.compile(r"\S")
_OUTSIDE: Final = re.compile(r'["{}\[\]]')
_INSIDE: Final = re.compile(r'["\\]')
_SCALAR_END: Final = re.compile(r"[\s,}\]:]")


def compact(marker: str) -> str:
    """Return a marker without its white space, as `fits` expects it."""
    return "".join(marker.split())


@define(eq=False)
class Source:
    """The received text of a reply, read up to `pos`.

    Text before `pos` is dropped with the next piece, unless it is `kept` to be read in another way. `ended`
    means that there is no more, `cut` that the model did not end it, so that a half marker at the end is
    one. `short` is set where a reader needed more than there is; readers clear it.
    """

    text: str = ""
    pos: int = 0
    kept: bool = False
    ended: bool = False
    cut: bool = False
    short: bool = False

    def feed(self, piece: str) -> None:
        if self.kept:
            self.text += piece
        else:
            self.text = self.text[self.pos :] + piece
            self.pos = 0

    def drop(self) -> None:
        self.text = self.text[self.pos :]
        self.pos = 0

    def keep(self) -> None:
        self.drop()
        self.kept = True

    def kept_text(self) -> str:
        """Stop keeping, and return what was read meanwhile."""
        self.kept = False
        return self.text[: self.pos]

    def more(self) -> Steps[bool]:
        """Wait for another piece; false if there is none."""
        if not self.ended:
            yield
        self.short |= self.ended
        return not self.ended

    def drop_rest(self) -> None:
        self.pos = len(self.text)

    def first(self) -> Steps[str]:
        """Return the next character that is no white space, "" at the end, without reading."""
        while True:
            found = _NOT_SPACE.search(self.text, self.pos)
            if found is not None:
                return found[0]
            if not (yield from self.more()):
                return ""

    def peek(self) -> Steps[str]:
        """Skip white space; return the next character, "" at the end."""
        while True:
            found = _NOT_SPACE.search(self.text, self.pos)
            if found is not None:
                self.pos = found.start()
                return found[0]
            self.pos = len(self.text)
            if not (yield from self.more()):
                return ""

    def _end_of(self, marker: str) -> Steps[int | None]:
        while (end := fits(self.text, self.pos, marker)) is None:
            if not (yield from self.more()):
                return None
        return end

    def take(self, marker: str) -> Steps[bool]:
        """Skip a compact `marker`, and white space in and before it; also half of one in a reply cut off."""
        end = yield from self._end_of(marker)
        if end is None and self.cut:
            self.drop_rest()
        elif end is not None and end >= 0:
            self.pos = end
        return end is not None and end >= 0

    def starts_with(self, marker: str) -> Steps[bool]:
        end = yield from self._end_of(marker)
        return end is not None and end >= 0

    def begins_line(self) -> bool:
        """Whether the white space at `pos` has a line end."""
        found = _NOT_SPACE.search(self.text, self.pos)
        return "\n" in self.text[self.pos : None if found is None else found.start()]

    def through(self, char: str) -> str:
        """Read up to and with the next `char`, which must have come."""
        start, self.pos = self.pos, self.text.index(char, self.pos) + 1
        return self.text[start : self.pos]

    def until(self, pattern: re.Pattern[str], most: int) -> Steps[str | None]:
        """Read up to what `pattern` finds; None if that is not within `most` characters."""
        while True:
            found = pattern.search(self.text, self.pos)
            end = len(self.text) if found is None else found.start()
            if end - self.pos > most:
                return None
            if found is not None:
                text = self.text[self.pos : end]
                self.pos = end
                return text
            if not (yield from self.more()):
                return None

    def through_text(self, closer: str, out: Callable[[str], object]) -> Steps[bool]:
        """Pass on a text up to `closer`, and read that; false if it does not come."""
        while True:
            place = self.text.find(closer, self.pos)
            end = place if place >= 0 else max(self.pos, len(self.text) - begun(self.text, closer))
            out(self.text[self.pos : end])
            self.pos = end
            if place >= 0:
                self.pos += len(closer)
                return True
            if not (yield from self.more()):
                out("" if self.cut else self.text[self.pos :])
                self.drop_rest()
                return False

    def value(self, out: Callable[[str], object]) -> Steps[bool]:
        """Pass on a JSON value as it arrives, by strings and nesting only; false if the reply ends in it."""
        first = yield from self.peek()
        if first and first not in '"{[':
            return (yield from self._scalar(out))
        nesting = (0, False)
        while True:
            end, nesting, whole = _scan(self.text, self.pos, nesting)
            out(self.text[self.pos : end])
            self.pos = end
            if whole:
                return True
            if not (yield from self.more()):
                out(self.text[self.pos :])
                self.drop_rest()
                return False

    def _scalar(self, out: Callable[[str], object]) -> Steps[bool]:
        while True:
            found = _SCALAR_END.search(self.text, self.pos)
            end = len(self.text) if found is None else found.start()
            out(self.text[self.pos : end])
            self.pos = end
            if found is not None:
                return True
            if not (yield from self.more()):
                return False


def _scan(text: str, at: int, nesting: tuple[int, bool]) -> tuple[int, tuple[int, bool], bool]:
    """Return the end of a JSON value so far, its state there (depth, inside a string), and if that is its end."""
    depth, inside = nesting
    while True:
        found = (_INSIDE if inside else _OUTSIDE).search(text, at)
        if found is None:
            return len(text), (depth, inside), False
        char, at = found[0], found.end()
        if char == "\\":
            if at == len(text):  # the escaped character is in the next piece
                return at - 1, (depth, inside), False
            at += 1
            continue
        if char == '"':
            inside = not inside
        else:
            depth += 1 if char in "{[" else -1
        if depth <= 0 and not inside:
            return at, (depth, inside), True


def begun(text: str, marker: str) -> int:
    """Return how much of `marker` the text ends with, less than all of it."""
    most = min(len(marker) - 1, len(text))
    return next((n for n in range(most, 0, -1) if marker.startswith(text[-n:])), 0)


def fits(text: str, at: int, marker: str) -> int | None:
    """Return where a compact `marker` at `at` ends; -1 if it does not fit, None if that is not certain."""
    end = len(text)
    for char in marker:
        while at < end and text[at].isspace():
            at += 1
        if at == end:
            return None
        if text[at] != char:
            return -1
        at += 1
    return at
