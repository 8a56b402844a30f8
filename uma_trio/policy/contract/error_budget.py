"""The error budget of each interactive stream: how many late gaps it can bear now.

A stream starts with no credit, earns a little with every gap that was in time, and pays 1 for
every gap that was not, whatever caused it. Only a tick that every stream can pay for may be
long. Since a gap earns less than a twentieth, long gaps stay under 5 % on every stream: its p95
is within the cap, not only the average's. Credit is the hysteresis, and a stream that is deep in
debt narrows the limit of every tick until it has recovered (:mod:`uma_trio.policy.contract.limit`).

"In time" is within the cap times the p95 gap of the streams alone: machines are restless, and
what they do to a stream by themselves is not the company's fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from uma_trio.policy.contract.learn import with_shapes
from uma_trio.policy.contract.rules import FREE_SHAPES, Rules
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import GuardMemory, MeasuredTick, SchedulerState

# Half of the twentieth that a p95 forgives: the other half is for gaps that nobody planned to be late.
EARNED_PER_TOKEN = 0.025
MOST_BUDGET = 2.0
DEEPEST_DEBT = -3.0  # one bad stretch must not starve the background for ever
# The p95 of gaps alone, over what was expected, is followed by small steps: up by nineteen parts
# when a gap is above it, down by one when it is not, so that it rests where one in twenty is.
NOISE_STEP, MOST_NOISE = 0.05, 2.0
NOISE_UP, NOISE_DOWN = math.exp(NOISE_STEP * 0.95), math.exp(NOISE_STEP * -0.05)
SHARE_SECONDS = 2.0  # over which the background's share is smoothed
NEWCOMER_SECONDS = 5.0  # the same for what people's prompts took


def keep_error_budget(state: SchedulerState, plan: Plan, rules: Rules = FREE_SHAPES) -> Plan:
    """Enter measured gaps into the ledger of each stream, and the time of their ticks into the share."""
    guard = plan.memory.guard
    if not state.measured:
        return plan
    for tick, same in with_shapes(state):
        guard = _entered(guard, tick, state, counts=same >= rules.settling_ticks)
    return evolve(plan, memory=evolve(plan.memory, guard=guard))


def _entered(
    guard: GuardMemory, tick: MeasuredTick, state: SchedulerState, *, counts: bool
) -> GuardMemory:
    """Return the ledger with one tick in it."""
    balance, late = _balance(guard, tick, state)
    noise = guard.noise
    if counts and not tick.mixed and tick.solo_s > 0:
        noise = _followed(noise, [tick.itl.get(v.key) for v in state.protected], tick.solo_s)
    took_s = tick.decode_s
    # What others added to the tick, as a part of it.
    added = max(0.0, 1.0 - tick.solo_s / took_s) if tick.mixed and took_s > 0 else 0.0
    return evolve(
        guard,
        budgets=balance,
        noise=noise,
        infeasible=guard.infeasible + (late and not tick.mixed),
        share=_moved(guard.share, added * tick.background, took_s, SHARE_SECONDS),
        newcomers=_moved(
            guard.newcomers, added * (1.0 - tick.background), took_s, NEWCOMER_SECONDS
        ),
    )


def _balance(
    guard: GuardMemory, tick: MeasuredTick, state: SchedulerState
) -> tuple[dict[int, float], bool]:
    """Return the credit of each stream with its gap in it, and whether any gap was late.

    Who is parked or in the other lane for a while finds its credit again, and its debt.
    """
    late_s = state.contract.latency_cap * guard.noise * tick.solo_s
    there = state.views
    balance, late = {key: credit for key, credit in guard.budgets.items() if key in there}, False
    for view in state.protected:
        credit, itl_s = balance.get(view.key, 0.0), tick.itl.get(view.key)
        if itl_s is None or tick.solo_s <= 0:
            pass  # nothing to enter
        elif itl_s > late_s:
            late, credit = True, max(DEEPEST_DEBT, credit - 1.0)
        else:
            credit = min(MOST_BUDGET, credit + EARNED_PER_TOKEN)
        balance[view.key] = credit
    return balance, late


def _followed(noise: float, itl: Sequence[float | None], solo_s: float) -> float:
    """Move the estimate of the p95 of gaps, in times of `solo_s`, by a gap of each stream."""
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
