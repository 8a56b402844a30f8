"""Who rides along: newcomers, background decoders and prompts, within the tick's limit.

The interactive streams have their rows already. What is added must keep the tick within its
limit. Since the staircase goes up and down, the choice is made among whole ticks, of the sizes
whose time is known, and then given out in the order of who is next.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.evolving import evolve
from uma_trio.policy.fairness import lift, turn_s, turns
from uma_trio.policy.plan import Limit, Plan, PlanItem, Skip
from uma_trio.policy.roles import is_newcomer
from uma_trio.policy.served import burst, next_burst, resized, sweet_spot
from uma_trio.policy.state import SchedulerState, SequenceView
from uma_trio.policy.tally import planned_work

# People's prompts are ordered by how much of the time they can expect is left, relative to that
# time: seconds of grace, and how many times its own prefill a prompt may take.
GRACE_S, PATIENCE = 0.3, 2.0
# A limit for every tick is aimed at from below. Half of the ticks take longer than expected, and the
# streams' ticks alone, which are the measure, are a little slower amid a load than without any: aimed
# at 0.97, the median gap in a storm was 1.21 times solo at a cap of 1.2 (docs/BENCHMARKS.md).
AIM = 0.93
# A prompt of so many tokens may end in a tick of the smallest sizes.
NEAR_END = 8
STEEPEST = 2.0  # no stair goes down by more than half: beyond this none is within the limit


class Line:
    """Sequences in the order of who is next, and what serving the first tokens adds to a tick.

    Each can use what is pending of its first `within` tokens.
    """

    def __init__(self, tick: Work, views: Sequence[SequenceView], within: float = math.inf) -> None:
        self.tick = tick
        self.views = views
        self._uses = [int(min(view.pending, within - view.computed)) for view in views]
        self._ends = list(accumulate(self._uses, initial=0))
        uses = list(zip(views, self._uses, strict=True))
        self._rows = list(accumulate((view.pending == n for view, n in uses), initial=0))
        self._looked = list(accumulate((n * view.computed for view, n in uses), initial=0))

    @property
    def demand(self) -> int:
        """How many tokens they all could use."""
        return self._ends[-1]

    def adds(self, n: int) -> tuple[int, int, int]:
        """Return what the first `n` tokens add to the tick: tokens, rows, cells looked back at."""
        whole = bisect_right(self._ends, n) - 1  # so many sequences get all they can use
        looked = self._looked[whole]
        if whole < len(self.views):
            looked += (n - self._ends[whole]) * self.views[whole].computed
        return n, self._rows[whole], looked

    def work(self, n: int) -> Work:
        """Return the tick with the first `n` tokens in it."""
        return self.tick.plus(*self.adds(n)) if n else self.tick

    def shares(self, n: int) -> list[tuple[SequenceView, int]]:
        """Return who gets how many of `n` tokens: each as many as it can use."""
        line = zip(self.views, self._uses, self._ends, strict=False)
        return [(view, min(uses, n - begin)) for view, uses, begin in line if begin < n]


def fill_within_limit(state: SchedulerState, plan: Plan) -> Plan:
    """Add what the limit allows: newcomers, then everyone else."""
    cost, limit = plan.memory.cost, plan.limit
    if cost is None:
        return plan
    newcomers, rest = _candidates(state, plan, cost)
    if not newcomers and not rest:
        return plan
    # Sizes are chosen by what they cost again and again, not by what the first such tick costs.
    tick = evolve(planned_work(state, plan), after=None)
    # Beside streams the rest of a long prompt has no claim to a late tick.
    within = math.inf if math.isinf(limit.newcomer_s) else state.contract.newcomer_tokens
    first = Line(tick, newcomers, within)
    n = 0 if limit.closed or limit.grant else _newcomers_size(state, cost, limit, first)
    second = Line(first.work(n), rest)
    m, most = (0, 0) if limit.closed else _size(state, cost, limit, second, beside_newcomers=n > 0)
    # Whoever ends asks for a row of logits, which may be what is too much. Others need not wait.
    others = [view for view in rest if view.pending > NEAR_END]
    if m == 0 and not limit.closed and 0 < len(others) < len(rest):
        second = Line(second.tick, others)
        m, most = _size(state, cost, limit, second, beside_newcomers=n > 0)
    items = _items(first.shares(n), f"newcomer: {limit.reason}")
    items += _items(second.shares(m), f"background: {limit.reason}")
    served, too_much = {item.key for item in items}, f"does not fit into this tick ({limit.reason})"
    skipped = [Skip(v.key, too_much) for v in (*newcomers, *rest) if v.key not in served]
    decoders = [v.key for v in rest if v.key in served and v.lane == "background" and v.decoding]
    in_use, without = state.memory.served, second.tick.tokens
    if not (limit.rare or limit.closed):
        in_use = resized(state, without + m, without + most, without + second.demand)
    return evolve(
        plan,
        items=(*plan.items, *items),
        skipped=(*plan.skipped, *skipped),
        memory=evolve(plan.memory, served=next_burst(state, in_use, decoders)),
    )


def _items(shares: Sequence[tuple[SequenceView, int]], reason: str) -> list[PlanItem]:
    return [PlanItem(v.key, n, "decode" if v.decoding else "prefill", reason) for v, n in shares]


def _newcomers_size(state: SchedulerState, cost: CostModel, limit: Limit, line: Line) -> int:
    """Return how many tokens of newcomers to compute: as many as the streams can bear.

    Their limit is aimed at from below, like the one for every tick, without the margin that a rare
    tick keeps: a gap beyond it is late and paid for, and smaller parts would make more gaps late.
    """
    most = min(line.demand, state.n_batch - line.tick.tokens)
    if most <= 0:
        return 0
    seconds = max(limit.seconds, limit.newcomer_s)
    if math.isinf(seconds):
        return min(most, cost.quickest(state.n_batch))
    return max(_fitting(cost, line, most, AIM * seconds, careful=False), default=0)


def _size(
    state: SchedulerState, cost: CostModel, limit: Limit, line: Line, *, beside_newcomers: bool
) -> tuple[int, int]:
    """Return how many tokens of everyone else to compute, and how many could be.

    With nobody to protect but a newcomer who waits for the first word, only what costs nothing.
    """
    most = min(line.demand, state.n_batch - line.tick.tokens)
    seconds = limit.seconds if limit.rare else AIM * limit.seconds
    if beside_newcomers and math.isinf(seconds):
        seconds = cost.seconds(line.tick)
    took = _fitting(cost, line, most, seconds, careful=limit.rare)
    longest = max(took, default=0)
    if limit.rare:
        return longest, longest
    captured = cost.switch_s > 0 and not math.isinf(limit.seconds)
    return sweet_spot(state, took, line.tick.tokens, captured=captured), longest


def _fitting(
    cost: CostModel, line: Line, most: int, limit_s: float, *, careful: bool
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


def _candidates(
    state: SchedulerState, plan: Plan, cost: CostModel
) -> tuple[list[SequenceView], list[SequenceView]]:
    """Return the interactive newcomers by urgency, and everyone else by need.

    The lane that had least of its share goes first, then decoders whose burst is not over, then
    whoever had least machine time; prompts stand together and take turns, of one client the oldest
    first. With nobody to protect, background decoders go before background prompts.
    """
    if len(plan.items) + len(plan.skipped) == len(state.sequences):
        return [], []
    settled = {item.key for item in plan.items}.union([skip.key for skip in plan.skipped])
    ready = [v for v in state.sequences if v.credit > 0 and v.key not in settled]
    newcomers = [view for view in ready if is_newcomer(view, state.contract.newcomer_tokens)]
    newcomers.sort(key=lambda view: (_urgency(view, state.now, cost), view.key))
    first = {view.key for view in newcomers}
    rest = [view for view in ready if view.key not in first]
    return newcomers, sorted(rest, key=_need(state, plan, cost, rest)) if len(rest) > 1 else rest


def _need(
    state: SchedulerState, plan: Plan, cost: CostModel, rest: Sequence[SequenceView]
) -> Callable[[SequenceView], tuple[float, ...]]:
    """Return what orders everyone else: who needs the tick most comes first."""
    turn = turn_s(cost, state.n_batch)
    used = lift(plan.memory.used_s, state.clients, turn)
    left: dict[int, float] = {}  # of the turn of each client's oldest prompt
    for view in sorted([v for v in rest if not v.decoding], key=_age):
        in_batch = (view.pending - 1) % state.n_batch + 1
        left.setdefault(view.client, turn * in_batch / state.n_batch)
    together, finish = turns(used, left, turn)
    lanes = lift(plan.memory.lane_s, {view.lane for view in state.riders.values()})
    running = burst(state)
    unlimited = math.isinf(plan.limit.seconds)
    return lambda view: (
        lanes.get(view.lane, 0.0),  # nobody's yet, where streams are served here, too
        view.lane == "background",
        unlimited and not view.decoding,
        view.key not in running,
        used[view.client] if view.decoding else together,
        not view.decoding,
        0.0 if view.decoding else finish[view.client],
        view.last_token_at if view.decoding and view.last_token_at is not None else view.arrived,
        view.key,
    )


def _age(view: SequenceView) -> tuple[float, int]:
    return view.arrived, view.key


def _urgency(view: SequenceView, now: float, cost: CostModel) -> float:
    """Return how much of its patience is left, in times of its own prefill; least goes first.

    What was computed of it already does not count: prompts that came together are finished one
    after the other, and not all of them last.
    """
    whole = max(cost.seconds(Work(view.pending + view.computed)), 1e-6)
    patience = GRACE_S + PATIENCE * whole if view.target_ttft_s is None else view.target_ttft_s
    return (view.arrived + patience - now) / whole
