"""The stream of one request: the engine's items on their way to its connection.

A :class:`trio.MemoryReceiveChannel` gives items one at a time and takes an exception to say that
there are no more. The hot path wants all that a tick delivered in one go, so this is the same
thing for one reader and whole bursts; `benches` has the difference.
"""

from __future__ import annotations

import trio

from uma_trio.engine.messages import StreamItem


class TokenStream:
    """A bounded line with one sender (the outlet) and one reader (the connection)."""

    __slots__ = ("_capacity", "_closed", "_items", "_reader")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: list[StreamItem] = []
        self._reader: trio.lowlevel.Task | None = None
        self._closed = False

    def send_nowait(self, item: StreamItem) -> None:
        """Put `item` into the stream; never blocks. Called on trio's thread.

        Raises:
            trio.WouldBlock: it is full, so the engine has ignored the stream's credit.
            trio.BrokenResourceError: the reader has closed it.
        """
        if self._closed:
            raise trio.BrokenResourceError
        if len(self._items) >= self._capacity:
            raise trio.WouldBlock
        self._items.append(item)
        if self._reader is not None:
            trio.lowlevel.reschedule(self._reader)
            self._reader = None

    async def receive(self) -> list[StreamItem]:
        """Return everything that has come, waiting for one item if there is none.

        Not a checkpoint when something is there: the engine delivers between two runs of the
        reader, so a reader that comes back at once always waits.
        """
        if not self._items:
            self._reader = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._forget_reader)
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Let the sender know that nobody reads any more. Idempotent."""
        self._closed = True
        self._items.clear()

    def _forget_reader(self, _: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED
