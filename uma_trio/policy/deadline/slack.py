"""How long a tick may take: until the next token of a reader is due.

Each token of a stream is due one *step* after the token before it was shown: `latency_cap` times solo, or
what its request asked for, and never so short that less than `background_floor` of the machine is left. A stream whose tokens are computed sooner is *ahead* of its reader. Its
*slack* is the time until the first token that is not computed is due: what it is ahead, and a step. A tick
may take as long as the least slack of all readers, less a margin for how far predictions are off.

Exceptions, in the order in which they are looked at:

- an isolated tick, without other work, after many mixed ones: it measures solo;
- no limit, while a newcomer with a short prompt waits that came before the first token of every stream:
  prompts that wait together are computed together;
- newcomers' prompts: where slack does not suffice, a token may be shown `startup_cap` or `pause_cap` times
  solo after the one before it;
- a grant, as long as that, where slack never sufficed for background work (:mod:`uma_trio.policy.floor`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.deadline.rules import FREE_SHAPES, Rules
from uma_trio.policy.deadline.solo import alone_s, next_turn, room_alone
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import NO_LIMIT, Limit, Plan
from uma_trio.policy.state import (
    PLACES_IN_FLIGHT,
    Contract,
    GuardMemory,
    SchedulerState,
    SequenceView,
    is_newcomer,
)

# Slack is spent on a tick that is longer by so many times the mean error of predictions, within bounds.
# The margin costs little: what is left of it keeps readers ahead.
MARGIN_ERRORS, LEAST_ERROR, MOST_ERROR = 4.0, 0.02, 0.25
# Newcomers are frequent from this part of machine time on, smoothed over some seconds: a prompt of
# 500 tokens takes a sixth where T(1) is 8 ms.
MANY_NEWCOMERS = 0.2
# Who asked may ask again soon. A question of so many tokens, which comes in the middle of a tick of so many
# times its own, has its first word after twice the time that it takes alone.
AGAIN_S, QUESTION, WAITED_FOR = 3.0, 32, 2.0
# Prompts with more tokens to compute than this are not waited for by who reads already: with 512, as for
# newcomers, every twentieth token of simulated chats came after 3.5 times solo, with 64 after 1.9.
TOGETHER = 64


def set_slack(state: SchedulerState, plan: Plan, rules: Rules = FREE_SHAPES) -> Plan:
    """Say how long this tick may take."""
    cost, guard, readers = plan.memory.cost, plan.memory.guard, reading(state)
    if readers or any(view.lane == "interactive" for view in state.sequences):
        guard = evolve(guard, people_at=state.now)
    if not readers or cost is None:
        guard = evolve(guard, newcomers=0.0)
        return _with(plan, _open(state, guard, cost), guard)
    contract = state.contract
    solo = alone_s(cost, readers, room_alone(state, len(readers)))
    guard, isolated = next_turn(guard, rules)
    if isolated:
        reason = "alone: to measure what the streams cost by themselves"
        return _with(plan, Limit(solo, reason, solo, isolated=True), guard)
    bound = _with_deadlines(state, readers)
    if not bound:
        together = evolve(NO_LIMIT, reason="who came together begins together", solo_s=solo)
        return _with(plan, together, guard)
    starting = _youngest_s(bound, state.now) < contract.startup_s
    hard = max(contract.latency_cap, contract.startup_cap if starting else contract.pause_cap)
    many = guard.newcomers >= MANY_NEWCOMERS or _pasted(state)
    welcome = min(hard, contract.startup_cap) if many else hard
    limit = _limit(state, bound, solo, welcome * solo, margin(cost))
    if guard.owed_s >= (hard - 1.0) * solo:
        granted_s = min([_ahead_s(view, state.now) for view in bound]) + hard * solo
        if limit.seconds < granted_s:
            reason = "floor grant: background got too little"
            limit = evolve(limit, seconds=granted_s, reason=reason, grant=True)
    return _with(plan, limit, guard)


def reading(state: SchedulerState) -> tuple[SequenceView, ...]:
    """Return the streams that somebody reads: what they show next is due at some time.

    Those are the protected ones, and those without credit that hold tokens which are not due yet.
    """
    if all(view.credit > 0 for view in state.sequences):
        return state.protected
    return tuple([v for v in state.sequences if v.protected or _holds(v, state.now)])


def step_s(view: SequenceView, contract: Contract, solo_s: float) -> float:
    """Return how many seconds after one token of a stream the next one is due."""
    asked_s = view.target_itl_s
    wanted_s = contract.latency_cap * solo_s if asked_s is None else asked_s
    return max(wanted_s, solo_s / (1.0 - contract.background_floor))


def margin(cost: CostModel) -> float:
    """Return how many times its prediction a tick is taken to be that spends slack."""
    return math.exp(MARGIN_ERRORS * min(max(cost.error, LEAST_ERROR), MOST_ERROR))


def _open(state: SchedulerState, guard: GuardMemory, cost: CostModel | None) -> Limit:
    """Return the limit of a tick that nobody reads: who asks meanwhile waits for its end."""
    if cost is None or guard.people_at is None or state.now - guard.people_at > AGAIN_S:
        return NO_LIMIT
    brief_s = WAITED_FOR * cost.seconds(Work(QUESTION))
    return evolve(NO_LIMIT, reason="short, since people ask", brief_s=brief_s)


def _limit(
    state: SchedulerState,
    readers: Sequence[SequenceView],
    solo_s: float,
    welcome_s: float,
    careful: float,
) -> Limit:
    """Return the limit of a tick that no reader notices, and that of one for newcomers."""
    now, contract = state.now, state.contract
    slack = reach = newcomer = least = math.inf
    for view in readers:
        ahead, step = _ahead_s(view, now), step_s(view, contract, solo_s)
        slack, least = min(slack, ahead + step), min(least, step)
        room = max(ahead, 0.0) + max(view.credit - PLACES_IN_FLIGHT, 0) * step
        reach = min(reach, min(contract.playout_s, room) + step)
        asked = view.target_itl_s is not None
        newcomer = min(newcomer, ahead + (step if asked else max(step, welcome_s)))
    seconds = slack / careful
    return Limit(
        seconds,
        f"the next token is due in {1e3 * max(slack, 0):.0f} ms, "
        f"this tick may take {1e3 * max(seconds, 0):.0f}",
        solo_s,
        newcomer_s=max(seconds, newcomer),
        reach_s=reach / careful,
        step_s=least,
    )


def _with_deadlines(
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


def _pasted(state: SchedulerState) -> bool:
    """Whether somebody is at the beginning of more than a newcomer's prompt."""
    most = state.contract.newcomer_tokens
    return any(
        is_newcomer(view, most) and view.uncached + view.due > most
        for view in state.best_effort.values()
    )


def _youngest_s(streams: Sequence[SequenceView], now: float) -> float:
    """Return how long ago the last of them began to be read."""
    return now - max([now if v.first_token_at is None else v.first_token_at for v in streams])


def _holds(view: SequenceView, now: float) -> bool:
    shown = view.shown_at
    return view.lane == "interactive" and view.decoding and shown is not None and shown > now


def _ahead_s(view: SequenceView, now: float) -> float:
    return 0.0 if view.shown_at is None else view.shown_at - now


def _with(plan: Plan, limit: Limit, guard: GuardMemory) -> Plan:
    return evolve(plan, limit=limit, memory=evolve(plan.memory, guard=guard))
