"""The latency guard: a ledger of pauses for each interactive stream.

A stream starts with no credit, earns a little with every gap that was in time, and pays 1 for
every gap that was not, whatever caused it. Only a tick that every stream can pay for may be
long. Since a gap earns less than a twentieth, long gaps stay under 5 % on every stream: its p95
is within the cap, not only the average's (scheduling.md, 3.2). Credit is the hysteresis, and a
stream that is deep in debt narrows the limit of every tick until it has recovered.

"In time" is within the cap times the p95 gap of the streams alone: machines are restless, and
what they do to a stream by themselves is not the company's fault.

Background work is owed a floor. Where the ledger leaves it less, a *grant* allows one longer
tick now and then, counted and never hidden; within a stream's first seconds a grant stays
within what such a stream was promised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import evolve

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.plan import NO_LIMIT, Limit, Plan
from uma_trio.policy.roles import is_newcomer, is_protected, protected
from uma_trio.policy.stairs import ballast_for
from uma_trio.policy.state import Contract, GuardMemory, SchedulerState, SequenceView

# Half of the twentieth that a p95 forgives: the other half is for gaps that nobody planned to be late.
EARNED_PER_GAP = 0.025
MOST_CREDIT = 2.0
DEEPEST_DEBT = -3.0  # one bad stretch must not starve the background for ever
EASY_DEBT = -1.0  # below this the limit narrows, at the deepest to what costs nothing
# The p95 of gaps alone, over what was expected, is followed by small steps: up by nineteen parts
# when a gap is above it, down by one when it is not, so that it rests where one in twenty is.
JITTER_STEP, MOST_JITTER = 0.05, 2.0
GAPS_BETWEEN_GRANTS = 25
SHARE_SECONDS = 2.0  # over which the background's share is smoothed
# Newcomers that take more than this part of the machine's time, smoothed over so many seconds,
# are no longer the odd visitor: a prompt of 500 tokens takes a sixth where T(1) is 8 ms.
MANY_NEWCOMERS, NEWCOMER_SECONDS = 0.2, 5.0
# What the streams cost alone is the measure of everything, and only a tick of theirs alone shows
# it: one in so many is kept free of others. Such a tick tells the machine's mood; a tick with
# others tells about its own step, or a step that was measured too low would raise the measure.
MOST_LOADED_TICKS = 20
# Where graphs are captured, the first two ticks of a shape are slow and tell nothing, so that the
# streams have to run alone for some ticks, and seldom: four switches make as many gaps late.
LOADED_BETWEEN_CAPTURES, CLOSED_AFTER_CAPTURE = 1000, 4
SLOW_AFTER_SWITCH = 2
ALONE_RATES = {"scale_rate": 0.2, "step_rate": 0.05}
LOADED_RATES = {"scale_rate": 0.02, "step_rate": 0.15}


def learn_cost(state: SchedulerState, plan: Plan) -> Plan:
    """Correct the cost model by the last tick, unless the graph of its shape was just captured."""
    cost, last = plan.memory.cost, state.last
    if cost is None or last.n_tokens == 0:
        return plan
    same = plan.memory.same_shape + 1 if last.work.after == last.work.shape else 0
    if _telling(cost, same):
        guard = plan.memory.guard
        rates: dict[str, float] = {}  # with nobody to protect, both at once
        if guard.solo_s > 0:
            rates = LOADED_RATES if guard.loaded else ALONE_RATES
        cost = cost.learn(last.work, last.decode_s, last.host_s, **rates)
    return evolve(plan, memory=evolve(plan.memory, cost=cost, same_shape=same))


def _telling(cost: CostModel | None, same_shape: int) -> bool:
    """Whether the time of the last tick says what such a tick takes."""
    captured = cost is not None and cost.switch_s > 0
    return not captured or same_shape >= SLOW_AFTER_SWITCH


def keep_ledger(state: SchedulerState, plan: Plan) -> Plan:
    """Enter the last tick's gaps into the ledger of each stream, and its time into the share."""
    guard, cap = plan.memory.guard, state.contract.latency_cap
    streams = protected(state)
    balance = {view.key: guard.credits.get(view.key, 0.0) for view in streams}
    late, jitter = False, guard.jitter
    telling = _telling(plan.memory.cost, plan.memory.same_shape)
    for view in streams:
        if view.gap_s is None or guard.solo_s <= 0:
            continue
        if not guard.loaded and telling:
            jitter = _followed(jitter, view.gap_s / guard.solo_s)
        if view.gap_s > cap * guard.jitter * guard.solo_s:
            late = True
            balance[view.key] = max(DEEPEST_DEBT, balance[view.key] - 1.0)
        else:
            balance[view.key] = min(MOST_CREDIT, balance[view.key] + EARNED_PER_GAP)
    took_s = state.last.decode_s
    # What others added to the last tick, as a part of it.
    added = max(0.0, 1.0 - guard.solo_s / took_s) if guard.loaded and took_s > 0 else 0.0
    guard = evolve(
        guard,
        credits=balance,
        jitter=jitter,
        infeasible=guard.infeasible + (late and not guard.loaded),
        share=_moved(guard.share, added * guard.background, took_s, SHARE_SECONDS),
        newcomers=_moved(
            guard.newcomers, added * (1.0 - guard.background), took_s, NEWCOMER_SECONDS
        ),
        since_grant=guard.since_grant + 1,
    )
    return evolve(plan, memory=evolve(plan.memory, guard=guard))


def _followed(jitter: float, ratio: float) -> float:
    """Move the estimate of the p95 of `ratio` by one sample."""
    step = 0.95 if ratio > jitter else -0.05
    return min(max(1.0, jitter * math.exp(JITTER_STEP * step)), MOST_JITTER)


def _moved(average: float, value: float, took_s: float, over_s: float) -> float:
    """Move an average over the last `over_s` by a tick that took `took_s`."""
    return average + (1.0 - math.exp(-took_s / over_s)) * (value - average)


def set_limit(state: SchedulerState, plan: Plan) -> Plan:
    """Say how long this tick may take."""
    streams, cost = protected(state), plan.memory.cost
    guard, contract = plan.memory.guard, state.contract
    if not streams or cost is None:
        return _with(plan, NO_LIMIT, evolve(guard, solo_s=0.0, share=1.0, newcomers=0.0))
    solo = cost.seconds(alone(cost, streams, room_alone(state, len(streams))))
    guard, closed = _closed(guard, captured=cost.switch_s > 0)
    if closed:
        limit = Limit(
            solo, "alone: to measure what the streams cost by themselves", solo, closed=True
        )
        return _with(plan, limit, evolve(guard, solo_s=solo))
    young = any(_age(view, state.now) < contract.young_s for view in streams)
    hard = max(contract.latency_cap, contract.young_cap if young else contract.pause_cap)
    credit = min(guard.credits.get(view.key, 0.0) for view in streams)
    # A late gap is late: few long ones serve a newcomer sooner than many of twice solo, and fewer
    # gaps are late. Where newcomers never end, the streams are spared the long ones.
    welcome = hard if guard.newcomers < MANY_NEWCOMERS else min(hard, contract.young_cap)
    # Where graphs are captured, a limit that moves changes the shape of ticks, which makes them late,
    # which moves the limit: there it stands still.
    limit = _limit(contract, 0.0 if cost.switch_s else credit, hard, solo)
    limit = evolve(limit, newcomer_s=welcome * solo)
    if limit.seconds < hard * solo and _owed(state, guard, young=young):
        limit = evolve(
            limit, seconds=hard * solo, reason="floor grant: background got too little", rare=True
        )
        guard = evolve(guard, since_grant=0, floor_grants=guard.floor_grants + 1)
    return _with(plan, _tightened(limit, streams), evolve(guard, solo_s=solo))


def _closed(guard: GuardMemory, *, captured: bool) -> tuple[GuardMemory, bool]:
    """Count ticks with company, and say whether this one is to be without."""
    loaded_ticks = guard.loaded_ticks + 1 if guard.loaded else 0
    closed_ticks = guard.closed_ticks
    if loaded_ticks >= (LOADED_BETWEEN_CAPTURES if captured else MOST_LOADED_TICKS):
        loaded_ticks, closed_ticks = 0, CLOSED_AFTER_CAPTURE if captured else 1
    left = max(0, closed_ticks - 1)
    return evolve(guard, loaded_ticks=loaded_ticks, closed_ticks=left), closed_ticks > 0


def room_alone(state: SchedulerState, streams: int) -> int:
    """Return how many ballast rows there would be with nobody but so many streams."""
    return state.spare_rows + len(state.sequences) - streams if state.spare_rows else 0


def alone(cost: CostModel, streams: Sequence[SequenceView], spare_rows: int) -> Work:
    """Return a tick of nothing but `streams`, in a context that holds nobody else."""
    looked = sum(view.computed for view in streams)
    work = Work(len(streams), len(streams), looked, looked)
    ballast = ballast_for(cost, work, spare_rows)
    return work.plus(ballast, rows=ballast)


def _limit(contract: Contract, credit: float, hard: float, solo: float) -> Limit:
    """Return the limit of a tick whose poorest stream has that much credit."""
    if credit >= 1.0:
        return Limit(hard * solo, f"long tick: every stream can bear {hard:g}x", solo, rare=True)
    cap = contract.latency_cap
    if credit >= EASY_DEBT:
        return Limit(cap * solo, f"within {cap:g}x", solo)
    ease = max(0.0, (credit - DEEPEST_DEBT) / (EASY_DEBT - DEEPEST_DEBT))
    narrow = 1.0 + ease * (cap - 1.0)
    return Limit(narrow * solo, f"within {narrow:.2f}x: recent gaps were late", solo)


def _tightened(limit: Limit, streams: Sequence[SequenceView]) -> Limit:
    """Respect what applications asked for, as far as the streams alone would."""
    asked = min((v.target_gap_s for v in streams if v.target_gap_s is not None), default=math.inf)
    asked = max(asked, limit.solo_s)
    newcomer_s = min(asked, limit.newcomer_s)
    if asked >= limit.seconds:
        return evolve(limit, newcomer_s=newcomer_s)
    return evolve(limit, seconds=asked, reason="within a request's own slo", newcomer_s=newcomer_s)


def _owed(state: SchedulerState, guard: GuardMemory, *, young: bool) -> bool:
    """Whether background work waits and has had less than its floor for too long.

    While a stream is young the floor is owed rather than paid, until half of it is missing:
    where short conversations follow each other, somebody is always young.
    """
    floor = state.contract.background_floor
    return (
        guard.since_grant >= GAPS_BETWEEN_GRANTS
        and guard.share < (floor / 2 if young else floor)
        and any(_is_background(view, state.contract) for view in state.sequences)
    )


def _is_background(view: SequenceView, contract: Contract) -> bool:
    """Whether it could use time that is neither a stream's nor a newcomer's."""
    newcomer = is_newcomer(view, contract.newcomer_tokens)
    return view.credit > 0 and not is_protected(view) and not newcomer


def _age(view: SequenceView, now: float) -> float:
    return now - view.first_token_at if view.first_token_at is not None else 0.0


def _with(plan: Plan, limit: Limit, guard: GuardMemory) -> Plan:
    return evolve(plan, limit=limit, memory=evolve(plan.memory, guard=guard))
