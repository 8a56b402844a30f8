"""The running requests, also those that wait for a model: for listings, explain and the drain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import trio

from uma_trio.models.model import Model
from uma_trio.observe.records import RequestRecord, Snapshot, Wait
from uma_trio.observe.view import Named
from uma_trio.service.ask import Origin
from uma_trio.words import Lane

_REMEMBERED = 256  # as many as the engine can explain


class RunningRequest(Protocol):
    """A running request, for tasks other than its reader."""

    @property
    def handle(self) -> int:
        """Unique for the life of the daemon."""

    @property
    def origin(self) -> Origin: ...

    @property
    def choice(self) -> int:
        """The number of the answer among those to the same prompt, from 0."""

    @property
    def model(self) -> str | None:
        """The model that computes it; None while it is prepared."""

    @property
    def lane(self) -> Lane: ...

    @property
    def arrived(self) -> float:
        """Time of arrival, on the engines' clock."""

    @property
    def awaited(self) -> Model | None:
        """The model that it waits for; None once that is loaded."""

    @property
    def streams(self) -> bool:
        """Whether it sends token by token, which a busy trio thread would delay."""

    def end(self, code: str | None = None, message: str | None = None) -> None:
        """End it: as cancelled, or with an error code."""

    def move_to(self, lane: Lane) -> None: ...


def _named(request: RunningRequest) -> Named:
    origin = request.origin
    return Named(origin.name, origin.app, request.choice, origin.principal, request.model)


class Directory:
    """All running requests by handle, and the names of the latest ones that ended."""

    def __init__(self) -> None:
        self._running: dict[int, RunningRequest] = {}
        self._streams = 0
        self._past: dict[int, Named] = {}
        self._empty: trio.Event | None = None
        self._first: trio.Event | None = None

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(tuple(self._running.values()))

    def __len__(self) -> int:
        return len(self._running)

    def add(self, request: RunningRequest) -> None:
        self._running[request.handle] = request
        self._streams += request.streams
        if self._first is not None:
            self._first.set()
            self._first = None

    def remove(self, request: RunningRequest) -> bool:
        """Remove a request whose reader has finished; return whether it was present. Idempotent."""
        if self._running.pop(request.handle, None) is None:
            return False
        self._streams -= request.streams
        self._past[request.handle] = _named(request)
        if len(self._past) > _REMEMBERED:
            del self._past[next(iter(self._past))]
        if not self._running and self._empty is not None:
            self._empty.set()
            self._empty = None
        return True

    @property
    def has_streams(self) -> bool:
        """Whether any request sends token by token."""
        return self._streams > 0

    def get(self, handle: int) -> RunningRequest | None:
        return self._running.get(handle)

    def live(self, handle: int) -> Named | None:
        """Return the names of a running request; None if none has this handle."""
        running = self._running.get(handle)
        return None if running is None else _named(running)

    def name_of(self, handle: int) -> Named:
        """Return the names of a request, also of one that ended recently."""
        if (running := self._running.get(handle)) is not None:
            return _named(running)
        return self._past.get(handle, Named())

    async def wait_until_empty(self) -> None:
        while self._running:
            if self._empty is None:
                self._empty = trio.Event()
            await self._empty.wait()

    async def wait_until_any(self) -> None:
        while not self._running:
            if self._first is None:
                self._first = trio.Event()
            await self._first.wait()


_MAX_IN_SNAPSHOT: Final = 256


class WaitsForModel:
    """A request that is in the directory while it waits for its model, before it is validated.

    :meth:`end` cancels `scope`, in which the front end must wait, and sets `ended` to the code and the message.
    """

    model: str | None = None
    choice = 0
    streams = False

    def __init__(
        self, handle: int, origin: Origin, lane: Lane, awaited: Model | None, arrived: float
    ) -> None:
        self.handle, self.origin, self.lane = handle, origin, lane
        self.awaited = awaited
        self.arrived = arrived
        self.scope = trio.CancelScope()
        self.ended: tuple[str | None, str | None] | None = None

    def end(self, code: str | None = None, message: str | None = None) -> None:
        """End it: as cancelled, or with an error code."""
        self.ended = self.ended or (code, message)
        self.scope.cancel()

    def move_to(self, lane: Lane) -> None:
        """Change the lane that is shown; the request itself determines in which lane it is computed."""
        self.lane = lane


def waiting_snapshot(directory: Directory, now: float) -> Snapshot:
    """Return the requests that wait for a model, in the form of an engine's queue."""
    every = waiting_records(directory, None)
    return Snapshot(at=now, tick=-1, queue=tuple(every[:_MAX_IN_SNAPSHOT]), waiting=len(every))


def waiting_records(directory: Directory, handle: int | None) -> list[RequestRecord]:
    """Return the records of the requests that wait for a model, or of one of them."""
    return [
        RequestRecord(
            handle=request.handle,
            lane=request.lane,
            state="queued",
            submitted=request.arrived,
            queue_reason=wait,
            wait=Wait(wait),
        )
        for request in directory
        if request.awaited is not None
        and (wait := request.awaited.wait_reason)
        and handle in (None, request.handle)
    ]
