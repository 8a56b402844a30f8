"""What newcomers may do where the readers' slack does not suffice.

- A token may be shown `startup_cap` or `pause_cap` times solo after the one before it. If newcomers
  use much of the machine, or somebody has pasted a long text, the limit is `startup_cap` for all
  streams.
- A reader has no deadline while a short prompt waits that arrived before the reader's first token:
  prompts that wait together are computed together.
- Without readers, ticks are short after an interactive request: the next newcomer waits for the end
  of one.
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
# Who asked may ask again soon. A question of so many tokens, which comes in the middle of a tick of so many
# times its own, has its first word after twice the time that it takes alone.
AGAIN_S, QUESTION, WAITED_FOR = 3.0, 32, 2.0
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
    many = guard.newcomers >= MANY or _somebody_pasted(state)
    return latest, min(latest, contract.startup_cap) if many else latest


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
    if cost is None or guard.people_at is None or state.now - guard.people_at > AGAIN_S:
        return NO_LIMIT
    brief_s = WAITED_FOR * cost.seconds(Work(QUESTION))
    if guard.owed_s >= brief_s:
        return evolve(NO_LIMIT, reason=GRANTED, brief_s=brief_s, grant=True)
    reason = f"a short tick, since somebody asked in the last {AGAIN_S:.0f} s"
    return evolve(NO_LIMIT, reason=reason, brief_s=brief_s)


def _added(tick: MeasuredTick) -> float:
    """Return which part of a tick newcomers' prompts added to what readers took."""
    if not tick.mixed or tick.solo_s <= 0 or tick.decode_s <= 0:
        return 0.0
    return max(0.0, 1.0 - tick.solo_s / tick.decode_s) * (1.0 - tick.background)


def _somebody_pasted(state: SchedulerState) -> bool:
    """Whether somebody is at the beginning of more than a newcomer's prompt."""
    most = state.contract.newcomer_tokens
    return any(
        is_newcomer(view, most) and view.uncached + view.due > most
        for view in state.best_effort.values()
    )
