"""How many tokens a tick should hold, learnt from how long ticks take."""

from __future__ import annotations

from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

# The seeds let the batch drift towards ~30 ms, and name no rate.
GROW, SHRINK = 1.25, 0.8
TOLERANCE = 0.1
FULL = 0.75  # a tick tells something about the target only when it nearly reached it
SMALLEST_TARGET = 8


def adapt_budget(state: SchedulerState, plan: Plan) -> Plan:
    """Move the target towards the tick budget by the time of each measured tick."""
    target = state.memory.target_tokens
    for tick in state.measured:
        if tick.n_tokens < FULL * target:
            continue
        # A tick of prompts alone may be several targets long, and takes as much longer.
        budget_s = state.tick_budget_s * max(1.0, tick.n_tokens / target)
        if tick.decode_s < (1 - TOLERANCE) * budget_s:
            target = min(state.n_batch, max(target + 1, int(target * GROW)))
        elif tick.decode_s > (1 + TOLERANCE) * budget_s:
            target = max(SMALLEST_TARGET, int(target * SHRINK))
    if target == state.memory.target_tokens:
        return plan
    return evolve(plan, memory=evolve(plan.memory, target_tokens=target))
