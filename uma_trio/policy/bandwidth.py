"""Bytes moved per tick, kept within a budget (the seeds' sum of BMT).

A tick reads all weights once, of a mixture of experts those that its tokens are routed to, and
the KV cells that its tokens look back at. Machines whose processors share one memory slow down
together when that is used up, so background work is trimmed before it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from uma_trio.policy.plan import Plan, PlanItem, Skip
from uma_trio.policy.roles import is_newcomer
from uma_trio.policy.state import SchedulerState, SequenceView
from uma_trio.policy.tally import planned_work
from uma_trio.policy.traffic import Traffic


def guard_bandwidth(state: SchedulerState, plan: Plan) -> Plan:
    """Trim background items, last first, until the tick's bytes fit into the time it takes.

    Only as long as that moves fewer bytes a second: weights are read once a tick, so a tick that
    becomes much shorter moves more.
    """
    traffic, budget = state.traffic, state.contract.bmt_budget
    views = {view.key: view for view in state.sequences}
    if traffic is None or not plan.items:
        return plan
    trimmed = evolve(plan, moved_bytes=_moved(traffic, plan.items, views))
    while budget is not None and trimmed.moved_bytes > budget * _takes(state, trimmed):
        item = _last_trimmable(trimmed.items, views, state.contract.newcomer_tokens)
        if item is None:
            break
        items = [other for other in trimmed.items if other is not item]
        skipped = trimmed.skipped
        if item.n_tokens > 1:
            less, reason = item.n_tokens // 2, f"{item.reason}; bandwidth"
            items.append(evolve(item, n_tokens=less, reason=reason))
        else:
            skipped += (Skip(item.key, "bandwidth: the tick moves as much as it may"),)
        moved = _moved(traffic, items, views)
        less_of_it = evolve(trimmed, items=tuple(items), skipped=skipped, moved_bytes=moved)
        if moved * _takes(state, trimmed) >= trimmed.moved_bytes * _takes(state, less_of_it):
            break
        trimmed = less_of_it
    return trimmed


def _takes(state: SchedulerState, plan: Plan) -> float:
    """Return the seconds of the tick, as far as anything is known of them."""
    cost = plan.memory.cost
    return state.tick_budget_s if cost is None else cost.seconds(planned_work(state, plan))


def _moved(traffic: Traffic, items: Sequence[PlanItem], views: Mapping[int, SequenceView]) -> float:
    tokens = sum(item.n_tokens for item in items)
    return traffic.moved(tokens, sum(views[i.key].computed + i.n_tokens for i in items))


def _last_trimmable(
    items: Sequence[PlanItem], views: Mapping[int, SequenceView], newcomer_tokens: int
) -> PlanItem | None:
    """Return the last item that no person waits for; never the only token there is."""
    if len(items) == 1 and items[0].n_tokens == 1:
        return None
    for item in reversed(items):
        view = views[item.key]
        paste = not view.decoding and not is_newcomer(view, newcomer_tokens)
        if view.lane == "background" or paste:
            return item
    return None
