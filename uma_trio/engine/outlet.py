"""The queue from the engine to trio's thread: the items of a tick, delivered with one wake.

The engine never waits here. Credit guarantees that each stream has room, so a delivery cannot fail
for lack of it. A stream without a reader drops its items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from uma_trio.engine.messages import Sink, StreamItem

Call = Callable[[], None]


class Outlet:
    """Hands items over to trio's thread, with one wake for many items.

    `post` runs a function on trio's thread: :meth:`trio.lowlevel.TrioToken.run_sync_soon` across
    threads, or a plain call when the engine runs inline.
    """

    def __init__(self, post: Callable[[Call], object]) -> None:
        self._post = post

    def deliver(self, items: Sequence[tuple[Sink, StreamItem]], calls: Sequence[Call] = ()) -> None:
        """Put each item into its stream, have them read, then run each of `calls`.

        All on trio's thread, in order: what is read by several streams is read once. Called on the engine's thread. Nothing is woken when there is nothing to deliver.
        """
        if not items and not calls:
            return

        def deliver() -> None:
            for sink, item in items:
                try:
                    sink.send_nowait(item)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    continue  # its connection is gone; the request is being cancelled
            for sink, _ in items:
                sink.flush()
            for call in calls:
                call()

        try:
            self._post(deliver)
        except trio.RunFinishedError:
            return  # the daemon has ended under us; nobody is left to read
