"""The scorecard: how well the machine was used, interval by interval, in the metrics and in a file.

Its columns are declared in :mod:`uma_trio.observe.catalogue`. Rates and percentiles are of one interval, so a column
can be plotted as it is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import trio

from uma_trio.observe import log
from uma_trio.observe.catalogue import AT_THE_END, COLUMNS
from uma_trio.observe.figures import ratio
from uma_trio.observe.histogram import Histogram
from uma_trio.observe.memory import SharedMemory, resident_bytes
from uma_trio.observe.metrics import Metrics, Totals
from uma_trio.observe.table_file import TableFile
from uma_trio.words import LANES

UPDATE_S = 1.0  # how often the scorecard in the metrics is updated

Card = Mapping[str, object]


class Scorecard:
    """The figures of the latest `interval_s`, and of each interval in turn.

    Owned by one task, which calls :meth:`update` several times per interval. `wall` is the Unix time.
    """

    def __init__(
        self,
        metrics: Metrics,
        interval_s: float,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._interval_s = interval_s
        self._wall = wall
        self._marks = deque([metrics.totals()])
        self._reported = self._marks[0]

    def update(self, pss_bytes: int | None, *, within_s: float = 0.0) -> Card | None:
        """Update the scorecard in the metrics; return the row of an interval that has ended.

        An interval has ended when less than `within_s` is missing.
        """
        now, marks = self._metrics.totals(), self._marks
        marks.append(now)
        while now.at - marks[1].at >= self._interval_s:
            marks.popleft()
        self._metrics.scorecard = self._card(marks[0], now, pss_bytes)
        if now.at - self._reported.at <= self._interval_s - within_s:
            return None
        return self.line(pss_bytes)

    def line(self, pss_bytes: int | None) -> Card:
        """Return the figures since the previous row."""
        since, self._reported = self._reported, self._metrics.totals()
        return self._card(since, self._reported, pss_bytes)

    def _card(self, since: Totals, now: Totals, pss_bytes: int | None) -> Card:
        metrics, within = self._metrics, now.since(since)
        seconds, shown = within.at, metrics.histograms["interactive_shown_ms"]
        gaps = within.bins["interactive_shown_ms"]
        if within.storage_bytes is not None:
            churn = ratio(within.storage_bytes / 1e6, within.computed)
            metrics.measured["residency_churn_mb_per_token"] = churn
        values = metrics.values()
        found = {
            **{name: _at_the_end(values[name], within.bins.get(name)) for name in AT_THE_END},
            **within.values(),
            "time": datetime.fromtimestamp(self._wall(), UTC).isoformat(timespec="milliseconds"),
            "interval_s": seconds,
            "busy_ratio": ratio(within.busy_s, seconds),
            "tokens_per_s": ratio(within.computed, seconds),
            **{
                f"{lane}_tokens_per_s": ratio(within.lanes.get(lane, 0), seconds)
                if now.lanes
                else None
                for lane in LANES
            },
            "tokens_generated_per_s": ratio(within.sampled, seconds),
            "interactive_gaps": sum(gaps),
            "interactive_p95_ms": shown.quantile(0.95, gaps),
            "interactive_p99_ms": shown.quantile(0.99, gaps),
            "draft_accepted_ratio": ratio(within.drafts_right, within.drafts),
            "sum_bmt_mb_per_tick": ratio(within.moved_bytes / 1e6, within.ticks),
            "rss_gb": resident_bytes() / 1e9,
            "pss_gb": None if pss_bytes is None else pss_bytes / 1e9,
        }
        return {column: found[column] for column in COLUMNS}


def _at_the_end(value: object, bins: Sequence[int] | None) -> object:
    return value.quantile(0.95, bins) if isinstance(value, Histogram) else value


class ScoreKeeper:
    """Updates the scorecards every second, and appends a row to `table` every `interval_s`.

    `every` returns the metrics of all loaded models; rows are of `metrics` only. Files are read and written in a
    helper thread. A failed write is logged once and tried again with the next row. Cancellation waits for a row that
    is being written, so that the table can be closed.
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
        """Run until cancelled; the last row covers what is left."""
        try:
            due = trio.current_time()
            while True:
                # By the clock, so that intervals do not drift.
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
