"""The trace: every tick as a line of a file, to be planned again by `uma-trio replay`.

A thread of its own encodes and writes the lines of a bounded queue. When the disk is too slow, lines are dropped, and
the last line of the file says how many.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, Generic, TypeVar

from uma_trio.observe import log
from uma_trio.observe.records import TickRecord
from uma_trio.policy.plan import Plan
from uma_trio.policy.portable import Footer, Header, TracedTick, encode
from uma_trio.policy.state import SchedulerState

T = TypeVar("T")
MOST_WAITING = 1024


class LineFile(Generic[T]):
    """Lines in a file that only its user may read; an existing file is replaced.

    `encode` makes a line of an item, in the file's own thread; `last_line` receives the numbers of written and of
    dropped lines. :meth:`close` it.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(
        self,
        path: Path,
        encode: Callable[[T], bytes],
        *,
        first_line: bytes,
        last_line: Callable[[int, int], bytes],
        most_waiting: int = MOST_WAITING,
    ) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._file: BinaryIO = os.fdopen(os.open(path, flags, 0o600), "wb")
        self._encode = encode
        self._last_line = last_line
        self._most_waiting = most_waiting
        self._items: SimpleQueue[T | None] = SimpleQueue()
        self._log = log.get("trace").bind(file=str(path))
        self._broken = False
        self.written = 0
        self.dropped = 0  # written by `put`'s thread
        self._lost = 0  # written by the file's thread
        self._write(first_line)
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Queue `item`, or count it as dropped. Neither waits nor raises; for one thread at a time."""
        if self._items.qsize() >= self._most_waiting:
            self.dropped += 1
        else:
            self._items.put(item)

    def close(self) -> None:
        """Write the queue and the last line, and wait for it. Idempotent."""
        if self._file.closed:
            return
        self._items.put(None)
        self._thread.join()
        dropped = self.dropped + self._lost
        self._write(self._last_line(self.written, dropped))
        if dropped:
            self._log.warning("ticks are missing in the trace", dropped=dropped)
        try:
            self._file.close()
        except OSError:
            return  # logged when the first write failed

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                line = self._encode(item)
            except Exception as error:  # a policy's plan may hold anything
                self._lost += 1
                if self._lost == 1:
                    self._log.warning("a tick cannot be written", why=type(error).__name__)
                continue
            if self._write(line):
                self.written += 1
            else:
                self._lost += 1
            if self._items.empty():
                self._flush()

    def _write(self, line: bytes) -> bool:
        if self._broken:
            return False
        try:
            self._file.write(line)
        except OSError as error:
            self._give_up(error)
            return False
        return True

    def _flush(self) -> None:
        if not self._broken:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        self._log.warning("the trace ends here: the file cannot be written", why=error.strerror)


class TraceFile:
    """A file of ticks as JSON lines, for the recorder; close it.

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
        """Queue one tick (engine's thread)."""
        self._file.put(traced(state, plan, record))

    def close(self) -> None:
        """Write the footer. Idempotent; the engine must have ended."""
        self._file.close()


def traced(state: SchedulerState, plan: Plan, record: TickRecord) -> TracedTick:
    """Return a tick in the format of traces."""
    accepted = {drafted.key: drafted.right for drafted in record.drafted}
    late = tuple(sorted(record.late))
    return TracedTick(state, plan, record.decode_s, record.host_s, record.status, accepted, late)
