"""Text to tokens for one model: part by part, and not twice what was tokenised before.

A long text is cut where its tokens are those of its parts (:attr:`Vocabulary.parts_at_lines`, and within a long
line :meth:`Vocabulary.apart`), so that a text that begins as an earlier one did is tokenised from the last such
place on. What is remembered of somebody's texts nobody else can find out, not even by how long a text takes: tokens
are kept by principal, and below that by namespace, as cached prefixes are.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

import numpy as np
from attrs import define, field, frozen

from uma_trio.backend.base import IntArray, Vocabulary
from uma_trio.text.slices import SLICE, digest

BUDGET: Final = 16 << 20
"""Bytes: four million tokens, less what is kept beside them."""
MOST_PRINCIPALS: Final = 64
_SHORT: Final = 64  # characters of a text that is its own name
# A name, an array, and their places in a dict.
_ENTRY_BYTES: Final = 400


_Name = tuple[str, str, str | bytes]  # the namespace, how, the text or its digest


@frozen
class Whose:
    """Who may know that a text was tokenised: requests of one namespace of one principal."""

    principal: str
    namespace: str


@define
class _Shelf:
    """What is kept for one principal, the entry that was used last at the end."""

    tokens: OrderedDict[_Name, IntArray] = field(factory=OrderedDict)
    n_bytes: int = 0


class Remembered:
    """Tokens by text, at most `budget` bytes of them. Safe to use from any thread.

    Where there is no room the principal that holds most loses what it used least recently, and with too
    many principals the one goes that asked least recently.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()
        self._n_bytes = 0

    @property
    def n_bytes(self) -> int:
        """The size of everything that is kept."""
        return self._n_bytes

    def tokens(self, whose: Whose, text: str, how: str, make: Callable[[], IntArray]) -> IntArray:
        """Return the tokens of `text`, which `make` makes where nothing is remembered. Not to be changed.

        `how` names everything else that the tokens depend on.
        """
        name = whose.namespace, how, _digest(text)
        with self._lock:
            shelf = self._shelves.get(whose.principal)
            found = None if shelf is None else shelf.tokens.get(name)
            if shelf is not None and found is not None:
                shelf.tokens.move_to_end(name)
                self._shelves.move_to_end(whose.principal)
                return found
        made = make()
        with self._lock:
            self._keep(whose.principal, name, made)
        return made

    def forget(self, principal: str) -> None:
        """Drop what is remembered of a principal's texts."""
        with self._lock:
            self._drop(principal)

    def _keep(self, principal: str, name: _Name, tokens: IntArray) -> None:
        n_bytes = tokens.nbytes + _ENTRY_BYTES
        shelf = self._shelves.setdefault(principal, _Shelf())
        self._shelves.move_to_end(principal)
        if name not in shelf.tokens and n_bytes <= self._budget:
            shelf.tokens[name] = tokens
            shelf.n_bytes += n_bytes
            self._n_bytes += n_bytes
        while len(self._shelves) > MOST_PRINCIPALS:
            self._drop(next(iter(self._shelves)))
        while self._n_bytes > self._budget:
            most = max(self._shelves.values(), key=lambda one: one.n_bytes)
            _, oldest = most.tokens.popitem(last=False)
            most.n_bytes -= oldest.nbytes + _ENTRY_BYTES
            self._n_bytes -= oldest.nbytes + _ENTRY_BYTES

    def _drop(self, principal: str) -> None:
        dropped = self._shelves.pop(principal, None)
        if dropped is not None:
            self._n_bytes -= dropped.n_bytes


def _digest(text: str) -> str | bytes:
    """Return a name of a text that no other one has: for most texts a digest, which is short."""
    return text if len(text) <= _SHORT else digest("text", text)


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
        joined: bool = False,
    ) -> IntArray:
        """Return the tokens (int32) of one part of a longer text, of which none is a control token. Not to be changed.

        Some vocabularies put a space before any text they begin with; in the middle of a text, `joined`, it is
        left out. Tokens are remembered for `whose` texts these are; None for nobody's.
        """
        if whose is None or len(text) < _LEAST_REMEMBERED:
            return self._made(text, joined=joined)
        parts: Iterable[str] = [text]
        if not self._adds_space and len(text) > self._least_part:
            if self._parts_at_lines:
                parts = _parts(text, self._least_part)
            parts = chain.from_iterable(map(self._apart, parts))
        how = "joined" if joined else ""

        def tokens_of(part: str) -> IntArray:
            return self._remembered.tokens(
                whose, part, how, lambda: self._made(part, joined=joined)
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

    def _made(self, text: str, *, joined: bool) -> IntArray:
        tokenize = self._vocabulary.tokenize
        if joined and self._adds_space:
            # A line end goes first and is cut off again, with the space before it.
            tokens = tokenize(_MARKER + text, add_special=False, parse_special=False)
            for count in range(1, min(4, len(tokens)) + 1):
                if self._bytes(tokens[:count]) == b" " + _MARKER.encode():
                    return tokens[count:]
        return tokenize(text, add_special=False, parse_special=False)

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
