"""The work beside streams in a tick: newcomers, then other work in the size with the best rate.

Readers gain slack in isolated ticks and spend it in mixed ones. The long-run rate of a size is its
tokens divided by the time that it adds to a tick, times the readers' gain. A small tick that fits
at once may have a tenth of the rate of a larger one that fits a little later; the policy then runs
isolated ticks until the larger one fits. It never waits for a tick that is longer than the slack
can become.

Where a change of shape costs time (CUDA graphs), slack is saved for several mixed ticks in a row,
and the size is kept while it lasts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from uma_trio.policy.accounting import planned_work
from uma_trio.policy.cost import CostModel, level
from uma_trio.policy.deadline.ballast import ballast_for
from uma_trio.policy.deadline.candidates import Candidates, burst, candidates, next_burst, standing
from uma_trio.policy.deadline.sizes import DEAD_BAND, fitting, sweet_spot
from uma_trio.policy.evolving import evolve
from uma_trio.policy.fairness import turn_s
from uma_trio.policy.plan import Limit, Plan, PlanItem, Skip
from uma_trio.policy.state import SchedulerState, SequenceView

# What adds less than this part of a tick is priced as if it added so much: predictions are no finer.
FINEST = 0.02
# From this part of what slack may become on nothing is waited for. Where a change of shape costs, no mixed
# tick comes behind an isolated one before slack is this part.
FULL, WORTH_A_CHANGE = 0.9, 0.7
# Ticks for newcomers are planned for this part of their limit, since half of them take longer than predicted.
AIM = 0.93
TURNS = 16  # decoders get ticks of their own once they lag by this part of a turn
SAVING = "waits until readers are far enough ahead for a larger tick"
TOO_LONG = "no tick with it is short enough for the readers"


def fill_tick(state: SchedulerState, plan: Plan) -> Plan:
    """Add what the limit allows: newcomers, then everyone else."""
    cost, limit = plan.memory.cost, plan.limit
    if cost is None:
        return plan
    newcomers, rest = candidates(state, plan, cost)
    if not newcomers and not rest:
        return plan
    # Sizes are chosen by what they cost again and again, not by what the first such tick costs.
    tick = planned_work(state, plan, captured=True)
    within = math.inf if math.isinf(limit.newcomer_s) else state.contract.newcomer_tokens
    first = Candidates(tick, newcomers, within)
    n = 0 if limit.isolated or limit.grant else _newcomers_size(state, cost, limit, first)
    second = Candidates(first.work(n), _in_turn(state, plan, cost, rest))
    m, why = (0, limit.reason) if limit.isolated else _size(state, cost, limit, second, n)
    items = _items(first.shares(n), f"newcomer: {limit.reason}")
    items += _items(second.shares(m), f"background: {limit.reason}")
    served = {item.key for item in items}
    skipped = [Skip(v.key, why) for v in (*newcomers, *rest) if v.key not in served]
    decoders = [v.key for v in rest if v.key in served and v.lane == "background" and v.decoding]
    in_use = state.memory.served
    if m and not limit.grant:
        in_use = evolve(in_use, tokens=second.tick.tokens + m)
    return evolve(
        plan,
        items=(*plan.items, *items),
        skipped=(*plan.skipped, *skipped),
        memory=evolve(plan.memory, served=next_burst(state, in_use, decoders)),
    )


def _in_turn(
    state: SchedulerState, plan: Plan, cost: CostModel, rest: list[SequenceView]
) -> list[SequenceView]:
    """Return who may share the tick: decoders alone, as long as they are owed ticks.

    A large tick that carries prompts gives each decoder one token. Decoders whose clients had
    less machine time than clients with prompts get ticks of their own, a burst at a time.
    """
    if math.isinf(plan.limit.seconds) or not rest or not rest[0].decoding or rest[-1].decoding:
        return rest
    decoders = [view for view in rest if view.decoding]
    turn = turn_s(cost, state.n_batch)
    used = standing(state, plan, turn)
    prompts = [used[view.client] for view in rest if not view.decoding]
    lag = math.fsum(prompts) / len(prompts) - used[decoders[0].client]
    begun = not burst(state).isdisjoint([view.key for view in decoders])
    return decoders if lag > (0.0 if begun else turn / TURNS) else rest


def _items(shares: Sequence[tuple[SequenceView, int]], reason: str) -> list[PlanItem]:
    return [PlanItem(v.key, n, "decode" if v.decoding else "prefill", reason) for v, n in shares]


def _newcomers_size(state: SchedulerState, cost: CostModel, limit: Limit, line: Candidates) -> int:
    """Return how many tokens of newcomers to compute: as many as the readers can bear."""
    most = min(line.demand, state.n_batch - line.tick.tokens)
    if most <= 0:
        return 0
    if math.isinf(limit.newcomer_s):
        # Of several the first is done sooner in chunks that are no larger than they need to be.
        several = len(line.views) > 1
        return min(most, (cost.plateau if several else cost.quickest)(state.n_batch))
    seconds = max(limit.seconds, AIM * limit.newcomer_s)
    return max(fitting(cost, line, most, seconds, state.spare_rows), default=0)


def _size(
    state: SchedulerState, cost: CostModel, limit: Limit, line: Candidates, newcomers: int
) -> tuple[int, str]:
    """Return how many tokens of everyone else to compute, and why others get none."""
    most, spare = min(line.demand, state.n_batch - line.tick.tokens), state.spare_rows
    if math.isinf(limit.seconds):
        # With no reader but a newcomer in the tick, only what makes it no longer.
        seconds = cost.seconds(line.tick) if newcomers else limit.brief_s
        took = fitting(cost, line, most, seconds, spare)
        if not took and not newcomers:  # somebody has to go on
            took = dict([*fitting(cost, line, most, math.inf, spare).items()][:1])
        return sweet_spot(state, took, line.tick.tokens), "does not fit into this tick"
    recapture_s, capture_s = cost.scale * cost.recapture_s, cost.scale * cost.capture_s
    if limit.grant:
        granted_s = limit.seconds - recapture_s
        return max(fitting(cost, line, most, granted_s, spare), default=0), TOO_LONG
    begun, full = state.memory.guard.mixed, limit.seconds >= FULL * limit.reach_s
    if recapture_s and not begun and limit.seconds < WORTH_A_CHANGE * limit.reach_s:
        return 0, SAVING
    seconds = limit.seconds if full else max(limit.seconds, limit.reach_s)
    took = fitting(cost, line, most, seconds - recapture_s, spare)
    if not took:
        return 0, TOO_LONG
    _, base_s = ballast_for(cost, line.tick, spare)
    in_use = state.memory.served.tokens - line.tick.tokens
    kept = begun and in_use > 0 and line.tick.rows + line.adds(in_use)[1] <= state.before.rows
    base_s *= limit.drafted_part
    best = _best(took, base_s, limit.step_s, recapture_s + cost.change_s, in_use, kept=kept)
    # The shape changes once more when readers are alone again.
    stays_s = 0.0 if state.before.repeats else capture_s
    changes_s = cost.change_s + (stays_s if kept and best == in_use else recapture_s)
    return (best if took[best] + changes_s <= limit.seconds else 0), SAVING


def _best(
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
        rates.append(rate * DEAD_BAND if n == in_use else rate)
    return tuple(took)[level(rates)]
