"""How much to add to a tick: the sizes that fit, and the one with the best rate.

The staircase is not monotonic, so only measured sizes are used, and each is evaluated by itself. Of
the sizes within :data:`~uma_trio.policy.cost.PLATEAU` of the best rate, in tokens per second, the
smallest is taken, because shorter ticks delay other work less. The current size is kept for small
gains (hysteresis). Sometimes a neighbouring size is tried, because only ticks of a size correct its
measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from uma_trio.policy.cost import CostModel, level
from uma_trio.policy.deadline.ballast import ballast_for
from uma_trio.policy.deadline.candidates import Candidates
from uma_trio.policy.state import SchedulerState

STEEPEST = 2.0  # no stair goes down by more than half: beyond this none is within the limit
DEAD_BAND = 1.03  # a size in use is worth this much more than it is
PROBE_EVERY = 64  # ticks


def fitting(
    cost: CostModel, line: Candidates, most: int, limit_s: float, spare_rows: int
) -> dict[int, float]:
    """Return the seconds of the tick by how many tokens are added to it, where within `limit_s`.

    Sizes fill the tick up to a known step, or take all `most` that there are; none goes beyond
    the largest step: nobody knows what it takes, and who comes meanwhile waits for it. Only a tick
    of all `most` is priced with ballast: any other can have useful rows in its place.
    """
    total, endless = line.tick.tokens, math.isinf(limit_s)
    if total < cost.steps[-1]:
        most = min(most, cost.steps[-1] - total)
    took: dict[int, float] = {}
    for size in [step - total for step in cost.steps if 0 < step - total < most]:
        # Most sizes are too large by their own step, before it is asked what they look back at.
        seconds = 0.0 if endless else cost.at_least(total + size)
        if seconds <= limit_s:
            seconds = cost.seconds(line.tick, *line.adds(size))
        if seconds <= limit_s:
            took[size] = seconds
        elif seconds > STEEPEST * limit_s:
            return took
    if most > 0:
        _, seconds = ballast_for(cost, line.work(most), spare_rows)
        if seconds <= limit_s:
            took[most] = seconds
    return took


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
