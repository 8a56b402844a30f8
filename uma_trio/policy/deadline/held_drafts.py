"""Rows for drafts where another shape of the batch costs: a size that is held.

Where graphs are captured, a tick of another shape is slow. So ticks with drafts have one size, and rows
that there is no guess for are ballast. A tick with drafts is not prepared beside the one before
it, either: how many guesses are right is known too late.

A change of the size costs two changes of shape, there and back. For each size, and for no drafts at
all, the stage adds up what it would have saved on the same tokens since the last change, less what it
would have lost. The size is changed once that is worth the price. What a held size saved is known from
the tokens that came. After one that was not worth its price the next has to promise twice as much, so
that guesses which are believed and wrong cost little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

from uma_trio.policy.accounting import planned_work
from uma_trio.policy.cost import CostModel
from uma_trio.policy.deadline.draft_cost import making_s
from uma_trio.policy.deadline.drafts import (
    MOST_DRAFTS,
    Guess,
    likeliest_first,
    longest_s,
    with_drafts,
)
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import HeldDrafts, SchedulerState

# Sampling, the commit and the plan, which else run beside a decode, as long as it is not known: 0.7 to 1 ms
# for six rows beside an H200 (8B, a vocabulary of 128,256).
UNPREPARED_S = 0.0008
HOST_RATE = 0.1
LEAST_CHANCE = 0.1  # a row costs more than a tenth of a tick on every GPU that was measured
MOST_DOUBT = 6  # a price is never more than 64 times as high
PATIENCE = 4  # prices that a size may have lost, since a guess more or less is chance
PLAIN = 0  # the size of a tick without drafts, whatever it is


def hold_drafts(state: SchedulerState, plan: Plan) -> Plan:
    """Give a tick of decoders the size that is held for drafts, and choose that size."""
    cost, held = plan.memory.cost, plan.memory.held_drafts
    if cost is None or plan.limit.isolated:
        return plan
    if not (state.drafting or held.size or held.missed_s):
        return plan
    if not _only_decoders(state, plan):
        # The shape changes anyway.
        return _remember(plan, _anew(held))
    found = likeliest_first(state, plan, paying=True)
    guesses = [guess for guess in found if guess[0] >= LEAST_CHANCE]
    work = planned_work(state, plan, captured=True)
    plain_s, held = cost.seconds(work), _timed(state, held)
    waits_s = max(0.0, _host_s(held) - cost.between_s(work))
    savings = _savings(state, plan, cost, guesses, held, waits_s)
    held = _judged(state, plan, cost, held, plain_s, waits_s)
    held = _next(held, savings, 2 * cost.change_s)
    if held.size == PLAIN:
        return _remember(plan, evolve(held, known={}))
    known = {item.key: _known(state, item.key) for item in plan.items}
    room = held.size - plan.n_tokens
    chosen = guesses[:room]
    plan = _remember(plan, evolve(held, known=known))
    counts = Counter([view.key for _, view in chosen])
    return evolve(with_drafts(plan, counts), ballast=room - len(chosen))


def _only_decoders(state: SchedulerState, plan: Plan) -> bool:
    views = state.views
    return bool(plan.items) and all(
        views[item.key].decoding and item.n_tokens == 1 for item in plan.items
    )


def _anew(held: HeldDrafts) -> HeldDrafts:
    """Return what is left when the shape changes for another reason."""
    return HeldDrafts(doubt=held.doubt, host_s=held.host_s)


def _host_s(held: HeldDrafts) -> float:
    return UNPREPARED_S if held.host_s is None else held.host_s


def _timed(state: SchedulerState, held: HeldDrafts) -> HeldDrafts:
    """Return `held` with the host's part of the latest tick with drafts."""
    took = [tick.host_s for tick in state.measured if tick.host_s is not None]
    if not held.known or not took:
        return held
    return evolve(held, host_s=_host_s(held) + HOST_RATE * (took[-1] - _host_s(held)))


def _savings(
    state: SchedulerState,
    plan: Plan,
    cost: CostModel,
    guesses: list[Guess],
    held: HeldDrafts,
    waits_s: float,
) -> Mapping[int, float]:
    """Return by the size of the tick the seconds that it saves beside one without drafts.

    All for as many tokens as the size that is `held` gives: how long ticks without drafts would need for
    them, less what ticks of that size would. Those with drafts wait `waits_s` for the host.
    """
    work, plain = planned_work(state, plan, captured=True), plan.n_tokens
    plain_s = cost.seconds(work)
    savings = {PLAIN: 0.0}
    if not state.contract.paid_drafts:
        return savings
    most = min(MOST_DRAFTS, state.spare_rows, min(state.n_batch, state.empty_cells) - plain)
    gains = [0.0, *accumulate(chance for chance, _ in guesses)]
    context = [0, *accumulate(view.computed for _, view in guesses)]
    made_s = making_s(state.draft, [view for _, view in guesses])
    longest = longest_s(state, plan, plain_s)
    tokens = plain + gains[min(max(held.size - plain, 0), len(guesses))]
    begun = {held.size, *held.missed_s}
    for size in cost.steps:
        more = size - plain
        if not 0 < more <= most or (more > len(guesses) and size not in begun):
            continue
        drafts = min(more, len(guesses))
        seconds = cost.seconds(work, tokens=more, rows=more, context_cells=context[drafts])
        seconds += made_s[drafts]
        if seconds <= longest:
            each_s = (seconds + waits_s) / (plain + gains[drafts])
            savings[size] = tokens * (plain_s / plain - each_s)
    return savings


def _known(state: SchedulerState, key: int) -> int:
    view = state.views[key]
    return view.computed + view.due


def _judged(
    state: SchedulerState,
    plan: Plan,
    cost: CostModel,
    held: HeldDrafts,
    plain_s: float,
    waits_s: float,
) -> HeldDrafts:
    """Return `held` with what the latest tick of its size saved, by the tokens that it gave."""
    streams = [item.key for item in plan.items if item.key in held.known]
    if not streams:
        return held
    tokens = sum(_known(state, key) - held.known[key] for key in streams)
    more = held.size - plan.n_tokens
    work = planned_work(state, plan, captured=True)
    took_s = cost.seconds(work, tokens=more, rows=more) + waits_s
    saved_s = tokens * plain_s / plan.n_tokens - took_s
    missed_s = {**held.missed_s, PLAIN: max(0.0, held.missed_s.get(PLAIN, 0.0) - saved_s)}
    return evolve(held, missed_s=missed_s, saved_s=held.saved_s + saved_s)


def _next(held: HeldDrafts, savings: Mapping[int, float], price_s: float) -> HeldDrafts:
    """Return the size for this tick, and what each other one would have saved until now."""
    if held.size not in savings:  # more streams than it has rows, or too long for them
        return _anew(held)
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
    return HeldDrafts(best, doubt=doubt, host_s=held.host_s)


def _remember(plan: Plan, held: HeldDrafts) -> Plan:
    if held == plan.memory.held_drafts:
        return plan
    return evolve(plan, memory=evolve(plan.memory, held_drafts=held))
