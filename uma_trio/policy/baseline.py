"""The simplest policy that is of use: a budget of tokens a tick, learnt from how long ticks take.

Decoders come first, a token each (:mod:`uma_trio.policy.decode`); what is left of the budget goes to prompts, in
chunks.
"""

from __future__ import annotations

from uma_trio.policy.decode import leave_out_parked, rotate, select_decoders
from uma_trio.policy.evolving import evolve
from uma_trio.policy.pipeline import Pipeline
from uma_trio.policy.plan import Plan, PlanItem, Skip
from uma_trio.policy.state import SchedulerState, SequenceView

# The seeds let the batch drift towards ~30 ms, and name no rate.
GROW, SHRINK = 1.25, 0.8
TOLERANCE = 0.1
FULL = 0.75  # a tick tells something about the target only when it nearly reached it
SMALLEST_TARGET = 8
# When decoding alone fills the budget, prompts still move by this many tokens a tick: a
# request that never starts is worse than a tick that is a little long.
SMALLEST_CHUNK = 8
# Ticks of prompts alone may be this many times as long, and hold at least so many tokens: no stream
# waits for its next token, only a new request for the end of the tick, and on slow machines a
# small chunk costs as much as a large one (32 tokens took 345 ms where 128 took 233).
ALONE, SMALLEST_ALONE = 4, 128


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


def fill_with_prefill(state: SchedulerState, plan: Plan) -> Plan:
    """Give the rest of the budget to prompts, each in the largest chunk that fits."""
    ready = _order(state)
    if not ready:
        return plan
    used = plan.n_tokens
    target = plan.memory.target_tokens
    room = max(target - used, SMALLEST_CHUNK) if used else max(ALONE * target, SMALLEST_ALONE)
    room = min(room, state.n_batch - used)
    items: list[PlanItem] = []
    skipped: list[Skip] = []
    for view in ready:
        n = min(view.due, room)
        if n <= 0:
            skipped.append(Skip(view.key, "prefill: this tick's budget is used up"))
            continue
        room -= n
        reason = "prefill: last chunk" if n == view.due else "prefill: as much as the budget holds"
        items.append(PlanItem(view.key, n, "prefill", reason))
    cursor = items[-1].key if items else state.memory.prefill_cursor
    return evolve(
        plan,
        items=plan.items + tuple(items),
        skipped=plan.skipped + tuple(skipped),
        memory=evolve(plan.memory, prefill_cursor=cursor),
    )


def _order(state: SchedulerState) -> list[SequenceView]:
    """Prompts without a first token before recomputed ones, interactive before background."""
    ready = [view for view in state.sequences if view.credit > 0 and not view.decoding]
    ready = rotate(ready, state.memory.prefill_cursor)
    return sorted(ready, key=lambda view: (view.lane == "background", view.started))


baseline = Pipeline(
    stages={
        "parking": leave_out_parked,
        "budget": adapt_budget,
        "decode": select_decoders,
        "prefill": fill_with_prefill,
    },
    needs_cost=False,
)
"""Decode first, a token each; what is left of an adaptive budget goes to prompts."""
