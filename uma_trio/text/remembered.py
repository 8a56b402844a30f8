"""Tokens of texts that were tokenised lately: a conversation comes again with each of its turns.

What is remembered of somebody's texts nobody else can find out, not even by how long a text takes: tokens
are kept by principal, and below that by namespace, as cached prefixes are.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from attrs import define, field, frozen

from uma_trio.backend.base import IntArray
from uma_trio.text.slices import digest

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
