"""Prompts by the deadlines of their first tokens (:mod:`uma_trio.policy.stretch`), and what readers leave to them.

- A short prompt whose sender is within its share goes before all others, one per sender and tick.
- A request's own TTFT target orders it among the prompts of its sender. Among senders it can only make it
  later.
- Prompts of one sender that are due at nearly the same time are equals: one that has begun is finished
  first, then the conversation that had least machine time begins. Shared between them, all would be done
  last.
"""

from __future__ import annotations

from collections.abc import Sequence

from uma_trio.policy.cost import CostModel
from uma_trio.policy.deadline.slack import alone_s, reading, room_alone, step_s
from uma_trio.policy.evolving import evolve
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState, SequenceView, is_prompt
from uma_trio.policy.stretch import CHANGED, deadline, eligible_from

# Prompts of one sender that are due so close together are equals.
EQUAL_S = 0.05


def note_first_tokens(state: SchedulerState, plan: Plan) -> Plan:
    """Note which part of the machine readers leave to the prompts that are waited for."""
    cost, known = plan.memory.cost, plan.memory.prompts_share
    if cost is None or not any(map(is_prompt, state.sequences)):
        return plan
    share = _share(state, cost)
    if abs(share - known) <= CHANGED * known:
        return plan
    return evolve(plan, memory=evolve(plan.memory, prompts_share=share))


def in_order_of_deadlines(
    state: SchedulerState, views: Sequence[SequenceView]
) -> list[SequenceView]:
    """Return prompts in the order in which they are computed: :func:`short_first`, then by their deadlines.

    Prompts whose sender has used its share are behind those of others.
    """
    if len(views) < 2:
        return list(views)
    known, now = state.first_tokens, state.now
    due = {view.key: deadline(known, view) for view in views}
    order = sorted(views, key=lambda view: (due[view.key], view.key))
    short = short_first(state, order)
    settled = {view.key for view in short}
    rest = [view for view in order if view.key not in settled]
    rest.sort(
        key=lambda v: (
            v.first is not None and not v.waited_by and eligible_from(known, v.first) > now
        )
    )
    by_sender: dict[int, list[SequenceView]] = {}
    for view in rest:
        by_sender.setdefault(_sender(state, view), []).append(view)
    if len(by_sender) == len(rest):
        return short + rest
    own_order = {sender: iter(_among_own(state, mine)) for sender, mine in by_sender.items()}
    return short + [next(own_order[_sender(state, view)]) for view in rest]


def short_first(state: SchedulerState, order: Sequence[SequenceView]) -> list[SequenceView]:
    """Return the prompts that fit into one tick, one of each sender that is within its share.

    `order` is that of the deadlines, or the order in which they are computed.
    """
    known, now = state.first_tokens, state.now
    by_sender: dict[int, list[SequenceView]] = {}
    eligible = []
    for view in order:
        if view.first is not None and view.first.short:
            sender = view.path[min(known.level, len(view.path) - 1)]
            by_sender.setdefault(sender, []).append(view)
            if eligible_from(known, view.first) <= now and sender not in eligible:
                eligible.append(sender)
    return [_among_own(state, by_sender[sender])[0] for sender in eligible]


def _sender(state: SchedulerState, view: SequenceView) -> int:
    """Return the sender of a prompt: its principal, or its program where all are of one principal."""
    return view.path[0] if state.first_tokens.level == 0 else view.path[-2:][0]


def _among_own(state: SchedulerState, views: Sequence[SequenceView]) -> list[SequenceView]:
    """Return the prompts of one sender in its own order: by what they ask for, then equals in turn."""
    if len(views) < 2:
        return list(views)
    asked = {
        view.key: deadline(state.first_tokens, view)
        if view.target_ttft_s is None
        else view.arrived + view.target_ttft_s
        for view in views
    }
    used_s = state.memory.used_s
    equals: dict[int, float] = {}  # by key, when the first of its equals is due
    since = None
    for view in sorted(views, key=lambda view: (asked[view.key], view.key)):
        if since is None or asked[view.key] > since + EQUAL_S:
            since = asked[view.key]
        equals[view.key] = since
    return sorted(
        views,
        key=lambda view: (
            equals[view.key],
            view.uncached == 0,
            used_s.get(view.client, 0.0),
            asked[view.key],
            view.key,
        ),
    )


def _share(state: SchedulerState, cost: CostModel) -> float:
    readers = reading(state)
    if not readers:
        return 1.0
    solo = alone_s(cost, readers, room_alone(state, len(readers)))
    step = min([step_s(view, state.contract, solo) for view in readers])
    return max(1.0 - solo / step, state.contract.background_floor, 0.01)
