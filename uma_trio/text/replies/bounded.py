"""Bounded reasoning in harmony, where it is a message among others and a grammar spans all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from uma_trio.text.inner import Constraint
from uma_trio.text.under_way import UnderWay

_CHANNEL: Final = rb"<\|channel\|>\s*"
_NAME: Final = b"analysis"
_OPENED: Final = re.compile(_CHANNEL + _NAME + rb"\s*<\|message\|>\Z")
_NAMED: Final = re.compile(_CHANNEL + rb"\Z")
_CLOSED: Final = re.compile(rb"<\|(end|start|call|return|channel)\|>\Z")
_TAIL: Final = 64  # bytes of a reply in which its latest marker is looked for; a header has fewer
CLOSE: Final = "<|end|><|start|>assistant"
"""What ends a message of reasoning and begins the next message."""


@frozen(eq=False)
class Framing:
    """How a model writes harmony: the bytes of each token, special ones as markers.

    `close` are the tokens of :data:`CLOSE`, `names` those that may begin the name of reasoning's channel.
    """

    pieces: Sequence[bytes]
    close: tuple[int, ...]
    names: NDArray[np.intp]

    @classmethod
    def of(cls, pieces: Sequence[bytes], close: tuple[int, ...]) -> Framing:
        """Find the tokens. Takes some ten milliseconds for a large vocabulary."""
        found = ((token, piece.lstrip()) for token, piece in enumerate(pieces))
        names = [
            token
            for token, piece in found
            if piece and (_NAME.startswith(piece) or piece.startswith(_NAME))
        ]
        return cls(pieces, close, np.array(names, np.intp))


@frozen
class _At:
    """The state of a reply: its last bytes, its tokens of reasoning, and the tokens that must come next."""

    tail: bytes = b""
    n: int = 0
    thinking: bool = False
    forced: tuple[int, ...] = ()


class Bounded:
    """Bounds all reasoning of one reply in harmony to `budget` tokens.

    Then the message is closed, and the next one is an answer or a call. `inner` constrains the whole reply.
    """

    __slots__ = ("_at", "_budget", "_framing", "_inner", "_past")

    def __init__(self, framing: Framing, inner: Constraint | None, budget: int) -> None:
        self._framing = framing
        self._inner = inner
        self._budget = budget
        self._at = _At()
        self._past: list[_At] = []

    @property
    def elsewhere(self) -> bool:
        return not self._at.forced and self._inner is not None and self._inner.elsewhere

    @property
    def problem(self) -> str | None:
        return None if self._inner is None else self._inner.problem

    def allows(self, token: int) -> bool:
        at = self._at
        if at.forced:
            return token == at.forced[0]
        if self._is_spent_in_header and token in self._framing.names:
            return False
        return self._inner is None or self._inner.allows(token)

    def allowed(self) -> NDArray[np.intp]:
        return self.deferred()()

    def deferred(self) -> Callable[[], NDArray[np.intp]]:
        at = self._at
        if at.forced:
            return lambda: np.array(at.forced[:1], np.intp)
        inner = self._every if self._inner is None else self._inner.deferred()
        if not self._is_spent_in_header:
            return inner
        names = self._framing.names
        if isinstance(inner, UnderWay):
            return inner.then(lambda ids: np.setdiff1d(ids, names))
        return lambda: np.setdiff1d(inner(), names)

    def accept(self, token: int) -> None:
        if self._inner is not None:
            self._inner.accept(token)
        self._past.append(self._at)
        self._at = self._behind(token)

    def take_back(self) -> None:
        self._at = self._past.pop()
        if self._inner is not None:
            self._inner.take_back()

    @property
    def _is_spent_in_header(self) -> bool:
        """Whether the name of a channel comes next, and may not be that of the reasoning."""
        return self._at.n >= self._budget and _NAMED.search(self._at.tail) is not None

    def _behind(self, token: int) -> _At:
        at = self._at
        tail = (at.tail + self._framing.pieces[token])[-_TAIL:]
        if at.forced:
            return _At(tail, at.n, thinking=False, forced=at.forced[1:])
        if not at.thinking:
            opened = _OPENED.search(tail) is not None
            return self._spent(_At(tail, at.n, thinking=opened))
        if _CLOSED.search(tail):
            return _At(tail, at.n)
        return self._spent(_At(tail, at.n + 1, thinking=True))

    def _spent(self, at: _At) -> _At:
        """Return the same place; its message must be closed if the budget is spent.

        In the middle of a character a grammar takes no marker: then the next token ends that first.
        """
        close = self._framing.close
        if not at.thinking or at.n < self._budget:
            return at
        whole = self._inner is None or self._inner.allows(close[0])
        return evolve(at, forced=close) if whole else at

    def _every(self) -> NDArray[np.intp]:
        return np.arange(len(self._framing.pieces), dtype=np.intp)
