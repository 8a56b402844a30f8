"""Door two, engine to trio: what a tick has to say, delivered with one wake.

The engine never waits here. Each stream's credit guarantees that its channel has room, so a
delivery cannot fail for want of it; a stream whose reader is gone swallows its items.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from uma_trio.engine.messages import Sink, StreamItem

Delivery = Callable[[], None]


class Outlet:
    """Collects a tick's items and hands them over in one call.

    `emit`, `call` and `flush` are called on the engine's thread. `post` runs a function on
    trio's thread: :meth:`trio.lowlevel.TrioToken.run_sync_soon` across threads, or a plain
    call when the engine runs inline.
    """

    def __init__(self, post: Callable[[Delivery], object]) -> None:
        self._post = post
        self._pending: list[tuple[Sink, StreamItem]] = []
        self._calls: list[Delivery] = []

    def emit(self, sink: Sink, item: StreamItem) -> None:
        """Add `item` to its stream with the next flush."""
        self._pending.append((sink, item))

    def call(self, function: Delivery) -> None:
        """Run `function` on trio's thread with the next flush."""
        self._calls.append(function)

    def flush(self) -> None:
        """Wake trio once for all that was emitted; nothing happens when there is nothing."""
        if not self._pending and not self._calls:
            return
        pending, self._pending = self._pending, []
        calls, self._calls = self._calls, []

        def deliver() -> None:
            for sink, item in pending:
                try:
                    sink.send_nowait(item)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    continue  # its connection is gone; the abort is on its way
            for function in calls:
                function()

        try:
            self._post(deliver)
        except trio.RunFinishedError:
            return  # the daemon has ended under us; nobody is left to read
