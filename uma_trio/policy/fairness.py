"""Machine time, shared evenly among clients, and among lanes by their weights.

Each client has a counter of the machine seconds it was given, each lane one of its seconds over
its weight. Whoever could use nothing for a while comes back with what it had, but at the least of
those that stayed: nobody saves up a claim by being idle, and nobody sheds what it used by leaving
between two requests (the lift of Sheng et al., OSDI 2024). A client that was never seen starts
where the furthest of them stands, a turn ahead of the least at the most: or clients that come new
with every request would always be before one that waits.

Who has least is served first; only prompts of different clients take turns. Half-done ones lie in
the KV cache, where others may pay for them, so they are computed a batch at a time: that client
first which would have least once its oldest prompt, or the batch that it is in, is done (fair
queueing by finish, of Demers, Keshav and Shenker, 1989). So a short one passes a long one. Clients
whose prompts could always fill a tick differ by a turn (:func:`turn_s`) and a tick at the most, also
beside background decoders, which are served when they had less than the mean of those clients, and
then for a burst (:mod:`uma_trio.policy.served`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar

from uma_trio.policy.cost import CostModel, Work

K = TypeVar("K")


def turn_s(cost: CostModel, n_batch: int) -> float:
    """Return the most machine seconds a turn takes: a full batch, at the price of the smallest ticks.

    Beside a stream no token costs more than half of a tick of two, and whoever has begun must not
    fall behind for what it costs.
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
