"""Door two, engine to trio: what a tick has to say, delivered with one wake.

The engine never waits here. Each stream's credit guarantees that its channel has room, so a
delivery cannot fail for want of it; a stream whose reader is gone swallows its items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from uma_trio.engine.messages import Sink, StreamItem

Call = Callable[[], None]


class Outlet:
    """Hands items over to trio's thread, with one wake for many.

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
