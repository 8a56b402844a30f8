"""Whether trio's thread runs: how late it is, and for how long readers could have been heard.

Trio's thread writes every token, so whatever holds it up (a call, another thread with the GIL, a stalled machine)
holds up all streams. It also notices every token that a reader takes: while it stands still nobody's reader is
away, however long that lasts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from uma_trio.service.directory import Directory
from uma_trio.service.timer import Timer

BUSY_S: Final = 0.02
"""Between two looks while requests are there: a quarter of a percent of a core."""
IDLE_S: Final = 0.25
BEAT_S: Final = 0.1
"""The same for presence. A busy machine wakes the loop later, by less than that."""


class LagWatch:
    """Measures the lag of trio's thread while :meth:`run` is active.

    `timer` uses `clock`, in seconds. `record` is told each lag in seconds, `is_busy` says whether there
    are requests whose tokens would wait.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        timer: Timer,
        record: Callable[[float], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self._clock = clock
        self._timer = timer
        self._record = record
        self._is_busy = is_busy

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        try:
            while True:
                due = self._clock() + (BUSY_S if self._is_busy() else IDLE_S)
                self._timer.set(due)
                await self._timer.wait()
                self._record(max(0.0, self._clock() - due))
        finally:
            self._timer.close()


class Presence:
    """A clock of the seconds in which readers could give credit back. Calling it returns them.

    It stands still while the loop does, and while no request runs; it moves by beats, and by two of them
    at the most for a time that the loop stood still. `clock` is in seconds. May be called on any thread.
    """

    def __init__(self, clock: Callable[[], float], directory: Directory) -> None:
        self._clock = clock
        self._directory = directory
        self._seconds = 0.0

    def __call__(self) -> float:
        """Return the seconds so far."""
        return self._seconds

    async def run(self) -> None:
        """Count until cancelled."""
        while True:
            await self._directory.wait_until_any()
            before = self._clock()
            while len(self._directory):
                await trio.sleep(BEAT_S)
                now = self._clock()
                # Of a longer time only the beats at its two ends are known to be the loop's.
                self._seconds += min(max(0.0, now - before), 2 * BEAT_S)
                before = now
