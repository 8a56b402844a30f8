"""The work beside streams in a tick: prompts by their deadlines, then other work, and how much of it.

Readers gain slack in isolated ticks and spend it in mixed ones. The long-run rate of a size is its
tokens divided by the time that it adds to a tick, times the readers' gain. A small tick that fits
at once may have a tenth of the rate of a larger one that fits a little later; the policy then runs
isolated ticks until the larger one fits. It never waits for a tick that is longer than the slack
can become.

The staircase is not monotonic, so only measured sizes are used, and each is evaluated by itself. Of
the sizes that reach the `plateau` of the best rate, in tokens per second, the
smallest is taken, because shorter ticks delay other work less. The current size is kept for small
gains (hysteresis). Sometimes a neighbouring size is tried, because only ticks of a size correct its
measurement.

Where a change of shape costs time (CUDA graphs), slack is saved for several mixed ticks in a row,
and the size is kept while it lasts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile

from attrs import frozen

from uma_trio.policy.accounting import owes_answers, planned_work
from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.deadline.candidates import (
    Candidates,
    burst,
    candidates,
    leading_lane,
    next_burst,
    standing,
)
from uma_trio.policy.deadline.first_tokens import short_first
from uma_trio.policy.deadline.shape import ballast_for
from uma_trio.policy.evolving import evolve
from uma_trio.policy.fairness import turn_s
from uma_trio.policy.plan import Limit, Plan, PlanItem, Skip
from uma_trio.policy.state import USUAL_LEAD_S, SchedulerState, SequenceView, Served, is_prompt

# One tick in so many tries a neighbouring size, because only ticks of a size correct its measurement.
PROBE_EVERY = 64
# What adds less than this part of a tick is priced as if it added so much: predictions are no finer.
FINEST = 0.02
# From this part of what slack may become on nothing is waited for; and for the first mixed tick behind an
# isolated one where a change of shape costs.
FULL, WORTH_A_CHANGE = 0.9, 0.7
# Decoders get ticks of their own once they lag by one part in so many of a turn.
DECODER_TURNS = 16
# Without readers, a tick that can be aborted takes at most so long: a request that arrives in its second half waits for up
# to 0.3 s of it. One that cannot may take so long if shorter ones compute prompts at a lower rate.
ABORTABLE_S, DEEP_S = 1.0, 0.3
STEEPEST = 2.0  # no stair goes down by more than half: beyond this none is within the limit


def fitting(
    cost: CostModel, line: Candidates, most: int, limit_s: float, spare_rows: int
) -> dict[int, float]:
    """Return the seconds of the tick by how many tokens are added to it, where within `limit_s`.

    Sizes fill the tick up to a known size, or take all `most` that there are; none goes beyond
    the largest size: its time is unknown, and arriving requests wait for it. Only a tick
    of all `most` is priced with ballast: any other can have useful rows in its place.
    """
    total, endless = line.tick.tokens, math.isinf(limit_s)
    if total < cost.sizes[-1]:
        most = min(most, cost.sizes[-1] - total)
    took: dict[int, float] = {}
    for size in [n - total for n in cost.sizes if 0 < n - total < most]:
        # Most sizes are too large by their own time, before it is asked what they look back at.
        seconds = 0.0 if endless else cost.at_least(total + size)
        if seconds <= limit_s:
            seconds = cost.seconds(line.tick, *line.adds(size))
        if seconds <= limit_s:
            took[size] = seconds
        elif seconds > STEEPEST * limit_s:
            return took
    if most > 0:
        _, seconds = ballast_for(cost, line.work(most), spare_rows)
        if seconds <= limit_s:
            took[most] = seconds
    return took


def sweet_spot(
    state: SchedulerState, cost: CostModel, took: Mapping[int, float], total: int
) -> int:
    """Return which size to add to a tick that has `total` tokens already; 0 if there is none.

    `took` says what the tick takes by so many more, ascending.
    """
    if not took:
        return 0
    sizes, in_use, tuning = tuple(took), state.memory.served.tokens - total, cost.tuning
    rates = [n / took[n] * (tuning.dead_band if n == in_use else 1.0) for n in sizes]
    best = cost.level(rates)
    if state.tick % PROBE_EVERY == 0:
        other = best + (1 if state.tick % (2 * PROBE_EVERY) else -1)
        best = other if 0 <= other < len(sizes) else best
    return sizes[best]


SAVING = "waits until readers are far enough ahead for a larger tick"
TOO_LONG = "no tick with it is short enough for the readers"


def fill_tick(state: SchedulerState, plan: Plan) -> Plan:
    """Add what the limit allows: prompts whose first token is waited for, then all other work."""
    cost = plan.memory.cost
    if cost is None:
        return plan
    prompts, rest = candidates(state, plan, cost)
    if not prompts and not rest:
        return plan
    # Sizes are chosen by what they cost again and again, not by what the first such tick costs.
    tick = planned_work(state, plan, captured=True)
    fill = _unread if math.isinf(plan.limit.seconds) else _beside_readers
    lines = fill(state, plan, cost, tick, prompts, rest)
    items = [item for line in lines for item in line.items]
    served, why = {item.key for item in items}, lines[-1].why
    skipped = [Skip(v.key, why) for v in (*prompts, *rest) if v.key not in served]
    decoders = [v.key for v in rest if v.key in served and v.lane == "background" and v.decoding]
    memory = evolve(plan.memory, served=next_burst(state, lines[-1].in_use, decoders))
    return evolve(
        plan,
        items=(*plan.items, *items),
        skipped=(*plan.skipped, *skipped),
        memory=memory,
        limit=evolve(plan.limit, saves=lines[-1].saves) if lines[-1].saves else plan.limit,
    )


@frozen
class _Line:
    """What is added to a tick, why others are not, and the size that is `in_use` from now on.

    It `saves` if it waits for a tick that is longer than a step.
    """

    items: Sequence[PlanItem]
    why: str
    in_use: Served
    saves: bool = False


def _beside_readers(
    state: SchedulerState,
    plan: Plan,
    cost: CostModel,
    tick: Work,
    prompts: list[SequenceView],
    rest: list[SequenceView],
) -> list[_Line]:
    limit, in_use, within = plan.limit, state.memory.served, state.contract.newcomer_tokens
    fresh = list(takewhile(lambda view: view.uncached < within, prompts))
    first = Candidates(tick, fresh, within)
    n = 0 if limit.isolated or limit.grant else _newcomers_size(state, cost, limit, first)
    lane = leading_lane(state, plan)
    people = [view for view in rest if view.lane == "interactive"] + prompts[len(fresh) :]
    others = [view for view in rest if view.lane != "interactive"]
    line = people + others if lane == "interactive" else others + people
    second = Candidates(first.work(n), _in_turn(state, plan, cost, line))
    m, why, saves = (0, limit.reason, False)
    if not limit.isolated:
        m, why, saves = _size(state, cost, limit, second)
    if m and not limit.grant:
        in_use = evolve(in_use, tokens=second.tick.tokens + m)
    return [
        _Line(_items(first.shares(n), f"newcomer: {limit.reason}"), why, in_use),
        _Line(_in_slack(second.shares(m), limit), why, in_use, saves),
    ]


def _unread(
    state: SchedulerState,
    plan: Plan,
    cost: CostModel,
    tick: Work,
    prompts: list[SequenceView],
    rest: list[SequenceView],
) -> list[_Line]:
    """Fill a tick without readers: the lane whose turn it is, and what makes that no longer.

    Answers whose end is waited for ride along with prompts, and have ticks of their own as far as they
    are owed some.
    """
    answers = [view for view in rest if view.lane == "interactive"]
    others = [view for view in rest if view.lane != "interactive"]
    longer_s = cost.tuning.little_longer
    short = short_first(state, prompts)
    if leading_lane(state, plan) == "interactive" and not plan.limit.grant:
        if short:
            first, second = short, answers + prompts[len(short) :]
        else:
            first = answers if answers and owes_answers(state, cost) else answers + prompts
            second = others
    else:
        first, second = answers + others, prompts
    line = Candidates(tick, first)
    n = _unread_size(state, cost, plan.limit, line)
    full = line.work(n)
    more = Candidates(full, second)
    most = min(more.demand, state.n_batch - full.tokens)
    most_s = longer_s * cost.seconds(full)
    if short and first is short:
        most_s = max(most_s, cost.tuning.unread_s)
    took = fitting(cost, more, most, most_s, state.spare_rows)
    m = max(took, default=0)
    in_use = evolve(state.memory.served, tokens=full.tokens)
    why = "does not fit into this tick"
    return [
        _Line(_items(line.shares(n), plan.limit.reason), why, in_use),
        _Line(_items(more.shares(m), plan.limit.reason), why, in_use),
    ]


def _unread_size(state: SchedulerState, cost: CostModel, limit: Limit, line: Candidates) -> int:
    """Return how many tokens of a line to compute without readers.

    A tick that can be aborted is as long as it needs to be for the best rate. Others are brief, or take up to `DEEP_S` if
    prompts at their depth are computed at a lower rate in shorter ones.
    """
    most = min(line.demand, state.n_batch - line.tick.tokens)
    took = fitting(cost, line, most, math.inf, state.spare_rows)
    has_prompts = any(not view.decoding for view in line.views)
    rates = [(line.tick.tokens + size) / seconds for size, seconds in took.items()]
    enough = cost.level(rates) if rates else 0
    abortable = state.interruptible and not limit.solo_s
    deep_s = max(limit.brief_s, ABORTABLE_S if abortable else DEEP_S)
    brief = {
        size: seconds
        for i, (size, seconds) in enumerate(took.items())
        if seconds <= (deep_s if has_prompts and (abortable or i <= enough) else limit.brief_s)
    }
    took = brief or dict([*took.items()][:1])  # some sequence has to go on
    if not any(is_prompt(view) for view in line.views):
        return sweet_spot(state, cost, took, line.tick.tokens)
    if not took:
        return 0
    # A prompt that is alone waits for its own end only: the best rate is best. Of several the first is
    # done sooner in chunks that are no larger than they need to be.
    rates = [(line.tick.tokens + size) / seconds for size, seconds in took.items()]
    alone = len(line.views) == 1 and not line.tick.tokens
    return tuple(took)[rates.index(max(rates)) if alone else cost.level(rates)]


def _in_turn(
    state: SchedulerState, plan: Plan, cost: CostModel, rest: list[SequenceView]
) -> list[SequenceView]:
    """Return the sequences that may share the tick: decoders alone, as long as they are owed ticks.

    A large tick that carries prompts gives each decoder one token. Decoders whose clients had
    less machine time than clients with prompts get ticks of their own, a burst at a time.
    """
    if not rest or not rest[0].decoding or rest[-1].decoding:
        return rest
    decoders = [view for view in rest if view.decoding]
    turn = turn_s(cost, state.n_batch)
    used = standing(state, plan, turn)
    prompts = [used[view.client] for view in rest if not view.decoding]
    lag = math.fsum(prompts) / len(prompts) - used[decoders[0].client]
    begun = not burst(state).isdisjoint([view.key for view in decoders])
    return decoders if lag > (0.0 if begun else turn / DECODER_TURNS) else rest


def _items(shares: Sequence[tuple[SequenceView, int]], reason: str) -> list[PlanItem]:
    return [PlanItem(v.key, n, "decode" if v.decoding else "prefill", reason) for v, n in shares]


def _in_slack(shares: Sequence[tuple[SequenceView, int]], limit: Limit) -> list[PlanItem]:
    return [
        item
        for view, n in shares
        for item in _items([(view, n)], f"{_kind_of(view)}: {limit.reason}")
    ]


def _kind_of(view: SequenceView) -> str:
    if view.lane == "background":
        return "background"
    return "rest of a prompt" if is_prompt(view) else "answer"


def _newcomers_size(state: SchedulerState, cost: CostModel, limit: Limit, line: Candidates) -> int:
    """Return how many tokens of newcomers to compute: as many as the readers can bear."""
    most = min(line.demand, state.n_batch - line.tick.tokens)
    if most <= 0:
        return 0
    seconds = max(limit.seconds, cost.tuning.aim * limit.newcomer_s)
    return max(fitting(cost, line, most, seconds, state.spare_rows), default=0)


def _size(
    state: SchedulerState, cost: CostModel, limit: Limit, line: Candidates
) -> tuple[int, str, bool]:
    """Return how many tokens of all other work to compute, why others get none, and if it `saves`."""
    most, spare = min(line.demand, state.n_batch - line.tick.tokens), state.spare_rows
    recapture_s, capture_s = cost.scale * cost.recapture_s, cost.scale * cost.capture_s
    if limit.grant:
        granted_s = limit.seconds - recapture_s
        return max(fitting(cost, line, most, granted_s, spare), default=0), TOO_LONG, False
    begun, full = state.memory.guard.mixed, limit.seconds >= FULL * limit.reach_s
    # Larger leads are for deep contexts, whose ticks are longer.
    worth_s = WORTH_A_CHANGE * min(limit.reach_s, USUAL_LEAD_S + limit.step_s)
    changes = recapture_s > 0.0 and not begun and limit.seconds < worth_s
    if changes and not _is_read_soon(line.views):
        return 0, SAVING, True
    seconds = limit.seconds if full else max(limit.seconds, limit.reach_s)
    took = fitting(cost, line, most, seconds - recapture_s, spare)
    if not took:
        return 0, TOO_LONG, False
    _, base_s = ballast_for(cost, line.tick, spare)
    in_use = state.memory.served.tokens - line.tick.tokens
    kept = begun and in_use > 0 and line.tick.rows + line.adds(in_use)[1] <= state.before.rows
    base_s *= limit.drafted_part
    best = _best(cost, took, base_s, limit.step_s, recapture_s + cost.change_s, in_use, kept=kept)
    # The shape changes once more when readers are alone again.
    stays_s = 0.0 if state.before.repeats else capture_s
    changes_s = cost.change_s + (stays_s if kept and best == in_use else recapture_s)
    needs_s = took[best] + changes_s
    saves = needs_s > limit.step_s
    if changes:
        # With its first token a stream begins that is not ahead: nothing is saved beyond that.
        more = math.ceil(line.views[0].due / best) - 1
        needs_s = min(worth_s, needs_s + more * max(0.0, took[best] - limit.step_s))
    return (best if max(needs_s, took[best]) <= limit.seconds else 0), SAVING, saves


def _is_read_soon(views: Sequence[SequenceView]) -> bool:
    return bool(views) and is_prompt(views[0]) and views[0].read


def _best(
    cost: CostModel,
    took: Mapping[int, float],
    base_s: float,
    step_s: float,
    changes_s: float,
    in_use: int,
    *,
    kept: bool,
) -> int:
    """Return the size that gives most tokens a second in the long run.

    `took` are the seconds of a tick by size, `base_s` those without. A tick is shown for `step_s`, so
    one without gains the difference; a size that takes longer than a step has to wait for as
    many of those as it takes. `kept` says whether the size in use needs no other shape; another costs
    `changes_s`, there and back.
    """
    finest = FINEST * base_s
    waits = step_s / max(step_s - base_s, finest)
    rates = []
    for n, seconds in took.items():
        adds_s = seconds - base_s + (0.0 if kept and n == in_use else changes_s)
        rate = n / max(seconds, waits * max(adds_s, finest))
        rates.append(rate * cost.tuning.dead_band if n == in_use else rate)
    return tuple(took)[cost.level(rates)]
