"""Machine time, shared evenly among clients, and among lanes by their weights.

Each client has a counter of the machine seconds it was given, each lane one of its seconds over
its weight. Whoever could use nothing for a while comes back with what it had, but at the least of
those that stayed: nobody saves up a claim by being idle, and nobody sheds what it used by leaving
between two requests (the lift of Sheng et al., OSDI 2024).

Who has least is served first; only prompts of different clients take turns. Half-done ones lie in
the KV cache, where others may pay for them, so they are computed one after the other rather than all
at once: that client first which would have least once its oldest prompt is done (fair queueing by
finish, of Demers, Keshav and Shenker, 1989). So a short one passes a long one, whose turn is bounded:
no more is reckoned of it than of a full batch, at twice its time (:mod:`uma_trio.policy.fill`).
Clients whose prompts could always fill a tick differ by a turn and a tick at the most, the time of
three full batches, also beside background decoders, which are served when they had less than the
mean of those clients, and then for a burst (:mod:`uma_trio.policy.served`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar

K = TypeVar("K")


def lift(used_s: Mapping[K, float], ready: AbstractSet[K]) -> dict[K, float]:
    """Return the counters once those `ready` are no lower than the least of them that was known.

    Of the others only who is above that is remembered: the rest would be lifted to it.
    """
    if ready and ready == used_s.keys():
        return dict(used_s)  # nobody came or went
    known = [used_s[key] for key in ready if key in used_s]
    least = min(known, default=max(used_s.values(), default=0.0))
    counters = {key: used for key, used in used_s.items() if used > least and key not in ready}
    for key in ready:
        counters[key] = max(used_s.get(key, least), least)
    return counters


def turns(
    used_s: Mapping[K, float], left_s: Mapping[K, float], turn_s: float
) -> tuple[float, dict[K, float]]:
    """Return where clients with prompts stand among others, and each one's finish among them.

    `left_s` is what the oldest prompt of each still takes, at the most `turn_s`. They stand at the
    mean of what they used: beside a client's whole turn others would wait until all had theirs.
    Who is a turn ahead of the least of them has a debt from before, and is left out of the mean.
    """
    if not left_s:
        return 0.0, {}
    least = min(used_s[key] for key in left_s)
    level = [used_s[key] for key in left_s if used_s[key] <= least + turn_s]
    return math.fsum(level) / len(level), {key: used_s[key] + left_s[key] for key in left_s}
