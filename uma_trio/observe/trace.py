"""A file that is written line by line beside the work, and never holds it up.

Whoever has something to write puts it into a bounded queue and goes on. A thread takes it out,
turns it into a line and writes it. When the disk is slower than the work, lines are dropped and
counted, and the last line of the file says how many.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, Generic, TypeVar

from uma_trio.observe import log

T = TypeVar("T")
MOST_WAITING = 1024


class LineFile(Generic[T]):
    """Lines in a file of the user's own, which nobody else may read.

    `encode` makes a line of an item, in the file's own thread; `last_line` gets how many were
    written and dropped. A file that exists is written anew. :meth:`close` it.

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
        """Have `item` written, or count it as dropped. Never waits and never raises.

        Called by one thread at a time.
        """
        if self._items.qsize() >= self._most_waiting:
            self.dropped += 1
        else:
            self._items.put(item)

    def close(self) -> None:
        """Write what waits, then the last line; return when all of it is in the file. Idempotent."""
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
            return  # it was said when the first write failed

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
