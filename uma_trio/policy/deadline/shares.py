"""Which part of machine time background work and newcomers had lately, and what could not be kept."""

from __future__ import annotations

from uma_trio.policy.contract.error_budget import shared
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

# Slack is spent in few large ticks: the share is that of several of them.
SHARE_SECONDS = 10.0


def note_shares(state: SchedulerState, plan: Plan) -> Plan:
    """Note the machine time of measured ticks, and tokens that were late without any other work."""
    if not state.measured:
        return plan
    guard, cap = plan.memory.guard, state.contract.latency_cap
    for tick in state.measured:
        late = not tick.mixed and max(tick.itl.values(), default=0.0) > cap * tick.solo_s > 0
        guard = evolve(shared(guard, tick, SHARE_SECONDS), infeasible=guard.infeasible + late)
    return evolve(plan, memory=evolve(plan.memory, guard=guard))
