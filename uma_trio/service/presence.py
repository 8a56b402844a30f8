"""How long readers could have been heard: the time in which trio's loop was running.

Every token that a reader takes is noticed by trio's loop. While the loop stands still (a stalled machine,
a function that holds the GIL), nobody's reader is away, however long that lasts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from uma_trio.service.directory import Directory

BEAT_S: Final = 0.1
"""The loop is looked at so often while requests run. A busy machine wakes it later, by less than that."""


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
