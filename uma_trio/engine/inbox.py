"""The queue from trio's thread to the engine: bounded for requests, unbounded for other messages.

The sender never waits: a full queue raises an exception at once. The engine takes all messages in
one call per tick.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from uma_trio.engine.messages import InboxMessage, Submit
from uma_trio.machine.bell import Bell
from uma_trio.observe import log


class QueueFull(Exception):
    """The queue is full. `retry_after_s` is the time after which a slot may be free."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"the queue is full, with {waiting} waiting")
        self.waiting = waiting
        self.retry_after_s = retry_after_s


class EngineStopped(Exception):
    """The engine takes no further messages."""


class Inbox:
    """A queue with many senders and one receiver, the engine.

    `submit`, `put` and `close` are called on trio's thread, `drain` and `left_queue` on the engine's. None of them blocks. Deque appends and stores of one value are atomic under the GIL, and each
    field has one writer, so no lock is needed. `bell` wakes the compute thread; `wake` is called in its place if
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
        self._closed = False
        self._on_close: list[Callable[[], object]] = []  # trio's
        self.bell = bell or Bell()
        self.bell.connect(self)
        self._ring = wake if wake is not None else self.bell.ring
        #: Whether anything came since the latest claim, which clears it.
        self.is_rung = False

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
        for message in messages:
            self.bell.announce(self, message)

    def put(self, message: InboxMessage) -> None:
        """Queue a message other than a request. After `close` it is dropped."""
        if self._closed:
            return
        self._messages.append(message)
        self.wake()

    def wake(self) -> None:
        """Wake the engine without a message. May be called on any thread."""
        self.is_rung = True
        self._ring()

    def close(self) -> None:
        """Accept no further messages, and wake the engine so that it ends."""
        self._closed = True
        self.bell.disconnect(self)
        for notify in tuple(self._on_close):
            notify()
        self.wake()

    @contextmanager
    def when_closed(self, notify: Callable[[], object]) -> Iterator[None]:
        """Call `notify`, on trio's thread, when the inbox is closed: now if it is, else while this is entered."""
        if self._closed:
            notify()
        self._on_close.append(notify)
        try:
            yield
        finally:
            self._on_close.remove(notify)

    def drain(self) -> list[InboxMessage]:
        """Return all messages that have arrived, in order."""
        messages = self._messages
        return [messages.popleft() for _ in range(len(messages))]

    def requests(self) -> list[Submit]:
        """Return the requests that have arrived since the latest `drain`."""
        # Copying a deque runs no Python code, so that no append can come in between.
        return [message for message in tuple(self._messages) if isinstance(message, Submit)]

    def left_queue(self, waited_s: float) -> None:
        """Note that a request left the queue after `waited_s`: admitted or cancelled."""
        self._left_queue += 1
        self._queue_s = waited_s


class EngineDied(Exception):
    """An engine ended with an exception. Every stream of it has got its terminal item."""


class Failing(Protocol):
    """What an engine has that its end needs."""

    inbox: Inbox

    def fail_all(self, code: str, message: str) -> None:
        """End every request with an error, when the engine is computed no more."""


def bury(engine: Failing, error: Exception, message: str) -> EngineDied:
    """End every request of an engine that raised `error`, with E_RUNTIME_004 and `message`; return the error of the daemon.

    Called on trio's thread, when the engine is computed no more.
    """
    engine.inbox.close()
    try:
        engine.fail_all("E_RUNTIME_004", message)
    except Exception as failed:  # on trio's thread it would end all models
        log.get("engine").error("not every request was ended", exc_info=failed)
    died = EngineDied(f"the engine has stopped: {type(error).__name__}: {error}")
    died.__cause__ = error
    return died
