"""Machine time, shared evenly among clients, and among lanes by their weights.

Shares are divided in levels: machine time among principals, the time of a principal among its programs,
the time of a program among its conversations. A sequence has a *path* of one number for each level, of
which its `client` is the last. Each number has a counter of its own, and is compared with those that
divide the same share. Where there is one level, all of this is about clients.

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
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar

from uma_trio.policy.cost import CostModel, Work

K = TypeVar("K")

#: A turn has so many tokens at the most, however wide a batch may be.
TURN_TOKENS = 512


def turn_s(cost: CostModel, n_batch: int) -> float:
    """Return the quantum in machine seconds: a batch, 512 tokens at most, at half the price of a tick of two.

    With a stream in the tick no token costs more than that, so a client that has begun its turn can
    finish it.
    """
    return min(n_batch, TURN_TOKENS) * cost.seconds(Work(2)) / 2


def lift(used_s: Mapping[K, float], ready: AbstractSet[K], beyond_s: float = 0.0) -> dict[K, float]:
    """Return the counters once those `ready` are no lower than the least of them that was known.

    A new key starts at the greatest counter, at most `beyond_s` above the least. Of the keys that
    are not ready only those above the least are kept: the others would be lifted to it.
    """
    if ready and ready == used_s.keys():
        return dict(used_s)  # the same keys
    known = [used_s[key] for key in ready if key in used_s]
    least = min(known, default=max(used_s.values(), default=0.0))
    start = min(max(known, default=least), least + beyond_s)
    counters = {key: used for key, used in used_s.items() if used > least and key not in ready}
    for key in ready:
        counters[key] = max(used_s.get(key, start), least)
    return counters


Path = tuple[int, ...]
"""The nodes that share machine time, outermost first. The numbers are unique, also across levels."""


def lift_all(
    used_s: Mapping[int, float],
    part_of: Mapping[int, int],
    paths: Collection[Path],
    beyond_s: float,
) -> tuple[dict[int, float], dict[int, int]]:
    """Return the counters of all levels, lifted for those on `paths`, and whose share each one divides.

    Counters of those that divide the same share are lifted together (:func:`lift`). If none of them
    is ready, they are dropped.
    """
    ready = _by_parent(paths)
    if ready.keys() <= {None} and not part_of:
        return lift(used_s, ready[None], beyond_s), {}
    known: defaultdict[int | None, dict[int, float]] = defaultdict(dict)
    for node, used in used_s.items():
        known[part_of.get(node)][node] = used
    counters: dict[int, float] = {}
    parts: dict[int, int] = {}
    for parent, nodes in ready.items():
        lifted = lift(known[parent], nodes, beyond_s)
        counters.update(lifted)
        if parent is not None:
            parts.update(dict.fromkeys(lifted, parent))
    return counters, parts


def standings(
    used_s: Mapping[int, float], paths: Collection[Path], most_s: float
) -> dict[int, float]:
    """Return for each client one number that compares it with all others; the least goes first.

    It is the counter of its outermost share, plus on each level how far it is from the mean of those
    that divide the same share. Beside other shares it counts for no more than `most_s`: by how a
    principal divides its own it gets at most that much before others, however many names it uses.
    """
    ready = _by_parent(paths)
    mean_s = {
        parent: math.fsum([used_s[node] for node in nodes]) / len(nodes)
        for parent, nodes in ready.items()
    }
    found: dict[int, float] = {}
    for path in paths:
        stands, alone, parent = used_s[path[0]], len(ready[None]) == 1, path[0]
        for node in path[1:]:
            apart = used_s[node] - mean_s[parent]
            stands += apart if alone else min(max(apart, -most_s), most_s)
            alone, parent = alone and len(ready[parent]) == 1, node
        found[path[-1]] = stands
    return found


def _by_parent(paths: Iterable[Path]) -> defaultdict[int | None, set[int]]:
    """Return the numbers on these paths, by the node whose share they divide; None for the outermost."""
    ready: defaultdict[int | None, set[int]] = defaultdict(set)
    for path in paths:
        parent: int | None = None
        for node in path:
            ready[parent].add(node)
            parent = node
    return ready


def turns(
    used_s: Mapping[K, float], left_s: Mapping[K, float], most_s: float
) -> tuple[float, dict[K, float]]:
    """Return the level of clients with prompts among others, and each one's finish among them.

    `left_s` is what the turn of each still takes, at the most `most_s`. They stand at the
    mean of what they used: beside a client's whole turn others would wait until all had theirs.
    A client that is a turn ahead of the least has a debt from before, and is left out of the mean.
    """
    if not left_s:
        return 0.0, {}
    least = min(used_s[key] for key in left_s)
    level = [used_s[key] for key in left_s if used_s[key] <= least + most_s]
    return math.fsum(level) / len(level), {key: used_s[key] + left_s[key] for key in left_s}
