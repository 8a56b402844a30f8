"""What ticks take: the model corrected by what was measured, a plan's predicted time, and the charges to clients.

:func:`learn_cost` is the first stage, :func:`account` the last one, so its values describe the final plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.evolving import evolve
from uma_trio.policy.fairness import lift, lift_all, turn_s
from uma_trio.policy.plan import Limit, Plan
from uma_trio.policy.state import (
    USUAL_LEAD_S,
    MeasuredTick,
    Memory,
    SchedulerState,
    is_newcomer,
    is_prompt,
)

# A tick of a new shape teaches more than the change if that is at most this part of it.
SMALL_CHANGE = 0.1


def learn_cost(state: SchedulerState, plan: Plan) -> Plan:
    """Correct the cost model by what was measured."""
    cost = plan.memory.cost
    if cost is None or not state.measured:
        return plan
    for tick in state.measured:
        if _shows_a_change(cost, tick.work):
            cost = cost.learn_change(tick.work, tick.decode_s)
        else:
            cost = cost.learn(tick.work, tick.decode_s, tick.host_s, *_rates(cost, tick))
    return evolve(plan, memory=evolve(plan.memory, cost=cost))


def _rates(cost: CostModel, tick: MeasuredTick) -> tuple[float | None, float | None]:
    """Return how much a tick corrects the scale factor and the staircase where it is; without readers both at once."""
    tuning = cost.tuning
    if tick.solo_s <= 0:
        return None, None
    if tick.mixed:
        return tuning.mixed_scale_rate, tuning.mixed_step_rate
    return tuning.alone_scale_rate, tuning.alone_step_rate


def _shows_a_change(cost: CostModel, work: Work) -> bool:
    if not cost.recapture_s or (work.repeats and work.settled):
        return False
    return cost.change_s > SMALL_CHANGE * cost.seconds(work)


def planned_work(state: SchedulerState, plan: Plan, *, captured: bool = False) -> Work:
    """Return what of `plan` costs time, ballast included; as if its shape was `captured` already."""
    views = state.views
    tokens, rows, context_cells = plan.ballast, plan.ballast + plan.extra_rows, 0
    for item in plan.items:
        view, n, drafts = views[item.key], item.n_tokens, item.n_drafts
        tokens += n
        if view.scored:
            rows += view.rows(n, drafts)
        elif n - drafts == view.pending - view.drafted:  # the same, without a call
            rows += 1 + drafts
        context_cells += n * view.computed
    contended, before = bool(state.best_effort), state.before
    if captured:
        return Work(tokens, rows, context_cells, state.used_cells, contended)
    return Work(
        *(tokens, rows, context_cells, state.used_cells, contended),
        after=before.shape,
        settled=before.repeats,
    )


def as_measured(
    plan: Plan, work: Work, decode_s: float, host_s: float | None, itl: Mapping[int, float]
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
    """Predict the tick, charge it to clients and lanes, and record its other work for the guard."""
    cost = plan.memory.cost
    if not plan.items:
        return plan
    moved = moved_bytes(state, plan)
    if cost is None:
        return evolve(plan, moved_bytes=moved)
    predicted_s = cost.seconds(planned_work(state, plan))
    memory = _charged(state, plan, predicted_s, turn_s(cost, state.n_batch))
    return evolve(plan, predicted_s=predicted_s, moved_bytes=moved, memory=memory)


def _charged(state: SchedulerState, plan: Plan, predicted_s: float, beyond_s: float) -> Memory:
    """Charge the whole tick to its clients, and its best-effort part to the lanes, by weight.

    What clients used beside ticks is charged to them, too.
    """
    views, best_effort, contract, memory = (
        state.views,
        state.best_effort,
        state.contract,
        plan.memory,
    )
    per_token_s = predicted_s / plan.n_tokens
    weight = {"interactive": contract.interactive_weight, "background": 1.0}
    used_s, part_of = lift_all(memory.used_s, memory.part_of, state.paths, beyond_s)
    for node, seconds in state.charges:
        if node in used_s:  # an unknown one starts later
            used_s[node] += seconds
    lane_s = lift(memory.lane_s, {view.lane for view in best_effort.values()})
    mixed = others = unwatched = prompts = 0
    for item in plan.items:
        view, seconds = views[item.key], per_token_s * item.n_tokens
        for node in view.path:
            used_s[node] += seconds
        if item.key in best_effort:
            lane_s[view.lane] += seconds / weight[view.lane]
            mixed += item.n_tokens
            others += 0 if is_newcomer(view, contract.newcomer_tokens) else item.n_tokens
            unwatched += item.n_tokens if view.lane == "background" else 0
            prompts += is_prompt(view)
    owed_s = owed_after(state, plan.limit, predicted_s, unwatched / max(1, mixed))
    guard = evolve(
        memory.guard,
        mixed=mixed > 0,
        background=others / max(1, mixed),
        owed_s=owed_s,
        answers_owed_s=_answers_owed_after(state, plan, predicted_s, beyond_s, prompts > 0),
    )
    return evolve(memory, guard=guard, used_s=used_s, part_of=part_of, lane_s=lane_s)


def owed_after(state: SchedulerState, limit: Limit, tick_s: float, background: float) -> float:
    """Return the machine time, in seconds, that background work is owed after a tick.

    A step is long enough that readers leave the floor to other work
    (:func:`~uma_trio.policy.deadline.slack.step_s`), as slack. Slack can still be too small:

    - readers can be ahead by little only (`playout_s`, few free places), and one additional row
      takes longer;
    - newcomers that arrive without end use all of it, and without readers all of the machine;
    - ticks take so much longer than predicted that readers never get ahead.

    Background work that is ready is therefore owed its floor of each tick, half of it where no newcomer is,
    less the time that it got, and never more than a grant can give. The tick takes `tick_s`;
    `background` is background work's part of the time beyond solo.
    """
    contract, solo_s = state.contract, limit.solo_s
    # Readers that leave the floor to other work need their usual lead over the floor to get as far ahead as they can.
    nothing_s = -min(contract.playout_s, USUAL_LEAD_S) / 2
    people = sum([view.lane == "interactive" for view in state.best_effort.values()])
    if people == len(state.best_effort) or not (solo_s > 0 or people):
        return nothing_s
    owed_s = contract.background_floor * (1.0 if people else 0.5) * tick_s
    had_s = max(0.0, tick_s - solo_s) * background
    after_s = state.memory.guard.owed_s + owed_s - had_s
    grant_s = contract.pause_cap * solo_s if solo_s > 0 else limit.brief_s
    return min(max(after_s, nothing_s), grant_s)


def owes_answers(state: SchedulerState, cost: CostModel) -> bool:
    """Whether answers get a tick without prompts: they are owed time, and it is enough or has begun."""
    owed_s = state.memory.guard.answers_owed_s
    begun = 0 < state.before.tokens <= len(state.best_effort)
    return owed_s > (0.0 if begun else turn_s(cost, state.n_batch) / cost.tuning.answers_turns)


def _answers_owed_after(
    state: SchedulerState, plan: Plan, predicted_s: float, most_s: float, with_prompts: bool
) -> float:
    """Return the machine time that answers are owed after a tick without readers.

    Their share is that of their number among answers and prompts.
    """
    if plan.limit.solo_s > 0:
        return 0.0
    ready = [view for view in state.best_effort.values() if view.lane == "interactive"]
    prompts = sum([is_prompt(view) for view in ready])
    if not prompts or prompts == len(ready):
        return 0.0
    share = min(state.tuning.answers_share, 1.0 - prompts / len(ready))
    had_s = 0.0 if with_prompts else predicted_s
    owed_s = state.memory.guard.answers_owed_s + share * predicted_s - had_s
    return min(max(owed_s, 0.0), most_s)
