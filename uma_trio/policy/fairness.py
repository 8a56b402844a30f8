"""Machine time, shared evenly among clients, and among lanes by their weights.

Each client has a counter of machine seconds, each lane one of its seconds over its weight; the least
is served first. A client that returns keeps its counter, lifted to the least of those that stayed: it
gains no claim by being idle, and loses no debt by leaving (the counter lift of VTC: Sheng et
al., OSDI 2024). A new client starts at the greatest counter, at most a turn above the least, or
clients that are new with every request would always be first.

Half-computed prompts occupy the KV cache, so prompts of different clients take turns of a batch: the
client goes first that would have least once its oldest prompt, or the current batch of it, is done (fair
queueing by finish: Demers, Keshav and Shenker, 1989). Clients whose prompts could fill any tick differ
by at most a turn (:func:`turn_s`) and a tick. Background decoders are served when they had less than
the mean of those clients, and then for a burst (:mod:`uma_trio.policy.deadline.candidates`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar

from uma_trio.policy.cost import CostModel, Work

K = TypeVar("K")


def turn_s(cost: CostModel, n_batch: int) -> float:
    """Return the quantum in machine seconds: a full batch at half the price of a tick of two.

    With a stream in the tick no token costs more than that, so a client that has begun its turn can
    finish it.
    """
    return n_batch * cost.seconds(Work(2)) / 2


def lift(used_s: Mapping[K, float], ready: AbstractSet[K], ahead_s: float = 0.0) -> dict[K, float]:
    """Return the counters once those `ready` are no lower than the least of them that was known.

    Who was not starts where the furthest is, no more than `ahead_s` beyond the least. Of those that
    are not ready only who is above the least is remembered: the rest would be lifted to it.
    """
    if ready and ready == used_s.keys():
        return dict(used_s)  # nobody came or went
    known = [used_s[key] for key in ready if key in used_s]
    least = min(known, default=max(used_s.values(), default=0.0))
    start = min(max(known, default=least), least + ahead_s)
    counters = {key: used for key, used in used_s.items() if used > least and key not in ready}
    for key in ready:
        counters[key] = max(used_s.get(key, start), least)
    return counters


def turns(
    used_s: Mapping[K, float], left_s: Mapping[K, float], most_s: float
) -> tuple[float, dict[K, float]]:
    """Return where clients with prompts stand among others, and each one's finish among them.

    `left_s` is what the turn of each still takes, at the most `most_s`. They stand at the
    mean of what they used: beside a client's whole turn others would wait until all had theirs.
    Who is a turn ahead of the least of them has a debt from before, and is left out of the mean.
    """
    if not left_s:
        return 0.0, {}
    least = min(used_s[key] for key in left_s)
    level = [used_s[key] for key in left_s if used_s[key] <= least + most_s]
    return math.fsum(level) / len(level), {key: used_s[key] + left_s[key] for key in left_s}
