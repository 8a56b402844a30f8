"""The task that keeps the scorecard: in the metrics all the time, in a file line by line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from uma_trio.observe import log
from uma_trio.observe.memory import SharedMemory
from uma_trio.observe.metrics import Metrics
from uma_trio.observe.scorecard import COLUMNS, Card, Scorecard
from uma_trio.observe.table_file import TableFile

UPDATE_S = 1.0  # how often the scorecard in the metrics is brought up to date


class ScoreKeeper:
    """Brings the scorecard up to date every second, with a line for `table` every `interval_s`.

    `every` returns the metrics of all loaded models: the others have scorecards, too, without lines.
    Files are read and written in a helper thread. A table that cannot be written any more is
    told of once, and tried again with every line: a disk may be made room on. What is being
    written when the task is cancelled is waited for, so that the table can be closed then.
    """

    def __init__(
        self,
        metrics: Metrics,
        interval_s: float,
        table: TableFile | None,
        *,
        memory: SharedMemory | None = None,
        every: Callable[[], Sequence[Metrics]] = lambda: (),
    ) -> None:
        self._metrics, self._every, self._interval_s = metrics, every, interval_s
        self._others: dict[Metrics, Scorecard] = {}
        self._tick_s = min(UPDATE_S, interval_s)
        self._card = Scorecard(metrics, interval_s)
        self._table = table
        self._memory = memory or SharedMemory()
        self._failed = False

    async def run(self) -> None:
        """Keep it until cancelled; a last line tells of what was not told yet."""
        try:
            due = trio.current_time()
            while True:
                # By the clock and not by naps, so that lines come as often as they should.
                due = max(due + self._tick_s, trio.current_time())
                await trio.sleep_until(due)
                if self._memory.due:
                    await trio.to_thread.run_sync(self._memory.refresh, abandon_on_cancel=True)
                self._update_others()
                card = self._card.update(self._memory.bytes, within_s=self._tick_s / 2)
                if card is not None:
                    await self._write(card)
        finally:
            with trio.CancelScope(shield=True):
                await self._write(self._card.line(self._memory.bytes))

    def _update_others(self) -> None:
        loaded = [each for each in self._every() if each is not self._metrics]
        for gone in self._others.keys() - set(loaded):
            del self._others[gone]
            gone.scorecard = None
        for each in loaded:
            if each not in self._others:
                self._others[each] = Scorecard(each, self._interval_s)
            self._others[each].update(self._memory.bytes)

    async def _write(self, card: Card) -> None:
        if self._table is None:
            return
        values = [card[column] for column in COLUMNS]
        try:
            await trio.to_thread.run_sync(self._table.append, values)
        except OSError as error:
            if not self._failed:
                log.get("scorecard").warning("a line cannot be written", why=error.strerror)
            self._failed = True
