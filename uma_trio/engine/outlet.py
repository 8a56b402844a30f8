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
        """Put each item into its stream, flush these streams, then run each of `calls`.

        Called on the engine's thread; the rest happens on trio's thread, in this order. The items are
        all in their streams before the first flush, so a reader of several streams takes them in one
        call. Without items and calls trio's thread is not woken.
        """
        if not items and not calls:
            return

        def deliver() -> None:
            for sink, item in items:
                try:
                    sink.send_nowait(item)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    continue  # its connection was closed; the request is being cancelled
            for sink, _ in items:
                sink.flush()
            for call in calls:
                call()

        try:
            self._post(deliver)
        except trio.RunFinishedError:
            return  # the daemon has ended; there is no reader left
