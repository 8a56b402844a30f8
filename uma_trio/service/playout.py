"""When held tokens are released: one timer for all streams of the daemon.

Streams with the same pace are usually due together and share one wake of trio's loop. A separate
deadline for each token and stream would cost half as much again as writing the token (90 us instead
of 52).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

from uma_trio.service.timer import Timer, TrioTimer

GRAIN_S: Final = 0.0001
"""What is due so close together is shown together. Nobody sees the difference, and a wake of trio's
loop takes about as long."""


class PacedStream(Protocol):
    """A stream that holds tokens."""

    def show(self, until: float) -> float:
        """Show the tokens that are due by `until`; return the next due time, or infinity."""

    def flush(self) -> None:
        """Have the reader take the tokens that were shown."""


class Playout:
    """Makes streams show their held tokens when they are due, while :meth:`run` is active.

    `clock` is the clock of the engine, of the tokens' times, and of `timer`. For trio's thread
    only.
    """

    def __init__(self, clock: Callable[[], float], timer: Timer | None = None) -> None:
        self.clock = clock
        #: Tokens that all streams hold.
        self.held = 0
        self._timer = timer or TrioTimer(clock)
        self._due: dict[PacedStream, float] = {}
        self._next = math.inf  # what the timer is set to

    def expect(self, holder: PacedStream, due: float) -> None:
        """Call :meth:`PacedStream.show` of the stream at `due`; replaces an earlier time."""
        self._due[holder] = due
        if due < self._next:
            self._set(due)

    def forget(self, holder: PacedStream) -> None:
        """Note that the stream holds no tokens. Idempotent."""
        self._due.pop(holder, None)

    async def run(self) -> None:
        """Release tokens when they are due, until cancelled."""
        try:
            while True:
                await self._timer.wait()
                self._show(self.clock() + GRAIN_S)
        finally:
            self._timer.close()

    def _show(self, until: float) -> None:
        waiting = self._due
        holders = [holder for holder, due in waiting.items() if due <= until]
        for holder in holders:
            due = holder.show(until)
            if due == math.inf:
                del waiting[holder]
            else:
                waiting[holder] = due
        self._set(min(waiting.values(), default=math.inf))
        for holder in holders:
            holder.flush()

    def _set(self, due: float) -> None:
        self._next = due
        self._timer.set(due)
