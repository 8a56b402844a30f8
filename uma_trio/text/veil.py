"""Words that stand for somebody's text while a template renders, and the way back from them.

See :mod:`uma_trio.text.template` for what they are good for.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, Final

from attrs import frozen

from uma_trio.text.slices import consists_of, is_blank, json_text, slices, stripped

# Around a word: a line end, a white space that no template writes (vertical tab), a line end.
# `strip()` takes all of it, `strip("\n")` the outer half. In the middle of a word stands a character
# that nothing strips. JSON escapes all of these.
VT: Final = "\x0b"
_PAD: Final = "\n\x0b\n"
_MIDDLE: Final = "\x0e"
# What is longer is compared by no template, and would be searched for words with it.
_LONGEST_SHOWN: Final = 16_384
_PROSE: Final = re.compile(r"[\w .,:;!?'()+/\n-]*")


class Unrenderable(Exception):
    """The template cannot be used, or not for these messages; the message says why."""


@frozen
class Part:
    """A piece of a rendered chat: the template's own text, or what somebody wrote."""

    text: str
    is_content: bool


@frozen
class Word:
    """A word that a template wrote: which text it stands for, and how often it is escaped as JSON."""

    index: int
    level: int


@frozen
class Cut:
    """A rendered chat, cut at its words: `outside` has one piece more than there are words."""

    outside: Sequence[str]
    words: Sequence[Word]
    texts: Sequence[str]

    def parts(self) -> list[Part]:
        """Put the texts where their words are, stripped where the template stripped.

        Raises :class:`Unrenderable` if it altered them in another way.
        """
        outside = list(self.outside)
        inner: list[str] = []
        for place, word in enumerate(self.words):
            outside[place], left = _unpadded(outside[place], word.level, at_end=True)
            outside[place + 1], right = _unpadded(outside[place + 1], word.level, at_end=False)
            text = stripped(self.texts[word.index], left, right)
            inner.append(escaped(text, word.level))
        if any(VT in text or _MIDDLE in text for text in outside):
            raise Unrenderable("it alters the white space of messages")
        parts = [Part(outside[0], is_content=False)]
        for content, text in zip(inner, outside[1:], strict=True):
            parts += [Part(content, is_content=True), Part(text, is_content=False)]
        return [part for part in parts if part.text]


class Veil:
    """Hides the texts of one rendering behind words.

    `contents` are those that have to come back exactly once, each with the place and the role of its
    message, by the index of its word.
    """

    def __init__(self) -> None:
        self._word = f"q{secrets.token_hex(12)}"
        self._texts: list[str] = []
        self.contents: dict[int, tuple[int, str]] = {}

    def content(self, text: str, place: int, role: str) -> str:
        """Hide the content of a message. A little white space alone does no harm, and is not hidden."""
        if len(text) <= _LONGEST_SHOWN and is_blank(text) and VT not in text:
            return text
        self.contents[len(self._texts)] = place, role
        return self._hidden(text)

    def hide(self, value: Any) -> Any:
        """Hide every text in a JSON value that is no plain prose, keys included."""
        if isinstance(value, str):
            return (
                value if len(value) <= _LONGEST_SHOWN and is_prose(value) else self._hidden(value)
            )
        if isinstance(value, dict):
            return {self.hide(key): self.hide(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(inner) for inner in value]
        return value

    def cut(self, rendered: str) -> Cut:
        """Cut a rendered chat at its words. Raises :class:`Unrenderable` if one is altered."""
        pieces = re.split(rf"{self._word}(?:{_MIDDLE}|(\\+)u000e)([0-9]+)q", rendered)
        outside = pieces[0::3]
        if any(self._word in text.lower() for text in outside):
            raise Unrenderable("it alters a text")
        words = [
            Word(int(index), len(slashes or "").bit_length())
            for slashes, index in zip(pieces[1::3], pieces[2::3], strict=True)
        ]
        return Cut(outside, words, self._texts)

    def _hidden(self, text: str) -> str:
        self._texts.append(_encodable(text))
        return f"{_PAD}{self._word}{_MIDDLE}{len(self._texts) - 1}q{_PAD}"


def _encodable(text: str) -> str:
    """Return `text` with U+FFFD for halves of characters, which JSON may write as an escape."""
    if text.isascii():
        return text
    parts = (part.encode("utf-16-le", "surrogatepass") for part in slices(text))
    return "".join(part.decode("utf-16-le", "replace") for part in parts)


def is_prose(text: str) -> bool:
    """Whether a text is too plain to be part of a special token."""
    return consists_of(_PROSE, text)


def escaped(text: str, level: int) -> str:
    """Return `text` as it stands inside a JSON string, in one inside another, and so on."""
    for _ in range(level):
        text = json_text(text)[1:-1]
    return text


def _unpadded(text: str, level: int, *, at_end: bool) -> tuple[str, str | None]:
    """Take the padding off one end of `text`; return what the template strips there.

    That is "" for nothing, a line end, or None for all white space, as `str.strip` takes it.
    """
    whole, half = _PAD, VT + "\n" if at_end else "\n" + VT
    cut = str.removesuffix if at_end else str.removeprefix
    for padding, taken in ((whole, ""), (half, "\n")):
        rest = cut(text, escaped(padding, level))
        if rest != text:
            return rest, taken
    return text, None
