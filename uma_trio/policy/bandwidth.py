"""Bytes moved per tick, kept within a budget (the seeds' sum of BMT).

A tick reads all weights once, of a mixture of experts those that its tokens are routed to, and
the KV cells that its tokens look back at. Machines whose processors share one memory slow down
together when that is used up, so background work is trimmed before it is.
"""

from __future__ import annotations

import math

from attrs import evolve

from uma_trio.policy.plan import Plan, PlanItem, Skip
from uma_trio.policy.state import SchedulerState, SequenceView
from uma_trio.policy.tally import planned_work
from uma_trio.policy.traffic import Traffic


def guard_bandwidth(state: SchedulerState, plan: Plan) -> Plan:
    """Trim background items, last first, until the tick's bytes fit into its time."""
    traffic, budget = state.traffic, state.contract.bmt_budget
    views = {view.key: view for view in state.sequences}
    if traffic is None or not plan.items:
        return plan
    if budget is None:
        return evolve(plan, moved_bytes=_moved(traffic, plan.items, views))
    time_s = plan.limit.seconds
    if math.isinf(time_s):
        cost = plan.memory.cost
        expected_s = cost.seconds(planned_work(state, plan)) if cost is not None else 0.0
        time_s = max(state.tick_budget_s, expected_s)
    items, skipped = list(plan.items), list(plan.skipped)
    while _moved(traffic, items, views) > budget * time_s:
        item = _last_trimmable(items, views)
        if item is None:
            break
        items.remove(item)
        if item.n_tokens > 1:
            smaller = evolve(item, n_tokens=item.n_tokens // 2, reason=f"{item.reason}; bandwidth")
            items.append(smaller)
        else:
            skipped.append(Skip(item.key, "bandwidth: the tick moves as much as it may"))
    return evolve(
        plan,
        items=tuple(items),
        skipped=tuple(skipped),
        moved_bytes=_moved(traffic, items, views),
    )


def _moved(
    traffic: Traffic, items: list[PlanItem] | tuple[PlanItem, ...], views: dict[int, SequenceView]
) -> float:
    tokens = sum(item.n_tokens for item in items)
    return traffic.moved(tokens, sum(views[i.key].computed + i.n_tokens for i in items))


def _last_trimmable(items: list[PlanItem], views: dict[int, SequenceView]) -> PlanItem | None:
    """Return the last item that no person waits for; never the only one there is."""
    if len(items) == 1 and items[0].n_tokens == 1:
        return None
    for item in reversed(items):
        view = views[item.key]
        if view.lane == "background" or (not view.decoding and len(items) > 1):
            return item
    return None
