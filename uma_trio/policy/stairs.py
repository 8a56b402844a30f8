"""Where one row more costs less, take it: a useful one, or one that is thrown away."""

from __future__ import annotations

from attrs import evolve

from uma_trio.policy.cost import Work
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

MOST_BALLAST = 3
WORTH = 0.97  # below this part of the time without; measuring is no finer


def add_ballast(state: SchedulerState, plan: Plan) -> Plan:
    """Add rows in a scratch slot where the staircase goes down.

    Useful rows were added before, as far as there were any and the limit allowed.
    """
    cost = plan.memory.cost
    n = plan.n_tokens
    if cost is None or not plan.items or state.spare_rows <= 0:
        return plan
    rows = sum(item.n_tokens == _pending(state, item.key) for item in plan.items)
    best, least = 0, cost.seconds(Work(n, max(1, rows))) * WORTH
    for extra in range(1, min(MOST_BALLAST, state.spare_rows, state.n_batch - n) + 1):
        seconds = cost.seconds(Work(n + extra, rows + extra))
        if seconds < least:
            best, least = extra, seconds
    return evolve(plan, ballast=best) if best else plan


def _pending(state: SchedulerState, key: int) -> int:
    return next(view.pending for view in state.sequences if view.key == key)
