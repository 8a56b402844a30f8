"""Drafts may fail and harm nobody: what a drafter raises stays here, and it rests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import TypeVar

from uma_trio.engine.chunk import NO_DRAFT, Outcome
from uma_trio.engine.drafts.drafting import Drafting, Unread
from uma_trio.engine.drafts.failures import Failures
from uma_trio.engine.sequences import Sequence
from uma_trio.telemetry import log

T = TypeVar("T")


class Contained:
    """Calls `inner` for an engine, and raises nothing.

    After a failure nothing is drafted in that tick; after several the drafter rests, for a minute at
    first (:class:`Failures`). Answers do not change: drafts are verified.
    """

    def __init__(self, inner: Drafting, clock: Callable[[], float] = monotonic) -> None:
        self.inner = inner
        self._clock = clock
        self._failed = Failures()

    @property
    def failures(self) -> int:
        """How often the drafter failed."""
        return self._failed.total

    def propose(self, running: Mapping[int, Sequence]) -> None:
        """Draft for each sequence that decodes and whose request allows it."""
        before = self._failed.total
        self._guarded(lambda: self.inner.propose(running), default=None)
        if self._failed.total > before or self._rests:
            for sequence in running.values():
                sequence.guess(NO_DRAFT)

    def unread(self, running: Mapping[int, Sequence]) -> list[Unread]:
        """Return what is to be taken in before there are guesses."""
        return self._guarded(lambda: self.inner.unread(running), default=[])

    def take_in(self, part: Unread) -> None:
        """Take in a part of a text."""
        self._guarded(lambda: self.inner.take_in(part), default=None)

    def expects(self, outcomes: Iterable[Outcome], running: Mapping[int, Sequence]) -> bool:
        """Whether a likely draft follows what was just sampled; see :class:`Drafting`."""
        return self._guarded(lambda: self.inner.expects(outcomes, running), default=False)

    def learn(self, sequence: Sequence, outcome: Outcome) -> None:
        """Note what became of a chunk of `sequence`."""
        self._guarded(lambda: self.inner.learn(sequence, outcome), default=None)

    def keep(self, sequence: Sequence) -> None:
        """Take note of a sequence whose answer is whole, and has ended."""
        self._guarded(lambda: self.inner.keep(sequence), default=None)

    def forget(self, mine: Callable[[str], bool]) -> None:
        """Drop what was kept of answers of the namespaces that are `mine`, also during a rest."""
        self._guarded(lambda: self.inner.forget(mine), default=None, rests=False)

    @property
    def _rests(self) -> bool:
        return self._clock() < self._failed.rests_until

    def _guarded(self, act: Callable[[], T], *, default: T, rests: bool = True) -> T:
        """Return what `act` returns; `default` if it raises, or if the drafter rests."""
        if rests and self._rests:
            return default
        try:
            return act()
        except Exception as error:
            rest_s = self._failed.note(self._clock())
            log.get("drafts").warning(
                "drafts failed; nothing is lost",
                why=f"{type(error).__name__}: {error}",
                asked_again_in_s=rest_s,
                exc_info=error,
            )
            return default
