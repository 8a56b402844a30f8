"""Which sizes a tick may have: as many more tokens as fit into so many seconds.

The staircase goes up and down, so a size is one that was measured, and each is looked at by itself.
"""

from __future__ import annotations

import math

from uma_trio.policy.cost import CostModel
from uma_trio.policy.deadline.candidates import Candidates

STEEPEST = 2.0  # no stair goes down by more than half: beyond this none is within the limit


def fitting(cost: CostModel, line: Candidates, most: int, limit_s: float) -> dict[int, float]:
    """Return the seconds of the tick by how many tokens are added to it, where within `limit_s`.

    Sizes fill the tick up to a known step, or take all `most` that there are; none goes beyond
    the largest step: nobody knows what it takes, and who comes meanwhile waits for it.
    """
    total, endless = line.tick.tokens, math.isinf(limit_s)
    if total < cost.steps[-1]:
        most = min(most, cost.steps[-1] - total)
    took: dict[int, float] = {}
    for size in [*(step - total for step in cost.steps if 0 < step - total < most), most]:
        # Most sizes are too large by their own step, before it is asked what they look back at.
        seconds = 0.0 if endless else cost.at_least(total + size)
        if seconds <= limit_s:
            seconds = cost.seconds(line.tick, *line.adds(size))
        if seconds <= limit_s and size > 0:
            took[size] = seconds
        elif seconds > STEEPEST * limit_s:
            break
    return took
