"""When a drafter that fails is asked again. Pure, but for what it remembers."""

from __future__ import annotations

import math
from typing import Final

from attrs import define

PATIENCE: Final = 3  # failures until the first rest; after a rest one is enough
# Memory that ran out may be there again after a minute. An attempt that fails costs its tick the drafts
# and a line of the log, so that nobody notices one an hour.
FIRST_REST_S: Final = 60.0
LONGEST_REST_S: Final = 3600.0


@define
class Failures:
    """Counts failures, and says how long to rest after them. Times are the caller's clock, in seconds.

    A time in which it may be asked and does not fail makes up for all failures, if it is as long as the
    rest that would come next.
    """

    total: int = 0
    rests_until: float = -math.inf
    _left: int = PATIENCE
    _rest_s: float = FIRST_REST_S
    _latest: float = -math.inf

    def note(self, now: float) -> float:
        """Count a failure; return how long to rest from `now` on, or 0.

        Failures during a rest, such as those of cleaning up behind the one before it, make it no longer.
        """
        if now < self.rests_until:
            self.total += 1
            return self.rests_until - now
        if now - max(self._latest, self.rests_until) >= self._rest_s:
            self._left, self._rest_s = PATIENCE, FIRST_REST_S
        self.total += 1
        self._latest = now
        self._left -= 1
        if self._left > 0:
            return 0.0
        rest_s, self._left = self._rest_s, 1
        self.rests_until, self._rest_s = now + rest_s, min(2.0 * rest_s, LONGEST_REST_S)
        return rest_s
