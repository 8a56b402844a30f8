"""Keeps the batch's shape (tokens, logits rows), where a change needs a new graph.

A prompt asks for a logits row only in its last chunk, so each prompt would change the shape twice
at its end. Instead every chunk asks for a row, as if the prompt ended there, and for as many rows
as the previous tick of the same size.
"""

from __future__ import annotations

from uma_trio.policy.accounting import planned_work
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState


def keep_shape(state: SchedulerState, plan: Plan) -> Plan:
    """Ask for unread rows of the last prompt, so that mixed ticks have one shape."""
    cost = plan.memory.cost
    if cost is None or not cost.recapture_s or not plan.items:
        return plan
    prompts = [item for item in plan.items if item.phase == "prefill"]
    if len(prompts) in (0, len(plan.items)) or plan.items[-1].phase != "prefill":
        return plan
    ends = [state.views[item.key].rows(item.n_tokens) > 0 for item in prompts]
    if ends[-1]:  # its row is read, and unread rows have to come behind it
        return plan
    work, before = planned_work(state, plan), state.before
    rows = before.rows if before.tokens == work.tokens else 0
    rows = min(max(rows, work.rows + (not any(ends))), len(state.sequences))
    extra = min(rows - work.rows, plan.items[-1].n_tokens)
    return evolve(plan, extra_rows=extra) if extra > 0 else plan
