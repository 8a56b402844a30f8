"""The last word of the contract on a plan: what the finished tick costs, and whom.

It stands behind everything that adds, trims or pads, so that each figure is of the tick that is
computed and not of one that was considered.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from uma_trio.policy.cost import Work
from uma_trio.policy.fairness import charged
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.roles import is_newcomer, is_protected, ready_clients, riding_lanes
from uma_trio.policy.state import Lane, SchedulerState


def planned_work(state: SchedulerState, plan: Plan) -> Work:
    """Return what of `plan` costs time, ballast included."""
    views = {view.key: view for view in state.sequences}
    rows, looked = int(plan.extra_row), 0
    for item in plan.items:
        view = views[item.key]
        rows += item.n_tokens == view.pending
        looked += item.n_tokens * view.computed
    return Work(
        tokens=plan.n_tokens + plan.ballast,
        rows=rows + plan.ballast,
        looked=looked,
        resident=sum(view.computed for view in state.sequences),
        after=state.last.work.shape,
    )


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
    used_s, lane_s = _charged(state, plan, predicted_s / plan.n_tokens, riders)
    memory = evolve(plan.memory, guard=guard, used_s=used_s, lane_s=lane_s)
    return evolve(plan, predicted_s=predicted_s, memory=memory)


def _charged(
    state: SchedulerState, plan: Plan, per_token_s: float, riders: Sequence[PlanItem]
) -> tuple[dict[int, float], dict[Lane, float]]:
    """Book the tick: all of it to the clients, what rode along to the lanes, by their weights."""
    views = {view.key: view for view in state.sequences}
    contract = state.contract
    weight = {"interactive": contract.interactive_weight, "background": contract.background_weight}
    by_client = [(views[i.key].client, per_token_s * i.n_tokens) for i in plan.items]
    by_lane: list[tuple[Lane, float]] = [
        (lane, per_token_s * item.n_tokens / weight[lane])
        for item in riders
        for lane in [views[item.key].lane]
    ]
    return (
        charged(plan.memory.used_s, ready_clients(state), by_client),
        charged(plan.memory.lane_s, riding_lanes(state), by_lane),
    )
