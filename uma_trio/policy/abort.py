"""Decides whether a running tick is aborted for an arriving interactive request. Pure.

A request that arrives during a tick waits for its end, and an aborted tick's work is lost. A tick
is therefore aborted only if it contains background prompts only, the remaining wait is long, and
less than half of the work is done.
"""

from __future__ import annotations

from attrs import frozen

from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState
from uma_trio.words import Lane

# A wait that a person hardly notices is not worth a chunk, and neither is one more than half done.
# Interrupted, a CPU is back after about 12 ms (docs/SCHEDULER.md), so 50 ms are worth it.
LONG_S, HALF = 0.050, 0.5


@frozen
class Abortable:
    """A tick that may be aborted. A newcomer could use `free_cells`; 0 if it would get no slot."""

    predicted_s: float
    free_cells: int


@frozen
class Newcomer:
    """The lane of an arriving request, and the KV cells that admission will reserve for it."""

    lane: Lane
    cells: int


def abortable(state: SchedulerState, plan: Plan, free_slots: int) -> Abortable | None:
    """Return the data for aborting `plan`; None if it must not be aborted.

    None, too, if nobody would benefit. Only ticks with nothing but background prompts may be
    aborted. Without a prediction the end of a tick is unknown.
    """
    if plan.predicted_s <= LONG_S or free_slots <= 0:
        return None
    background = {view.key for view in state.sequences if view.lane == "background"}
    if all(item.phase == "prefill" and item.key in background for item in plan.items):
        return Abortable(plan.predicted_s, state.free_cells)
    return None


def gives_way(tick: Abortable, elapsed_s: float, newcomer: Newcomer) -> bool:
    """Whether `tick`, which has run for `elapsed_s`, is aborted for `newcomer`."""
    return (
        newcomer.lane == "interactive"
        and newcomer.cells <= tick.free_cells
        and tick.predicted_s - elapsed_s > LONG_S
        and elapsed_s < HALF * tick.predicted_s
    )
