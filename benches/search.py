"""The largest rate that a server keeps up with, found by trials."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Keeps = Callable[[float], bool]
"""Whether a rate is kept."""


@dataclass(frozen=True)
class Search:
    """How the largest rate is searched: from `start` in steps of two, then by bisection.

    It ends when the rate that is kept and the one that is not are within `precision` of each
    other, or after `most` trials.
    """

    start: float
    precision: float = 0.15
    most: int = 8

    def largest(self, keeps: Keeps) -> float:
        """Return the largest rate that was tried and kept; 0 if none was."""
        low, high, rate = 0.0, math.inf, self.start
        for _ in range(self.most):
            if keeps(rate):
                low = rate
            else:
                high = rate
            if low and high <= low * (1 + self.precision):
                break
            rate = _between(low, high)
        return low


def _between(low: float, high: float) -> float:
    if high == math.inf:
        return 2 * low
    return math.sqrt(low * high) if low else high / 2
