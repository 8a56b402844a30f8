"""Side work: what the engine's thread does between two ticks, and while nothing is computed.

Restoring, saving and moving cells of prefixes, indexing texts for drafts and refining the staircase are
*side work*: each is a :class:`SideWork`, done in parts that cannot be left half done. The :class:`Desk` has what they share: the order, the allowance, and the
ledger of what was spent for whom. The time between two decodes is lost for readers, so a part is begun only if its
predicted time is within the allowance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, Protocol

from attrs import define, field

from uma_trio.engine.sequences import Sequence as Running
from uma_trio.policy.fairness import Path
from uma_trio.policy.prefix import SAVING_SHARE

#: What of the tick before it side work may take beside a tick, where streams are read.
TICK_SHARE: Final = 0.25
#: And what of the time until the next token that is read has to be computed, where that is more, beside requests that
#: want it for their own ticks. Beside readers only it is all of it: no token is late by it.
PACE_SHARE: Final = 0.5
#: What saving may put by of its share of the time.
MOST_SAVED_S: Final = 0.020
#: A part that takes at most so long is done as soon as nothing is computed: who comes waits for it.
QUICK_S: Final = 1e-3

Yields = Literal["readers", "people", "ticks"]
"""Who bounds a work: streams that are read, any interactive request that has work, or any request at all."""


class SideWork(Protocol):
    """One kind of work. For the engine's thread; nothing of it raises."""

    @property
    def yields_to(self) -> Yields:
        """Whom it may delay by its allowance only. Without them it is done as far as there is any."""

    @property
    def makes_room(self) -> bool:
        """Whether others take the place of what it is done with, so that it comes first where nobody reads.

        It has the :class:`SavingBudget` while a client waits for a token.
        """

    def look(self, running: Mapping[int, Running], *, alone: bool) -> bool:
        """Take note of who runs; return whether there may be work. `alone`: nobody else has any."""

    def do(self, most_s: float) -> float:
        """Do parts that should take at most `most_s` together; return the seconds that they took."""

    def falls_short(self, left_s: float) -> bool:
        """Whether its next part takes more than is left, so that this is put by for it."""

    def do_idle(self, most_s: float) -> float | None:
        """Do a part while nothing is computed; return how long to be idle before the next.

        None if no part should take at most `most_s`, as far as that is known.
        """


@define(eq=False)
class Ledger:
    """The seconds of side work by whom it was for, since somebody took them."""

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
class SavingBudget:
    """The seconds that saving prefixes may take while a client waits for a token: :data:`SAVING_SHARE` of the time.

    One budget serves all models of a machine. It holds at most :data:`MOST_SAVED_S`, a page of a slow bus.
    """

    _left_s: float = field(default=MOST_SAVED_S, init=False)
    _last: float | None = field(default=None, init=False)

    def left_s(self, now: float) -> float:
        """Return what is left at this time."""
        passed_s = 0.0 if self._last is None else now - self._last
        self._last = now
        self._left_s = min(MOST_SAVED_S, self._left_s + SAVING_SHARE * passed_s)
        return self._left_s

    def spend(self, seconds: float) -> None:
        """Note seconds that saving took."""
        self._left_s -= seconds


@define(eq=False)
class Desk:
    """Gives each kind of side work its time. `works` are in the order of their urgency.

    `charge` is told what was spent for whom. `saving_budget` is that of the machine. `spare_s` tells from the time how long the next tick may wait before a token
    that is read is late (infinite: nobody reads). `spent_s` is the time that passed between ticks since the latest decode.
    """

    works: Sequence[SideWork]
    ledger: Ledger
    charge: Callable[[Mapping[Path, float]], None]
    reading_pace_s: float
    clock: Callable[[], float]
    spare_s: Callable[[float], float]
    saving_budget: SavingBudget = field(factory=SavingBudget)
    spent_s: float = field(default=0.0, init=False)
    _put_by_s: float = field(default=0.0, init=False)

    def between_ticks(self, running: Mapping[int, Running], blocked: int, tick_s: float) -> None:
        """Do what the readers can bear before the next tick. `blocked` of the `running` requests wait for side work.

        What was too little for a part adds up, or a slow one would never come about.
        """
        alone = blocked >= len(running)
        busy = [work.look(running, alone=alone) for work in self.works]
        if running and any(busy):
            self._work(running, self._share_s(running, tick_s), alone=alone)
        else:
            self._put_by_s = 0.0
        if spent_s := self.ledger.take():
            self.charge(spent_s)

    def _share_s(self, running: Mapping[int, Running], tick_s: float) -> float:
        """Return the seconds that all works together may take before the next tick."""
        spare_s = self.spare_s(self.clock())
        # A reader who is far ahead is so for long ticks: at most a step of that goes to side work.
        spare_s = (
            min(spare_s, self.reading_pace_s)
            if spare_s < math.inf
            else self.reading_pace_s - tick_s
        )
        if any(not sequence.view.protected for sequence in running.values()):
            spare_s *= PACE_SHARE
        return max(TICK_SHARE * tick_s, spare_s)

    def _work(self, running: Mapping[int, Running], share_s: float, *, alone: bool) -> None:
        began, took_s, short = self.clock(), 0.0, False
        bounds = self._bounds(running, share_s, alone=alone)
        left_s = bounds["readers"]
        unread = math.isinf(left_s)
        for work in sorted(self.works, key=lambda w: not w.makes_room) if unread else self.works:
            if work.yields_to == "ticks":
                took_s += work.do(share_s - took_s)
                continue
            most_s = bounds[work.yields_to] if unread else left_s
            if work.makes_room and bounds["people"] < math.inf:
                most_s = min(most_s, self.saving_budget.left_s(self.clock()))
            spent_s = work.do(most_s)
            if work.makes_room:
                self.saving_budget.spend(spent_s)
            left_s, took_s = left_s - spent_s, took_s + spent_s
            short = short or work.falls_short(left_s)
        self._put_by_s = left_s if short and not unread else 0.0
        self.spent_s += self.clock() - began

    def while_idle(self, most_s: float = math.inf) -> float | None:
        """Do a part of some work while nothing is computed; return how long to be idle before the next.

        None if no part should take at most `most_s`.
        """
        for work in self.works:
            idle_s = work.do_idle(most_s)
            if idle_s is not None:
                return idle_s
        return None

    def _bounds(
        self, running: Mapping[int, Running], share_s: float, *, alone: bool
    ) -> dict[Yields, float]:
        views = [s.view for s in running.values() if s.lane == "interactive" and s.credit > 0]
        read = any(view.protected for view in views) and not alone
        return {
            "readers": share_s + self._put_by_s if read else math.inf,
            "people": share_s if views else math.inf,
            "ticks": share_s,
        }
