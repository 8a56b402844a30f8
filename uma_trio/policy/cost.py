"""What a tick costs on this machine: a measured staircase, and how far it is off today.

The time of one decode of n tokens is no line. On one CPU build four rows cost less than three,
since matrix kernels take rows in fours; elsewhere two cost twice one. So the model is a table,
measured at start-up (:mod:`uma_trio.engine.calibrate`) and corrected by every tick:

    seconds = scale * (computing(n) + output(rows)) + host

`computing` is the time of n tokens of which one wants logits, `output` what further logits rows
add, `host` what passes between two decodes. The model is a value; learning returns a new one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping

from attrs import evolve, field, frozen

# How quickly the model follows: the common factor within about ten ticks (another program takes
# a core), a single step of the staircase within twenty of its own ticks.
SCALE_RATE, STEP_RATE, ERROR_RATE = 0.1, 0.05, 0.05
SCALE_BOUNDS = (0.5, 3.0)
# One tick that took three times what we thought was not slow by its own doing (a page fault, a
# frozen machine) and must not teach the model anything, unless it happens all the time. One that
# took a third was no accident: nothing makes a machine quicker by chance.
OUTLIER = math.log(3.0)
# A limit that may be missed by one tick in a hundred: the 99th percentile of a normal error.
CAREFUL_SIGMAS = 2.33
# Beyond this the model says so and is not used to promise anything (scheduling.md, 3.1).
UNTRUSTED_ERROR = 0.15


@frozen
class Staircase:
    """Seconds by a count, measured at some counts, linear between them and beyond."""

    at: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, n: float) -> float:
        """Return the seconds of `n`; 0 for nothing."""
        if n <= 0 or not self.at:
            return 0.0
        if len(self.at) == 1:
            return self.seconds[0]
        i = min(max(bisect_right(self.at, n) - 1, 0), len(self.at) - 2)
        if n < self.at[0]:
            return self.seconds[0]
        low, high = self.at[i], self.at[i + 1]
        share = (n - low) / (high - low)
        return max(0.0, self.seconds[i] + share * (self.seconds[i + 1] - self.seconds[i]))

    def table(self) -> Mapping[int, float]:
        """Return the seconds by count."""
        return dict(zip(self.at, self.seconds, strict=True))

    def times(self, factor: float) -> Staircase:
        """Return a staircase that is `factor` times as high everywhere."""
        return Staircase(self.at, tuple(s * factor for s in self.seconds))

    def corrected(self, n: int, factor: float) -> Staircase:
        """Return a staircase whose steps at or around `n` are multiplied by `factor`."""
        i = bisect_right(self.at, n) - 1
        touched = {i} if i >= 0 and self.at[i] == n else {i, i + 1}
        seconds = tuple(s * factor if j in touched else s for j, s in enumerate(self.seconds))
        return Staircase(self.at, seconds)


@frozen
class Work:
    """What of a tick costs time: its tokens, and how many of them want logits."""

    tokens: int
    rows: int = 1


@frozen
class CostModel:
    """See the module. `error` is the smoothed absolute log error of its latest predictions."""

    computing: Staircase
    output: Staircase = field(factory=lambda: Staircase((1,), (0.0,)))
    scale: float = 1.0
    host_s: float = 0.0
    error: float = 0.0

    @property
    def trusted(self) -> bool:
        """Whether its predictions may carry a promise."""
        return self.error <= UNTRUSTED_ERROR

    def seconds(self, work: Work) -> float:
        """Return how long a tick with this work should take, from decode to decode."""
        return self.scale * self._compute(work) + self.host_s

    def careful(self, work: Work) -> float:
        """Return a time that such a tick should exceed once in a hundred."""
        return self.seconds(work) * math.exp(CAREFUL_SIGMAS * min(self.error, UNTRUSTED_ERROR))

    def _compute(self, work: Work) -> float:
        extra = self.output(work.rows) if work.rows > 1 else 0.0
        return self.computing(work.tokens) + extra

    def learn(
        self,
        work: Work,
        decode_s: float,
        host_s: float,
        *,
        scale_rate: float = SCALE_RATE,
        step_rate: float = STEP_RATE,
    ) -> CostModel:
        """Return the model corrected by one measured tick.

        The rates say how much of a miss is the machine's mood, and how much this step's own.
        """
        expected = self._compute(work)
        if expected <= 0 or decode_s <= 0:
            return self
        miss = math.log(decode_s / (self.scale * expected))
        error = self.error + ERROR_RATE * (min(abs(miss), OUTLIER) - self.error)
        if miss >= OUTLIER and self.trusted:
            return evolve(self, error=error)
        if miss <= -OUTLIER:
            return evolve(self, computing=self.computing.times(math.exp(miss)), error=error)
        low, high = SCALE_BOUNDS
        scale = min(max(self.scale * math.exp(scale_rate * miss), low), high)
        return evolve(
            self,
            computing=self.computing.corrected(work.tokens, math.exp(step_rate * miss)),
            scale=scale,
            host_s=self.host_s + SCALE_RATE * (min(host_s, decode_s) - self.host_s),
            error=error,
        )

    def plateau(self, largest: int, share: float = 0.95) -> int:
        """Return the smallest chunk that prefills at `share` of the best rate there is."""
        best = max(n / self.computing(n) for n in self._counts(largest))
        return min(n for n in self._counts(largest) if n / self.computing(n) >= share * best)

    def _counts(self, largest: int) -> list[int]:
        counts = [n for n in self.computing.at if n <= largest and self.computing(n) > 0]
        return counts or [max(1, largest)]

    def settled(self) -> CostModel:
        """Return the model with today's factor written into its table, to be stored."""
        return CostModel(self.computing.times(self.scale), output=self.output.times(self.scale))

    def table(self) -> Mapping[int, float]:
        """Return the measured seconds by tokens, for people."""
        return self.computing.table()
