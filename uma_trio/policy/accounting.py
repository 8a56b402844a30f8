"""The last word of the contract on a plan: what the finished tick costs, and whom.

It stands behind everything that adds, trims or pads, so that each figure is of the tick that is
computed and not of one that was considered.
"""

from __future__ import annotations

from collections.abc import Mapping

from uma_trio.policy.cost import Work
from uma_trio.policy.evolving import evolve
from uma_trio.policy.fairness import lift, turn_s
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import GuardMemory, MeasuredTick, Memory, SchedulerState, is_newcomer


def planned_work(state: SchedulerState, plan: Plan) -> Work:
    """Return what of `plan` costs time, ballast included."""
    views = state.views
    tokens, rows, context_cells = plan.ballast, plan.ballast + plan.extra_rows, 0
    for item in plan.items:
        view, n = views[item.key], item.n_tokens
        tokens += n
        rows += view.rows(n, item.n_drafts)
        context_cells += n * view.computed
    return Work(
        tokens, rows, context_cells, state.used_cells, bool(state.best_effort), state.before.shape
    )


def as_measured(
    plan: Plan, work: Work, decode_s: float, host_s: float, itl: Mapping[int, float]
) -> MeasuredTick:
    """Return the tick of `plan` as it is to be learnt from."""
    guard = plan.memory.guard
    return MeasuredTick(
        decode_s, host_s, work, itl, plan.limit.solo_s, guard.mixed, guard.background
    )


def moved_bytes(state: SchedulerState, plan: Plan) -> float:
    """Return how many bytes the tick reads and writes, 0 if the model's own numbers are unknown.

    Ballast rows reach experts like any other. Each looks at a KV cell or two of its own, which
    is nothing beside the weights and is not counted.
    """
    if state.traffic is None:
        return 0.0
    views = state.views
    cells = sum([views[item.key].computed + item.n_tokens for item in plan.items])
    return state.traffic.moved(plan.n_tokens + plan.ballast, cells)


def account(state: SchedulerState, plan: Plan) -> Plan:
    """Predict the tick, book it to its clients, and note what rode along for the guard."""
    cost = plan.memory.cost
    if not plan.items:
        return plan
    moved = moved_bytes(state, plan)
    if cost is None:
        return evolve(plan, moved_bytes=moved)
    predicted_s = cost.seconds(planned_work(state, plan))
    memory = _booked(state, plan, predicted_s / plan.n_tokens, turn_s(cost, state.n_batch))
    return evolve(plan, predicted_s=predicted_s, moved_bytes=moved, memory=memory)


def _booked(state: SchedulerState, plan: Plan, per_token_s: float, ahead_s: float) -> Memory:
    """Book the tick: all of it to the clients, what rode along to the lanes, by their weights."""
    views, best_effort, contract, memory = (
        state.views,
        state.best_effort,
        state.contract,
        plan.memory,
    )
    weight = {"interactive": contract.interactive_weight, "background": contract.background_weight}
    used_s = lift(memory.used_s, state.clients, ahead_s)
    lane_s = lift(memory.lane_s, {view.lane for view in best_effort.values()})
    rode = others = 0
    for item in plan.items:
        view, seconds = views[item.key], per_token_s * item.n_tokens
        used_s[view.client] += seconds
        if item.key in best_effort:
            lane_s[view.lane] += seconds / weight[view.lane]
            rode += item.n_tokens
            others += 0 if is_newcomer(view, contract.newcomer_tokens) else item.n_tokens
    guard = _noted(
        memory.guard,
        mixed=rode > 0,
        background=others / max(1, rode),
    )
    return evolve(memory, guard=guard, used_s=used_s, lane_s=lane_s)


def _noted(guard: GuardMemory, *, mixed: bool, background: float) -> GuardMemory:
    """Note for the guard whether anything rode along, and what part of it was no newcomer's."""
    if (mixed, background) == (guard.mixed, guard.background):
        return guard
    return evolve(guard, mixed=mixed, background=background)
