"""Snapshots of the engine for all who look: one question for all of them, ten times a second at most."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import islice, takewhile
from typing import Final

import trio

from uma_trio.engine.inbox import Inbox
from uma_trio.engine.messages import Inspect, Snapshot
from uma_trio.engine.records import TickRecord
from uma_trio.service.asking import Answered

#: Ticks that are remembered for who comes back.
MOST_TICKS: Final = 1024
INTERVAL_S: Final = 0.1
"""Between two snapshots."""


class Snapshots:
    """The latest snapshot, and the turns of those who want a later one. For trio's thread only.

    Nothing is asked and nothing is computed while nobody waits in :meth:`fresh`.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._latest: Snapshot | None = None
        self._asked = 0  # how many questions were put
        self._told = 0  # the number of the question that `_latest` answers
        self._next_at = float("-inf")  # on trio's clock
        self._news = Answered()
        self._ticks: deque[TickRecord] = deque(maxlen=MOST_TICKS)

    @property
    def latest(self) -> Snapshot | None:
        """The newest snapshot that has come; None if none was asked for yet."""
        return self._latest

    def ticks_after(self, tick: int, most: int) -> tuple[TickRecord, ...]:
        """Return the latest ticks with higher numbers, at most so many, oldest first.

        They are without a gap as long as somebody looks.
        """
        found = takewhile(lambda record: record.tick > tick, reversed(self._ticks))
        return tuple(islice(found, most))[::-1]

    async def fresh(self) -> Snapshot:
        """Return a snapshot that is taken after this call: within 0.1 s and a tick, if nobody else asks.

        Cancelled, it leaves the others' questions as they are.

        Raises:
            EngineStopped: there is no engine to ask, or it ended before it could answer.
        """
        wanted = self._asked + 1
        while self._latest is None or self._told < wanted:
            if self._asked >= wanted:
                await self._news.wait(self._inbox)
            elif trio.current_time() < self._next_at:
                await trio.sleep_until(self._next_at)
            else:
                self._ask()
        return self._latest

    def _ask(self) -> None:
        self._asked += 1
        self._next_at = trio.current_time() + INTERVAL_S
        after = -1 if self._latest is None else self._latest.tick
        self._inbox.put(Inspect(partial(self._take, self._asked), after))

    def _take(self, number: int, snapshot: Snapshot) -> None:
        self._latest, self._told = snapshot, number
        self._ticks.extend(snapshot.ticks)
        news, self._news = self._news, Answered()
        news.set()
