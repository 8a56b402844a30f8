"""The error budget of each interactive stream: how many late tokens it can bear.

A budget starts at 0. A token in time adds 0.025, a late one costs 1, whatever caused it. A tick may be
long only if every stream's budget can pay for it (:mod:`uma_trio.policy.contract.limit`). Since a
token earns less than a twentieth, fewer than 5 % of a stream's tokens are planned to be late: the
p95 of each stream is within the cap, not only the average's. A budget far below 0 narrows the limit of
every tick until it has recovered.

A token is in time within `latency_cap` times the p95 of isolated ticks (`noise` times solo). What
the machine's own noise adds is not charged to best-effort work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from uma_trio.policy.contract.learn import with_shapes
from uma_trio.policy.contract.rules import FREE_SHAPES, Rules
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import GuardMemory, MeasuredTick, SchedulerState

# Half of the twentieth that a p95 forgives; the other half is for tokens that are late unplanned.
EARNED_PER_TOKEN = 0.025
MOST_BUDGET = 2.0
DEEPEST_DEBT = -3.0  # one bad stretch must not starve the background for ever
# The p95 of isolated ticks, over the predicted time, is followed by small steps: up by nineteen parts
# when a latency is above it, down by one when it is not. It settles where one in twenty is above.
NOISE_STEP, MOST_NOISE = 0.05, 2.0
NOISE_UP, NOISE_DOWN = math.exp(NOISE_STEP * 0.95), math.exp(NOISE_STEP * -0.05)
SHARE_SECONDS = 2.0  # over which the background's share is smoothed
NEWCOMER_SECONDS = 5.0  # the same for what people's prompts took


def keep_error_budget(state: SchedulerState, plan: Plan, rules: Rules = FREE_SHAPES) -> Plan:
    """Charge measured latencies to the budget of each stream, and machine time to the shares."""
    guard = plan.memory.guard
    if not state.measured:
        return plan
    for tick, same in with_shapes(state):
        guard = _entered(guard, tick, state, counts=same >= rules.settling_ticks)
    return evolve(plan, memory=evolve(plan.memory, guard=guard))


def _entered(
    guard: GuardMemory, tick: MeasuredTick, state: SchedulerState, *, counts: bool
) -> GuardMemory:
    """Return the memory with one tick in it."""
    budgets, late = _balance(guard, tick, state)
    noise = guard.noise
    if counts and not tick.mixed and tick.solo_s > 0:
        noise = _followed(noise, [tick.itl.get(v.key) for v in state.protected], tick.solo_s)
    return evolve(
        shared(guard, tick),
        budgets=budgets,
        noise=noise,
        infeasible=guard.infeasible + (late and not tick.mixed),
    )


def shared(guard: GuardMemory, tick: MeasuredTick, over_s: float = SHARE_SECONDS) -> GuardMemory:
    """Return the memory with the machine time of one tick in the shares."""
    took_s = tick.decode_s
    # What others added to the tick, as a part of it.
    added = max(0.0, 1.0 - tick.solo_s / took_s) if tick.mixed and took_s > 0 else 0.0
    return evolve(
        guard,
        share=_moved(guard.share, added * tick.background, took_s, over_s),
        newcomers=_moved(
            guard.newcomers, added * (1.0 - tick.background), took_s, NEWCOMER_SECONDS
        ),
    )


def _balance(
    guard: GuardMemory, tick: MeasuredTick, state: SchedulerState
) -> tuple[dict[int, float], bool]:
    """Return each stream's budget after this tick, and whether any token was late.

    A sequence that is parked or in the other lane keeps its budget.
    """
    late_s = state.contract.latency_cap * guard.noise * tick.solo_s
    there = state.views
    budgets, late = {key: budget for key, budget in guard.budgets.items() if key in there}, False
    for view in state.protected:
        budget, itl_s = budgets.get(view.key, 0.0), tick.itl.get(view.key)
        if itl_s is None or tick.solo_s <= 0:
            pass  # nothing to enter
        elif itl_s > late_s:
            late, budget = True, max(DEEPEST_DEBT, budget - 1.0)
        else:
            budget = min(MOST_BUDGET, budget + EARNED_PER_TOKEN)
        budgets[view.key] = budget
    return budgets, late


def _followed(noise: float, itl: Sequence[float | None], solo_s: float) -> float:
    """Move the estimate of the p95 latency, in times of `solo_s`, by one token of each stream."""
    for itl_s in itl:
        if itl_s is None:
            continue
        if itl_s / solo_s > noise:
            noise = min(noise * NOISE_UP, MOST_NOISE)
        else:
            noise = max(1.0, noise * NOISE_DOWN)
    return noise


def _moved(average: float, value: float, took_s: float, over_s: float) -> float:
    """Move an average over the last `over_s` by a tick that took `took_s`."""
    return average + (1.0 - math.exp(-took_s / over_s)) * (value - average)
