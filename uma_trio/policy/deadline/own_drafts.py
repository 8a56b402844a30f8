"""How much quicker readers would be alone by their own drafts.

A deadline is a multiple of what a stream takes alone, and with drafts that are right it takes less.
The deadlines of such a stream are therefore closer together, and others get what it leaves. The
figure is smoothed, because a text is copied now and then, and looked at only while others have
work.
"""

from __future__ import annotations

from collections.abc import Mapping

from uma_trio.policy.accounting import planned_work
from uma_trio.policy.cost import CostModel
from uma_trio.policy.deadline.ballast import MOST_BALLAST, ballast_for
from uma_trio.policy.deadline.drafts import (
    MOST_DRAFTS,
    WORTH,
    likeliest_first,
    longest_s,
    offers_of,
)
from uma_trio.policy.deadline.purses import left_of
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

RATE = 0.1  # of what a tick tells
GONE = 0.99  # from this part on nothing is remembered


def parts_with_drafts(state: SchedulerState, plan: Plan, cost: CostModel) -> Mapping[int, float]:
    """Return by key the time that a token takes a reader alone, as a part of that without drafts.

    `plan` has the readers' steps and nothing else. A reader that is not named takes the whole.
    """
    known = plan.memory.drafted_parts
    if not state.best_effort or not (known or state.drafting):
        return known
    told = _told(state, plan, cost)
    parts = {}
    for item in plan.items:
        before = known.get(item.key, 1.0)
        part = before + RATE * (told.get(item.key, 1.0) - before)
        if part < GONE:
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
        if left_of(purses, guess[1].key) > 0
    ]
    plain_s = ballast_for(cost, work, state.spare_rows)[1]
    streams, most_s = len(plan.items), longest_s(state, plan, plain_s)
    best, took_s, rate = 0, plain_s, WORTH * streams / plain_s
    for n, (more, seconds) in offers_of(state, cost, work, guesses).items():
        if seconds <= most_s and (streams + more) / seconds > rate:
            best, took_s, rate = n, seconds, (streams + more) / seconds
    gains = dict.fromkeys([item.key for item in plan.items], 1.0)
    for chance, view in guesses[:best]:
        gains[view.key] += chance
    return {key: min(1.0, took_s / (plain_s * gain)) for key, gain in gains.items()}
