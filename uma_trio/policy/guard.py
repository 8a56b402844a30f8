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
from collections.abc import Iterator, Sequence

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import NO_LIMIT, Limit, Plan
from uma_trio.policy.roles import is_newcomer
from uma_trio.policy.stairs import ballast_for
from uma_trio.policy.state import (
    Contract,
    GuardMemory,
    MeasuredTick,
    SchedulerState,
    SequenceView,
)

# Half of the twentieth that a p95 forgives: the other half is for gaps that nobody planned to be late.
EARNED_PER_GAP = 0.025
MOST_CREDIT = 2.0
DEEPEST_DEBT = -3.0  # one bad stretch must not starve the background for ever
EASY_DEBT = -1.0  # below this the limit narrows, at the deepest to what costs nothing
# The p95 of gaps alone, over what was expected, is followed by small steps: up by nineteen parts
# when a gap is above it, down by one when it is not, so that it rests where one in twenty is.
JITTER_STEP, MOST_JITTER = 0.05, 2.0
JITTER_UP, JITTER_DOWN = math.exp(JITTER_STEP * 0.95), math.exp(JITTER_STEP * -0.05)
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
    """Correct the cost model by what was measured, unless the graph of that shape was just captured."""
    cost, same = plan.memory.cost, 0
    if cost is None or not state.measured:
        return plan
    for tick, same in _with_shapes(state):
        if _telling(cost, same):
            rates: dict[str, float] = {}  # with nobody to protect, both at once
            if tick.solo_s > 0:
                rates = LOADED_RATES if tick.loaded else ALONE_RATES
            cost = cost.learn(tick.work, tick.decode_s, tick.host_s, **rates)
    return evolve(plan, memory=evolve(plan.memory, cost=cost, same_shape=same))


def _with_shapes(state: SchedulerState) -> Iterator[tuple[MeasuredTick, int]]:
    """Yield each measured tick, and how many in a row up to it had the shape of the one before."""
    same = state.memory.same_shape
    for tick in state.measured:
        same = same + 1 if tick.work.after == tick.work.shape else 0
        yield tick, same


def _telling(cost: CostModel | None, same_shape: int) -> bool:
    """Whether the time of a tick says what such a tick takes."""
    captured = cost is not None and cost.switch_s > 0
    return not captured or same_shape >= SLOW_AFTER_SWITCH


def keep_ledger(state: SchedulerState, plan: Plan) -> Plan:
    """Enter measured gaps into the ledger of each stream, and the time of their ticks into the share."""
    guard = plan.memory.guard
    if not state.measured:
        return plan
    for tick, same in _with_shapes(state):
        guard = _entered(guard, tick, state, telling=_telling(plan.memory.cost, same))
    return evolve(plan, memory=evolve(plan.memory, guard=guard))


def _entered(
    guard: GuardMemory, tick: MeasuredTick, state: SchedulerState, *, telling: bool
) -> GuardMemory:
    """Return the ledger with one tick in it."""
    balance, late = _balance(guard, tick, state)
    jitter = guard.jitter
    if telling and not tick.loaded and tick.solo_s > 0:
        jitter = _followed(jitter, [tick.gaps.get(v.key) for v in state.protected], tick.solo_s)
    took_s = tick.decode_s
    # What others added to the tick, as a part of it.
    added = max(0.0, 1.0 - tick.solo_s / took_s) if tick.loaded and took_s > 0 else 0.0
    return evolve(
        guard,
        credits=balance,
        jitter=jitter,
        infeasible=guard.infeasible + (late and not tick.loaded),
        share=_moved(guard.share, added * tick.background, took_s, SHARE_SECONDS),
        newcomers=_moved(
            guard.newcomers, added * (1.0 - tick.background), took_s, NEWCOMER_SECONDS
        ),
    )


def _balance(
    guard: GuardMemory, tick: MeasuredTick, state: SchedulerState
) -> tuple[dict[int, float], bool]:
    """Return the credit of each stream with its gap in it, and whether any gap was late.

    Who is parked or in the other lane for a while finds its credit again, and its debt.
    """
    late_s = state.contract.latency_cap * guard.jitter * tick.solo_s
    there = state.views
    balance, late = {key: credit for key, credit in guard.credits.items() if key in there}, False
    for view in state.protected:
        credit, gap_s = balance.get(view.key, 0.0), tick.gaps.get(view.key)
        if gap_s is None or tick.solo_s <= 0:
            pass  # nothing to enter
        elif gap_s > late_s:
            late, credit = True, max(DEEPEST_DEBT, credit - 1.0)
        else:
            credit = min(MOST_CREDIT, credit + EARNED_PER_GAP)
        balance[view.key] = credit
    return balance, late


def _followed(jitter: float, gaps: Sequence[float | None], solo_s: float) -> float:
    """Move the estimate of the p95 of gaps, in times of `solo_s`, by a gap of each stream."""
    for gap_s in gaps:
        if gap_s is None:
            continue
        if gap_s / solo_s > jitter:
            jitter = min(jitter * JITTER_UP, MOST_JITTER)
        else:
            jitter = max(1.0, jitter * JITTER_DOWN)
    return jitter


def _moved(average: float, value: float, took_s: float, over_s: float) -> float:
    """Move an average over the last `over_s` by a tick that took `took_s`."""
    return average + (1.0 - math.exp(-took_s / over_s)) * (value - average)


def set_limit(state: SchedulerState, plan: Plan) -> Plan:
    """Say how long this tick may take."""
    streams, cost = state.protected, plan.memory.cost
    guard, contract = plan.memory.guard, state.contract
    if not streams or cost is None:
        return _with(plan, NO_LIMIT, evolve(guard, newcomers=0.0))
    solo = alone_s(cost, streams, room_alone(state, len(streams)))
    loaded_ticks, closed_ticks = _turns(guard, captured=cost.switch_s > 0)
    guard = evolve(
        guard,
        loaded_ticks=loaded_ticks,
        closed_ticks=max(0, closed_ticks - 1),
        since_grant=guard.since_grant + 1,
    )
    if closed_ticks > 0:
        limit = Limit(
            solo, "alone: to measure what the streams cost by themselves", solo, closed=True
        )
        return _with(plan, limit, guard)
    young = _youngest_s(streams, state.now) < contract.young_s
    hard = max(contract.latency_cap, contract.young_cap if young else contract.pause_cap)
    # A late gap is late: few long ones serve a newcomer sooner than many of twice solo, and fewer
    # gaps are late. Where newcomers never end, or who comes pastes a document and will wait anyway,
    # the streams are spared the long ones.
    odd = guard.newcomers < MANY_NEWCOMERS and not _pasted(state)
    welcome = hard if odd else min(hard, contract.young_cap)
    # Where graphs are captured, a limit that moves changes the shape of ticks, which makes them late,
    # which moves the limit: there it stands still.
    credit = 0.0 if cost.switch_s else min([guard.credits.get(v.key, 0.0) for v in streams])
    # By the margin that it keeps, a rare tick may have less room than any other, and be no gain.
    rare = credit >= 1.0 and hard > cost.margin * contract.latency_cap
    rare = rare and not (state.ahead and guard.rare)  # that one has not been paid for yet
    limit = _limit(contract, credit, hard if rare else None, solo, welcome * solo)
    limit = _tightened(limit, streams)
    # What one application asks for does not take the floor from the others.
    if limit.seconds < hard * solo and _owed(state, guard, hard, young=young):
        limit = evolve(
            limit,
            seconds=hard * solo,
            reason="floor grant: background got too little",
            rare=True,
            grant=True,
        )
        guard = evolve(guard, since_grant=0, floor_grants=guard.floor_grants + 1)
    return _with(plan, limit, guard)


def _pasted(state: SchedulerState) -> bool:
    """Whether somebody is at the beginning of more than a newcomer's prompt."""
    most = state.contract.newcomer_tokens
    return any(
        is_newcomer(view, most) and view.computed + view.pending > most
        for view in state.riders.values()
    )


def _turns(guard: GuardMemory, *, captured: bool) -> tuple[int, int]:
    """Return how many ticks in a row had company, and how many are to be without, this one first."""
    loaded_ticks = guard.loaded_ticks + 1 if guard.loaded else 0
    closed_ticks = guard.closed_ticks
    if loaded_ticks >= (LOADED_BETWEEN_CAPTURES if captured else MOST_LOADED_TICKS):
        loaded_ticks, closed_ticks = 0, CLOSED_AFTER_CAPTURE if captured else 1
    return loaded_ticks, closed_ticks


def room_alone(state: SchedulerState, streams: int) -> int:
    """Return how many ballast rows there would be with nobody but so many streams."""
    return state.spare_rows + len(state.sequences) - streams if state.spare_rows else 0


def alone_s(cost: CostModel, streams: Sequence[SequenceView], spare_rows: int) -> float:
    """Return the seconds of a tick of nothing but `streams`, in a context that holds nobody else."""
    looked = sum([view.computed for view in streams])
    _, seconds = ballast_for(cost, Work(len(streams), len(streams), looked, looked), spare_rows)
    return seconds


def _limit(
    contract: Contract, credit: float, hard: float | None, solo: float, newcomer_s: float
) -> Limit:
    """Return the limit of a tick whose poorest stream has that much credit; a rare one is `hard`."""
    times = contract.latency_cap
    if hard is not None:
        times, reason = hard, f"long tick: every stream can bear {hard:g}x"
    elif credit >= EASY_DEBT:
        reason = f"within {times:g}x"
    else:
        ease = max(0.0, (credit - DEEPEST_DEBT) / (EASY_DEBT - DEEPEST_DEBT))
        times = 1.0 + ease * (times - 1.0)
        reason = f"within {times:.2f}x: recent gaps were late"
    return Limit(times * solo, reason, solo, hard is not None, newcomer_s)


def _tightened(limit: Limit, streams: Sequence[SequenceView]) -> Limit:
    """Respect what applications asked for, as far as the streams alone would."""
    targets = [view.target_gap_s for view in streams if view.target_gap_s is not None]
    if not targets:
        return limit
    asked = max(min(targets), limit.solo_s)
    newcomer_s = min(asked, limit.newcomer_s)
    if asked >= limit.seconds:
        return evolve(limit, newcomer_s=newcomer_s)
    return evolve(limit, seconds=asked, reason="within a request's own slo", newcomer_s=newcomer_s)


def _owed(state: SchedulerState, guard: GuardMemory, hard: float, *, young: bool) -> bool:
    """Whether background work waits and has had less than its floor for too long.

    While a stream is young the floor is owed rather than paid, until half of it is missing:
    where short conversations follow each other, somebody is always young. Grants of `hard` times
    solo come no closer than so that they add up to the floor.
    """
    floor = state.contract.background_floor / (2 if young else 1)
    return (
        guard.share < floor
        and guard.since_grant >= min(GAPS_BETWEEN_GRANTS, (hard - 1.0) * (1.0 / floor - 1.0))
        and any(not is_newcomer(v, state.contract.newcomer_tokens) for v in state.riders.values())
    )


def _youngest_s(streams: Sequence[SequenceView], now: float) -> float:
    """Return how long ago the last of them began to be read."""
    return now - max([now if v.first_token_at is None else v.first_token_at for v in streams])


def _with(plan: Plan, limit: Limit, guard: GuardMemory) -> Plan:
    if limit.rare != guard.rare:
        guard = evolve(guard, rare=limit.rare)
    return evolve(plan, limit=limit, memory=evolve(plan.memory, guard=guard))
