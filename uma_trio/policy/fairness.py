"""Machine time, shared evenly among clients, and among lanes by their weights.

Each client has a counter of the machine seconds it was given, each lane one of its seconds over
its weight. Who has least is served first. Whoever could use nothing for a while comes back with
what it had, but at the least of those that stayed: nobody saves up a claim by being idle, and
nobody sheds what it used by leaving between two requests (the lift of Sheng et al., OSDI 2024).
Clients whose prompts could always fill a tick differ by at most two ticks' time; beside background
decoders by one burst of theirs more (:mod:`uma_trio.policy.served`).
"""

from __future__ import annotations

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
