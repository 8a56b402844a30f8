"""What the streams cost by themselves: *solo*, and the ticks that measure it."""

from __future__ import annotations

from collections.abc import Sequence

from uma_trio.policy.cost import CostModel, Work
from uma_trio.policy.deadline.ballast import ballast_for
from uma_trio.policy.evolving import evolve
from uma_trio.policy.state import GuardMemory, SchedulerState, SequenceView

# So many isolated ticks come after so many mixed ones in a row: every limit is a multiple of solo, and only
# they measure that. Where graphs are captured the first two of them are slow, and paid from slack.
MIXED, ISOLATED = 20, 1
MIXED_CAPTURED, ISOLATED_CAPTURED = 1000, 4


def next_turn(guard: GuardMemory, *, captured: bool) -> tuple[GuardMemory, bool]:
    """Return what the guard remembers from this tick on, and whether the tick is an isolated one."""
    most, then = (MIXED_CAPTURED, ISOLATED_CAPTURED) if captured else (MIXED, ISOLATED)
    mixed_ticks = guard.mixed_ticks + 1 if guard.mixed else 0
    isolated_ticks = guard.isolated_ticks
    if mixed_ticks >= most:
        mixed_ticks, isolated_ticks = 0, then
    counted = evolve(
        guard,
        mixed_ticks=mixed_ticks,
        isolated_ticks=max(0, isolated_ticks - 1),
    )
    return counted, isolated_ticks > 0


def room_alone(state: SchedulerState, streams: int) -> int:
    """Return how many ballast rows there would be with nobody but so many streams."""
    return state.spare_rows + len(state.sequences) - streams if state.spare_rows else 0


def alone_s(cost: CostModel, streams: Sequence[SequenceView], spare_rows: int) -> float:
    """Return the seconds of a tick of nothing but `streams`, in a context that holds nobody else."""
    context_cells = sum([view.computed for view in streams])
    _, seconds = ballast_for(
        cost, Work(len(streams), len(streams), context_cells, context_cells), spare_rows
    )
    return seconds
