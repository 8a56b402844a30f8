"""The last word of the contract on a plan: what the finished tick costs, and whom.

It stands behind everything that adds, trims or pads, so that each figure is of the tick that is
computed and not of one that was considered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from uma_trio.policy.cost import Work
from uma_trio.policy.evolving import evolve
from uma_trio.policy.fairness import charged
from uma_trio.policy.plan import Plan
from uma_trio.policy.roles import is_newcomer
from uma_trio.policy.state import GuardMemory, Lane, Memory, SchedulerState, SequenceView

Ride = tuple[SequenceView, int]  # somebody who is no protected stream, and its tokens


def planned_work(state: SchedulerState, plan: Plan) -> Work:
    """Return what of `plan` costs time, ballast included."""
    views = state.views
    tokens, rows, looked = plan.ballast, plan.ballast + plan.extra_row, 0
    for item in plan.items:
        view, n = views[item.key], item.n_tokens
        tokens += n
        rows += n == view.pending
        looked += n * view.computed
    return Work(tokens, rows, looked, state.resident, state.last.work.shape)


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


def tally(state: SchedulerState, plan: Plan) -> Plan:
    """Predict the tick, book it to its clients, and note what rode along for the guard."""
    cost = plan.memory.cost
    if not plan.items:
        return plan
    moved = moved_bytes(state, plan)
    if cost is None:
        return evolve(plan, moved_bytes=moved)
    predicted_s = cost.seconds(planned_work(state, plan))
    memory = _booked(state, plan, predicted_s / plan.n_tokens)
    return evolve(plan, predicted_s=predicted_s, moved_bytes=moved, memory=memory)


def _booked(state: SchedulerState, plan: Plan, per_token_s: float) -> Memory:
    """Book the tick: all of it to the clients, what rode along to the lanes, by their weights."""
    views, riders = state.views, state.riders
    by_client = [(views[i.key].client, per_token_s * i.n_tokens) for i in plan.items]
    used_s = charged(plan.memory.used_s, state.clients, by_client)
    rides: list[Ride] = []
    lane_s: dict[Lane, float] = {}
    if riders:
        rides = [(riders[item.key], item.n_tokens) for item in plan.items if item.key in riders]
        lane_s = _by_lane(state, plan.memory.lane_s, rides, per_token_s)
    guard = _noted(plan.memory.guard, rides, state.contract.newcomer_tokens)
    return evolve(plan.memory, guard=guard, used_s=used_s, lane_s=lane_s)


def _by_lane(
    state: SchedulerState, lane_s: Mapping[Lane, float], rides: Sequence[Ride], per_token_s: float
) -> dict[Lane, float]:
    contract = state.contract
    weight = {"interactive": contract.interactive_weight, "background": contract.background_weight}
    shares = [(view.lane, per_token_s * n / weight[view.lane]) for view, n in rides]
    return charged(lane_s, {view.lane for view in state.riders.values()}, shares)


def _noted(guard: GuardMemory, rides: Sequence[Ride], newcomer_tokens: int) -> GuardMemory:
    """Note for the guard whether anything rode along, and what part of it was no newcomer's."""
    others = sum([n for view, n in rides if not is_newcomer(view, newcomer_tokens)])
    loaded, background = bool(rides), others / max(1, sum([n for _, n in rides]))
    if (loaded, background) == (guard.loaded, guard.background):
        return guard
    return evolve(guard, loaded=loaded, background=background)
