"""When first tokens are due: one stretch for all prompts that are waited for.

A prompt's deadline is ``since + S * (own_s + MOMENT_S)``. `own_s` is the predicted time of its tokens
alone, without those that were cached, and is fixed when the prompt is first seen. The *stretch* S is
:data:`STRETCH`, or, where that cannot be met, the smallest for which all prompts end in time if the one
with the earliest deadline is always computed first (EDF) at the rate that readers leave. Under overload the
slowdown of all prompts then grows together: EDF with the smallest common stretch minimises the largest
one (Bender, Chakrabarti and Muthukrishnan, SODA 1998).

- Prompts of one sender stand one behind another: each counts as arrived no earlier than the one before it
  would be done alone. A sender gains nothing by sending many at once. Senders are principals, and while
  prompts of one principal only are waited for, its programs.
- A request's own TTFT target orders it among the prompts of its sender. Among senders it can only make it
  later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.deadline.slack import reading, step_s
from uma_trio.policy.deadline.solo import alone_s, room_alone
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import FirstToken, FirstTokens, SchedulerState, SequenceView, is_prompt

STRETCH, MOMENT_S = 2.0, 0.15
#: The stretch is searched again when the share of the machine for prompts has changed by so much of it.
CHANGED = 0.1
#: How exactly the stretch is found, and the largest that is looked for.
EXACT, MOST = 1.05, 1e6


def note_first_tokens(state: SchedulerState, plan: Plan) -> Plan:
    """Note which prompts are waited for, and find their common stretch."""
    cost, known = plan.memory.cost, plan.memory.first_tokens
    waited = [view for view in state.sequences if is_prompt(view)]
    if cost is None or not (waited or known.prompts or known.chains):
        return plan
    keys = {view.key for view in waited}
    prompts, chains = known.prompts, known.chains
    new = [view for view in waited if view.key not in prompts]
    if new or len(keys) < len(prompts):
        kept = {key: known.prompts[key] for key in keys if key in known.prompts}
        prompts, chains = _with_new(state, cost, kept, known.chains, new, _senders(waited))
    elif not waited and all(done < state.now for done in chains.values()):
        chains = {}
    share, stretch = known.share, known.stretch
    if len(waited) > 1:
        share = _share(state, cost)
        changed = new or len(keys) < len(known.prompts)
        if changed or abs(share - known.share) > CHANGED * known.share:
            stretch = _common_stretch(state.now, cost, waited, prompts, share)
        else:
            share = known.share
    else:
        stretch = STRETCH
    found = FirstTokens(prompts, stretch, share, chains)
    if found == known:
        return plan
    return evolve(plan, memory=evolve(plan.memory, first_tokens=found))


def in_order_of_deadlines(
    state: SchedulerState, plan: Plan, views: Sequence[SequenceView]
) -> list[SequenceView]:
    """Return prompts in the order in which they are computed."""
    if len(views) < 2:
        return list(views)
    known = plan.memory.first_tokens
    due = {view.key: deadline(known, view) for view in views}
    order = sorted(views, key=lambda view: (due[view.key], view.key))
    if all(view.target_ttft_s is None for view in views):
        return order
    sender = _senders(views)
    by_sender: dict[int, list[SequenceView]] = {}
    for view in order:
        by_sender.setdefault(sender[view.key], []).append(view)
    asked = {
        whose: iter(sorted(mine, key=lambda view: (_asked(due, view), view.key)))
        for whose, mine in by_sender.items()
    }
    return [next(asked[sender[view.key]]) for view in order]


def deadline(known: FirstTokens, view: SequenceView) -> float:
    """Return when the first token of a prompt is due."""
    prompt = known.prompts.get(view.key)
    if prompt is None:
        return view.arrived + STRETCH * MOMENT_S
    due = prompt.since + known.stretch * (prompt.own_s + MOMENT_S)
    return due if view.target_ttft_s is None else max(due, view.arrived + view.target_ttft_s)


def prefill_s(cost: CostModel, n_batch: int, tokens: int, behind: int) -> float:
    """Return the seconds of `tokens` of a prompt `behind` so many, alone, in chunks of the best rate."""
    if tokens <= 0:
        return 0.0
    chunk = min(cost.quickest(n_batch), n_batch)
    whole, rest = divmod(tokens, chunk)
    cells = behind + tokens // 2  # what a token of it looks back at, on average
    seconds = whole * cost.seconds(Work(chunk, 1, chunk * cells, cells)) if whole else 0.0
    return seconds + (cost.seconds(Work(rest, 1, rest * cells, cells)) if rest else 0.0)


def _with_new(
    state: SchedulerState,
    cost: CostModel,
    prompts: Mapping[int, FirstToken],
    chains: Mapping[int, float],
    new: Sequence[SequenceView],
    sender: Mapping[int, int],
) -> tuple[Mapping[int, FirstToken], Mapping[int, float]]:
    """Return the prompts with `new` ones, and by sender when its latest ones would be done alone."""
    found = dict(prompts)
    ends = {whose: at for whose, at in chains.items() if at >= state.now}
    for view in sorted(new, key=lambda view: (view.arrived, view.key)):
        own_s = prefill_s(cost, state.n_batch, view.due, view.computed)
        since = max(view.arrived, ends.get(sender[view.key], -math.inf))
        found[view.key] = FirstToken(since, own_s)
        ends[sender[view.key]] = since + own_s
    return found, ends


def _senders(views: Sequence[SequenceView]) -> Mapping[int, int]:
    """Return by key who sent a prompt: its principal, or its program where all are of one principal."""
    several = len({view.path[0] for view in views}) > 1
    return {view.key: view.path[0] if several else view.path[-2:][0] for view in views}


def _share(state: SchedulerState, cost: CostModel) -> float:
    """Return which part of the machine readers leave to prompts."""
    readers = reading(state)
    if not readers:
        return 1.0
    solo = alone_s(cost, readers, room_alone(state, len(readers)))
    step = min([step_s(view, state.contract, solo) for view in readers])
    return max(1.0 - solo / step, state.contract.background_floor, 0.01)


def _common_stretch(
    now: float,
    cost: CostModel,
    waited: Sequence[SequenceView],
    prompts: Mapping[int, FirstToken],
    share: float,
) -> float:
    """Return the smallest stretch, :data:`STRETCH` at least, with which all prompts end in time."""
    left = []
    for view in waited:
        prompt = prompts[view.key]
        whole = max(1, view.due + view.uncached)
        left.append(
            (prompt.since, prompt.own_s + MOMENT_S, prompt.own_s * view.due / whole / share)
        )

    def met(stretch: float) -> bool:
        at = now
        for due, takes_s in sorted([(since + stretch * own, takes) for since, own, takes in left]):
            at += takes_s
            if at > due:
                return False
        return True

    if met(STRETCH):
        return STRETCH
    low = STRETCH
    while low < MOST and not met(2 * low):
        low *= 2
    high = 2 * low
    while high > EXACT * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if met(middle) else (middle, high)
    return high


def _asked(due: Mapping[int, float], view: SequenceView) -> float:
    if view.target_ttft_s is None:
        return due[view.key]
    return view.arrived + view.target_ttft_s
