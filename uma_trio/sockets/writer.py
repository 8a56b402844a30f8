"""The writer half of a connection: sends everything, in order.

Bytes go to the kernel at once, from whatever task has them; as all tasks share one thread there
is no lock. What the kernel does not take is kept in line and sent by :meth:`Writer.run`. The
line is bounded by its callers: tokens by their stream's credit, answers by the reader half,
which stops reading while they pile up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from uma_trio.sockets.transport import Transport


class Writer:
    """Sends in order. `lost` is called when the peer has closed, `stalled` when it reads nothing.

    After either the connection is expected to end; what is written then is dropped.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        stall_timeout_s: float,
        lost: Callable[[], None],
        stalled: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._stall_timeout_s = stall_timeout_s
        self._lost = lost
        self._stalled = stalled
        self._line: deque[memoryview] = deque()
        self._work = trio.Event()
        self._flushed: trio.Event | None = None
        self.waiting_bytes = 0
        self.broken = False

    def write(self, data: bytes) -> bool:
        """Send `data` after all earlier writes. True if the kernel has all of it now."""
        if self.broken:
            return False
        if self._line:
            self._enqueue(memoryview(data))
            return False
        try:
            sent = self._transport.send_nowait(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._break()
            return False
        if sent == len(data):
            return True
        self._enqueue(memoryview(data)[sent:])
        self._work.set()
        return False

    async def flushed(self) -> None:
        """Wait until the kernel has all that was written.

        Returns at once, without a checkpoint, if it has. Waits forever if the peer has closed:
        `lost` has to cancel it.
        """
        while self._line:
            if self._flushed is None:
                self._flushed = trio.Event()
            await self._flushed.wait()

    async def run(self) -> None:
        """Send queued bytes whenever the kernel has room. Ends when the peer has closed."""
        while not self.broken:
            await self._work.wait()
            self._work = trio.Event()
            while self._line:
                if not await self._wait_sendable():
                    self._stalled()
                    return
                self._send_some()

    async def finish(self) -> None:
        """Send the queued bytes without `run`. The caller sets a timeout."""
        while self._line and not self.broken:
            await self._transport.wait_sendable()
            self._send_some()

    def close(self) -> None:
        """Drop unsent bytes and the callbacks. Idempotent.

        A connection and its writer refer to each other: as a cycle, both would keep megabytes of an answer until a
        full garbage collection.
        """
        self.broken = True
        self._line.clear()
        self.waiting_bytes = 0
        self._lost = self._stalled = _ignore

    async def _wait_sendable(self) -> bool:
        """Wait for room; False when the peer has read nothing for the stall timeout."""
        unread = self._transport.unread_bytes()
        while True:
            with trio.move_on_after(self._stall_timeout_s):
                await self._transport.wait_sendable()
                return True
            before, unread = unread, self._transport.unread_bytes()
            # A Unix socket calls itself writable only when most of it was read, so a reader
            # may well be at work, slowly, in all that time.
            if unread >= before:
                return False

    def _send_some(self) -> None:
        while self._line:
            head = self._line[0]
            try:
                sent = self._transport.send_nowait(head)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._break()
                return
            self.waiting_bytes -= sent
            if sent < len(head):
                self._line[0] = head[sent:]
                return
            self._line.popleft()
        if self._flushed is not None:
            self._flushed.set()
            self._flushed = None

    def _enqueue(self, data: memoryview) -> None:
        self._line.append(data)
        self.waiting_bytes += len(data)

    def _break(self) -> None:
        self.broken = True
        self._lost()


def _ignore() -> None:
    """Replace a callback of a closed writer."""
