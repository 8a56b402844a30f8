"""What wakes the compute thread, and reports requests to it that arrive while it computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class RequestQueue(Protocol):
    """A queue of requests for one work."""

    def requests(self) -> Iterable[object]:
        """Return those that have arrived and were not taken in. May be called on any thread."""


#: Called with the queue and the request.
Arrived = Callable[[Any, Any], object]


class Bell:
    """Wakes the compute thread. There is one, for the messages to all works."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._queues: list[RequestQueue] = []  # written by trio's thread
        self._arrived: Arrived | None = None  # written by the compute thread
        self.asleep = False  # written by the compute thread: whether it waits
        #: Whether it rang since the compute thread, which clears it, looked for messages last.
        self.rang = False

    def connect(self, queue: RequestQueue) -> None:
        """Add a queue whose requests are watched, until it is disconnected. For trio's thread."""
        self._queues.append(queue)

    def disconnect(self, queue: RequestQueue) -> None:
        """Remove a queue. For trio's thread; one that is unknown is ignored."""
        if queue in self._queues:
            self._queues.remove(queue)

    def ring(self) -> None:
        """Wake the compute thread, now or when it waits next. May be called on any thread."""
        self.rang = True
        # While it computes the event is set already, and setting it takes a lock. After clearing it
        # the thread reads the queues, which the message is in.
        if not self._event.is_set():
            self._event.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it rings; False if it did not within `timeout_s`. For the compute thread."""
        self.asleep = True
        rang = self._event.wait(timeout_s)
        self.asleep = False
        self._event.clear()
        return rang

    def announce(self, queue: RequestQueue, request: object) -> None:
        """Report a request that was queued. For trio's thread."""
        arrived = self._arrived
        if arrived is not None:
            arrived(queue, request)

    def watch(self, arrived: Arrived | None) -> None:
        """Call `arrived` for every request that is queued, and for every later one. For the compute thread.

        It is called at least once for each request, on either thread. It must not block, and may be called once more
        after another function has replaced it. No request is missed: this stores the function and then reads the
        queues, and :meth:`announce` comes after a request was queued.
        """
        self._arrived = arrived
        if arrived is not None:
            for queue in tuple(self._queues):
                for request in queue.requests():
                    arrived(queue, request)
