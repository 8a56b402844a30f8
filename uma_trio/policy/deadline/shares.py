"""Which part of machine time newcomers' prompts had lately."""

from __future__ import annotations

import math

from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import MeasuredTick, SchedulerState

OVER_S = 5.0


def note_shares(state: SchedulerState, plan: Plan) -> Plan:
    """Note the machine time that newcomers had in the measured ticks."""
    guard = plan.memory.guard
    share = guard.newcomers
    for tick in state.measured:
        moves = 1.0 - math.exp(-tick.decode_s / OVER_S)
        share += moves * (_newcomers(tick) - share)
    if share == guard.newcomers:
        return plan
    return evolve(plan, memory=evolve(plan.memory, guard=evolve(guard, newcomers=share)))


def _newcomers(tick: MeasuredTick) -> float:
    """Return which part of a tick newcomers' prompts added to it."""
    if not tick.mixed or tick.decode_s <= 0:
        return 0.0
    return max(0.0, 1.0 - tick.solo_s / tick.decode_s) * (1.0 - tick.background)
