"""Where one row more costs less, take it: a useful one, or one that is thrown away.

Where a backend captures graphs, a tick of another shape (tokens and logits rows) than the one
before is slow, and the next one, too. A stream beside a long prompt would pay for each prompt that
ends. So such a tick asks for a logits row of an unfinished prompt, as if it ended there, and for as
many as the tick before had, if that was of the same size.
"""

from __future__ import annotations

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState
from uma_trio.policy.tally import planned_work

MOST_BALLAST = 3
WORTH = 0.97  # below this part of the time without; measuring is no finer
# One tick in so many goes without: a step that was measured too high would never be seen again.
TRY_WITHOUT = 256


def ballast_for(cost: CostModel, work: Work, room: int) -> tuple[int, float]:
    """Return how many rows to throw in, at most `room`, so that `work` takes least time, and which."""
    best, takes_s = 0, cost.seconds(work)
    worth_s = WORTH * takes_s
    for extra in range(1, min(MOST_BALLAST, room) + 1):
        seconds = cost.seconds(work, tokens=extra, rows=extra)
        if seconds < worth_s:
            best, takes_s, worth_s = extra, seconds, seconds
    return best, takes_s


def add_ballast(state: SchedulerState, plan: Plan) -> Plan:
    """Add rows in a scratch slot where the staircase goes down.

    Useful rows were added before, as far as there were any and the limit allowed.
    """
    cost = plan.memory.cost
    if cost is None or not plan.items:
        return plan
    room = min(state.spare_rows, min(state.n_batch, state.empty_cells) - plan.n_tokens)
    best, _ = ballast_for(cost, planned_work(state, plan), room)
    return evolve(plan, ballast=best) if best and state.tick % TRY_WITHOUT else plan


def keep_shape(state: SchedulerState, plan: Plan) -> Plan:
    """Ask for rows of the last prompt, where that gives all ticks beside it one shape."""
    cost = plan.memory.cost
    if cost is None or not cost.switch_s or not plan.items:
        return plan
    prompts = [item for item in plan.items if item.phase == "prefill"]
    if len(prompts) in (0, len(plan.items)) or plan.items[-1].phase != "prefill":
        return plan
    ends = [item.n_tokens == state.views[item.key].pending for item in prompts]
    if ends[-1]:  # its row is read, and those that nobody reads have to come behind
        return plan
    work, before = planned_work(state, plan), state.before
    rows = before.rows if before.tokens == work.tokens else 0
    rows = min(max(rows, work.rows + (not any(ends))), len(state.sequences))
    extra = min(rows - work.rows, plan.items[-1].n_tokens)
    return evolve(plan, extra_rows=extra) if extra > 0 else plan
