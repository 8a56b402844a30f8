"""The interval between shown tokens, while other work can use the machine.

A stream is shown at the rate at which it is computed: its tokens come the smoothed interval between
computed tokens after one another. Where other work waits for ticks that are longer than a step, tokens
are shown a step apart and those computed earlier are held, so that a reader is ahead when a long tick
comes and does not notice it. Without other work every token is shown at once.
"""

from __future__ import annotations

from uma_trio.policy.deadline.slack import reading, step_s
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

# Whoever asks again and again is away for a moment between two requests. What readers are ahead would be
# shown in it, and missing behind it.
LINGER_S = 0.5


def pace_streams(state: SchedulerState, plan: Plan) -> Plan:
    """Say how far apart the tokens of each stream are shown."""
    guard, solo_s = plan.memory.guard, plan.limit.solo_s
    # A prompt that nobody reads beside is company for nobody: it may be the reader's own.
    if state.best_effort and solo_s > 0:
        guard = evolve(guard, company_at=state.now)
        plan = evolve(plan, memory=evolve(plan.memory, guard=guard))
    if guard.company_at is None or state.now - guard.company_at > LINGER_S or solo_s <= 0:
        return plan
    contract, parts = state.contract, plan.memory.drafted_parts
    paces = {}
    for view in reading(state):
        step = step_s(view, contract, parts.get(view.key, 1.0) * solo_s)
        paces[view.key] = step if plan.limit.saves else min(step, guard.interval_s or step)
    return evolve(plan, paces=paces)
