"""How long a tick may take: the limit that protects the interactive streams.

It is `latency_cap` times solo, the predicted time of the streams alone. Exceptions, in the order in
which they are looked at:

- an isolated tick, without other work, after many mixed ones: it measures solo;
- a long tick, up to the hard cap, where every stream's error budget can pay for it
  (:mod:`uma_trio.policy.contract.error_budget`);
- a narrower limit where a budget is deep below 0, or where an application asked for less;
- a grant, up to the hard cap, where background work had less than its floor.

The hard cap is `startup_cap` while any stream is in its start-up window, `pause_cap` afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from uma_trio.policy.contract.ballast import ballast_for
from uma_trio.policy.contract.error_budget import DEEPEST_DEBT
from uma_trio.policy.contract.rules import FREE_SHAPES, Rules
from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import NO_LIMIT, Limit, Plan
from uma_trio.policy.state import (
    Contract,
    GuardMemory,
    SchedulerState,
    SequenceView,
    is_newcomer,
)

EASY_DEBT = -1.0  # below this the limit narrows, at the deepest to what costs nothing
TOKENS_BETWEEN_GRANTS = 25
# Newcomers are frequent from this part of machine time on, smoothed over some seconds: a prompt of
# 500 tokens takes a sixth where T(1) is 8 ms.
MANY_NEWCOMERS = 0.2


def set_limit(state: SchedulerState, plan: Plan, rules: Rules = FREE_SHAPES) -> Plan:
    """Say how long this tick may take."""
    streams, cost = state.protected, plan.memory.cost
    guard, contract = plan.memory.guard, state.contract
    if not streams or cost is None:
        return _with(plan, NO_LIMIT, evolve(guard, newcomers=0.0))
    solo = alone_s(cost, streams, room_alone(state, len(streams)))
    guard, isolated = next_turn(guard, rules)
    if isolated:
        limit = Limit(
            solo, "alone: to measure what the streams cost by themselves", solo, isolated=True
        )
        return _with(plan, limit, guard)
    starting = youngest_s(streams, state.now) < contract.startup_s
    hard = max(contract.latency_cap, contract.startup_cap if starting else contract.pause_cap)
    # Few long ticks serve a newcomer sooner than many of twice solo, and make fewer tokens late. Where
    # newcomers are frequent, or one pastes a document and waits anyway, ticks stay shorter.
    odd = guard.newcomers < MANY_NEWCOMERS and not pasted(state)
    welcome = hard if odd else min(hard, contract.startup_cap)
    budget = 0.0
    if rules.spends_budget:
        budget = min([guard.budgets.get(v.key, 0.0) for v in streams])
    # With the margin that it keeps, a long tick may have less room than others, and be no gain.
    long = budget >= 1.0 and hard > cost.margin * contract.latency_cap
    long = long and not (state.prepared and guard.long)  # not measured, so not paid for yet
    limit = _limit(contract, budget, hard if long else None, solo, welcome * solo)
    limit = _tightened(limit, streams)
    floor = contract.background_floor / (2 if starting else 1)
    # What one application asks for does not take the floor from the others.
    if limit.seconds < hard * solo and is_owed(state, guard, hard, floor):
        limit = evolve(
            limit,
            seconds=hard * solo,
            reason="floor grant: background got too little",
            long=True,
            grant=True,
        )
        guard = evolve(guard, since_grant=0, floor_grants=guard.floor_grants + 1)
    return _with(plan, limit, guard)


def pasted(state: SchedulerState) -> bool:
    """Whether somebody is at the beginning of more than a newcomer's prompt."""
    most = state.contract.newcomer_tokens
    return any(
        is_newcomer(view, most) and view.uncached + view.due > most
        for view in state.best_effort.values()
    )


def next_turn(guard: GuardMemory, rules: Rules) -> tuple[GuardMemory, bool]:
    """Return what the guard remembers from this tick on, and whether the tick is an isolated one.

    Isolated ticks come after so many mixed ones: every limit is a multiple of solo, and only they
    measure that.
    """
    mixed_ticks = guard.mixed_ticks + 1 if guard.mixed else 0
    isolated_ticks = guard.isolated_ticks
    if mixed_ticks >= rules.mixed_ticks:
        mixed_ticks, isolated_ticks = 0, rules.isolated_ticks
    counted = evolve(
        guard,
        mixed_ticks=mixed_ticks,
        isolated_ticks=max(0, isolated_ticks - 1),
        since_grant=guard.since_grant + 1,
    )
    return counted, isolated_ticks > 0


def room_alone(state: SchedulerState, streams: int) -> int:
    """Return how many ballast rows there would be with nobody but so many streams."""
    return state.spare_rows + len(state.sequences) - streams if state.spare_rows else 0


def alone_s(cost: CostModel, streams: Sequence[SequenceView], spare_rows: int) -> float:
    """Return the seconds of a tick of nothing but `streams`, in a context that holds nobody else."""
    context_cells = sum([view.computed for view in streams])
    _, seconds = ballast_for(
        cost, Work(len(streams), len(streams), context_cells, context_cells), spare_rows
    )
    return seconds


def _limit(
    contract: Contract, budget: float, hard: float | None, solo: float, newcomer_s: float
) -> Limit:
    """Return the limit of a tick whose poorest stream has that `budget`; a long one is `hard`."""
    times = contract.latency_cap
    if hard is not None:
        times, reason = hard, f"long tick: every stream can bear {hard:g}x"
    elif budget >= EASY_DEBT:
        reason = f"within {times:g}x"
    else:
        ease = max(0.0, (budget - DEEPEST_DEBT) / (EASY_DEBT - DEEPEST_DEBT))
        times = 1.0 + ease * (times - 1.0)
        reason = f"within {times:.2f}x: recent gaps were late"
    return Limit(times * solo, reason, solo, hard is not None, newcomer_s)


def _tightened(limit: Limit, streams: Sequence[SequenceView]) -> Limit:
    """Respect what applications asked for, as far as the streams alone would."""
    targets = [view.target_itl_s for view in streams if view.target_itl_s is not None]
    if not targets:
        return limit
    asked = max(min(targets), limit.solo_s)
    newcomer_s = min(asked, limit.newcomer_s)
    if asked >= limit.seconds:
        return evolve(limit, newcomer_s=newcomer_s)
    return evolve(limit, seconds=asked, reason="within a request's own slo", newcomer_s=newcomer_s)


def is_owed(state: SchedulerState, guard: GuardMemory, hard: float, floor: float) -> bool:
    """Whether background work is ready and has had less than its `floor` for too long.

    In a start-up window it may fall to half of the floor first: not to none, as where short
    conversations follow each other some stream is always starting. Grants of `hard` times solo come no
    closer than they need to add up to the floor.
    """
    return (
        guard.share < floor
        and guard.since_grant >= min(TOKENS_BETWEEN_GRANTS, (hard - 1.0) * (1.0 / floor - 1.0))
        and any(
            not is_newcomer(v, state.contract.newcomer_tokens) for v in state.best_effort.values()
        )
    )


def youngest_s(streams: Sequence[SequenceView], now: float) -> float:
    """Return how long ago the last of them began to be read."""
    return now - max([now if v.first_token_at is None else v.first_token_at for v in streams])


def _with(plan: Plan, limit: Limit, guard: GuardMemory) -> Plan:
    if limit.long != guard.long:
        guard = evolve(guard, long=limit.long)
    return evolve(plan, limit=limit, memory=evolve(plan.memory, guard=guard))
