"""The picture of the engine that is handed to trio's thread when somebody looks.

It is made on the engine's thread from what is there already, and only for an
:class:`~uma_trio.engine.messages.Inspect`; the service asks at most ten times a second, however many
look. Its cost is bounded by :data:`MOST_WAITING` requests and :data:`MOST_TICKS` ticks.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from uma_trio.engine.messages import SequenceReport, Snapshot
from uma_trio.engine.recorder import Recorder
from uma_trio.engine.records import CellReport
from uma_trio.engine.registry import Registry
from uma_trio.engine.sequences import Sequence
from uma_trio.engine.waits import wait_of

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
