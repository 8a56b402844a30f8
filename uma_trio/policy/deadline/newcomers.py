"""What newcomers may do where the readers' slack does not suffice.

- A token may be shown `startup_cap` or `pause_cap` times solo after the one before it, as long as
  newcomers use little of the machine.
- A reader has no deadline while a short prompt waits that arrived before the reader's first token:
  prompts that wait together are computed together.
- Without readers a tick takes at most :data:`UNREAD_S`, or the time of the chunk with the best rate
  where a tick can be given up for a newcomer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import NO_LIMIT, Limit, Plan
from uma_trio.policy.state import (
    GuardMemory,
    MeasuredTick,
    SchedulerState,
    SequenceView,
    is_newcomer,
)

# Newcomers are frequent from this part of machine time on, smoothed over so many seconds: a prompt of
# 500 tokens takes a sixth where T(1) is 8 ms.
MANY, OVER_S = 0.2, 5.0
# People take an answer within a tenth of a second for immediate (Miller 1968, Nielsen 1993).
UNREAD_S = 0.1
# Prompts with more tokens to compute than this are not waited for by who reads already: with 512, as for
# newcomers, every twentieth token of simulated chats came after 3.5 times solo, with 64 after 1.9.
TOGETHER = 64
GRANTED = "floor grant: background got too little"


def note_newcomers(state: SchedulerState, plan: Plan) -> Plan:
    """Note which part of machine time newcomers had beside readers in the measured ticks."""
    guard = plan.memory.guard
    share = guard.newcomers
    for tick in state.measured:
        moves = 1.0 - math.exp(-tick.decode_s / OVER_S)
        share += moves * (_added(tick) - share)
    if share == guard.newcomers:
        return plan
    return evolve(plan, memory=evolve(plan.memory, guard=evolve(guard, newcomers=share)))


def late_caps(
    state: SchedulerState, guard: GuardMemory, readers: Sequence[SequenceView]
) -> tuple[float, float]:
    """Return how many times solo after the one before it a token is shown at the latest.

    The second is the same beside newcomers of today's number.
    """
    contract = state.contract
    began = max([state.now if v.first_token_at is None else v.first_token_at for v in readers])
    starting = state.now - began < contract.startup_s
    latest = max(contract.latency_cap, contract.startup_cap if starting else contract.pause_cap)
    return latest, contract.latency_cap if guard.newcomers >= MANY else latest


def who_waits_for_nobody(
    state: SchedulerState, readers: Sequence[SequenceView]
) -> Sequence[SequenceView]:
    """Return the readers for whom nobody waits who came before their first token with a short prompt.

    A reader that had its first token `startup_s` ago waits for nobody any more.
    """
    most = state.contract.newcomer_tokens
    came = [
        view.arrived
        for view in state.best_effort.values()
        if is_newcomer(view, most) and view.pending <= TOGETHER
    ]
    if not came:
        return readers
    since = max(min(came), state.now - state.contract.startup_s)
    return [v for v in readers if v.first_token_at is None or v.first_token_at <= since]


def unread_limit(state: SchedulerState, guard: GuardMemory, cost: CostModel | None) -> Limit:
    """Return the limit of a tick that nobody reads."""
    if cost is None:
        return NO_LIMIT
    brief_s = UNREAD_S
    if state.interruptible:
        brief_s = max(brief_s, cost.seconds(Work(cost.plateau(state.n_batch))))
    if guard.owed_s >= brief_s:
        return evolve(NO_LIMIT, reason=GRANTED, brief_s=brief_s, grant=True)
    return evolve(NO_LIMIT, brief_s=brief_s)


def _added(tick: MeasuredTick) -> float:
    """Return which part of a tick newcomers' prompts added to what readers took."""
    if not tick.mixed or tick.solo_s <= 0 or tick.decode_s <= 0:
        return 0.0
    return max(0.0, 1.0 - tick.solo_s / tick.decode_s) * (1.0 - tick.background)
