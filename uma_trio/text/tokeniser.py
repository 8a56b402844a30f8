"""Text to tokens for one model: part by part, and not twice what was tokenised before.

A long text is cut where its tokens are those of its parts (:attr:`Vocabulary.parts_at_lines`, and within a long
line :meth:`Vocabulary.apart`), so that a text that begins as an earlier one did is tokenised from the last such
place on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

import numpy as np

from uma_trio.backend.base import IntArray, Vocabulary
from uma_trio.text.remembered import Remembered, Whose
from uma_trio.text.slices import SLICE

_MARKER: Final = "\n"
#: Characters of a part at least. So many and a line are tokenised anew: about a millisecond.
LEAST_PART: Final = 2048
# Shorter texts are tokenised in the time that it takes to look them up.
_LEAST_REMEMBERED: Final = 16
# A line end that follows no white space, before a letter: `Vocabulary.parts_at_lines`.
_SEAM: Final = re.compile(r"\n(?<=[!-~]\n)(?=[A-Za-z])")


class Tokeniser:
    """The tokens of texts for one vocabulary. Safe to use from any thread.

    Long texts are remembered in parts of at least so many characters.
    """

    def __init__(
        self, vocabulary: Vocabulary, pieces: Sequence[bytes], least_part: int = LEAST_PART
    ) -> None:
        self._vocabulary = vocabulary
        self._pieces = pieces
        self._least_part = least_part
        self._remembered = Remembered()
        self._adds_space = self._bytes(self.tokens("a")).startswith(b" ")
        self._parts_at_lines = vocabulary.parts_at_lines

    def tokens(
        self,
        text: str,
        whose: Whose | None = None,
        *,
        special: bool = False,
        joined: bool = False,
    ) -> IntArray:
        """Return the tokens (int32) of one part of a longer text. Not to be changed.

        With `special` what looks like a special token is one. Some vocabularies put a space before any
        text they begin with; in the middle of a text, `joined`, it is left out. Tokens are remembered
        for `whose` texts these are; None for nobody's.
        """
        if whose is None or len(text) < _LEAST_REMEMBERED:
            return self._made(text, special=special, joined=joined)
        parts: Iterable[str] = [text]
        if not self._adds_space and len(text) > self._least_part:
            if self._parts_at_lines and not special:
                parts = _parts(text, self._least_part)
            parts = chain.from_iterable(map(self._apart, parts))
        how = f"{special} {joined}"

        def tokens_of(part: str) -> IntArray:
            return self._remembered.tokens(
                whose, part, how, lambda: self._made(part, special=special, joined=joined)
            )

        found = [tokens_of(part) for part in parts]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def forget(self, principal: str) -> None:
        """Drop what is remembered of a principal's texts."""
        self._remembered.forget(principal)

    def _apart(self, text: str) -> Iterator[str]:
        """Yield the parts that the vocabulary takes one by one, as many together as make a part of ours."""
        if len(text) <= self._least_part:
            yield text
            return
        together = ""
        for part in self._vocabulary.apart(text):
            together += part
            if len(together) >= self._least_part:
                yield together
                together = ""
        if together:
            yield together

    def _made(self, text: str, *, special: bool, joined: bool) -> IntArray:
        tokenize = self._vocabulary.tokenize
        if joined and self._adds_space:
            # A line end goes first and is cut off again, with the space before it.
            tokens = tokenize(_MARKER + text, add_special=False, parse_special=special)
            for count in range(1, min(4, len(tokens)) + 1):
                if self._bytes(tokens[:count]) == b" " + _MARKER.encode():
                    return tokens[count:]
        return tokenize(text, add_special=False, parse_special=special)

    def _bytes(self, tokens: IntArray) -> bytes:
        return b"".join([self._pieces[token] for token in tokens.tolist()])


def _parts(text: str, least: int) -> Iterator[str]:
    """Cut `text` at seams, each the first behind `least` characters. Looks at slices of it."""
    start, at = 0, least
    while at < len(text):
        found = _SEAM.search(text, at, at + SLICE)
        if found is None:
            at += SLICE - 1  # the letter behind the last line end was not seen
        else:
            yield text[start : found.end()]
            start, at = found.end(), found.end() + least
    yield text[start:]
