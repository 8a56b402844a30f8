"""The scorecard: how well the machine was used, interval by interval.

Everything in it is of one interval and not since the start, so a column can be plotted as it
stands. What the columns mean is declared in :mod:`uma_trio.observe.catalogue`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from uma_trio.observe.catalogue import SCORECARD
from uma_trio.observe.memory import resident_bytes
from uma_trio.observe.metrics import Metrics, Totals
from uma_trio.observe.promise import PromiseTotals, ratio
from uma_trio.words import LANES

Card = Mapping[str, object]
COLUMNS = tuple(column.name for column in SCORECARD)


class Scorecard:
    """The figures of the last `interval_s`, and of each interval in turn.

    Owned by one task, which calls :meth:`update` a few times an interval. `wall` is the time of
    day in seconds since 1970.
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
        self._told = self._marks[0]

    def update(self, pss_bytes: int | None, *, within_s: float = 0.0) -> Card | None:
        """Bring what the metrics show up to date; return the line of an interval that is over.

        It counts as over when less than `within_s` is missing.
        """
        now, marks = self._metrics.totals(), self._marks
        marks.append(now)
        while now.at - marks[1].at >= self._interval_s:
            marks.popleft()
        self._metrics.scorecard = self._card(marks[0], now, pss_bytes)
        if now.at - self._told.at <= self._interval_s - within_s:
            return None
        return self.line(pss_bytes)

    def line(self, pss_bytes: int | None) -> Card:
        """Return the figures since the line before, however long ago that was."""
        told, self._told = self._told, self._metrics.totals()
        return self._card(told, self._told, pss_bytes)

    def _card(self, since: Totals, now: Totals, pss_bytes: int | None) -> Card:
        seconds = now.at - since.at
        shown = [late - early for late, early in zip(now.shown, since.shown, strict=True)]
        histogram = self._metrics.playout.shown_ms["interactive"]
        lanes = {
            f"{lane}_tokens_per_s": ratio(
                now.lanes.get(lane, 0) - since.lanes.get(lane, 0), seconds
            )
            if now.lanes
            else None
            for lane in LANES
        }
        return {
            "time": datetime.fromtimestamp(self._wall(), UTC).isoformat(timespec="milliseconds"),
            "interval_s": seconds,
            "busy_ratio": ratio(now.busy_s - since.busy_s, seconds),
            "tokens_per_s": ratio(now.tokens - since.tokens, seconds),
            **lanes,
            "tokens_generated_per_s": ratio(now.sampled - since.sampled, seconds),
            "interactive_gaps": sum(shown),
            "interactive_p95_ms": histogram.quantile(0.95, shown),
            "interactive_p99_ms": histogram.quantile(0.99, shown),
            "copy_free_ratio": ratio(now.in_place - since.in_place, now.rows - since.rows),
            "draft_accepted_ratio": ratio(
                now.drafts_right - since.drafts_right, now.drafts - since.drafts
            ),
            **_promised(now.promise.since(since.promise)),
            "rss_gb": resident_bytes() / 1e9,
            "pss_gb": None if pss_bytes is None else pss_bytes / 1e9,
        }


def _promised(within: PromiseTotals) -> dict[str, object]:
    return {
        "tokens_per_s_at_cap": within.tokens_per_s_at_cap,
        "ticks_over_budget": within.over_budget,
        "sum_bmt_mb_per_token": within.moved_mb_per_token,
        "sum_bmt_mb_per_tick": ratio(within.moved_bytes / 1e6, within.ticks),
        "scheduler_efficiency": within.efficiency,
    }
