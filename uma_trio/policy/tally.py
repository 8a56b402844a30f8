"""The last word of the contract on a plan: what the finished tick costs, and whom.

It stands behind everything that adds, trims or pads, so that each figure is of the tick that is
computed and not of one that was considered.
"""

from __future__ import annotations

from attrs import evolve

from uma_trio.policy.cost import Work
from uma_trio.policy.fairness import charged
from uma_trio.policy.plan import Plan
from uma_trio.policy.roles import is_newcomer, is_protected
from uma_trio.policy.state import SchedulerState


def planned_work(state: SchedulerState, plan: Plan) -> Work:
    """Return what of `plan` costs time, ballast included."""
    pending = {view.key: view.pending for view in state.sequences}
    rows = sum(item.n_tokens == pending[item.key] for item in plan.items)
    return Work(plan.n_tokens + plan.ballast, rows + plan.ballast)


def tally(state: SchedulerState, plan: Plan) -> Plan:
    """Predict the tick, book it to its clients, and note what rode along for the guard."""
    cost = plan.memory.cost
    if cost is None or not plan.items:
        return plan
    predicted_s = cost.seconds(planned_work(state, plan))
    views = {view.key: view for view in state.sequences}
    riders = [item for item in plan.items if not is_protected(views[item.key])]
    newcomers = state.contract.newcomer_tokens
    others = sum(i.n_tokens for i in riders if not is_newcomer(views[i.key], newcomers))
    guard = evolve(
        plan.memory.guard,
        loaded=bool(riders),
        background=others / max(1, sum(item.n_tokens for item in riders)),
    )
    clients = {key: view.client for key, view in views.items()}
    used_s = charged(plan.memory.used_s, clients, plan.items, predicted_s)
    memory = evolve(plan.memory, guard=guard, used_s=used_s)
    return evolve(plan, predicted_s=predicted_s, memory=memory)
