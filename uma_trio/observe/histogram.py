"""Histograms over the life of the daemon, and quantiles of the latest values.

Each is written by one thread and read by another without a lock: a reader may miss the value that is being recorded.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

_RATIO = 1.02  # neighbouring edges, so a quantile is right to 1 %


def bounds_ms(lowest: float, highest: float) -> tuple[float, ...]:
    """Return 1-2-5 bounds from `lowest` to `highest`."""
    decades = (m * 10.0**e for e in range(-6, 9) for m in (1, 2, 5))
    return tuple(b for b in decades if lowest * 0.999 <= b <= highest * 1.001)


class Histogram:
    """Counts in bins that are 2 % wide, with exact `bounds` for scrapers."""

    __slots__ = ("_counts", "_edges", "bounds", "largest", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        fine, edge = [], bounds[0]
        while edge < bounds[-1]:
            fine.append(edge)
            edge *= _RATIO
        self._edges = sorted({*fine, *bounds})
        self._counts = [0] * (len(self._edges) + 1)
        self.total = self.largest = 0.0

    def record(self, value: float, n: int = 1) -> None:
        """Count `value` `n` times, in the first bin whose upper edge is not below it."""
        self._counts[bisect_left(self._edges, value)] += n
        self.total += n * value
        self.largest = max(self.largest, value)

    def summary(self) -> dict[str, object]:
        """Return the histogram as the JSON of the metrics shows it."""
        count = self.count
        return {
            "count": count,
            "sum": self.total,
            "mean": self.total / count if count else None,
            **{f"p{100 * share:g}": self.quantile(share) for share in (0.50, 0.95, 0.99)},
            "max": self.largest if count else None,
            "buckets": {
                "+Inf" if bound == math.inf else f"{bound:g}": n for bound, n in self.cumulative()
            },
        }

    @property
    def count(self) -> int:
        """Number of recorded values."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """Return the number of values up to each bound; the last bound is infinity."""
        counts, found, reached = list(self._counts), [], 0
        position = 0
        for bound in self.bounds:
            end = bisect_right(self._edges, bound)
            reached += sum(counts[position:end])
            position = end
            found.append((bound, reached))
        found.append((math.inf, reached + sum(counts[position:])))
        return found

    def counts(self) -> list[int]:
        """Return a copy of the bins; the difference of two copies is an interval."""
        return list(self._counts)

    def quantile(self, share: float, counts: Sequence[int] | None = None) -> float | None:
        """Return the quantile, accurate to 1 %; None while empty.

        `counts` may be the difference of two :meth:`counts`. Values above the last bound count as that bound.
        """
        counts = self.counts() if counts is None else counts
        wanted, reached = share * sum(counts), 0
        if not wanted:
            return None
        for index, count in enumerate(counts):
            reached += count
            if reached >= wanted:
                return self._middle(index)
        return self.bounds[-1]

    def _middle(self, index: int) -> float:
        if index == 0:
            return self._edges[0]
        if index == len(self._edges):
            return self._edges[-1]
        return (self._edges[index - 1] + self._edges[index]) / 2


class Recent:
    """The latest `size` values."""

    __slots__ = ("_next", "_values", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[float] = []
        self._next = 0

    def record(self, value: float, n: int = 1) -> None:
        """Record `value` `n` times, replacing the oldest values."""
        values, size = self._values, self.size
        for _ in range(n):
            if len(values) < size:
                values.append(value)
            else:
                values[self._next] = value
                self._next = (self._next + 1) % size

    def quantiles(self, shares: Sequence[float]) -> list[float | None]:
        """Return the value at each share by the nearest rank; None while empty."""
        values = sorted(self._values)
        if not values:
            return [None] * len(shares)
        last = len(values) - 1
        return [values[min(last, int(share * len(values)))] for share in shares]
