"""Who may have a shape compiled when: helper threads of their own, shared fairly between clients.

A thread waits for a process that compiles, or compiles here what has passed there. Text is tokenised
in other threads, so that nobody's prompt waits for somebody's grammar.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import trio

from uma_trio.service.ask import Origin
from uma_trio.text.patience import Patience, patient

Answer = TypeVar("Answer")

COMPILE_S: Final = (
    10.0  # for all shapes of a request; the first one waits for a second of preparation
)
# Their processes are niced, and more would only take cores.
_PLACES: Final = 4


class Client(NamedTuple):
    """Who has shapes compiled: a user as :class:`Principal` attests it, and one of its programs."""

    user: str
    program: str


def client_of(origin: Origin) -> Client:
    """Return the client of a request. What a program calls itself divides its user's places only."""
    return Client(origin.principal.shares_as, origin.app or str(origin.principal.pid))


class RunFor(Protocol):
    """Runs a slow function for a client without holding up the event loop."""

    def __call__(self, function: Callable[[], Answer], client: Client, /) -> Awaitable[Answer]:
        """Return the function's result or raise its exception. If cancelled, abandon it."""


class FairPlaces:
    """`n` places: each program has at most one of them, and each user leaves one to the others.

    Who waits is served in turn, program by program.
    """

    def __init__(self, n: int = _PLACES) -> None:
        self._free = n
        self._most_of_user = max(1, n - 1)
        self._held: set[Client] = set()
        self._users: Counter[str] = Counter()
        self._waiting: OrderedDict[Client, deque[trio.Event]] = OrderedDict()

    async def acquire(self, client: Client) -> None:
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
            self._leave(client, turn)
            raise

    def release(self, client: Client) -> None:
        """Give a place back."""
        self._free += 1
        self._held.discard(client)
        self._users[client.user] -= 1
        if not self._users[client.user]:
            del self._users[client.user]
        self._grant()

    def _may(self, client: Client) -> bool:
        """Whether a client may have a place now."""
        return (
            self._free > 0
            and client not in self._held
            and self._users[client.user] < self._most_of_user
        )

    def _take(self, client: Client) -> None:
        self._free -= 1
        self._held.add(client)
        self._users[client.user] += 1

    def _leave(self, client: Client, turn: trio.Event) -> None:
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


class _Place:
    """A place of one client, as :func:`trio.to_thread.run_sync` takes and gives back a limiter's."""

    def __init__(self, places: FairPlaces, client: Client) -> None:
        self._places = places
        self._client = client

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await self._places.acquire(self._client)

    def release_on_behalf_of(self, borrower: object) -> None:
        self._places.release(self._client)


def in_fair_threads(places: FairPlaces | None = None) -> RunFor:
    """Return a :class:`RunFor`. A thread that is given up keeps its place until it ends.

    It ends soon: nothing is begun for a request that was given up, and what was begun is bounded.
    """
    shared = places or FairPlaces()

    async def run(function: Callable[[], Answer], client: Client, /) -> Answer:
        patience = Patience(time.monotonic() + COMPILE_S)

        def work() -> Answer:
            with patient(patience):
                return function()

        limiter: Any = _Place(shared, client)
        try:
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
        except trio.Cancelled:
            patience.until = 0.0
            raise

    return run
