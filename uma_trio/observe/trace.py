"""The trace: every tick as a line of a file, to be planned again by `uma-trio replay`.

A thread of its own encodes and writes the ticks of a bounded queue. When the disk is too slow, ticks are dropped, and
the last line of the file says how many.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from uma_trio.observe import log
from uma_trio.observe.records import TickRecord
from uma_trio.policy.plan import Plan
from uma_trio.policy.portable import Footer, Header, TracedTick, encode
from uma_trio.policy.state import SchedulerState

MOST_WAITING = 1024


class TraceFile:
    """A file of ticks as JSON lines, for the recorder: only its user may read it, an existing file is replaced.

    `encode_tick` makes a line of a tick, in the file's own thread. :meth:`close` it.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        *,
        encode_tick: Callable[[TracedTick], bytes] = encode,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._file: BinaryIO = os.fdopen(os.open(path, flags, 0o600), "wb")
        self._encode = encode_tick
        self._most_waiting = most_waiting
        self._ticks: SimpleQueue[TracedTick | None] = SimpleQueue()
        self._log = log.get("trace").bind(file=str(path))
        self._broken = False
        self._dropped = 0  # written by the engine's thread
        self._written = self._lost = 0  # written by the file's thread
        self._write(encode(header))
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def __call__(self, state: SchedulerState, plan: Plan, record: TickRecord) -> None:
        """Queue one tick, or count it as dropped. Neither waits nor raises; for the engine's thread."""
        if self._ticks.qsize() >= self._most_waiting:
            self._dropped += 1
        else:
            self._ticks.put(traced(state, plan, record))

    def close(self) -> None:
        """Write the queue and the footer, and wait for it. Idempotent; the engine must have ended."""
        if self._file.closed:
            return
        self._ticks.put(None)
        self._thread.join()
        dropped = self._dropped + self._lost
        self._write(encode(Footer(self._written, dropped)))
        if dropped:
            self._log.warning("ticks are missing in the trace", dropped=dropped)
        try:
            self._file.close()
        except OSError:
            return  # logged when the first write failed

    def _run(self) -> None:
        while (tick := self._ticks.get()) is not None:
            try:
                line = self._encode(tick)
            except Exception as error:  # a policy's plan may contain anything
                self._lost += 1
                if self._lost == 1:
                    self._log.warning("a tick cannot be written", why=type(error).__name__)
                continue
            if self._write(line, flush=self._ticks.empty()):
                self._written += 1
            else:
                self._lost += 1

    def _write(self, line: bytes, *, flush: bool = False) -> bool:
        if self._broken:
            return False
        try:
            self._file.write(line)
            if flush:
                self._file.flush()
        except OSError as error:
            self._broken = True
            self._log.warning("the trace ends here: the file cannot be written", why=error.strerror)
        return not self._broken


def traced(state: SchedulerState, plan: Plan, record: TickRecord) -> TracedTick:
    """Return a tick in the format of traces."""
    accepted = {drafted.key: drafted.right for drafted in record.drafted}
    late = tuple(sorted(record.late))
    return TracedTick(state, plan, record.decode_s, record.host_s, record.status, accepted, late)
