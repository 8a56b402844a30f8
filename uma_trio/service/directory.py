"""The requests that run: what a listing shows and a drain waits for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import trio
from attrs import frozen

from uma_trio.lanes import Lane
from uma_trio.service.ask import Origin

_REMEMBERED = 256  # as many as the engine can explain


class Request(Protocol):
    """A running request, as far as others than its reader may touch it."""

    @property
    def handle(self) -> int:
        """The number that no other request of this daemon's life has."""

    @property
    def origin(self) -> Origin:
        """Who asked."""

    @property
    def choice(self) -> int:
        """Which of the answers to the same prompt it is, from 0."""

    def end(self, code: str | None = None, message: str | None = None) -> None:
        """Bring it to its terminal item: cancelled, or an error with a code."""

    def move_to(self, lane: Lane) -> None:
        """Promote or demote it."""


@frozen
class Named:
    """How a request was called by its client, how that calls itself, and which choice it is."""

    name: str | None = None
    app: str | None = None
    choice: int = 0


def _named(request: Request) -> Named:
    return Named(request.origin.name, request.origin.app, request.choice)


class Directory:
    """All running requests by handle, and how the latest of those that ran were called."""

    def __init__(self) -> None:
        self._running: dict[int, Request] = {}
        self._past: dict[int, Named] = {}
        self._empty: trio.Event | None = None

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._running.values()))

    def __len__(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        """Note a request that has come."""
        self._running[request.handle] = request

    def remove(self, request: Request) -> None:
        """Forget one that its reader is done with. Idempotent."""
        if self._running.pop(request.handle, None) is None:
            return
        self._past[request.handle] = _named(request)
        if len(self._past) > _REMEMBERED:
            del self._past[next(iter(self._past))]
        if not self._running and self._empty is not None:
            self._empty.set()
            self._empty = None

    def get(self, handle: int) -> Request | None:
        """Return the request with this handle."""
        return self._running.get(handle)

    def name_of(self, handle: int) -> Named:
        """Return what a request was called, of the latest also when it is over."""
        if (running := self._running.get(handle)) is not None:
            return _named(running)
        return self._past.get(handle, Named())

    async def wait_until_empty(self) -> None:
        """Wait until no request runs."""
        while self._running:
            if self._empty is None:
                self._empty = trio.Event()
            await self._empty.wait()
