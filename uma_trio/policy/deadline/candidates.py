"""The order of best-effort work, and the cost of adding the first of it to a tick.

Background decoders that share a tick continue together for a burst: a batch of the same shape uses
its graph again, and fewer answers are incomplete at a time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.deadline.first_tokens import in_order_of_deadlines
from uma_trio.policy.evolving import evolve
from uma_trio.policy.fairness import TURN_TOKENS, lift, lift_all, standings, turn_s, turns
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState, SequenceView, Served, is_prompt
from uma_trio.words import Lane

# Ticks that background decoders are served before others have their turn.
BURST = 16


class Candidates:
    """Sequences in the order in which they are served, and what serving the first tokens adds to a tick.

    Each can use what is due of the first `within` tokens that are computed for it.
    """

    def __init__(self, tick: Work, views: Sequence[SequenceView], within: float = math.inf) -> None:
        self.tick = tick
        self.views = views
        self._uses = [view.pending - view.drafted for view in views]
        if not math.isinf(within):
            most = [int(within) - view.uncached for view in views]
            self._uses = list(map(min, self._uses, most))
        uses = list(zip(views, self._uses, strict=True))
        self._ends = list(accumulate(self._uses, initial=0))
        self._rows = list(accumulate([view.rows(n) for view, n in uses], initial=0))
        self._context = list(accumulate([n * view.computed for view, n in uses], initial=0))

    @property
    def demand(self) -> int:
        """How many tokens they all could use."""
        return self._ends[-1]

    def adds(self, n: int) -> tuple[int, int, int]:
        """Return what the first `n` tokens add to the tick: tokens, rows, context cells."""
        whole = bisect_right(self._ends, n) - 1  # so many sequences get all they can use
        rows, context_cells = self._rows[whole], self._context[whole]
        if whole < len(self.views):
            view, part = self.views[whole], n - self._ends[whole]
            rows += part if view.scoring else 0
            context_cells += part * view.computed
        return n, rows, context_cells

    def work(self, n: int) -> Work:
        """Return the tick with the first `n` tokens in it."""
        return self.tick.plus(*self.adds(n)) if n else self.tick

    def shares(self, n: int) -> list[tuple[SequenceView, int]]:
        """Return how many of `n` tokens each sequence gets: as many as it can use."""
        line = zip(self.views, self._uses, self._ends, strict=False)
        return [(view, min(uses, n - begin)) for view, uses, begin in line if begin < n]


def candidates(
    state: SchedulerState, plan: Plan, cost: CostModel
) -> tuple[list[SequenceView], list[SequenceView]]:
    """Return the interactive prompts by their deadlines, and all other work by need.

    Among the others decoders go first whose burst is not over, then the client with least machine time;
    background prompts stand together and take turns, of one client the oldest first. Without readers background decoders go before background prompts.
    """
    if len(plan.items) + len(plan.skipped) == len(state.sequences):
        return [], []
    settled = {item.key for item in plan.items}.union([skip.key for skip in plan.skipped])
    ready = [v for v in state.sequences if v.credit > 0 and v.key not in settled]
    prompts = in_order_of_deadlines(state, [view for view in ready if is_prompt(view)])
    rest = [view for view in ready if not is_prompt(view)]
    return prompts, sorted(rest, key=_need(state, plan, cost, rest)) if len(rest) > 1 else rest


def leading_lane(state: SchedulerState, plan: Plan) -> Lane:
    """Return the lane that had least of its share of best-effort time; of equal ones the interactive."""
    ready = {view.lane for view in state.best_effort.values()}
    if "background" not in ready:
        return "interactive"
    lanes = lift(plan.memory.lane_s, ready)
    if "interactive" in ready and lanes["interactive"] <= lanes["background"]:
        return "interactive"
    return "background"


def _need(
    state: SchedulerState, plan: Plan, cost: CostModel, rest: Sequence[SequenceView]
) -> Callable[[SequenceView], tuple[float, ...]]:
    """Return the sort key of all other work: most urgent first."""
    turn = turn_s(cost, state.n_batch)
    used = standing(state, plan, turn)
    left: dict[int, float] = {}  # of the turn of each client's oldest prompt
    for view in sorted([v for v in rest if not v.decoding], key=_age):
        batch = min(state.n_batch, TURN_TOKENS)
        left.setdefault(view.client, turn * ((view.due - 1) % batch + 1) / batch)
    together, finish = turns(used, left, turn)
    running = burst(state)
    unlimited = math.isinf(plan.limit.seconds)
    return lambda view: (
        unlimited and not view.decoding,
        view.key not in running,
        used[view.client] if view.decoding else together,
        not view.decoding,
        0.0 if view.decoding else finish[view.client],
        view.last_token_at if view.decoding and view.last_token_at is not None else view.arrived,
        view.key,
    )


def standing(state: SchedulerState, plan: Plan, turn: float) -> Mapping[int, float]:
    """Return how much machine time each client had, in a number that compares it with all others."""
    used_s, _ = lift_all(plan.memory.used_s, plan.memory.part_of, state.paths, turn)
    return standings(used_s, state.paths, turn)


def _age(view: SequenceView) -> tuple[float, int]:
    return view.arrived, view.key


def burst(state: SchedulerState) -> frozenset[int]:
    """Return the background decoders whose burst is not over."""
    served = state.memory.served
    return frozenset(served.keys) if state.tick - served.since < BURST else frozenset()


def next_burst(state: SchedulerState, served: Served, keys: Sequence[int]) -> Served:
    """Return what to remember of a tick that serves these background decoders."""
    if not keys:
        return served  # a burst goes on after such a tick
    running = burst(state)
    since = served.since if running and running.issuperset(keys) else state.tick
    return evolve(served, keys=tuple(keys), since=since)
