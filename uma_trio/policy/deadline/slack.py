"""The limit of a tick: the time until the next token of a reader is due.

Each token of a stream is due one *step* after the token before it was shown. A step is
`latency_cap` times solo or the reading pace, whichever is longer, or the request's own target, and
never so short that less than `background_floor` of the machine is left. For a reader whose drafts are right, solo includes them
(:mod:`uma_trio.policy.deadline.own_drafts`). A stream whose tokens are computed earlier is *ahead* of
its reader. Its *slack* is the time until its first uncomputed token is due. A tick may take as long
as the least slack of all readers, less a margin for prediction errors.

Exceptions, in this order:

- an isolated tick, without other work, after many mixed ones: it measures solo;
- more time for newcomers, or no limit at all (:mod:`uma_trio.policy.deadline.newcomers`);
- a grant, if slack never sufficed for background work
  (:func:`~uma_trio.policy.accounting.owed_after`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from uma_trio.policy.cost import CostModel
from uma_trio.policy.deadline.newcomers import (
    GRANTED,
    late_caps,
    unread_limit,
    who_waits_for_nobody,
)
from uma_trio.policy.deadline.own_drafts import parts_with_drafts
from uma_trio.policy.deadline.solo import alone_s, next_turn, room_alone
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import NO_LIMIT, Limit, Plan
from uma_trio.policy.state import (
    PLACES_IN_FLIGHT,
    Contract,
    GuardMemory,
    SchedulerState,
    SequenceView,
)

# Slack is spent on a tick that is longer by so many times the mean error of predictions, within bounds.
# The margin costs little: what is left of it keeps readers ahead.
MARGIN_ERRORS, LEAST_ERROR, MOST_ERROR = 4.0, 0.02, 0.25
PROMPTS_FIRST = "no limit: short prompts that came together are computed first"


def set_slack(state: SchedulerState, plan: Plan) -> Plan:
    """Say how long this tick may take."""
    cost, guard, readers = plan.memory.cost, plan.memory.guard, reading(state)
    guard = note_interval(state, guard)
    if not readers or cost is None:
        return _with(plan, unread_limit(state, guard, cost), guard)
    solo = alone_s(cost, readers, room_alone(state, len(readers)))
    guard, isolated = next_turn(guard, captured=cost.recapture_s > 0)
    if isolated:
        reason = "alone: to measure what the streams cost by themselves"
        return _with(plan, Limit(solo, reason, solo, isolated=True), guard)
    parts = parts_with_drafts(state, plan, cost)
    if parts != plan.memory.drafted_parts:
        plan = evolve(plan, memory=evolve(plan.memory, drafted_parts=parts))
    bound = who_waits_for_nobody(state, readers)
    if not bound:
        return _with(plan, evolve(NO_LIMIT, reason=PROMPTS_FIRST, solo_s=solo), guard)
    latest, beside_newcomers = late_caps(state, guard, bound)
    limit = _limit(state, bound, parts, solo, beside_newcomers * solo, margin(cost))
    if guard.owed_s >= (latest - 1.0) * solo:
        granted_s = min([_ahead_s(view, state.now) for view in bound]) + latest * solo
        if limit.seconds < granted_s:
            limit = evolve(limit, seconds=granted_s, reason=GRANTED, grant=True)
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
    if asked_s is None:
        asked_s = max(contract.latency_cap * solo_s, contract.reading_pace_s)
    return max(asked_s, solo_s / (1.0 - contract.background_floor))


def note_interval(state: SchedulerState, guard: GuardMemory) -> GuardMemory:
    """Note how far apart the tokens of streams are computed, smoothed over the playout time."""
    interval_s = guard.interval_s
    for tick in state.measured:
        if tick.solo_s > 0:
            took_s = tick.decode_s + (tick.host_s or 0.0)
            known_s = interval_s or took_s
            moves = min(1.0, max(took_s, known_s) / max(state.contract.playout_s, took_s))
            interval_s = known_s + moves * (took_s - known_s)
        else:
            interval_s = 0.0  # nobody read
    return guard if interval_s == guard.interval_s else evolve(guard, interval_s=interval_s)


def margin(cost: CostModel) -> float:
    """Return how many times its prediction a tick is taken to be that spends slack."""
    return math.exp(MARGIN_ERRORS * min(max(cost.error, LEAST_ERROR), MOST_ERROR))


def _limit(
    state: SchedulerState,
    readers: Sequence[SequenceView],
    parts: Mapping[int, float],
    solo_s: float,
    welcome_s: float,
    careful: float,
) -> Limit:
    """Return the limit of a tick that no reader notices, and that of one for newcomers."""
    now, contract = state.now, state.contract
    slack = reach = newcomer = least = math.inf
    shortest = 1.0
    for view in readers:
        part = parts.get(view.key, 1.0)
        ahead, step = _ahead_s(view, now), step_s(view, contract, part * solo_s)
        slack = min(slack, ahead + step)
        if step < least:
            least, shortest = step, part
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
        drafted_part=shortest,
    )


def _holds(view: SequenceView, now: float) -> bool:
    shown = view.shown_at
    return view.read and view.decoding and shown is not None and shown > now


def _ahead_s(view: SequenceView, now: float) -> float:
    return 0.0 if view.shown_at is None else view.shown_at - now


def _with(plan: Plan, limit: Limit, guard: GuardMemory) -> Plan:
    return evolve(plan, limit=limit, memory=evolve(plan.memory, guard=guard))
