"""Rows for drafts where another shape of the batch costs: a size that is held.

Where graphs are captured, a tick of another shape is slow. So ticks with drafts have one size, and rows
that there is no guess for are ballast. A tick with drafts is not prepared beside the one before
it, either: how many guesses are right is known too late.

A change of the size costs two changes of shape, there and back. For each size, none among them, the
stage adds up what it would have saved since the last change; what it would have lost is taken off. The size is
changed once that is worth the price. What a held size saved is known from the tokens that came. After
one that was not worth its price the next has to promise twice as much, so that guesses which are
believed and wrong cost little.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from uma_trio.policy.accounting import planned_work
from uma_trio.policy.cost import CostModel
from uma_trio.policy.deadline.drafts import (
    MOST_DRAFTS,
    Guess,
    likeliest_first,
    longest_s,
    with_drafts,
)
from uma_trio.policy.deadline.making import making_s
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import NO_HELD_DRAFTS, HeldDrafts, SchedulerState

# Sampling, the commit and the plan, which else run beside a decode: the host's part of a tick, by the
# project's own benchmarks (uma_trio/sim/machine.py).
UNPREPARED_S = 0.0004
MOST_DOUBT = 6  # a price is never more than 64 times as high
PATIENCE = 4  # prices that a size may have lost, since a guess more or less is chance
PLAIN = 0  # the size of a tick without drafts, whatever it is


def hold_drafts(state: SchedulerState, plan: Plan) -> Plan:
    """Give a tick of decoders the size that is held for drafts, and choose that size."""
    cost, held = plan.memory.cost, plan.memory.held_drafts
    if cost is None or plan.limit.isolated:
        return plan
    if not (state.drafting or held != NO_HELD_DRAFTS):
        return plan
    if not _only_decoders(state, plan):
        # The shape changes anyway.
        return _remember(plan, HeldDrafts(doubt=held.doubt))
    guesses = likeliest_first(state, plan, paying=True)
    plain_s = cost.seconds(planned_work(state, plan, captured=True))
    savings = _savings(state, plan, cost, guesses, plain_s)
    held = _judged(state, plan, cost, held, plain_s)
    held = _next(held, savings, 2 * cost.change_s)
    if held.size == PLAIN:
        return _remember(plan, evolve(held, known={}))
    known = {item.key: _known(state, item.key) for item in plan.items}
    room = held.size - plan.n_tokens
    chosen = guesses[:room]
    plan = _remember(plan, evolve(held, known=known))
    return evolve(with_drafts(plan, chosen), ballast=room - len(chosen))


def _only_decoders(state: SchedulerState, plan: Plan) -> bool:
    views = state.views
    return bool(plan.items) and all(
        views[item.key].decoding and item.n_tokens == 1 for item in plan.items
    )


def _savings(
    state: SchedulerState, plan: Plan, cost: CostModel, guesses: list[Guess], plain_s: float
) -> Mapping[int, float]:
    """Return by the size of the tick the seconds that it saves beside one without drafts.

    That is how long ticks without drafts would need for its tokens, less what it takes itself.
    """
    work, plain = planned_work(state, plan, captured=True), plan.n_tokens
    savings = {PLAIN: 0.0}
    if not state.contract.paid_drafts:
        return savings
    most = min(MOST_DRAFTS, state.spare_rows, min(state.n_batch, state.empty_cells) - plain)
    gains = [0.0, *accumulate(chance for chance, _ in guesses)]
    context = [0, *accumulate(view.computed for _, view in guesses)]
    made_s = making_s(state.draft, [view for _, view in guesses])
    longest = longest_s(state, plan, plain_s)
    for size in cost.steps:
        more = size - plain
        if not 0 < more <= most:
            continue
        drafts = min(more, len(guesses))
        seconds = cost.seconds(work, tokens=more, rows=more, context_cells=context[drafts])
        seconds += made_s[drafts]
        if seconds <= longest:
            worth_s = (plain + gains[drafts]) * plain_s / plain
            savings[size] = worth_s - seconds - UNPREPARED_S
    return savings


def _known(state: SchedulerState, key: int) -> int:
    view = state.views[key]
    return view.computed + view.due


def _judged(
    state: SchedulerState, plan: Plan, cost: CostModel, held: HeldDrafts, plain_s: float
) -> HeldDrafts:
    """Return `held` with what the latest tick of its size saved, by the tokens that it gave."""
    streams = [item.key for item in plan.items if item.key in held.known]
    if not streams:
        return held
    tokens = sum(_known(state, key) - held.known[key] for key in streams)
    more = held.size - plan.n_tokens
    work = planned_work(state, plan, captured=True)
    took_s = cost.seconds(work, tokens=more, rows=more) + UNPREPARED_S
    saved_s = tokens * plain_s / plan.n_tokens - took_s
    missed_s = {**held.missed_s, PLAIN: max(0.0, held.missed_s.get(PLAIN, 0.0) - saved_s)}
    return evolve(held, missed_s=missed_s, saved_s=held.saved_s + saved_s)


def _next(held: HeldDrafts, savings: Mapping[int, float], price_s: float) -> HeldDrafts:
    """Return the size for this tick, and what each other one would have saved until now."""
    if held.size not in savings:  # more streams than it has rows, or too long for them
        return HeldDrafts(doubt=held.doubt)
    now_s = savings[held.size]
    missed_s = {
        size: max(0.0, held.missed_s.get(size, 0.0) + saved_s - now_s)
        for size, saved_s in savings.items()
        if size not in (held.size, PLAIN)
    }
    if held.size != PLAIN:  # judged by what came
        missed_s[PLAIN] = held.missed_s.get(PLAIN, 0.0)
    best = max(missed_s, key=missed_s.__getitem__, default=held.size)
    doubted = 2**held.doubt if held.size == PLAIN else PATIENCE
    if best == held.size or missed_s[best] < price_s * doubted:
        return evolve(held, missed_s=missed_s)
    doubt = held.doubt
    if held.size != PLAIN:
        doubt = 0 if held.saved_s >= price_s else min(MOST_DOUBT, doubt + (best == PLAIN))
    return HeldDrafts(best, doubt=doubt)


def _remember(plan: Plan, held: HeldDrafts) -> Plan:
    if held == plan.memory.held_drafts:
        return plan
    return evolve(plan, memory=evolve(plan.memory, held_drafts=held))
