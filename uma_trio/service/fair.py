"""Fairness between clients: helper threads, compilations of constraints, and the shares of machine time."""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import trio

from uma_trio.models.loaded import RunBlocking as RunBlocking
from uma_trio.service.ask import Origin
from uma_trio.sockets.principal import Principal
from uma_trio.text.shape import NotChecked, Patience, Unconstrainable, patient

Answer = TypeVar("Answer")
K = TypeVar("K", bound=Hashable)


class UserProgram(NamedTuple):
    """The client that work is done for: a user, as :class:`Principal` attests it, and one of its programs."""

    user: str
    program: str


def program_of(principal: Principal, app: str | None) -> UserProgram:
    """Return the user and the program of a request. The program's own name divides only its user's places.

    Clients that close before the kernel reports their user count as one user.
    """
    return UserProgram(principal.counts_as, app or str(principal.pid))


THE_DAEMON: Final = UserProgram("", "")
_CLIENT: ContextVar[UserProgram] = ContextVar("asking", default=THE_DAEMON)


def set_client(client: UserProgram) -> None:
    """Set the client of this task and of the tasks that it starts from now on, for work in helper threads."""
    _CLIENT.set(client)


HELPERS: Final = 3
"""Helper threads for one kind of work. A user has at most two; more would take cores from the model."""


class FairQueue(Generic[K]):
    """A round-robin queue of tasks by key: many tasks of one key delay another key by at most one turn."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[K, deque[trio.Event]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, key: K) -> bool:
        return key in self._waiting

    async def wait(self, key: K, cancelled: Callable[[], object]) -> None:
        """Wait for :meth:`wake`. `cancelled` is called if the task was woken and cancelled at the same time."""
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
        """Wake the oldest task of the first key that `take` accepts, and rotate the key to the end; False if there is none."""
        for key in self._waiting:
            if take(key):
                turns = self._waiting.pop(key)
                turns.popleft().set()
                if turns:
                    self._waiting[key] = turns
                return True
        return False


class FairPlaces:
    """`n` places: at most one for each program, and at most `n` - 1 for each user."""

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
    """A place of one client, as a limiter for :func:`trio.to_thread.run_sync`."""

    def __init__(self, places: FairPlaces, client: UserProgram) -> None:
        self._places = places
        self._client = client

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await self._places.acquire(self._client)

    def release_on_behalf_of(self, borrower: object) -> None:
        self._places.release(self._client)


def in_threads(n: int) -> RunBlocking:
    """Return a :class:`RunBlocking` that uses at most `n` helper threads at a time, shared fairly.

    Abandoned threads keep their place until they end, so cancelling gains a client no further threads.
    """
    places = FairPlaces(n)

    def run(function: Callable[[], Answer], /) -> Awaitable[Answer]:
        limiter: Any = FairLimiter(places, _CLIENT.get())
        return trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=limiter)

    return run


# --- compiling constraints ---

COMPILE_S: Final = 10.0
"""Seconds for all constraints of a request, once it has its place; the first one includes a second of preparation."""
QUEUE_S: Final = 60.0
"""Maximum seconds that a request waits for its place."""
# Compilers run niced; more of them would only take cores.
_PLACES: Final = 4
_TOO_LONG: Final = f"takes longer than {COMPILE_S:g} s to be compiled; simplify it"


class RunFor(Protocol):
    """Runs a slow function for a client without holding up the event loop."""

    def __call__(self, function: Callable[[], Answer], client: UserProgram, /) -> Awaitable[Answer]:
        """Return the function's result or raise its exception. If cancelled, abandon it.

        Raises:
            NotChecked: it did not start within :data:`QUEUE_S`.
            Unconstrainable: it ran longer than :data:`COMPILE_S`.
        """


class _Turn(FairLimiter):
    """A place for one request, which starts its time to compile."""

    def __init__(self, places: FairPlaces, client: UserProgram, scope: trio.CancelScope) -> None:
        super().__init__(places, client)
        self._scope = scope
        self.patience = Patience()

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait for the place. Raises :class:`NotChecked` if that takes too long."""
        with trio.move_on_after(QUEUE_S) as waiting:
            await super().acquire_on_behalf_of(borrower)
        if waiting.cancelled_caught:
            raise NotChecked(f"waited {QUEUE_S:g} s behind other compilations; try again")
        self._scope.deadline = trio.current_time() + COMPILE_S
        self.patience.until = time.monotonic() + COMPILE_S


def in_fair_threads(places: FairPlaces | None = None) -> RunFor:
    """Return a :class:`RunFor`. An abandoned thread keeps its place until its current, bounded step ends."""
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


#: Maximum number of children of a node; the least recently used one is dropped, and later gets a new number.
MAX_CHILDREN = 256


class _Node:
    """A share and its children. `number` is unique for the life of the daemon."""

    __slots__ = ("_children", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._children: OrderedDict[str, _Node] = OrderedDict()

    def child(self, name: str, numbers: Iterator[int]) -> _Node:
        node = self._children.get(name)
        if node is None:
            node = self._children[name] = _Node(next(numbers))
            if len(self._children) > MAX_CHILDREN:
                self._children.popitem(last=False)
        self._children.move_to_end(name)
        return node


class Shares:
    """Numbers principals, their programs and their conversations, for the division of machine time.

    Machine time is divided among principals first, then among a principal's programs, then among a program's
    conversations. Clients choose the names of programs and conversations, so these only divide their principal's
    share, and each node is bounded separately.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._root = _Node(0)

    def path(self, origin: Origin, session: str | None) -> tuple[int, ...]:
        """Return the numbers of a request's principal, program and conversation."""
        node, path = self._root, []
        for name in _names(origin, session):
            node = node.child(name, self._numbers)
            path.append(node.number)
        return tuple(path)


def _names(origin: Origin, session: str | None) -> Sequence[str]:
    """Return the names of a request on each level; without a session, the process is the conversation, if known."""
    principal = origin.principal
    process = "" if principal.pid is None else principal.process
    conversation = process if session is None else f"session {session}"
    return principal.counts_as, origin.app or "", conversation
