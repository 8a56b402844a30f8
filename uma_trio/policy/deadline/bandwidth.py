"""Bytes moved per tick, kept within a budget (the seeds' sum of BMT).

A tick reads all weights once, of a mixture of experts those that its tokens are routed to, and
the KV cells that its tokens look back at. Machines whose processors share one memory slow down
together when that is used up, so background work is trimmed before it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from uma_trio.policy.accounting import moved_bytes, planned_work
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan, PlanItem, Skip
from uma_trio.policy.state import SchedulerState


def guard_bandwidth(state: SchedulerState, plan: Plan) -> Plan:
    """Trim background items, last first, until the tick's bytes fit into the time it takes.

    Only as long as that moves fewer bytes a second: weights are read once a tick, so a tick that
    becomes much shorter moves more. Ballast comes later and is not looked at here.
    """
    budget = state.contract.bmt_budget
    if budget is None or not plan.items:
        return plan
    trimmed, moved = plan, moved_bytes(state, plan)
    while moved > budget * _takes(state, trimmed):
        item = _last_trimmable(state, trimmed.items)
        if item is None:
            break
        items = [other for other in trimmed.items if other is not item]
        skipped = trimmed.skipped
        if item.n_tokens > 1:
            less, reason = item.n_tokens // 2, f"{item.reason}; bandwidth"
            items.append(evolve(item, n_tokens=less, reason=reason))
        else:
            skipped += (Skip(item.key, "bandwidth: the tick moves as much as it may"),)
        less_of_it = evolve(trimmed, items=tuple(items), skipped=skipped)
        moves_less = moved_bytes(state, less_of_it)
        if moves_less * _takes(state, trimmed) >= moved * _takes(state, less_of_it):
            break
        trimmed, moved = less_of_it, moves_less
    return trimmed


def _takes(state: SchedulerState, plan: Plan) -> float:
    """Return the seconds of the tick, as far as anything is known of them."""
    cost = plan.memory.cost
    return state.tick_budget_s if cost is None else cost.seconds(planned_work(state, plan))


def _last_trimmable(state: SchedulerState, items: Sequence[PlanItem]) -> PlanItem | None:
    """Return the last item that no person waits for; never the only token there is."""
    if len(items) == 1 and items[0].n_tokens == 1:
        return None
    for item in reversed(items):
        if state.views[item.key].lane == "background":
            return item
    return None
