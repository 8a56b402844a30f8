"""How much to add to a tick: the size with the best rate, and the same decoders for a while.

The rate of a size is its tokens per second. Of the sizes within :data:`~uma_trio.policy.cost.PLATEAU` of the best rate the
smallest is taken, since shorter ticks delay everyone else less. A size in use is kept for small gains
(hysteresis). Now and then a neighbour is tried, since only ticks of a size correct its step.

Background decoders that share a tick go on together for a burst: a batch of the same shape reuses its
graph, and fewer answers are half done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from uma_trio.policy.cost import level
from uma_trio.policy.evolving import evolve
from uma_trio.policy.state import SchedulerState, Served

DEAD_BAND = 1.03  # a size in use is worth this much more than it is
PROBE_EVERY = 64  # ticks
BURST = 16  # ticks that background decoders are served before others have their turn


def sweet_spot(state: SchedulerState, took: Mapping[int, float], total: int) -> int:
    """Return which size to add to a tick that has `total` tokens already; 0 if there is none.

    `took` says what the tick takes by so many more, ascending.
    """
    if not took:
        return 0
    sizes, in_use = tuple(took), state.memory.served.tokens - total
    rates = [n / took[n] * (DEAD_BAND if n == in_use else 1.0) for n in sizes]
    best = level(rates)
    if state.tick % PROBE_EVERY == 0:
        other = best + (1 if state.tick % (2 * PROBE_EVERY) else -1)
        best = other if 0 <= other < len(sizes) else best
    return sizes[best]


def burst(state: SchedulerState) -> frozenset[int]:
    """Return the background decoders whose burst is not over."""
    served = state.memory.served
    return frozenset(served.keys) if state.tick - served.since < BURST else frozenset()


def next_burst(state: SchedulerState, served: Served, keys: Sequence[int]) -> Served:
    """Return what to remember of a tick that serves these background decoders."""
    if not keys:
        return served  # a burst goes on after such a tick
    running = burst(state)
    since = served.since if running and running.issuperset(keys) else state.tick
    return evolve(served, keys=tuple(keys), since=since)
