"""The items of one request on their way from the engine to whoever reads them.

This is the hot path of every front: the items of a tick for one stream wake its reader once, and
:meth:`Pipe.take` gives them all. Nothing waits, locks or is looked up per token.
"""

from __future__ import annotations

import trio

from uma_trio.engine.messages import StreamItem


class Pipe:
    """A stream between the outlet and one task; it needs no bound of its own, credit is one.

    Both ends live on trio's thread. After :meth:`close` what comes is dropped.
    """

    __slots__ = ("_closed", "_items", "_reader")

    def __init__(self) -> None:
        self._items: list[StreamItem] = []
        self._reader: trio.lowlevel.Task | None = None
        self._closed = False

    def send_nowait(self, item: StreamItem) -> None:
        """Put `item` behind the others and wake the reader; never blocks."""
        if self._closed:
            return
        self._items.append(item)
        if self._reader is not None:
            reader, self._reader = self._reader, None
            trio.lowlevel.reschedule(reader)

    async def take(self) -> list[StreamItem]:
        """Return everything that is there, in order; wait until something is.

        For one task. Cancelled, it has taken nothing.
        """
        if self._items:
            await trio.lowlevel.checkpoint()
        else:
            self._reader = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._give_up)
        items, self._items = self._items, []
        return items

    def close(self) -> None:
        """Drop what is there and what comes. Idempotent."""
        self._closed = True
        self._items.clear()

    def _give_up(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED
