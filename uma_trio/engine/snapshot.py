"""Snapshots of the engine: its requests, why each waits, the latest ticks and the cache."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from uma_trio.engine.recorder import LATE, MOST_NAMED, Recorder
from uma_trio.engine.registry import Registry
from uma_trio.engine.sequences import NO_SLOT, Sequence
from uma_trio.observe.records import CellReport, RequestRecord, Snapshot, Wait

#: Requests without a slot that a snapshot describes; the others are counted.
MOST_WAITING: Final = 256
#: Latest ticks of a snapshot: ten snapshots a second miss none of 0.4 ms and longer.
MOST_TICKS: Final = 256
BEHIND: Final = "its reader is behind"


#: A machine this many times slower than measured is reported, as in `uma_trio.observe.sentences`.
SLOW: Final = 1.3
#: A stream whose latest token is older waits.
LONG_S: Final = 1.0


def snapshot(
    registry: Registry, recorder: Recorder, n_ctx: int, now: float, after: int
) -> Snapshot:
    """Return the state of the engine, with the ticks after the one numbered `after`.

    Its cost is bounded by :data:`MOST_WAITING` requests and :data:`MOST_TICKS` ticks.
    """
    running, waiting = registry.running.values(), registry.waiting.values()
    ticks = recorder.after(after, MOST_TICKS)

    def report(sequence: Sequence) -> RequestRecord:
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


def wait_of(sequence: Sequence, registry: Registry, recorder: Recorder, now: float) -> Wait | None:
    """Return why a request waits; None if the latest tick computed it."""
    handle = sequence.handle
    if sequence.slot == NO_SLOT:
        return _for_slot(sequence, registry, recorder)
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
    return _for_machine(sequence, registry, now)


def _some(handles: Iterable[int]) -> tuple[int, ...]:
    return tuple(islice(handles, MOST_NAMED))


def _computed_instead(handle: int, registry: Registry, recorder: Recorder) -> tuple[int, ...]:
    """Return the requests of the latest ticks that left one out, most tokens first: the readers if these limited it."""
    tokens, limited = recorder.instead_of(handle)
    running = registry.running
    here = [key for key, _ in tokens.most_common() if key in running]
    readers = [key for key in here if running[key].view.protected]
    return _some(readers if limited and readers else here)


def _for_machine(sequence: Sequence, registry: Registry, now: float) -> Wait | None:
    """Return the wait of a computed request for a machine that is slower than measured."""
    cost, view = registry.first_tokens.memory.cost, sequence.view
    since = sequence.submit.submitted if view.last_token_at is None else view.last_token_at
    if cost is None or cost.scale < SLOW or now - since < LONG_S:
        return None
    return Wait(
        f"the machine takes {cost.scale:.1f} x the time that was measured: another program may use it"
    )


def _for_slot(sequence: Sequence, registry: Registry, recorder: Recorder) -> Wait:
    """Return the wait of a request for a slot or for cells."""
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
    preemption = recorder.preemption(sequence.handle)
    if preemption is None:
        return Wait(reason, holders)
    if sequence.credit <= 0:
        return Wait(f"{reason}; {preemption.reason}", preemption.by)
    return Wait(f"{preemption.reason}; {reason}", preemption.by or holders)


def _before(sequence: Sequence, registry: Registry) -> tuple[int, ...]:
    """Return the queued requests that are admitted before a request: passed over more often, and older."""

    def place(one: Sequence) -> tuple[int, float]:
        return one.forgiven - one.passed_over, one.submit.submitted

    mine = place(sequence)
    waiting = registry.waiting.values()
    return _some(one.handle for one in waiting if one.credit > 0 and place(one) < mine)
