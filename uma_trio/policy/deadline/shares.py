"""Which part of machine time background work and newcomers had lately, and what could not be kept."""

from __future__ import annotations

import math

from uma_trio.policy.deadline.floor import owed_after
from uma_trio.policy.deadline.slack import reading, step_s
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import GuardMemory, MeasuredTick, SchedulerState

# Slack is spent in few large ticks: the background's share is that of several of them.
SHARE_SECONDS = 10.0
NEWCOMER_SECONDS = 5.0  # the same for what people's prompts took


def note_shares(state: SchedulerState, plan: Plan) -> Plan:
    """Note the machine time of measured ticks, and tokens that were late without any other work."""
    if not state.measured:
        return plan
    guard, contract, cap = plan.memory.guard, state.contract, state.contract.latency_cap
    for tick in state.measured:
        late = not tick.mixed and max(tick.itl.values(), default=0.0) > cap * tick.solo_s > 0
        owed_s = owed_after(guard, tick, contract, _left(state, tick.solo_s))
        guard = evolve(_shared(guard, tick), owed_s=owed_s, infeasible=guard.infeasible + late)
    return evolve(plan, memory=evolve(plan.memory, guard=guard))


def _left(state: SchedulerState, solo_s: float) -> float:
    """Return which part of machine time readers leave to the others."""
    least_s = min([step_s(view, state.contract, solo_s) for view in reading(state)], default=0.0)
    return 1.0 - solo_s / least_s if least_s > 0 else 0.0


def _shared(guard: GuardMemory, tick: MeasuredTick) -> GuardMemory:
    """Return the memory with the machine time of one tick in the shares."""
    took_s = tick.decode_s
    # What others added to the tick, as a part of it.
    added = max(0.0, 1.0 - tick.solo_s / took_s) if tick.mixed and took_s > 0 else 0.0
    prompts = added * (1.0 - tick.background)
    return evolve(
        guard,
        share=_moved(guard.share, added * tick.background, took_s, SHARE_SECONDS),
        newcomers=_moved(guard.newcomers, prompts, took_s, NEWCOMER_SECONDS),
    )


def _moved(average: float, value: float, took_s: float, over_s: float) -> float:
    """Move an average over the last `over_s` by a tick that took `took_s`."""
    return average + (1.0 - math.exp(-took_s / over_s)) * (value - average)
