"""Who rides along: newcomers, background decoders and prompts, within the tick's limit.

The interactive streams have their rows already. What is added must keep the tick within its
limit, by the cost model's careful prediction. Since the staircase goes up and down, the choice
is made for whole ticks: the largest number of further tokens that stays within the limit, given
out in the order of who is next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import evolve

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.fairness import lift
from uma_trio.policy.plan import Plan, PlanItem, Skip
from uma_trio.policy.roles import is_newcomer
from uma_trio.policy.state import SchedulerState, SequenceView
from uma_trio.policy.tally import planned_work

# People's prompts are ordered by how much of the time they can expect is left, relative to that
# time: seconds of grace, and how many times its own prefill a prompt may take.
GRACE_S, PATIENCE = 0.3, 2.0
FINE = 32  # up to here every count is tried, above it only steps

Share = tuple[SequenceView, int]


def fill_within_limit(state: SchedulerState, plan: Plan) -> Plan:
    """Add what the limit allows: newcomers, then everyone else."""
    cost = plan.memory.cost
    if cost is None:
        return plan
    alone = planned_work(state, plan)
    newcomers, rest = _candidates(state, plan, cost)
    patience = max(plan.limit.seconds, state.contract.young_cap * plan.limit.solo_s)
    first = _choose(state, cost, alone, newcomers, patience)
    second = _choose(state, cost, _with(alone, first), rest, plan.limit.seconds)
    shares = {view.key: n for view, n in (*first, *second)}
    items = tuple(
        PlanItem(
            view.key,
            shares[view.key],
            "decode" if view.decoding else "prefill",
            f"{'newcomer' if view in newcomers else 'background'}: {plan.limit.reason}",
        )
        for view in (*newcomers, *rest)
        if view.key in shares
    )
    skipped = tuple(
        Skip(view.key, f"does not fit into this tick ({plan.limit.reason})")
        for view in (*newcomers, *rest)
        if view.key not in shares
    )
    return evolve(plan, items=plan.items + items, skipped=plan.skipped + skipped)


def _with(work: Work, shares: Sequence[Share]) -> Work:
    """Return `work` with those shares added."""
    return Work(
        work.tokens + sum(n for _, n in shares),
        work.rows + sum(n == view.pending for view, n in shares),
    )


def _choose(
    state: SchedulerState,
    cost: CostModel,
    tick: Work,
    candidates: list[SequenceView],
    limit_s: float,
) -> list[Share]:
    """Return the shares of the largest tick within `limit_s`."""
    demand = min(sum(view.pending for view in candidates), state.n_batch - tick.tokens)
    if demand <= 0:
        return []
    if math.isinf(limit_s):
        # Nobody waits for this tick, but the next newcomer waits for its end.
        decoders = sum(view.decoding for view in candidates)
        chunk = max(cost.plateau(state.n_batch) - tick.tokens, decoders)
        return _deal(candidates, min(demand, chunk))
    for n in _counts(demand, tick.tokens):
        if cost.careful(Work(tick.tokens + n, tick.rows)) > limit_s:
            continue
        shares = _deal(candidates, n)
        if cost.careful(_with(tick, shares)) <= limit_s:
            return shares
    return []


def _deal(candidates: list[SequenceView], n: int) -> list[Share]:
    """Give out `n` tokens in order, to each as many as it can use."""
    shares: list[Share] = []
    for view in candidates:
        if n <= 0:
            break
        share = min(view.pending, n)
        shares.append((view, share))
        n -= share
    return shares


def _counts(top: int, used: int) -> list[int]:
    """Return counts to try, the largest first: every small one, and few of the large.

    Wide steps of the staircase are at multiples of the whole batch, so those are among them.
    """
    counts = set(range(1, min(top, FINE) + 1))
    n = FINE
    while n < top:
        n = min(top, n + max(8, n // 4))
        counts.add(n)
    counts.update(range(64 - used % 64, top + 1, 64))
    return sorted((n for n in counts if 0 < n <= top), reverse=True)


def _candidates(
    state: SchedulerState, plan: Plan, cost: CostModel
) -> tuple[list[SequenceView], list[SequenceView]]:
    """Return the interactive newcomers by slack, and everyone else by need.

    The rest of a person's long paste goes before background work; within each, decoders and
    prompts of whoever had least machine time first. With nobody to protect, decoders first.
    """
    planned = {item.key for item in plan.items}
    ready = [v for v in state.sequences if v.credit > 0 and v.key not in planned]
    newcomers = [view for view in ready if is_newcomer(view, state.contract.newcomer_tokens)]
    newcomers.sort(key=lambda view: (_slack(view, state.now, cost), view.key))
    keys = {view.key for view in newcomers}
    used = lift(plan.memory.used_s, (view.client for view in state.sequences))
    unlimited = math.isinf(plan.limit.seconds)
    rest = sorted(
        (view for view in ready if view.key not in keys),
        key=lambda view: (
            unlimited and not view.decoding,
            view.lane == "background",
            used[view.client],
            view.arrived,
            view.key,
        ),
    )
    return newcomers, rest


def _slack(view: SequenceView, now: float, cost: CostModel) -> float:
    """Return the share of its patience that is left; the least goes first."""
    whole = max(cost.seconds(Work(view.pending + view.computed)), 1e-6)
    left = cost.seconds(Work(view.pending))
    if view.target_ttft_s is not None:
        return (view.arrived + view.target_ttft_s - now - left) / whole
    return (view.arrived + GRACE_S + PATIENCE * whole - now - left) / whole
