"""The limit of a tick, and the time between shown tokens: what readers leave to other work.

Each token of a stream is due one *step* after the token before it was shown. A step is
`latency_cap` times *solo*, what the streams cost by themselves, or the reading pace, whichever is longer, or the
request's own target, and never so short that less than `background_floor` of the machine is left. For a reader
whose drafts are right, solo includes them (:func:`uma_trio.policy.deadline.drafts.parts_with_drafts`). A stream
whose tokens are computed earlier is *ahead* of its reader. Its *slack* is the time until its first uncomputed token
is due. A tick may take as long as the least slack of all readers, less a margin for prediction errors.

Exceptions, in this order:

- an isolated tick, without other work, after many mixed ones: it measures solo;
- no limit for readers that arrived together with others: a reader has no deadline while a short prompt waits that arrived before
  the reader's first token, since prompts that wait together are computed together;
- more time beside few newcomers: a token may be shown `startup_cap` or `pause_cap` times solo after the one before it,
  as long as newcomers use little of the machine;
- a grant, if slack never sufficed for background work (:func:`~uma_trio.policy.accounting.owed_after`).

Without readers a tick takes at most `unread_s`, or the time of the chunk with the best rate where a tick can
be given up for a newcomer.

A stream is shown at the rate at which it is computed: its tokens come the smoothed interval between computed tokens
after one another. Where other work waits for ticks that are longer than a step, tokens are shown a step
apart and those computed earlier are held, so that a reader is ahead when a long tick comes and does not notice it.
Without other work every token is shown at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.deadline.drafts import parts_with_drafts
from uma_trio.policy.deadline.shape import ballast_for
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import NO_LIMIT, Limit, Plan
from uma_trio.policy.state import (
    PLACES_IN_FLIGHT,
    Contract,
    GuardMemory,
    MeasuredTick,
    SchedulerState,
    SequenceView,
    is_newcomer,
)
from uma_trio.policy.tuning import Tuning

# Mixed ticks in a row and isolated ticks then, where graphs are captured: a change of shape makes two ticks
# slow, so there are few of them, and of the isolated ones the first two are paid from slack.
CAPTURED_TURN = (1000, 4)
# The largest mean error of predictions that is assumed: beyond it the model is not trusted at all.
MOST_ERROR = 0.25
# Tokens are held for so long after other work: a client that sends one request after another pauses between them.
LINGER_S = 0.5


def next_turn(guard: GuardMemory, tuning: Tuning, *, captured: bool) -> tuple[GuardMemory, bool]:
    """Return what the guard remembers from this tick on, and whether the tick is an isolated one."""
    most, then = tuning.mixed_ticks, tuning.isolated_ticks
    if captured:
        most, then = CAPTURED_TURN
    mixed_ticks = guard.mixed_ticks + 1 if guard.mixed else 0
    isolated_ticks = guard.isolated_ticks
    if mixed_ticks >= most:
        mixed_ticks, isolated_ticks = 0, then
    counted = evolve(
        guard,
        mixed_ticks=mixed_ticks,
        isolated_ticks=max(0, isolated_ticks - 1),
    )
    return counted, isolated_ticks > 0


def room_alone(state: SchedulerState, streams: int) -> int:
    """Return how many ballast rows there would be with `streams` streams alone."""
    return state.spare_rows + len(state.sequences) - streams if state.spare_rows else 0


def alone_s(cost: CostModel, streams: Sequence[SequenceView], spare_rows: int) -> float:
    """Return the seconds of a tick of nothing but `streams`, in a context without other sequences."""
    context_cells = sum([view.computed for view in streams])
    _, seconds = ballast_for(
        cost, Work(len(streams), len(streams), context_cells, context_cells), spare_rows
    )
    return seconds


GRANTED = "floor grant: background got too little"


def note_newcomers(state: SchedulerState, plan: Plan) -> Plan:
    """Note which part of machine time newcomers had beside readers in the measured ticks."""
    guard = plan.memory.guard
    share = guard.newcomers
    for tick in state.measured:
        moves = 1.0 - math.exp(-tick.decode_s / state.tuning.newcomers_over_s)
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
    return (
        latest,
        contract.latency_cap if guard.newcomers >= state.tuning.many_newcomers else latest,
    )


def bound_readers(state: SchedulerState, readers: Sequence[SequenceView]) -> Sequence[SequenceView]:
    """Return the readers that have deadlines: no short prompt waits that arrived before their first token.

    A reader that had its first token `startup_s` ago has one in any case.
    """
    most = state.contract.newcomer_tokens
    came = [
        view.arrived
        for view in state.best_effort.values()
        if is_newcomer(view, most) and view.pending <= state.tuning.together_tokens
    ]
    if not came:
        return readers
    since = max(min(came), state.now - state.contract.startup_s)
    return [v for v in readers if v.first_token_at is None or v.first_token_at <= since]


def unread_limit(state: SchedulerState, guard: GuardMemory, cost: CostModel | None) -> Limit:
    """Return the limit of a tick without readers."""
    if cost is None:
        return NO_LIMIT
    brief_s = cost.tuning.unread_s
    if state.interruptible:
        brief_s = max(brief_s, cost.seconds(Work(cost.plateau(state.n_batch))))
        if state.most_s < math.inf:  # readers of other models are ahead for a tick of this length
            brief_s = max(brief_s, state.most_s)
    if guard.owed_s >= brief_s:
        return evolve(NO_LIMIT, reason=GRANTED, brief_s=brief_s, grant=True)
    return evolve(NO_LIMIT, brief_s=brief_s)


def _added(tick: MeasuredTick) -> float:
    if not tick.mixed or tick.solo_s <= 0 or tick.decode_s <= 0:
        return 0.0
    return max(0.0, 1.0 - tick.solo_s / tick.decode_s) * (1.0 - tick.background)


PROMPTS_FIRST = "no limit: short prompts that came together are computed first"


def set_slack(state: SchedulerState, plan: Plan) -> Plan:
    """Say how long this tick may take."""
    cost, guard, readers = plan.memory.cost, plan.memory.guard, reading(state)
    guard = note_interval(state, guard)
    if not readers or cost is None:
        return _with(plan, unread_limit(state, guard, cost), guard)
    solo = alone_s(cost, readers, room_alone(state, len(readers)))
    guard, isolated = next_turn(guard, cost.tuning, captured=cost.recapture_s > 0)
    if isolated:
        reason = "alone: to measure what the streams cost by themselves"
        return _with(plan, Limit(solo, reason, solo, isolated=True), guard)
    parts = parts_with_drafts(state, plan, cost)
    if parts != plan.memory.drafted_parts:
        plan = evolve(plan, memory=evolve(plan.memory, drafted_parts=parts))
    bound = bound_readers(state, readers)
    if not bound:
        brief_s = cost.tuning.unread_s
        limit = evolve(NO_LIMIT, reason=PROMPTS_FIRST, solo_s=solo, brief_s=brief_s)
        return _with(plan, limit, guard)
    latest, beside_newcomers = late_caps(state, guard, bound)
    limit = _limit(state, bound, parts, solo, beside_newcomers * solo, margin(cost))
    if guard.owed_s >= (latest - 1.0) * solo:
        granted_s = min([_ahead_s(view, state.now) for view in bound]) + latest * solo
        if limit.seconds < granted_s:
            limit = evolve(limit, seconds=granted_s, reason=GRANTED, grant=True)
    return _with(plan, limit, guard)


def reading(state: SchedulerState) -> tuple[SequenceView, ...]:
    """Return the streams with a reader: what they show next is due at some time.

    Those are the protected ones, and those without credit that hold tokens which are not due yet.
    """
    if all(view.credit > 0 for view in state.sequences):
        return state.protected
    return tuple([v for v in state.sequences if is_read(v, state.now)])


def is_read(view: SequenceView, now: float) -> bool:
    """Whether what a stream shows next is due at some time."""
    return view.protected or _holds(view, now)


def step_s(view: SequenceView, contract: Contract, solo_s: float) -> float:
    """Return how many seconds after one token of a stream the next one is due."""
    asked_s = view.target_itl_s
    if asked_s is None:
        asked_s = max(contract.latency_cap * solo_s, contract.reading_pace_s)
    return max(asked_s, solo_s / (1.0 - contract.background_floor))


def reach_of(view: SequenceView, contract: Contract, ahead_s: float, step: float) -> float:
    """Return in how many seconds the next token of a stream may be due at the latest, once it is as far ahead as it can be.

    It is shown `step` seconds after the one before it, and is `ahead_s` now.
    """
    room = max(ahead_s, 0.0) + max(view.credit - PLACES_IN_FLIGHT, 0) * step
    return min(contract.playout_s, room) + step


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
            interval_s = 0.0  # no reader
    return guard if interval_s == guard.interval_s else evolve(guard, interval_s=interval_s)


def margin(cost: CostModel) -> float:
    """Return how many times its prediction a tick is taken to be that spends slack."""
    tuning = cost.tuning
    return math.exp(tuning.margin_errors * min(max(cost.error, tuning.least_error), MOST_ERROR))


def _limit(
    state: SchedulerState,
    readers: Sequence[SequenceView],
    parts: Mapping[int, float],
    solo_s: float,
    welcome_s: float,
    careful: float,
) -> Limit:
    now, contract = state.now, state.contract
    slack = reach = newcomer = least = math.inf
    shortest = 1.0
    for view in readers:
        part = parts.get(view.key, 1.0)
        ahead, step = _ahead_s(view, now), step_s(view, contract, part * solo_s)
        slack = min(slack, ahead + step)
        if step < least:
            least, shortest = step, part
        reach = min(reach, reach_of(view, contract, ahead, step))
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


def pace_streams(state: SchedulerState, plan: Plan) -> Plan:
    """Say how far apart the tokens of each stream are shown."""
    guard, solo_s = plan.memory.guard, plan.limit.solo_s
    # Without a reader there is no company to hold tokens for: a prompt may be the reader's own.
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
