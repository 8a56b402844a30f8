"""Drafts: what an engine requests of a drafter, how failures of one are contained, and how it takes in texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Final, TypeVar

from attrs import define, evolve, field, frozen

from uma_trio.engine.chunk import NO_DRAFT, Outcome
from uma_trio.engine.drafts.lookup import INDEXED_A_TICK, ORDERS
from uma_trio.engine.sequences import Sequence
from uma_trio.machine.background import Bound, Charges, Part
from uma_trio.observe import log
from uma_trio.policy.fairness import Path


@frozen(eq=False)
class Unread:
    """A part of a text that is to be taken in: `n_tokens` of a `sequence`, or of an earlier answer.

    `program` is the path of the user that is charged.
    """

    program: Path
    n_tokens: int
    sequence: Sequence | None = None


class Drafting:
    """Proposes drafts, and receives the outcomes. This one guesses nothing. Every method is called on the engine's thread.

    `running` are the sequences that have a slot, by key.
    """

    failures = 0

    def propose(self, running: Mapping[int, Sequence]) -> None:
        """Draft for each sequence that decodes and whose request allows it."""

    def unread(self, running: Mapping[int, Sequence]) -> list[Unread]:
        """Return what is to be taken in before there are guesses, at most a part of each text."""
        return []

    def take_in(self, part: Unread) -> None:
        """Take in a part, which is one of :meth:`unread`, or the beginning of one."""

    def expects(self, outcomes: Iterable[Outcome], running: Mapping[int, Sequence]) -> bool:
        """Whether a likely draft follows what was just sampled, so that the next tick is planned again.

        The commit of these outcomes is still to come.
        """
        return False

    def learn(self, sequence: Sequence, outcome: Outcome) -> None:
        """Note the outcome of a chunk of `sequence`."""

    def keep(self, sequence: Sequence) -> None:
        """Take note of a sequence whose answer is whole, and has ended."""

    def forget(self, mine: Callable[[str], bool]) -> None:
        """Drop what was kept of answers of the namespaces for which `mine` is true."""


PATIENCE: Final = 3  # failures until the first rest; after a rest one is enough
# Memory that ran out may be there again after a minute. An attempt that fails costs its tick the drafts
# and a line of the log, so that one an hour is not noticed.
FIRST_REST_S: Final = 60.0
LONGEST_REST_S: Final = 3600.0


@define
class Failures:
    """Counts failures, and says how long to rest after them. Times are the caller's clock, in seconds.

    A time in which it may be asked and does not fail makes up for all failures, if it is as long as the
    rest that would come next.
    """

    total: int = 0
    rests_until: float = -math.inf
    _left: int = PATIENCE
    _rest_s: float = FIRST_REST_S
    _latest: float = -math.inf

    def note(self, now: float) -> float:
        """Count a failure; return how long to rest from `now` on, or 0.

        Failures during a rest, such as those of cleaning up behind the one before it, make it no longer.
        """
        if now < self.rests_until:
            self.total += 1
            return self.rests_until - now
        if now - max(self._latest, self.rests_until) >= self._rest_s:
            self._left, self._rest_s = PATIENCE, FIRST_REST_S
        self.total += 1
        self._latest = now
        self._left -= 1
        if self._left > 0:
            return 0.0
        rest_s, self._left = self._rest_s, 1
        self.rests_until, self._rest_s = now + rest_s, min(2.0 * rest_s, LONGEST_REST_S)
        return rest_s


T = TypeVar("T")


class Contained(Drafting):
    """Calls `inner` for an engine, and raises nothing.

    After a failure nothing is drafted in that tick; after several the drafter rests, for a minute at
    first (:class:`Failures`). Answers do not change: drafts are verified.
    """

    def __init__(self, inner: Drafting, clock: Callable[[], float] = monotonic) -> None:
        self.inner = inner
        self._clock = clock
        self._failed = Failures()

    @property
    def failures(self) -> int:  # type: ignore[override]
        return self._failed.total

    def propose(self, running: Mapping[int, Sequence]) -> None:
        before = self._failed.total
        self._guarded(lambda: self.inner.propose(running), default=None)
        if self._failed.total > before or self._rests:
            for sequence in running.values():
                sequence.guess(NO_DRAFT)

    def unread(self, running: Mapping[int, Sequence]) -> list[Unread]:
        return self._guarded(lambda: self.inner.unread(running), default=[])

    def take_in(self, part: Unread) -> None:
        self._guarded(lambda: self.inner.take_in(part), default=None)

    def expects(self, outcomes: Iterable[Outcome], running: Mapping[int, Sequence]) -> bool:
        return self._guarded(lambda: self.inner.expects(outcomes, running), default=False)

    def learn(self, sequence: Sequence, outcome: Outcome) -> None:
        self._guarded(lambda: self.inner.learn(sequence, outcome), default=None)

    def keep(self, sequence: Sequence) -> None:
        self._guarded(lambda: self.inner.keep(sequence), default=None)

    def forget(self, mine: Callable[[str], bool]) -> None:
        """Drop what was kept of answers of the namespaces that are `mine`, also during a rest."""
        self._guarded(lambda: self.inner.forget(mine), default=None, rests=False)

    @property
    def _rests(self) -> bool:
        return self._clock() < self._failed.rests_until

    def _guarded(self, act: Callable[[], T], *, default: T, rests: bool = True) -> T:
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


# A token and order takes about so long, until it is measured.
_ONE_S: Final = 1e-6
# What earlier parts still count, beside the latest one, for how long a token takes.
_FADE: Final = 0.8


@define(eq=False)
class Feeding:
    """Takes in the texts of `running` requests. `overlaps` says whether decodes leave the host free now."""

    drafter: Drafting
    charges: Charges
    clock: Callable[[], float]
    overlaps: Callable[[], bool]
    running: Mapping[int, Sequence]
    bound: Bound = "ticks"
    makes_room: bool = False
    _unread: list[Unread] = field(factory=list, init=False)
    _read: float = field(
        default=INDEXED_A_TICK, init=False
    )  # tokens, and the seconds that these took
    _read_s: float = field(default=_ONE_S * len(ORDERS) * INDEXED_A_TICK, init=False)

    def claim(self, *, idle: bool) -> Part | None:
        """Return a part if there are texts to take in; where decodes overlap that is done during them."""
        self._unread = [] if idle or self.overlaps() else self.drafter.unread(self.running)
        return Part() if self._unread else None

    def advance(self, most_s: float, *, idle: bool) -> float:
        """Take in what fits; charge the users whose texts these are."""
        took_s = 0.0
        for part in self._unread:
            n = min(part.n_tokens, int((most_s - took_s) * self._read / self._read_s))
            if n <= 0:
                break
            began = self.clock()
            self.drafter.take_in(evolve(part, n_tokens=n))
            part_s = self.clock() - began
            if part_s > 0:
                self._read, self._read_s = _FADE * self._read + n, _FADE * self._read_s + part_s
                self.charges.spend(part.program, part_s)
            took_s += part_s
        self._unread = []
        return took_s

    def take_in_all(self) -> None:
        """Take in texts while a decode leaves the host free."""
        for part in self.drafter.unread(self.running):
            self.drafter.take_in(part)
