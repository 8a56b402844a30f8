"""The load of this machine for routers, which ask many times a second: a snapshot for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import trio
from attrs import frozen

from uma_trio.observe.figures import Outlook
from uma_trio.observe.records import Snapshot
from uma_trio.service.headroom import NodeLoad, headroom, load_of, weight

#: A younger reading is given again: the engine is asked at most four times a second.
FRESH_S: Final = 0.25
#: A tick may be longer than a router's patience; then it gets the reading before.
PATIENCE_S: Final = 0.2
#: No tick of a sound engine takes so long. A node that hangs is known by it.
SILENT_S: Final = 30.0


@frozen
class LoadReading:
    """The load, and how long the engine has not answered a question: 0 if it answered the last one."""

    load: NodeLoad
    silent_s: float = 0.0

    @property
    def headroom(self) -> float:
        """What :func:`uma_trio.service.headroom.headroom` makes of the load."""
        return headroom(self.load)

    @property
    def weight(self) -> float:
        """What :func:`uma_trio.service.headroom.weight` makes of it."""
        return weight(self.load)

    @property
    def hangs(self) -> bool:
        """Whether the engine has been silent for longer than any tick takes."""
        return self.silent_s >= SILENT_S


class Pulse:
    """The latest reading. For trio's thread only.

    `fresh` asks the engine for a snapshot and `latest` returns the newest one that has come, None if none has.
    """

    def __init__(
        self,
        fresh: Callable[[], Awaitable[object]],
        latest: Callable[[], Snapshot | None],
        outlook: Callable[[], Outlook],
        slots: int,
    ) -> None:
        self._fresh = fresh
        self._latest = latest
        self._outlook = outlook
        self._slots = slots
        self._load = NodeLoad(slots=slots)
        self._seen: Snapshot | None = None
        self._read_at = float("-inf")  # on trio's clock
        self._silent_since: float | None = None

    async def read(self) -> LoadReading:
        """Return how things stand, at most 0.25 s and a tick ago, within 0.2 s.

        Cancelled, it changes nothing.

        Raises:
            uma_trio.service.ask.Refusal: the engine has stopped.
        """
        now = trio.current_time()
        if now - self._read_at >= FRESH_S:
            with trio.move_on_after(PATIENCE_S) as waiting:
                await self._fresh()
            self._take(now, answered=not waiting.cancelled_caught)
        since = self._silent_since
        return LoadReading(self._load, 0.0 if since is None else trio.current_time() - since)

    def _take(self, now: float, *, answered: bool) -> None:
        """Keep the newest snapshot, which may be the answer to an earlier question."""
        snapshot = self._latest()
        is_new = snapshot is not None and snapshot is not self._seen
        if snapshot is not None and is_new:
            self._seen, self._load = snapshot, load_of(snapshot, self._outlook(), self._slots)
            self._read_at = now
        if answered or is_new:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
