"""Keep the batch's shape from tick to tick, where another shape is slow.

Where a backend captures graphs, a tick of another shape (tokens and logits rows) than the one
before is slow, and the next one, too. A stream beside a long prompt would pay for each prompt that
ends. So such a tick asks for a logits row of an unfinished prompt, as if it ended there, and for as
many as the tick before had, if that was of the same size.
"""

from __future__ import annotations

from uma_trio.policy.accounting import planned_work
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState


def keep_shape(state: SchedulerState, plan: Plan) -> Plan:
    """Ask for rows of the last prompt, where that gives all ticks beside it one shape."""
    cost = plan.memory.cost
    if cost is None or not plan.items:
        return plan
    prompts = [item for item in plan.items if item.phase == "prefill"]
    if len(prompts) in (0, len(plan.items)) or plan.items[-1].phase != "prefill":
        return plan
    ends = [state.views[item.key].rows(item.n_tokens) > 0 for item in prompts]
    if ends[-1]:  # its row is read, and those that nobody reads have to come behind
        return plan
    work, before = planned_work(state, plan), state.before
    rows = before.rows if before.tokens == work.tokens else 0
    rows = min(max(rows, work.rows + (not any(ends))), len(state.sequences))
    extra = min(rows - work.rows, plan.items[-1].n_tokens)
    return evolve(plan, extra_rows=extra) if extra > 0 else plan
