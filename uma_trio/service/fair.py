"""Helper threads that are shared fairly between clients: a flood of one keeps nobody else's work waiting."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, TypeVar

import trio

from uma_trio.models.loaded import RunBlocking as RunBlocking
from uma_trio.sockets.principal import Principal

Answer = TypeVar("Answer")


class UserProgram(NamedTuple):
    """Who has work done: a user as :class:`Principal` attests it, and one of its programs."""

    user: str
    program: str


def program_of(principal: Principal, app: str | None) -> UserProgram:
    """Return the user and the program of a request. What a program calls itself divides its user's places only.

    Clients that close at once, so that the kernel does not tell their user, are one user together.
    """
    return UserProgram(principal.counts_as, app or str(principal.pid))


THE_DAEMON: Final = UserProgram("", "")
_ASKING: ContextVar[UserProgram] = ContextVar("asking", default=THE_DAEMON)


def works_for(client: UserProgram) -> None:
    """Say for whom this task, and those that it starts from now on, have work done in helper threads."""
    _ASKING.set(client)


HELPERS: Final = 3
"""Helper threads for one kind of work. A user has two of them at most; more would take cores from the model."""


class FairPlaces:
    """`n` places: each program has at most one of them, and each user leaves one to the others.

    Who waits is served in turn, program by program.
    """

    def __init__(self, n: int) -> None:
        self._free = n
        self._most_of_user = max(1, n - 1)
        self._busy: set[UserProgram] = set()
        self._users: Counter[str] = Counter()
        self._waiting: OrderedDict[UserProgram, deque[trio.Event]] = OrderedDict()

    async def acquire(self, client: UserProgram) -> None:
        """Wait for a place. If cancelled, none is taken."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if client not in self._waiting and self._may(client):
            self._take(client)
            return
        turn = trio.Event()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn.wait()  # `_grant` has taken the place then
        except trio.Cancelled:
            if turn.is_set():
                self.release(client)  # it was granted while it left
            else:
                self._leave(client, turn)
            raise

    def release(self, client: UserProgram) -> None:
        """Give a place back."""
        self._free += 1
        self._busy.discard(client)
        self._users[client.user] -= 1
        if not self._users[client.user]:
            del self._users[client.user]
        self._grant()

    def _may(self, client: UserProgram) -> bool:
        """Whether a client may have a place now."""
        return (
            self._free > 0
            and client not in self._busy
            and self._users[client.user] < self._most_of_user
        )

    def _take(self, client: UserProgram) -> None:
        self._free -= 1
        self._busy.add(client)
        self._users[client.user] += 1

    def _leave(self, client: UserProgram, turn: trio.Event) -> None:
        self._waiting[client].remove(turn)
        if not self._waiting[client]:
            del self._waiting[client]

    def _grant(self) -> None:
        """Give free places to those who wait and may have one, the longest-waiting program first."""
        for client in list(self._waiting):
            if not self._may(client):
                continue
            self._take(client)
            turns = self._waiting.pop(client)
            turns.popleft().set()
            if turns:
                self._waiting[client] = turns  # behind the others


class FairLimiter:
    """A place of one client, as :func:`trio.to_thread.run_sync` takes and gives back a limiter's."""

    def __init__(self, places: FairPlaces, client: UserProgram) -> None:
        self._places = places
        self._client = client

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait for a place, whoever borrows it."""
        await self._places.acquire(self._client)

    def release_on_behalf_of(self, borrower: object) -> None:
        """Give the place back."""
        self._places.release(self._client)


def in_threads(n: int) -> RunBlocking:
    """Return a :class:`RunBlocking` that uses at most `n` helper threads at a time, shared fairly.

    Abandoned threads keep their place until they end, so a client that sends and cancels for ever gets
    no more of them than one that waits.
    """
    places = FairPlaces(n)

    def run(function: Callable[[], Answer], /) -> Awaitable[Answer]:
        limiter: Any = FairLimiter(places, _ASKING.get())
        return trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)

    return run
