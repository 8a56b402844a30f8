"""Rows for drafts: guesses at the next tokens of a stream, computed with the tick and then checked.

A guess that turns out right is a token for one row of a batch. What a row costs is in the staircase, and
how likely each guess is to be right in the view of its sequence. So the guesses of all streams are sorted
by that, and as many are taken as give the most tokens a second:

- *Free* rows take no time: they stand where ballast would, on a size of the staircase that goes down or
  is level. They are always taken.
- *Paid* rows make the tick longer. They are taken where tokens a second rise by `PAID_WORTH`, within what
  the streams of the tick can bear: a reader's own drafts may take its tick to `pause_cap` times one
  without, since they are part of what it would do alone and give it more tokens a second, or until readers of other
  models are due; a tick with anybody else's work stays within its limit. Guesses of requests that asked for `speculation` free get no paid row.

A stream pays for paid rows out of its *purse*, in tokens: the rows are a stake, the tokens that the streams of the
tick would have had in that time, and each guess that is right puts a token into the purse. An empty purse pays for no
rows. So a stream whose guesses are all wrong loses `purse_at_start` tokens, `PURSE_EARNED` of the others, and the last
stake, whatever was believed of its guesses.

A deadline is a multiple of what a stream takes alone, and with drafts that are right it takes less. The deadlines of
such a stream are therefore closer together, and others get what it leaves: :func:`parts_with_drafts`. The figure is
smoothed, because a text is copied now and then, and looked at only while others have work.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heapreplace
from itertools import accumulate

from uma_trio.policy.accounting import planned_work
from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.deadline.shape import MOST_BALLAST, ballast_for
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan, PlanItem
from uma_trio.policy.state import Purse, SchedulerState, SequenceView
from uma_trio.policy.tuning import Tuning

# Purses of streams that are not in the state are kept: they may wait for a mask. Of so many some have ended.
MOST_PURSES = 64
# What each token of a stream adds to its purse, and the most that is in one: of what was won no more is lost again.
PURSE_EARNED, PURSE_MOST = 0.01, 16.0
# Guesses that give fewer tokens cost more to compute and to check; one that is right less often is not looked at.
LEAST_GAIN, LEAST_CHANCE = 0.1, 0.05
# Tokens a second must rise by this for rows that take time: predictions are no finer.
PAID_WORTH = 1.05
# How quickly the gain of a reader's own drafts is followed, and from which part of the time on it is forgotten.
DRAFTED_RATE, DRAFTED_GONE = 0.1, 0.99


def settled(state: SchedulerState, purses: Mapping[int, Purse]) -> Mapping[int, Purse]:
    """Return the purses with what the latest tick brought in them."""
    if not purses:
        return purses
    views, kept = state.views, dict(purses)
    for key, purse in purses.items():
        view = views.get(key)
        if view is not None and (came := _known(view) - purse.known) > 0:
            left = purse.left + PURSE_EARNED * came + (came - 1)
            kept[key] = Purse(min(left, PURSE_MOST), purse.known + came)
    if len(kept) > len(views) + MOST_PURSES:
        kept = {key: purse for key, purse in kept.items() if key in views}
    return kept


def left_of(purses: Mapping[int, Purse], key: int, tuning: Tuning) -> float:
    """Return how many tokens a stream may lose."""
    purse = purses.get(key)
    return tuning.purse_at_start if purse is None else purse.left


def staked(
    state: SchedulerState, purses: Mapping[int, Purse], counts: Mapping[int, int], tokens: float
) -> Mapping[int, Purse]:
    """Return the purses after a stake of `tokens`, by how many guesses each stream has in the tick."""
    views, left, each = state.views, dict(purses), tokens / sum(counts.values())
    for key, n in counts.items():
        left[key] = Purse(left_of(purses, key, state.tuning) - n * each, _known(views[key]))
    return left


def _known(view: SequenceView) -> int:
    return view.computed + view.pending - view.drafted


MOST_DRAFTS = 31  # a tick; beyond 32 rows no size paid in any staircase that was measured

Guess = tuple[float, SequenceView]
"""The chance that a guess and all before it are right, and whose it is."""


def add_drafts(state: SchedulerState, plan: Plan) -> Plan:
    """Give rows of the tick to the likeliest guesses of its decoders."""
    memory = plan.memory
    if memory.cost is None:
        return plan
    purses = settled(state, memory.purses)
    counts: dict[int, int] = {}
    if state.drafting:
        chosen, stake = _chosen(state, plan, memory.cost, purses)
        for _, view in chosen:
            counts[view.key] = counts.get(view.key, 0) + 1
        if stake > 0:
            purses = staked(state, purses, counts, stake)
    if purses is not memory.purses:
        plan = evolve(plan, memory=evolve(memory, purses=purses))
    return with_drafts(plan, counts) if counts else plan


def likeliest_first(
    state: SchedulerState, plan: Plan, most: int = MOST_DRAFTS, *, paying: bool = False
) -> list[Guess]:
    """Return the chance of each guess with whose it is; one behind another is never before it.

    Those are at most `most`, and with `paying` only of requests that pay for their guesses.
    """
    views, least = [state.views[item.key] for item in plan.items], LEAST_CHANCE
    # Guesses of one stream are no likelier the further they reach, so its next one is enough to know.
    nearest = [
        (-view.survival[0], 0, whose)
        for whose, (view, item) in enumerate(zip(views, plan.items, strict=True))
        if view.drafted
        and view.survival[0] >= least
        and view.decoding
        and item.n_tokens == 1
        and (view.pays_for_drafts or not paying)
    ]
    heapify(nearest)
    found: list[Guess] = []
    while nearest and len(found) < most:
        chance, place, whose = nearest[0]
        view, further = views[whose], place + 1
        found.append((-chance, view))
        if further < len(view.survival) and view.survival[further] >= least:
            heapreplace(nearest, (-view.survival[further], further, whose))
        else:
            heappop(nearest)
    return found


def _chosen(
    state: SchedulerState, plan: Plan, cost: CostModel, purses: Mapping[int, Purse]
) -> tuple[list[Guess], float]:
    """Return the guesses that get a row, and how many tokens the streams of the tick lose by that time."""
    work = planned_work(state, plan)
    room = min(
        MOST_DRAFTS,
        state.n_rows - work.rows - MOST_BALLAST,
        min(state.n_batch, state.empty_cells) - plan.n_tokens - MOST_BALLAST,
    )
    guesses = likeliest_first(state, plan, room)
    plain_s = ballast_for(cost, work, state.spare_rows)[1]
    offers = offers_of(state, cost, work, guesses)
    free = max(
        [n for n, (_, seconds) in offers.items() if seconds <= cost.tuning.free_rows * plain_s],
        default=0,
    )
    gain, free_s = offers.get(free, (0.0, plain_s))
    if not state.contract.paid_drafts or plan.limit.isolated:
        return guesses[:free], 0.0
    empty = {key for key, purse in purses.items() if purse.left <= 0}
    paying = [g for g in guesses if g[1].pays_for_drafts and g[1].key not in empty]
    if len(paying) < len(guesses):
        offers = offers_of(state, cost, work, paying)
    streams = len(plan.items)
    longest = longest_s(state, plan, plain_s)
    best, rate = 0, PAID_WORTH * (plan.n_tokens + gain) / free_s
    for n, (more, seconds) in offers.items():
        if seconds <= longest and (plan.n_tokens + more) / seconds > rate:
            best, rate = n, (plan.n_tokens + more) / seconds
    if not best:
        return guesses[:free], 0.0
    return paying[:best], streams * (offers[best][1] / free_s - 1.0)


def offers_of(
    state: SchedulerState, cost: CostModel, work: Work, guesses: list[Guess]
) -> dict[int, tuple[float, float]]:
    """Return by how many of `guesses` are taken the tokens that they give, and the tick's seconds.

    Only what fills the tick up to a size that was measured is worth its time, or all that there is:
    ballast stands only where no guess is left.
    """
    gains = [0.0, *accumulate([chance for chance, _ in guesses])]
    context = [0, *accumulate([view.computed for _, view in guesses])]
    sizes, offers, last = cost.sizes, {}, len(guesses)
    for n in range(1, last + 1):
        if gains[n] < LEAST_GAIN:
            continue
        if n == last:
            seconds = ballast_for(cost, work.plus(n, n, context[n]), state.spare_rows)[1]
        elif n <= MOST_BALLAST or work.tokens + n in sizes:
            seconds = cost.seconds(work, tokens=n, rows=n, context_cells=context[n])
        else:
            continue
        offers[n] = gains[n], seconds
    return offers


def longest_s(state: SchedulerState, plan: Plan, plain_s: float) -> float:
    """Return how long the tick may take with drafts, which takes `plain_s` without."""
    views = [state.views[item.key] for item in plan.items]
    readers = [view for view in views if view.protected]
    if not readers:
        return plan.limit.seconds  # infinite, unless a first token is waited for
    if len(readers) < len(plan.items):
        return max(plain_s, plan.limit.seconds)
    contract, own = state.contract, all(v.drafted and v.pays_for_drafts for v in readers)
    cap = contract.pause_cap if own else contract.latency_cap
    return min(cap * plain_s, max(plain_s, state.most_s))


def with_drafts(plan: Plan, counts: Mapping[int, int]) -> Plan:
    """Return `plan` with so many rows for guesses of each sequence, by key."""
    return evolve(
        plan, items=tuple([_drafted(item, counts.get(item.key, 0)) for item in plan.items])
    )


def _drafted(item: PlanItem, n: int) -> PlanItem:
    return PlanItem(item.key, 1 + n, item.phase, item.reason, n) if n else item


def parts_with_drafts(state: SchedulerState, plan: Plan, cost: CostModel) -> Mapping[int, float]:
    """Return by key the time that a token takes a reader alone, as a part of that without drafts.

    `plan` has the readers' tokens and nothing else. A reader that is not named takes the whole.
    """
    known = plan.memory.drafted_parts
    if not state.best_effort or not (known or state.drafting):
        return known
    told = _told(state, plan, cost)
    parts = {}
    for item in plan.items:
        before = known.get(item.key, 1.0)
        part = before + DRAFTED_RATE * (told.get(item.key, 1.0) - before)
        if part < DRAFTED_GONE:
            parts[item.key] = part
    return parts


def _told(state: SchedulerState, plan: Plan, cost: CostModel) -> Mapping[int, float]:
    """Return the same by the guesses of this tick only."""
    if not state.contract.paid_drafts or not state.drafting or not plan.items:
        return {}
    work, purses = planned_work(state, plan, captured=True), plan.memory.purses
    most = min(MOST_DRAFTS, state.n_rows - work.rows - MOST_BALLAST)
    guesses = [
        guess
        for guess in likeliest_first(state, plan, most, paying=True)
        if left_of(purses, guess[1].key, cost.tuning) > 0
    ]
    plain_s = ballast_for(cost, work, state.spare_rows)[1]
    streams, most_s = len(plan.items), longest_s(state, plan, plain_s)
    best, took_s, rate = 0, plain_s, PAID_WORTH * streams / plain_s
    for n, (more, seconds) in offers_of(state, cost, work, guesses).items():
        if seconds <= most_s and (streams + more) / seconds > rate:
            best, took_s, rate = n, seconds, (streams + more) / seconds
    gains = dict.fromkeys([item.key for item in plan.items], 1.0)
    for chance, view in guesses[:best]:
        gains[view.key] += chance
    return {key: min(1.0, took_s / (plain_s * gain)) for key, gain in gains.items()}
