"""The queue from trio's thread to the engine: bounded for requests, unbounded for other messages.

The sender never waits: a full queue raises an exception at once. The engine takes all messages in
one call per tick. The compute task waits in :meth:`Bell.wait` only when no engine has anything to compute.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from uma_trio.engine.messages import InboxMessage, Submit


class QueueFull(Exception):
    """The queue is full. `retry_after_s` is the time after which a slot may be free."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"the queue is full, with {waiting} waiting")
        self.waiting = waiting
        self.retry_after_s = retry_after_s


class EngineStopped(Exception):
    """The engine takes no further messages."""


class Bell:
    """Wakes the compute task. One of them serves all inboxes whose engines it computes."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.asleep = False  # written by the compute task: whether it waits
        #: Whether it rang since the compute task, which clears it, looked at the inboxes last.
        self.rang = False

    def ring(self) -> None:
        """Wake the compute task, now or when it waits next. May be called on any thread."""
        self.rang = True
        # While it computes the event is set already, and setting it takes a lock. Whoever clears it then
        # looks at the inboxes, which the message is in.
        if not self._event.is_set():
            self._event.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it rings; False if it did not within `timeout_s`. For the compute task."""
        self.asleep = True
        rang = self._event.wait(timeout_s)
        self.asleep = False
        self._event.clear()
        return rang


class Inbox:
    """A queue with many senders and one receiver, the engine.

    `submit`, `put` and `close` are called on trio's thread, `drain`, `watch` and `left_queue` on the
    engine's. None of them blocks. Deque appends and stores of one value are atomic under the GIL, and each
    field has one writer, so no lock is needed. `bell` wakes the compute task; `wake` is called in its place if
    the engine has none.
    """

    def __init__(
        self,
        max_waiting: int,
        wake: Callable[[], object] | None = None,
        bell: Bell | None = None,
    ) -> None:
        self._messages: deque[InboxMessage] = deque()
        self._max_waiting = max_waiting
        self._submitted = 0  # written by trio
        self._left_queue = 0  # written by the engine
        self._queue_s = 0.0  # written by the engine: how long the last one waited
        self._came: Callable[[Submit], object] | None = None  # written by the engine
        self._closed = False
        self._told_of_end: list[Callable[[], object]] = []  # trio's
        self.bell = bell or Bell()
        self._ring = wake if wake is not None else self.bell.ring
        #: Whether anything came since the compute task, which clears it, looked last.
        self.rung = False

    @property
    def waiting(self) -> int:
        """The number of submitted requests without a slot."""
        return self._submitted - self._left_queue

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def submit(self, *messages: Submit) -> None:
        """Queue requests that belong together: all of them or none.

        If no request waits, they are accepted whatever their number.

        Raises:
            QueueFull, EngineStopped: at once.
        """
        if self._closed:
            raise EngineStopped
        waiting = self.waiting
        if waiting and waiting + len(messages) > self._max_waiting:
            raise QueueFull(waiting, max(0.25, self._queue_s))
        self._submitted += len(messages)
        self._messages.extend(messages)
        self.wake()
        came = self._came
        if came is not None:
            for message in messages:
                came(message)

    def put(self, message: InboxMessage) -> None:
        """Queue a message other than a request. After `close` it is dropped."""
        if self._closed:
            return
        self._messages.append(message)
        self.wake()

    def wake(self) -> None:
        """Wake the engine without a message. May be called on any thread."""
        self.rung = True
        self._ring()

    def close(self) -> None:
        """Accept no further messages, and wake the engine so that it ends."""
        self._closed = True
        for told in tuple(self._told_of_end):
            told()
        self.wake()

    @contextmanager
    def when_closed(self, told: Callable[[], object]) -> Iterator[None]:
        """Call `told`, on trio's thread, when the inbox is closed: now if it is, else while this is entered."""
        if self._closed:
            told()
        self._told_of_end.append(told)
        try:
            yield
        finally:
            self._told_of_end.remove(told)

    def drain(self) -> list[InboxMessage]:
        """Return all messages that have arrived, in order."""
        messages = self._messages
        return [messages.popleft() for _ in range(len(messages))]

    def watch(self, came: Callable[[Submit], object] | None) -> None:
        """Call `came` for every request that arrived since `drain`, and for every later one.

        `came` is called at least once for each request, on either thread. It must not wait, and it
        may be called once more after another function has replaced it. No request is missed:
        `watch` stores `came` and then looks at the queue, and `submit` appends its message and then
        looks for `came`.
        """
        self._came = came
        if came is not None:
            # Copying a deque runs no Python code, so that no append can come in between.
            for message in tuple(self._messages):
                if isinstance(message, Submit):
                    came(message)

    def left_queue(self, waited_s: float) -> None:
        """Note that a request left the queue after `waited_s`: admitted or cancelled."""
        self._left_queue += 1
        self._queue_s = waited_s
