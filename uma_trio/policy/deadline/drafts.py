"""Rows for drafts: guesses at the next tokens of a stream, computed with the tick and then checked.

A guess that turns out right is a token for one row of a batch. What a row costs is in the staircase, and
how likely each guess is to be right in the view of its sequence. So the guesses of all streams are sorted
by that, and as many are taken as give the most tokens a second:

- *Free* rows take no time: they stand where ballast would, on a step of the staircase that goes down or
  is level. They are always taken.
- *Paid* rows make the tick longer. They are taken where tokens a second rise by :data:`WORTH`, within what
  the streams of the tick can bear: a reader's own drafts may take its tick to `pause_cap` times
  one without, since they are part of what it would do alone and give it more tokens a second; a tick with anybody else's work stays within its limit.
  Guesses of requests that asked for `speculation` free get no paid row. Where a draft model has to make them
  first, that is part of what they cost.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from itertools import accumulate

from uma_trio.policy.accounting import planned_work
from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.deadline.ballast import MOST_BALLAST, ballast_for
from uma_trio.policy.deadline.draft_cost import making_s
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.state import SchedulerState, SequenceView

MOST_DRAFTS = 31  # a tick; beyond 32 rows no size paid in any staircase that was measured
FREE = 1.001  # a tick that is expected to take this many times as long takes as long
LEAST_GAIN = 0.1  # tokens: to compute and to check guesses for less costs more than it gives
LEAST_CHANCE = 0.05  # a guess that is right once in twenty times is not worth being looked at
WORTH = 1.05  # so much must paid rows gain: predictions are no finer

Guess = tuple[
    float, SequenceView
]  # the chance that it and all before it are right, and whose it is


def add_drafts(state: SchedulerState, plan: Plan) -> Plan:
    """Give rows of the tick to the likeliest guesses of its decoders."""
    cost = plan.memory.cost
    if cost is None or not state.drafting:
        return plan
    guesses = likeliest_first(state, plan)
    if not guesses:
        return plan
    work = planned_work(state, plan)
    room = min(
        MOST_DRAFTS,
        len(guesses),
        state.n_rows - work.rows - MOST_BALLAST,
        min(state.n_batch, state.empty_cells) - plan.n_tokens - MOST_BALLAST,
    )
    chosen = _chosen(state, plan, cost, work, guesses[: max(0, room)])
    return with_drafts(plan, chosen) if chosen else plan


def likeliest_first(state: SchedulerState, plan: Plan, *, paying: bool = False) -> list[Guess]:
    """Return the chance of each guess with whose it is; one behind another is never before it.

    No more than a tick may have, and with `paying` only of requests that pay for their guesses.
    """
    views = [state.views[item.key] for item in plan.items]
    # Guesses of one stream are no likelier the further they reach, so its next one is enough to know.
    nearest = [
        (-view.survival[0], 0, whose)
        for whose, (view, item) in enumerate(zip(views, plan.items, strict=True))
        if view.drafted
        and view.survival[0] >= LEAST_CHANCE
        and view.decoding
        and item.n_tokens == 1
        and (view.pays_for_drafts or not paying)
    ]
    heapify(nearest)
    found: list[Guess] = []
    while nearest and len(found) < MOST_DRAFTS:
        chance, place, whose = nearest[0]
        view, further = views[whose], place + 1
        found.append((-chance, view))
        if further < len(view.survival) and view.survival[further] >= LEAST_CHANCE:
            heapreplace(nearest, (-view.survival[further], further, whose))
        else:
            heappop(nearest)
    return found


def _chosen(
    state: SchedulerState, plan: Plan, cost: CostModel, work: Work, guesses: list[Guess]
) -> list[Guess]:
    """Return those of `guesses` that get a row."""
    ballast = min(state.spare_rows, MOST_BALLAST)
    plain_s = ballast_for(cost, work, ballast)[1]
    found = [guess for guess in guesses if not guess[1].modelled]
    offers = _offers(state, plan, cost, work, found, ballast)
    free = max([n for n, (_, seconds) in offers.items() if seconds <= FREE * plain_s], default=0)
    gain, seconds = offers.get(free, (0.0, plain_s))
    plain = plan.n_tokens
    rate = (plain + gain) / seconds
    if not state.contract.paid_drafts or plan.limit.isolated:
        return found[:free]
    paying = [guess for guess in guesses if guess[1].pays_for_drafts]
    if len(paying) < len(guesses) or len(found) < len(guesses):
        offers = _offers(state, plan, cost, work, paying, ballast)
    longest = longest_s(state, plan, plain_s)
    rates = {
        n: (plain + gain) / seconds for n, (gain, seconds) in offers.items() if seconds <= longest
    }
    best = max(rates, key=rates.__getitem__, default=0)
    return paying[:best] if best and rates[best] >= WORTH * rate else found[:free]


def _offers(
    state: SchedulerState,
    plan: Plan,
    cost: CostModel,
    work: Work,
    guesses: list[Guess],
    ballast: int,
) -> dict[int, tuple[float, float]]:
    """Return by how many of `guesses` are taken the tokens that they give, and the tick's seconds.

    The time in which they are made is part of that. Only what fills the tick up to a size that was measured is worth its time.
    """
    context = [0, *accumulate(view.computed for _, view in guesses)]
    gains = [0.0, *accumulate(chance for chance, _ in guesses)]
    made_s = making_s(state.draft, [view for _, view in guesses])
    plain, sizes = plan.n_tokens, cost.steps
    return {
        n: (gains[n], made_s[n] + ballast_for(cost, work.plus(n, n, context[n]), ballast)[1])
        for n in range(1, len(guesses) + 1)
        if gains[n] >= LEAST_GAIN and (n <= MOST_BALLAST or plain + n in sizes)
    }


def longest_s(state: SchedulerState, plan: Plan, plain_s: float) -> float:
    """Return how long the tick may take with drafts, which takes `plain_s` without."""
    views = [state.views[item.key] for item in plan.items]
    readers = [view for view in views if view.protected]
    if not readers:
        return plan.limit.seconds  # infinite, but for who waits for a first word
    if len(readers) < len(plan.items):
        return max(plain_s, plan.limit.seconds)
    if all(view.drafted and view.pays_for_drafts for view in readers):
        return state.contract.pause_cap * plain_s
    return state.contract.latency_cap * plain_s


def with_drafts(plan: Plan, guesses: list[Guess]) -> Plan:
    """Return `plan` with a row for each of `guesses`."""
    counts: dict[int, int] = {}
    for _, view in guesses:
        counts[view.key] = counts.get(view.key, 0) + 1
    return evolve(
        plan, items=tuple([_drafted(item, counts.get(item.key, 0)) for item in plan.items])
    )


def _drafted(item: PlanItem, n: int) -> PlanItem:
    if not n:
        return item
    return evolve(item, n_tokens=1 + n, n_drafts=n)
