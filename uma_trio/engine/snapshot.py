"""The picture of the engine that is handed to trio's thread when somebody looks.

It is made on the engine's thread from what is there already, and only for an
:class:`~uma_trio.engine.messages.Inspect`; the service asks at most ten times a second, however many
look. Its cost is bounded by :data:`MOST_WAITING` requests and :data:`MOST_TICKS` ticks.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from uma_trio.engine.messages import SequenceReport, Snapshot
from uma_trio.engine.recorder import LATE, MOST_NAMED, Recorder
from uma_trio.engine.records import CellReport, Wait
from uma_trio.engine.registry import Registry
from uma_trio.engine.sequences import NO_SLOT, Sequence

#: Requests without a slot that a snapshot describes; it counts the others.
MOST_WAITING: Final = 256
#: Ticks that a snapshot has, the latest ones: ten snapshots a second miss none of 0.4 ms and longer.
MOST_TICKS: Final = 256


def snapshot(
    registry: Registry, recorder: Recorder, n_ctx: int, now: float, after: int
) -> Snapshot:
    """Return how things stand `now`, with the ticks numbered higher than `after`."""
    running, waiting = registry.running.values(), registry.waiting.values()
    ticks = recorder.after(after, MOST_TICKS)

    def report(sequence: Sequence) -> SequenceReport:
        return sequence.report(now, wait_of(sequence, registry, recorder, now))

    return Snapshot(
        at=now,
        tick=recorder.latest,
        running=tuple(map(report, running)),
        queue=tuple(map(report, islice(waiting, MOST_WAITING))),
        waiting=len(waiting),
        ticks=ticks,
        cells=CellReport(
            total=n_ctx,
            used=sum([s.computed for s in running]) - registry.cells.shared,
            reserved=registry.cells.reserved,
        ),
        prefixes=registry.cells.figures(),
    )


BEHIND: Final = "its reader is behind"


#: So many times slower than it was measured a machine is worth a word: as in `uma_trio.observe.sentences`.
SLOW: Final = 1.3
#: A stream whose latest token is older than this waits, whatever computes it.
LONG_S: Final = 1.0


def wait_of(sequence: Sequence, registry: Registry, recorder: Recorder, now: float) -> Wait | None:
    """Return what a live request waits for at the time `now`; None if the latest tick computed it."""
    handle = sequence.handle
    if sequence.slot == NO_SLOT:
        return _for_a_place(sequence, registry, recorder)
    if (wait := registry.cells.wait_of(sequence, registry.running)) is not None:
        return wait
    if sequence.credit <= 0:
        return Wait(BEHIND)
    if handle in registry.absent:
        return Wait(LATE)
    if registry.delayed_by is not None and registry.delayed_by.running:
        return Wait("another model is computed", _some(registry.delayed_by.running))
    if reason := recorder.waits(handle):
        return Wait(reason, _computed_instead(handle, registry, recorder))
    return _for_the_machine(sequence, registry, now)


def _some(handles: Iterable[int]) -> tuple[int, ...]:
    return tuple(islice(handles, MOST_NAMED))


def _computed_instead(handle: int, registry: Registry, recorder: Recorder) -> tuple[int, ...]:
    """Return who had the latest ticks that left a request out: the readers if the ticks had a limit for them.

    Whoever had most tokens comes first.
    """
    tokens, limited = recorder.instead_of(handle)
    running = registry.running
    here = [key for key, _ in tokens.most_common() if key in running]
    readers = [key for key in here if running[key].view.protected]
    return _some(readers if limited and readers else here)


def _for_the_machine(sequence: Sequence, registry: Registry, now: float) -> Wait | None:
    cost, view = registry.first_tokens.memory.cost, sequence.view
    since = sequence.submit.submitted if view.last_token_at is None else view.last_token_at
    if cost is None or cost.scale < SLOW or now - since < LONG_S:
        return None
    return Wait(
        f"the machine takes {cost.scale:.1f} x the time that was measured: another program may use it"
    )


def _for_a_place(sequence: Sequence, registry: Registry, recorder: Recorder) -> Wait:
    cells = registry.cells
    holders = _some(registry.running)
    if sequence.credit <= 0:
        reason, holders = BEHIND, ()
    elif cells.free_slots <= 0:
        reason = (
            "the slot is taken" if cells.n_slots == 1 else f"all {cells.n_slots} slots are taken"
        )
    elif sequence.cells > cells.free_cells:
        reason = f"it needs {sequence.cells:,} KV cells, {max(0, cells.free_cells):,} are free"
    elif before := _before(sequence, registry):
        reason, holders = "room is kept for requests before it", before
    else:
        reason = "its place would be needed again at once"
    told = recorder.preemption(sequence.handle)
    if told is None:
        return Wait(reason, holders)
    if sequence.credit <= 0:
        return Wait(f"{reason}; {told.reason}", told.by)
    return Wait(f"{told.reason}; {reason}", told.by or holders)


def _before(sequence: Sequence, registry: Registry) -> tuple[int, ...]:

    def place(one: Sequence) -> tuple[int, float]:
        return one.forgiven - one.passed_over, one.submit.submitted

    mine = place(sequence)
    waiting = registry.waiting.values()
    return _some(one.handle for one in waiting if one.credit > 0 and place(one) < mine)
