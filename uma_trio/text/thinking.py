"""Reasoning before an answer that is held to something: free, bounded if asked, and then handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from uma_trio.text.inner import Constraint

_MOST_SPACE: Final = 8  # tokens of white space between the reasoning and what follows


@frozen(eq=False)
class Markers:
    """The markers of a model's reasoning: their bytes, and the tokens that the model writes for them.

    `tokens_of` gives the tokens of such bytes, `pieces` the bytes of every token, special ones as a
    reply shows them; `ends` are the tokens that end an answer.
    """

    tokens_of: Callable[[bytes], Sequence[int]]
    pieces: Sequence[bytes]
    open: bytes
    close: bytes
    close_tokens: tuple[int, ...]
    ends: frozenset[int]


@frozen
class _At:
    """Where an answer is.

    `seen` is what was read of the marker that is looked for, `n` how many tokens of reasoning there
    were, `spaces` how many of white space behind it, `forced` the tokens that have to come.
    """

    phase: Literal["before", "thinking", "behind", "answer"]
    seen: bytes = b""
    n: int = 0
    spaces: int = 0
    forced: tuple[int, ...] = ()


_ANSWER: Final = _At("answer")


class Thinking:
    """Leaves the reasoning of one answer free, and holds what follows to `inner`, if there is one.

    With a `budget` the reasoning ends behind so many tokens: its closing marker is all that is
    allowed then. `thinking` says that the prompt has opened it. For one thread at a time.
    """

    __slots__ = ("_at", "_budget", "_inner", "_markers", "_past")

    def __init__(
        self, markers: Markers, inner: Constraint | None, budget: int | None, *, thinking: bool
    ) -> None:
        self._markers = markers
        self._inner = inner
        self._budget = budget
        self._at = self._in_thought(b"", 0, ()) if thinking else _At("before")
        self._past: list[_At] = []

    @property
    def elsewhere(self) -> bool:
        """Whether another process knows what is allowed here."""
        return self._at.phase == "answer" and self._inner is not None and self._inner.elsewhere

    @property
    def problem(self) -> str | None:
        """Which limit leaves no way on, for a message; None if none does."""
        return None if self._inner is None else self._inner.problem

    def allows(self, token: int) -> bool:
        """Whether the answer may go on with `token`; with an end token, whether it may end."""
        at = self._at
        if at.forced:
            return token == at.forced[0]
        if at.phase == "thinking":
            return self._inner is None or token not in self._markers.ends
        if self._opens(token) or self._is_space(token):
            return True
        return self._inner is None or (not at.seen and self._inner.allows(token))

    def allowed(self) -> NDArray[np.intp]:
        """Return all tokens that it may go on with."""
        return (
            self._allowed_here() if self._inner is None or self._is_free else self._inner.allowed()
        )

    def deferred(self) -> Callable[[], NDArray[np.intp]]:
        """Return what `allowed` is here and now, to be called later, in any thread, once."""
        if self._inner is not None and not self._is_free:
            return self._inner.deferred()
        here = self._allowed_here()
        return lambda: here

    @property
    def _is_free(self) -> bool:
        """Whether the reasoning alone decides what comes next."""
        at = self._at
        return bool(at.forced or at.phase == "thinking" or (at.seen and at.phase == "before"))

    def _allowed_here(self) -> NDArray[np.intp]:
        """Return what the reasoning allows."""
        at = self._at
        if at.forced:
            return np.array(at.forced[:1], np.intp)
        if at.seen and at.phase == "before" and self._inner is not None:
            rest = self._markers.open[len(at.seen) :]
            return np.array(self._markers.tokens_of(rest)[:1], np.intp)
        every = np.arange(len(self._markers.pieces), dtype=np.intp)
        return every if self._inner is None else np.delete(every, sorted(self._markers.ends))

    def accept(self, token: int) -> None:
        """Go on behind `token`."""
        self._past.append(self._at)
        self._at = self._behind(token)
        if self._at.phase == "answer" and self._inner is not None:
            self._inner.accept(token)

    def take_back(self) -> None:
        """Go back to before the latest `accept`."""
        if self._at.phase == "answer" and self._inner is not None:
            self._inner.take_back()
        self._at = self._past.pop()

    def _behind(self, token: int) -> _At:
        """Return where the answer is behind `token`."""
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
        """Whether `token` begins the opening marker or goes on with it."""
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
        """Whether `token` is white space between the reasoning and what follows."""
        at = self._at
        if at.phase != "behind" or at.spaces >= _MOST_SPACE:
            return False
        piece = self._markers.pieces[token]
        return bool(piece) and piece.isspace()
