"""Decides whether a running tick is aborted for an arriving interactive request. Pure.

A request that arrives during a tick waits for its end, and an aborted tick's work is lost. A tick is therefore aborted only if
no reader has a token in it and the remaining wait is long. A tick with interactive prompts
is aborted for short prompts only: to a longer one the wait makes little difference.
"""

from __future__ import annotations

import math

from attrs import frozen

from uma_trio.policy.plan import Plan
from uma_trio.policy.state import MOMENT_S, SchedulerState, SequenceView
from uma_trio.words import Lane

# A wait that a person hardly notices is not worth a chunk, and neither is one more than half done.
# Interrupted, a CPU is back after about 12 ms (docs/internals/design.md), so 50 ms are worth it. In the second half
# of a tick the wait must be longer than clients hardly notice.
LONG_S, LATE_S, HALF = 0.050, 2 * MOMENT_S, 0.5


@frozen
class Abortable:
    """A tick that may be aborted for prompts of at most `most_tokens`.

    A new request of the same model could use `free_cells`; 0 if it would get no slot.
    """

    predicted_s: float
    free_cells: int
    most_tokens: float = math.inf


@frozen
class Newcomer:
    """The lane and the prompt's tokens of an arriving request, and the KV cells that admission will reserve for it.

    One of another model needs none of these `cells`.
    """

    lane: Lane
    cells: int
    tokens: int = 0


def abortable(state: SchedulerState, plan: Plan, free_slots: int) -> Abortable | None:
    """Return the data for aborting `plan`; None if it must not be aborted.

    Without a prediction the end of a tick is unknown.
    """
    if plan.predicted_s <= LONG_S:
        return None
    views = [state.views[item.key] for item in plan.items]
    if all(item.phase == "decode" for item in plan.items):
        return None
    if any(v.protected or _is_short_prompt(v) for v in views):
        return None
    free_cells = state.free_cells if free_slots > 0 else 0
    if all(v.lane == "background" for v in views):
        return Abortable(plan.predicted_s, free_cells)
    return Abortable(plan.predicted_s, free_cells, state.contract.newcomer_tokens)


def _is_short_prompt(view: SequenceView) -> bool:
    return not view.started and view.first is not None and view.first.short


def should_abort(tick: Abortable, elapsed_s: float, newcomer: Newcomer) -> bool:
    """Whether `tick`, which has run for `elapsed_s`, is aborted for `newcomer`."""
    return (
        newcomer.lane == "interactive"
        and newcomer.cells <= tick.free_cells
        and newcomer.tokens <= tick.most_tokens
        and tick.predicted_s - elapsed_s
        > (LONG_S if elapsed_s < HALF * tick.predicted_s else LATE_S)
    )
