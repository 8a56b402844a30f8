"""What a request may take, and whether an answer kept to it.

The limits are those of MLPerf's interactive scenario for a model of this field's size, where the
machine can meet them at all: a limit is never below a multiple of what the request takes alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from benches.arrivals import Asked
from benches.clients import Answer


@dataclass(frozen=True)
class Limits:
    """Seconds, and multiples of the time alone.

    For a reader: TTFT and the mean time per output token. `slowdown` bounds the whole answer for
    whoever waits for its end. 450 and 40 ms are MLPerf Inference's interactive limits (Llama 2 70B).
    """

    ttft_s: float = 0.450
    tpot_s: float = 0.040
    times: float = 2.0
    slowdown: float = 3.0


@dataclass(frozen=True)
class Alone:
    """What a request takes on an otherwise idle machine, measured at some lengths of prompts.

    `lengths` ascend; between two of them a straight line is taken.
    """

    lengths: tuple[int, ...]
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]

    def ttft(self, prompt: int) -> float:
        """Return the seconds to the first token behind a prompt of so many tokens."""
        return _between(self.lengths, self.ttft_s, prompt)

    def tpot(self, prompt: int) -> float:
        """Return the seconds of each further token."""
        return _between(self.lengths, self.tpot_s, prompt)

    def whole(self, asked: Asked) -> float:
        """Return the seconds to the last token."""
        return self.ttft(asked.prompt) + (asked.answer - 1) * self.tpot(asked.prompt)

    def best(self, other: Alone) -> Alone:
        """Return the smaller value of both at each length, which must be the same ones."""
        return Alone(
            self.lengths,
            tuple(map(min, self.ttft_s, other.ttft_s)),
            tuple(map(min, self.tpot_s, other.tpot_s)),
        )


@dataclass(frozen=True)
class Bound:
    """The limits of one request in seconds; infinite where it has none."""

    ttft_s: float
    tpot_s: float
    end_s: float

    def kept(self, answer: Answer) -> bool:
        """Return whether a complete answer kept to all of them; one with an error never did."""
        if answer.error is not None or not answer.times:
            return False
        first, last, n = answer.times[0], answer.times[-1], len(answer.times)
        tpot = (last - first) / (n - 1) if n > 1 else 0.0
        return (
            first - answer.sent <= self.ttft_s
            and tpot <= self.tpot_s
            and last - answer.sent <= self.end_s
        )


def bound(asked: Asked, alone: Alone, limits: Limits) -> Bound:
    """Return what `asked` may take. A reader's end follows from the two other limits."""
    if asked.awaits == "answer":
        return Bound(math.inf, math.inf, limits.slowdown * alone.whole(asked))
    ttft = max(limits.ttft_s, limits.times * alone.ttft(asked.prompt))
    tpot = max(limits.tpot_s, limits.times * alone.tpot(asked.prompt))
    # A little later, so that rounding decides nothing: `kept` compares the two themselves.
    return Bound(ttft, tpot, 1.001 * (ttft + (asked.answer - 1) * tpot))


def _between(at: Sequence[int], values: Sequence[float], x: int) -> float:
    i = bisect_left(at, x)
    if i == 0:
        return values[0]
    if i == len(at):
        return values[-1]
    share = (x - at[i - 1]) / (at[i] - at[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])
