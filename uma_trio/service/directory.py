"""The running requests: for listings, and for the drain at the end of the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import trio

from uma_trio.models.model import Model
from uma_trio.observe.view import Named
from uma_trio.service.ask import Origin
from uma_trio.words import Lane

_REMEMBERED = 256  # as many as the engine can explain


class RunningRequest(Protocol):
    """A running request, as far as tasks other than its reader may use it."""

    @property
    def handle(self) -> int:
        """The handle, unique for the life of the daemon."""

    @property
    def origin(self) -> Origin:
        """Who asked."""

    @property
    def choice(self) -> int:
        """The number of the answer among those to the same prompt, from 0."""

    @property
    def model(self) -> str | None:
        """The model that has it; None while it is prepared."""

    @property
    def lane(self) -> Lane:
        """Its lane."""

    @property
    def arrived(self) -> float:
        """When it came, on the engines' clock."""

    @property
    def awaited(self) -> Model | None:
        """The model that it waits for; None once that is loaded."""

    @property
    def streams(self) -> bool:
        """Whether tokens of it come one by one, which a busy thread would hold up."""

    def end(self, code: str | None = None, message: str | None = None) -> None:
        """End it: as cancelled, or with an error code."""

    def move_to(self, lane: Lane) -> None:
        """Move it to a lane."""


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
        """Add a request."""
        self._running[request.handle] = request
        self._streams += request.streams
        if self._first is not None:
            self._first.set()
            self._first = None

    def remove(self, request: RunningRequest) -> bool:
        """Remove a request whose reader has finished. Idempotent; whether it was there."""
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
        """Whether tokens of any request come one by one."""
        return self._streams > 0

    def get(self, handle: int) -> RunningRequest | None:
        """Return the request with this handle."""
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
        """Wait until no request runs."""
        while self._running:
            if self._empty is None:
                self._empty = trio.Event()
            await self._empty.wait()

    async def wait_until_any(self) -> None:
        """Wait until a request runs."""
        while not self._running:
            if self._first is None:
                self._first = trio.Event()
            await self._first.wait()
