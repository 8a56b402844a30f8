"""Background work of all models: what is done between two ticks, and while nothing is computed.

Restoring and saving prefixes, indexing texts for drafts and measuring what ticks cost are each a
:class:`BackgroundWork`, done in parts that cannot be left half done. One :class:`BackgroundScheduler` for the machine has
what they share: the order, and the allowance. The time between two decodes is lost for the readers of every model, so a part is
begun only if its predicted time is within the allowance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, Protocol

from attrs import define, field, frozen

from uma_trio.policy.fairness import Path
from uma_trio.policy.prefix import SAVING_SHARE

EARLY_S: Final = 0.002
"""What passes between two ticks: a reader's tick is begun so much earlier."""
#: What of the tick before it background work may take beside a tick, where streams are read.
TICK_SHARE: Final = 0.25
#: And what of the time until the next token that is read has to be computed, where that is more, with requests that
#: want it for their own ticks. Beside readers only it is all of it: no token is late by it.
PACE_SHARE: Final = 0.5
#: What saving may put by of its share of the time.
MOST_SAVED_S: Final = 0.020
#: A part that takes at most so long is done as soon as nothing is computed: a request that arrives waits for it.
QUICK_S: Final = 1e-3
#: Seconds without ticks after which longer parts are done: the next request may arrive soon.
IDLE_S: Final = 0.5

Bound = Literal["readers", "ticks"]
"""What bounds a work: streams that are read, or any request at all."""


@frozen
class Part:
    """The next part of a background work: what it should take, and when it may begin while nothing is computed.

    If it `waits`, what is left of an allowance is put by for it.
    """

    least_s: float = 0.0
    at: float = -math.inf
    waits: bool = False


class BackgroundWork(Protocol):
    """One kind of work of one model. For the compute thread; nothing of it raises."""

    @property
    def bound(self) -> Bound:
        """What it may delay by its allowance only. Without them it is done as far as there is any."""

    @property
    def makes_room(self) -> bool:
        """Whether others take the place of what it is done with, so that it comes first where no stream is read."""

    def claim(self, *, idle: bool) -> Part | None:
        """Return the next part, between two ticks or while the machine is `idle`; None if there is none."""

    def advance(self, most_s: float, *, idle: bool) -> float:
        """Compute parts that should take at most `most_s` together, one if `idle`; return the seconds that they took."""


@define(eq=False)
class Charges:
    """The seconds of background work by the path that they are charged to, since they were taken."""

    _spent_s: defaultdict[Path, float] = field(factory=lambda: defaultdict(float), init=False)

    def spend(self, path: Path, seconds: float) -> None:
        """Note seconds that a part took."""
        self._spent_s[path] += seconds

    def take(self) -> dict[Path, float]:
        """Return what was noted since the last call."""
        spent = dict(self._spent_s)
        self._spent_s.clear()
        return spent


@define(eq=False)
class Background:
    """The background work of one model, most urgent first, and what it took.

    `charge` receives the seconds by path. `spent_s` is the time that passed between ticks since the latest decode.
    """

    works: Sequence[BackgroundWork] = ()
    charges: Charges = field(factory=Charges)
    charge: Callable[[Mapping[Path, float]], None] = lambda _spent: None
    spent_s: float = 0.0
    put_by_s: float = 0.0


@frozen
class Load:
    """The requests of a model that its background work delays.

    The latest tick took `tick_s`. The next one may wait `spare_s` before a token that is read is late (infinite without readers);
    tokens are read `pace_s` apart. `is_read`: there are streams that are read, and not all requests wait for background
    work. `has_people`: interactive requests have work. `has_others`: some requests are no streams that are read.
    """

    tick_s: float
    spare_s: float
    pace_s: float
    is_read: bool
    has_people: bool
    has_others: bool

    @property
    def share_s(self) -> float:
        """The seconds that all works together may take before the next tick."""
        # A reader who is far ahead is so for long ticks: at most a step of that goes to background work.
        spare_s = (
            min(self.spare_s, self.pace_s) if self.spare_s < math.inf else self.pace_s - self.tick_s
        )
        return max(TICK_SHARE * self.tick_s, spare_s * (PACE_SHARE if self.has_others else 1.0))


class BackgroundFailed(Exception):
    """A part of the background work of the `n`-th model raised the cause of this."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.n = n


@define(eq=False)
class BackgroundScheduler:
    """Gives the background work of all models its time.

    The machine sets `others_at` before it calls a work: when the tick of the first reader of another model has to begin.
    """

    clock: Callable[[], float]
    others_at: float = field(default=math.inf, init=False)
    _saving_s: float = field(default=MOST_SAVED_S, init=False)
    _last: float | None = field(default=None, init=False)

    def until_others_s(self) -> float:
        """Return how long parts may take before a reader of another model needs the machine; infinite if there is none.

        Of a part that was granted the time of a tick the margin for what passes before it is no part.
        """
        return max(0.0, self.others_at + EARLY_S - self.clock())

    def between_ticks(self, background: Background, load: Callable[[], Load] | None) -> None:
        """Do what readers can bear before the next tick of a model; None: it has no requests.

        What was too little for a part adds up, or a slow one would never come about.
        """
        works = [work for work in background.works if work.claim(idle=False) is not None]
        if load is not None and works:
            allowed, began = load(), self.clock()
            self._do(background, works, allowed)
            background.spent_s += self.clock() - began
        else:
            background.put_by_s = 0.0
        if spent_s := background.charges.take():
            background.charge(spent_s)

    def _do(self, background: Background, works: list[BackgroundWork], load: Load) -> None:
        share_s, others_s, took_s = load.share_s, self.until_others_s(), 0.0
        left_s = share_s + background.put_by_s if load.is_read else math.inf
        if not load.is_read:
            works = sorted(works, key=lambda work: not work.makes_room)
        for work in works:
            most_s = left_s if work.bound == "readers" else share_s - took_s
            most_s = min(most_s, others_s - took_s)
            if work.makes_room and (load.has_people or others_s < math.inf):
                most_s = min(most_s, self._left_for_saving_s())
            part_s = work.advance(most_s, idle=False)
            took_s += part_s
            if work.makes_room:
                self._saving_s -= part_s
            if work.bound == "readers":
                left_s -= part_s
        parts = [work.claim(idle=False) for work in works]
        waits = any(part is not None and part.waits and part.least_s > left_s for part in parts)
        background.put_by_s = left_s if waits and load.is_read else 0.0

    def _left_for_saving_s(self) -> float:
        now = self.clock()
        passed_s = 0.0 if self._last is None else now - self._last
        self._last = now
        self._saving_s = min(MOST_SAVED_S, self._saving_s + SAVING_SHARE * passed_s)
        return self._saving_s

    def idle(self, models: Sequence[Background], since: float) -> float | None:
        """Do a part while nothing is computed, since that time; return how long there is nothing to do, 0 if one was done.

        None if there is nothing.

        Raises:
            BackgroundFailed: a part raised.
        """
        now, next_at = self.clock(), math.inf
        works = [(n, work) for n, background in enumerate(models) for work in background.works]
        for n, work in sorted(works, key=lambda each: not each[1].makes_room):
            try:
                part = work.claim(idle=True)
                if part is None:
                    continue
                at = max(since + (IDLE_S if part.least_s > QUICK_S else 0.0), part.at)
                if at <= now:
                    work.advance(part.least_s, idle=True)
                    return 0.0
            except Exception as error:
                raise BackgroundFailed(n) from error
            next_at = min(next_at, at)
        return None if next_at == math.inf else next_at - now
