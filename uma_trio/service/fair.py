"""Helper threads that are shared fairly between clients: a flood of one keeps nobody else's work waiting."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable
from contextvars import ContextVar
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import trio

from uma_trio.models.loaded import RunBlocking as RunBlocking
from uma_trio.sockets.principal import Principal
from uma_trio.text.shape import NotChecked, Patience, Unconstrainable, patient

Answer = TypeVar("Answer")
K = TypeVar("K", bound=Hashable)


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


class FairQueue(Generic[K]):
    """Tasks that wait in turn, key by key: a flood of one key delays another by one turn of each key at most."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[K, deque[trio.Event]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, key: K) -> bool:
        return key in self._waiting

    async def wait(self, key: K, cancelled: Callable[[], object]) -> None:
        """Wait until :meth:`wake` wakes this task. `cancelled` is called if it was woken and cancelled at the same time."""
        turn = trio.Event()
        turns = self._waiting.setdefault(key, deque())
        turns.append(turn)
        try:
            await turn.wait()
        except trio.Cancelled:
            if turn.is_set():
                cancelled()
            else:
                turns.remove(turn)
                if not turns:
                    del self._waiting[key]
            raise

    def wake(self, take: Callable[[K], bool] = lambda _key: True) -> bool:
        """Wake the oldest task of the first key that `take` accepts, and put the key behind the others; False if there is none."""
        for key in self._waiting:
            if take(key):
                turns = self._waiting.pop(key)
                turns.popleft().set()
                if turns:
                    self._waiting[key] = turns
                return True
        return False


class FairPlaces:
    """`n` places: each program has at most one of them, and each user leaves one to the others."""

    def __init__(self, n: int) -> None:
        self._free = n
        self._max_of_user = max(1, n - 1)
        self._busy: set[UserProgram] = set()
        self._users: Counter[str] = Counter()
        self._queue = FairQueue[UserProgram]()

    async def acquire(self, client: UserProgram) -> None:
        """Wait for a place. If cancelled, none is taken."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if client in self._queue or not self._take(client):
            await self._queue.wait(client, lambda: self.release(client))

    def release(self, client: UserProgram) -> None:
        """Give a place back."""
        self._free += 1
        self._busy.discard(client)
        self._users[client.user] -= 1
        if not self._users[client.user]:
            del self._users[client.user]
        while self._free and self._queue.wake(self._take):
            pass

    def _take(self, client: UserProgram) -> bool:
        if not self._free or client in self._busy or self._users[client.user] >= self._max_of_user:
            return False
        self._free -= 1
        self._busy.add(client)
        self._users[client.user] += 1
        return True


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


# --- compiling shapes ---

COMPILE_S: Final = 10.0
"""For all shapes of a request, from when it has its place; the first one waits for a second of preparation."""
QUEUE_S: Final = 60.0
"""How long a request waits for its place."""
# Their processes are niced, and more would only take cores.
_PLACES: Final = 4
_TOO_LONG: Final = f"takes longer than {COMPILE_S:g} s to be compiled; simplify it"


class RunFor(Protocol):
    """Runs a slow function for a client without holding up the event loop."""

    def __call__(self, function: Callable[[], Answer], client: UserProgram, /) -> Awaitable[Answer]:
        """Return the function's result or raise its exception. If cancelled, abandon it.

        Raises:
            NotChecked: it was not begun in :data:`QUEUE_S`.
            Unconstrainable: it was, and took longer than :data:`COMPILE_S`.
        """


class _Turn(FairLimiter):
    """A place for one request, whose time to compile begins with it."""

    def __init__(self, places: FairPlaces, client: UserProgram, scope: trio.CancelScope) -> None:
        super().__init__(places, client)
        self._scope = scope
        self.patience = Patience()

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait for the place. Raises :class:`NotChecked` if that takes too long."""
        with trio.move_on_after(QUEUE_S) as waiting:
            await super().acquire_on_behalf_of(borrower)
        if waiting.cancelled_caught:
            raise NotChecked(f"waited {QUEUE_S:g} s for others that are compiled first; try again")
        self._scope.deadline = trio.current_time() + COMPILE_S
        self.patience.until = time.monotonic() + COMPILE_S


def in_fair_threads(places: FairPlaces | None = None) -> RunFor:
    """Return a :class:`RunFor`. A thread that is given up keeps its place until it ends.

    It ends soon: nothing is begun for a request that was given up, and what was begun is bounded.
    """
    shared = places or FairPlaces(_PLACES)

    async def run(function: Callable[[], Answer], client: UserProgram, /) -> Answer:
        with trio.CancelScope() as scope:
            turn: Any = _Turn(shared, client, scope)

            def work() -> Answer:
                with patient(turn.patience):
                    return function()

            try:
                return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=turn)
            except trio.Cancelled:
                turn.patience.until = 0.0
                raise
        raise Unconstrainable(_TOO_LONG)

    return run


def unqueued(run_blocking: RunBlocking) -> RunFor:
    """Return a :class:`RunFor` without places: for a service with few clients, and for tests."""

    async def run(function: Callable[[], Answer], client: UserProgram, /) -> Answer:
        with trio.move_on_after(COMPILE_S):
            return await run_blocking(function)
        raise Unconstrainable(_TOO_LONG)

    return run
