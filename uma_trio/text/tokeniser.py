"""Text to tokens for one model: part by part, with a cache.

A long text is cut where its tokens are those of its parts. As cached prefixes are, tokens are kept by
principal and namespace: no client can learn another's texts by timing.
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
"""Bytes: four million tokens, less the bookkeeping."""
MOST_PRINCIPALS: Final = 64
_SHORT: Final = 64  # characters of a text that is its own name
# A name, an array, and their places in a dict.
_ENTRY_BYTES: Final = 400


_Name = tuple[str, str, str | bytes]  # the namespace, how, the text or its digest


@frozen
class TextOwner:
    """The owner of texts: one namespace of one principal."""

    principal: str
    namespace: str


@define
class _Entries:
    """The tokens of one principal, in order of use."""

    tokens: OrderedDict[_Name, IntArray] = field(factory=OrderedDict)
    n_bytes: int = 0


class Remembered:
    """A cache of tokens by text, of at most `budget` bytes. Safe to use from any thread.

    The principal that holds most, and of too many the least recent one, loses entries first.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._by_principal: OrderedDict[str, _Entries] = OrderedDict()
        self.n_bytes = 0

    def tokens(
        self, owner: TextOwner, text: str, how: str, make: Callable[[], IntArray]
    ) -> IntArray:
        """Return the tokens of `text`, by `make` on a miss; `how` names what else they depend on."""
        name = owner.namespace, how, _digest(text)
        with self._lock:
            entries = self._by_principal.get(owner.principal)
            found = None if entries is None else entries.tokens.get(name)
            if entries is not None and found is not None:
                entries.tokens.move_to_end(name)
                self._by_principal.move_to_end(owner.principal)
                return found
        made = make()
        with self._lock:
            self._keep(owner.principal, name, made)
        return made

    def forget(self, principal: str) -> None:
        with self._lock:
            self._drop(principal)

    def _keep(self, principal: str, name: _Name, tokens: IntArray) -> None:
        n_bytes = tokens.nbytes + _ENTRY_BYTES
        entries = self._by_principal.setdefault(principal, _Entries())
        self._by_principal.move_to_end(principal)
        if name not in entries.tokens and n_bytes <= self._budget:
            entries.tokens[name] = tokens
            entries.n_bytes += n_bytes
            self.n_bytes += n_bytes
        while len(self._by_principal) > MOST_PRINCIPALS:
            self._drop(next(iter(self._by_principal)))
        while self.n_bytes > self._budget:
            most = max(self._by_principal.values(), key=lambda one: one.n_bytes)
            _, oldest = most.tokens.popitem(last=False)
            most.n_bytes -= oldest.nbytes + _ENTRY_BYTES
            self.n_bytes -= oldest.nbytes + _ENTRY_BYTES

    def _drop(self, principal: str) -> None:
        dropped = self._by_principal.pop(principal, None)
        if dropped is not None:
            self.n_bytes -= dropped.n_bytes


def _digest(text: str) -> str | bytes:
    return text if len(text) <= _SHORT else digest("text", text)


_MARKER: Final = "\n"
#: Characters of a part at least. So many and a line are tokenised again: about a millisecond.
LEAST_PART: Final = 2048
# Shorter texts are tokenised in the time that it takes to look them up.
_LEAST_REMEMBERED: Final = 16
# A line end that follows no white space, before a letter: `Vocabulary.parts_at_lines`.
_SEAM: Final = re.compile(r"\n(?<=[!-~]\n)(?=[A-Za-z])")


class Tokeniser:
    """The tokens of texts for one vocabulary. Safe to use from any thread."""

    def __init__(
        self, vocabulary: Vocabulary, pieces: Sequence[bytes], least_part: int = LEAST_PART
    ) -> None:
        self._vocabulary, self._pieces, self._least_part = vocabulary, pieces, least_part
        self._remembered = Remembered()
        self._adds_space = self._bytes(self.tokens("a")).startswith(b" ")
        self._parts_at_lines = vocabulary.parts_at_lines

    def tokens(
        self, text: str, owner: TextOwner | None = None, *, joined: bool = False
    ) -> IntArray:
        """Return the tokens (int32) of a text without control tokens, cached for its owner. Not to be changed.

        `joined` leaves out the space that some vocabularies put before a text.
        """
        if owner is None or len(text) < _LEAST_REMEMBERED:
            return self._made(text, joined=joined)
        parts: Iterable[str] = [text]
        if not self._adds_space and len(text) > self._least_part:
            if self._parts_at_lines:
                parts = _parts(text, self._least_part)
            parts = chain.from_iterable(map(self._apart, parts))
        how = "joined" if joined else ""

        def tokens_of(part: str) -> IntArray:
            return self._remembered.tokens(
                owner, part, how, lambda: self._made(part, joined=joined)
            )

        found = [tokens_of(part) for part in parts]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def forget(self, principal: str) -> None:
        self._remembered.forget(principal)

    def _apart(self, text: str) -> Iterator[str]:
        """Yield the parts that the vocabulary tokenises one by one, joined to parts of our length."""
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
    """Cut `text` at seams, each the first after `least` characters. Looks at slices of it."""
    start, at = 0, least
    while at < len(text):
        found = _SEAM.search(text, at, at + SLICE)
        if found is None:
            at += SLICE - 1  # the letter after the last line end was not in the slice
        else:
            yield text[start : found.end()]
            start, at = found.end(), found.end() + least
    yield text[start:]
