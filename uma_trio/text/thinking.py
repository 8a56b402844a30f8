"""Reasoning in front of a constrained answer: free, or bounded by a budget."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Literal

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from uma_trio.text.constraint import Constraint, UnderWay

_MOST_SPACE: Final = 8  # tokens of white space between the reasoning and what follows


@frozen(eq=False)
class Markers:
    """The markers of a model's reasoning, and the bytes of every token as a reply shows them."""

    tokens_of: Callable[[bytes], Sequence[int]]
    pieces: Sequence[bytes]
    open: bytes
    close: bytes
    close_tokens: tuple[int, ...]
    ends: frozenset[int]


@frozen
class _At:
    """The state of an answer; `seen` was read of the expected marker, and `forced` must come next."""

    phase: Literal["before", "thinking", "behind", "answer"]
    seen: bytes = b""
    n: int = 0
    spaces: int = 0
    forced: tuple[int, ...] = ()


_ANSWER: Final = _At("answer")


class Thinking:
    """Leaves at most `budget` tokens of reasoning free, and applies `inner` to what follows."""

    __slots__ = ("_at", "_budget", "_inner", "_markers", "_past")

    def __init__(
        self, markers: Markers, inner: Constraint | None, budget: int | None, *, thinking: bool
    ) -> None:
        self._markers, self._inner, self._budget = markers, inner, budget
        self._at = self._in_thought(b"", 0, ()) if thinking else _At("before")
        self._past: list[_At] = []

    @property
    def elsewhere(self) -> bool:
        return self._at.phase == "answer" and self._inner is not None and self._inner.elsewhere

    @property
    def problem(self) -> str | None:
        return None if self._inner is None else self._inner.problem

    def allows(self, token: int) -> bool:
        at = self._at
        if at.forced:
            return token == at.forced[0]
        if at.phase == "thinking":
            return self._inner is None or token not in self._markers.ends
        if self._opens(token) or self._is_space(token):
            return True
        return self._inner is None or (not at.seen and self._inner.allows(token))

    def allowed(self) -> NDArray[np.intp]:
        inner = self._deciding
        return self._allowed_here() if inner is None else inner.allowed()

    def deferred(self) -> Callable[[], NDArray[np.intp]]:
        if (inner := self._deciding) is not None:
            return inner.deferred()
        here = self._allowed_here()
        return lambda: here

    @property
    def _deciding(self) -> Constraint | None:
        """The constraint that determines the next tokens; None where the reasoning alone does."""
        at = self._at
        is_free = at.forced or at.phase == "thinking" or (at.seen and at.phase == "before")
        return None if is_free else self._inner

    def _allowed_here(self) -> NDArray[np.intp]:
        at = self._at
        if at.forced:
            return np.array(at.forced[:1], np.intp)
        if at.seen and at.phase == "before" and self._inner is not None:
            rest = self._markers.open[len(at.seen) :]
            return np.array(self._markers.tokens_of(rest)[:1], np.intp)
        every = np.arange(len(self._markers.pieces), dtype=np.intp)
        return every if self._inner is None else np.delete(every, sorted(self._markers.ends))

    def accept(self, token: int) -> None:
        self._past.append(self._at)
        self._at = self._behind(token)
        if self._at.phase == "answer" and self._inner is not None:
            self._inner.accept(token)

    def take_back(self) -> None:
        if self._at.phase == "answer" and self._inner is not None:
            self._inner.take_back()
        self._at = self._past.pop()

    def _behind(self, token: int) -> _At:
        at, markers = self._at, self._markers
        piece = markers.pieces[token]
        if at.phase == "thinking":
            seen = at.seen + piece
            if markers.close in seen:
                return _At("behind", n=at.n + 1)
            return self._in_thought(seen[-len(markers.close) :], at.n + 1, at.forced[1:])
        if self._opens(token):
            seen = at.seen + piece if at.seen else piece.lstrip()
            if seen.startswith(markers.open):
                return self._in_thought(b"", 0, ())
            return evolve(at, seen=seen)
        if self._is_space(token):
            return evolve(at, spaces=at.spaces + 1)
        return _ANSWER

    def _in_thought(self, seen: bytes, n: int, forced: tuple[int, ...]) -> _At:
        """Return a place in the reasoning, where that has to end if its budget is spent."""
        if not forced and self._budget is not None and n >= self._budget:
            forced = self._markers.close_tokens
        return _At("thinking", seen, n, 0, forced)

    def _opens(self, token: int) -> bool:
        at = self._at
        if at.phase != "before":
            return False
        piece = self._markers.pieces[token]
        text = at.seen + piece if at.seen else piece.lstrip()
        if text.startswith(self._markers.open):
            return True
        if not text or not self._markers.open.startswith(text):
            return False
        # What `inner` takes is its own; of what has begun here nothing can be given to it later.
        return self._inner is None or bool(at.seen) or not self._inner.allows(token)

    def _is_space(self, token: int) -> bool:
        at = self._at
        if at.phase != "behind" or at.spaces >= _MOST_SPACE:
            return False
        piece = self._markers.pieces[token]
        return bool(piece) and piece.isspace()


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
    """How a model writes harmony: `close` are the tokens of :data:`CLOSE`, `names` begin "analysis"."""

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
class _Place:
    """The state of a reply: its last bytes, its tokens of reasoning, and the tokens that must come next."""

    tail: bytes = b""
    n: int = 0
    thinking: bool = False
    forced: tuple[int, ...] = ()


class Bounded:
    """Bounds the reasoning of a reply in harmony; then the next message is an answer or a call."""

    __slots__ = ("_at", "_budget", "_framing", "_inner", "_past")

    def __init__(self, framing: Framing, inner: Constraint | None, budget: int) -> None:
        self._framing, self._inner, self._budget = framing, inner, budget
        self._at = _Place()
        self._past: list[_Place] = []

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
        """Whether the name of a channel is next, and may not be that of the reasoning."""
        return self._at.n >= self._budget and _NAMED.search(self._at.tail) is not None

    def _behind(self, token: int) -> _Place:
        at = self._at
        tail = (at.tail + self._framing.pieces[token])[-_TAIL:]
        if at.forced:
            return _Place(tail, at.n, thinking=False, forced=at.forced[1:])
        if not at.thinking:
            opened = _OPENED.search(tail) is not None
            return self._spent(_Place(tail, at.n, thinking=opened))
        if _CLOSED.search(tail):
            return _Place(tail, at.n)
        return self._spent(_Place(tail, at.n + 1, thinking=True))

    def _spent(self, at: _Place) -> _Place:
        """Close the message if the budget is spent, unless in the middle of a character, where no marker fits."""
        close = self._framing.close
        if not at.thinking or at.n < self._budget:
            return at
        whole = self._inner is None or self._inner.allows(close[0])
        return evolve(at, forced=close) if whole else at

    def _every(self) -> NDArray[np.intp]:
        return np.arange(len(self._framing.pieces), dtype=np.intp)
