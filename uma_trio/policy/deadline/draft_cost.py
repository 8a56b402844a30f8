"""What guesses cost that a draft model has to make: its own decodes, one after another, before the tick.

The guesses of several streams are made together: the first of each in one decode, then the second of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from uma_trio.policy.cost import CostModel, Staircase, Work
from uma_trio.policy.deadline.ballast import MOST_BALLAST, ballast_for
from uma_trio.policy.state import SequenceView

MOST_GUESSES = 15  # of one stream


def making_s(draft: Staircase | None, views: Iterable[SequenceView]) -> list[float]:
    """Return for each number of guesses the seconds until they are made; `views` is whose each is.

    Guesses that were found take none.
    """
    seconds = [0.0]
    taken: dict[int, int] = {}
    streams: list[int] = []  # that have a guess in each decode
    for view in views:
        more_s = 0.0
        if view.modelled and draft is not None:
            nth = taken.get(view.key, 0)
            taken[view.key] = nth + 1
            if nth == len(streams):
                streams.append(0)
            streams[nth] += 1
            more_s = draft(streams[nth]) - draft(streams[nth] - 1)
        seconds.append(seconds[-1] + more_s)
    return seconds


def best_of_model(
    cost: CostModel, draft: Staircase, streams: int, chance: float
) -> tuple[int, float]:
    """Return how many guesses a stream should have, and how many times as many tokens a second it gives.

    So many `streams` decode together, and each guess is right with this `chance` if those before it are.
    """
    plain_s = ballast_for(cost, Work(streams, streams), MOST_BALLAST)[1]
    gains = list(accumulate(chance**n for n in range(MOST_GUESSES + 1)))
    best, most = 0, 1.0
    for n in range(1, MOST_GUESSES + 1):
        size = streams * (1 + n)
        if size - streams > MOST_BALLAST and size not in cost.steps:
            continue
        seconds = ballast_for(cost, Work(size, size), MOST_BALLAST)[1] + n * draft(streams)
        times = gains[n] * plain_s / seconds
        if times > most:
            best, most = n, times
    return best, most
