"""Questions to an engine: waiting for an answer, and snapshots, of which at most ten a second are made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import trio

from uma_trio.engine.inbox import EngineStopped, Inbox
from uma_trio.engine.messages import Inspect
from uma_trio.observe.records import Snapshot

INTERVAL_S: Final = 0.1
"""Time between two snapshots."""


class Answered:
    """An answer of the engine that tasks wait for."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._is_there = False

    def set(self) -> None:
        """Wake the tasks: the answer has arrived."""
        self._is_there = True
        self._event.set()

    async def wait(self, inbox: Inbox) -> None:
        """Wait until it has arrived.

        Raises:
            EngineStopped: the inbox was closed first, so that no answer will arrive.
        """
        with inbox.when_closed(self._event.set):
            await self._event.wait()
        if not self._is_there:
            raise EngineStopped


class Snapshots:
    """The latest snapshot. For trio's thread only. The engine is asked only while :meth:`fresh` is awaited.

    `on_snapshot` receives every snapshot, in order.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._latest: Snapshot | None = None
        self._asked = 0  # number of questions
        self._answered = 0  # the question that `_latest` answers
        self._next_at = float("-inf")  # on trio's clock
        self._news = Answered()
        self.on_snapshot: Callable[[Snapshot], None] = lambda _: None

    @property
    def latest(self) -> Snapshot | None:
        """The newest snapshot; None before the first."""
        return self._latest

    async def fresh(self) -> Snapshot:
        """Return a snapshot that is made after this call, within 0.1 s and a tick.

        Raises:
            EngineStopped: the engine has ended.
        """
        wanted = self._asked + 1
        while self._latest is None or self._answered < wanted:
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
        self._latest, self._answered = snapshot, number
        self.on_snapshot(snapshot)
        news, self._news = self._news, Answered()
        news.set()
