"""Every tick in a file, to be planned again by `uma-trio replay`."""

from __future__ import annotations

from pathlib import Path

from uma_trio.engine.records import TickRecord
from uma_trio.observe.trace import LineFile
from uma_trio.policy.plan import Plan
from uma_trio.policy.portable import Footer, Header, TracedTick, encode
from uma_trio.policy.state import SchedulerState


class TraceFile:
    """A :data:`uma_trio.engine.recorder.Trace` that ends in a file of JSON lines; close it.

    The engine waits for none of it: ticks that the disk is too slow for are dropped and counted.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._file: LineFile[TracedTick] = LineFile(
            path,
            encode,
            first_line=encode(header),
            last_line=lambda written, dropped: encode(Footer(written, dropped)),
        )

    def __call__(self, state: SchedulerState, plan: Plan, record: TickRecord) -> None:
        """Take one tick (engine's thread)."""
        self._file.put(traced(state, plan, record))

    def close(self) -> None:
        """End the file in order. Idempotent; the engine must have ended."""
        self._file.close()


def traced(state: SchedulerState, plan: Plan, record: TickRecord) -> TracedTick:
    """Return a tick as a trace has it."""
    accepted = {drafted.key: drafted.right for drafted in record.drafted}
    late = tuple(sorted(record.late))
    return TracedTick(state, plan, record.decode_s, record.host_s, record.status, accepted, late)
