"""How late trio's thread runs: the time for which a call, or another thread with the GIL, keeps it.

Trio's thread writes every token, so whatever holds it up holds up all streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from uma_trio.service.timer import Timer

BUSY_S: Final = 0.02
"""Between two looks while requests are there: a quarter of a percent of a core."""
IDLE_S: Final = 0.25


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
