"""Fill the tick within its limit: newcomers first, then everyone else.

The interactive streams have their rows already. Since the staircase goes up and down, the size of
the whole tick is chosen first, among sizes whose time is known; its tokens are then given out
in the order of the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from uma_trio.policy.accounting import planned_work
from uma_trio.policy.contract.candidates import Candidates, candidates
from uma_trio.policy.contract.rules import FREE_SHAPES, Rules
from uma_trio.policy.contract.sizes import next_burst, resized, sweet_spot
from uma_trio.policy.cost import CostModel
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Limit, Plan, PlanItem, Skip
from uma_trio.policy.state import SchedulerState, SequenceView

# Ticks are planned for this part of their limit, since half of them take longer than predicted, and
# isolated ticks, which measure solo, are a little slower amid a load than without any. At 0.97 the
# median latency in a storm was 1.21 times solo at a cap of 1.2.
AIM = 0.93
# A prompt of so many tokens may end in a tick of the smallest sizes.
NEAR_END = 8
STEEPEST = 2.0  # no stair goes down by more than half: beyond this none is within the limit


def fill_within_limit(state: SchedulerState, plan: Plan, rules: Rules = FREE_SHAPES) -> Plan:
    """Add what the limit allows: newcomers, then everyone else."""
    cost, limit = plan.memory.cost, plan.limit
    if cost is None:
        return plan
    newcomers, rest = candidates(state, plan, cost)
    if not newcomers and not rest:
        return plan
    # Sizes are chosen by what they cost again and again, not by what the first such tick costs.
    tick = planned_work(state, plan, captured=True)
    # With streams to protect, the rest of a long prompt is scheduled as background work.
    within = math.inf if math.isinf(limit.newcomer_s) else state.contract.newcomer_tokens
    if math.isinf(limit.seconds):
        rules = FREE_SHAPES  # no stream waits for a recapture
    first = Candidates(tick, newcomers, within)
    n = 0 if limit.isolated or limit.grant else _newcomers_size(state, cost, limit, first)
    second = Candidates(first.work(n), rest)
    m, most = (
        (0, 0)
        if limit.isolated
        else _size(state, cost, limit, second, rules, beside_newcomers=n > 0)
    )
    # The last chunk of a prompt asks for a logits row, which may be what does not fit; others may.
    others = [view for view in rest if view.due > NEAR_END]
    if m == 0 and not limit.isolated and 0 < len(others) < len(rest):
        second = Candidates(second.tick, others)
        m, most = _size(state, cost, limit, second, rules, beside_newcomers=n > 0)
    items = _items(first.shares(n), f"newcomer: {limit.reason}")
    items += _items(second.shares(m), f"background: {limit.reason}")
    served, too_much = {item.key for item in items}, f"does not fit into this tick ({limit.reason})"
    skipped = [Skip(v.key, too_much) for v in (*newcomers, *rest) if v.key not in served]
    decoders = [v.key for v in rest if v.key in served and v.lane == "background" and v.decoding]
    in_use, without = state.memory.served, second.tick.tokens
    if not (limit.long or limit.isolated):
        in_use = resized(state, without + m, without + most, without + second.demand)
    return evolve(
        plan,
        items=(*plan.items, *items),
        skipped=(*plan.skipped, *skipped),
        memory=evolve(plan.memory, served=next_burst(state, in_use, decoders)),
    )


def _items(shares: Sequence[tuple[SequenceView, int]], reason: str) -> list[PlanItem]:
    return [PlanItem(v.key, n, "decode" if v.decoding else "prefill", reason) for v, n in shares]


def _newcomers_size(state: SchedulerState, cost: CostModel, limit: Limit, line: Candidates) -> int:
    """Return how many tokens of newcomers to compute: as many as the streams can bear.

    They are given :data:`AIM` of their limit, without the margin of a long tick: a token beyond it is
    late and charged, and smaller chunks would make more tokens late.
    """
    most = min(line.demand, state.n_batch - line.tick.tokens)
    if most <= 0:
        return 0
    seconds = max(limit.seconds, limit.newcomer_s)
    if math.isinf(seconds):
        return min(most, cost.quickest(state.n_batch))
    return max(fitting(cost, line, most, AIM * seconds, careful=False), default=0)


def _size(
    state: SchedulerState,
    cost: CostModel,
    limit: Limit,
    line: Candidates,
    rules: Rules,
    *,
    beside_newcomers: bool,
) -> tuple[int, int]:
    """Return how many tokens of everyone else to compute, and how many could be.

    With no stream to protect but a newcomer in the tick, only what makes it no longer.
    """
    most = min(line.demand, state.n_batch - line.tick.tokens)
    seconds = limit.seconds if limit.long else AIM * limit.seconds
    if beside_newcomers and math.isinf(seconds):
        seconds = cost.seconds(line.tick)
    took = fitting(cost, line, most, seconds, careful=limit.long)
    longest = max(took, default=0)
    if limit.long:
        return longest, longest
    return sweet_spot(state, took, line.tick.tokens, rules), longest


def fitting(
    cost: CostModel, line: Candidates, most: int, limit_s: float, *, careful: bool = False
) -> dict[int, float]:
    """Return the seconds of the tick by how many tokens are added to it, where within `limit_s`.

    Sizes fill the tick up to a known step, or take all `most` that there are; none goes beyond
    the largest step: nobody knows what it takes, and who comes meanwhile waits for it.
    """
    total = line.tick.tokens
    margin, endless = cost.margin if careful else 1.0, math.isinf(limit_s)
    if total < cost.steps[-1]:
        most = min(most, cost.steps[-1] - total)
    took: dict[int, float] = {}
    for size in [*(step - total for step in cost.steps if 0 < step - total < most), most]:
        # Most sizes are too large by their own step, before it is asked what they look back at.
        seconds = 0.0 if endless else margin * cost.at_least(total + size)
        if seconds <= limit_s:
            seconds = margin * cost.seconds(line.tick, *line.adds(size))
        if seconds <= limit_s and size > 0:
            took[size] = seconds
        elif seconds > STEEPEST * limit_s:
            break
    return took
