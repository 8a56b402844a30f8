"""When a running tick is aborted for an arriving interactive request. Pure.

A request that arrives during a tick waits for its end. An aborted tick's work is lost. So a tick is
aborted only if it holds background prompts alone, the wait that is saved is long, and less than half
of the work is done.
"""

from __future__ import annotations

from attrs import frozen

from uma_trio.lanes import Lane
from uma_trio.policy.plan import Plan
from uma_trio.policy.state import SchedulerState

# A wait that a person hardly notices is not worth a chunk, and neither is one more than half done.
# Interrupted, a CPU is back after about 12 ms (docs/SCHEDULER.md), so 50 ms are worth it.
LONG_S, HALF = 0.050, 0.5


@frozen
class Abortable:
    """A tick that may be given up; `free_cells` are for a newcomer, 0 if it would get no slot."""

    predicted_s: float
    free_cells: int


@frozen
class Newcomer:
    """Who has come, and how many KV cells admission will reserve for it."""

    lane: Lane
    cells: int


def abortable(state: SchedulerState, plan: Plan, free_slots: int) -> Abortable | None:
    """Return what speaks for giving up `plan`; None if it must not be or it would help nobody.

    Only a tick of background prompts alone may be. Without a prediction nothing is known of its
    end.
    """
    if plan.predicted_s <= LONG_S or free_slots <= 0:
        return None
    background = {view.key for view in state.sequences if view.lane == "background"}
    if all(item.phase == "prefill" and item.key in background for item in plan.items):
        return Abortable(plan.predicted_s, state.free_cells)
    return None


def gives_way(tick: Abortable, elapsed_s: float, newcomer: Newcomer) -> bool:
    """Whether `tick`, which has run for `elapsed_s`, is given up for `newcomer`."""
    return (
        newcomer.lane == "interactive"
        and newcomer.cells <= tick.free_cells
        and tick.predicted_s - elapsed_s > LONG_S
        and elapsed_s < HALF * tick.predicted_s
    )
