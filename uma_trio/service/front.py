"""The clients of a front end: accept them, run a task for each, and end them together."""

from __future__ import annotations

import math
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import closing
from typing import Generic, Protocol, TypeVar

import trio

from uma_trio.observe.log import Log
from uma_trio.observe.metrics import Metrics
from uma_trio.sockets.accepting import Arrivals
from uma_trio.sockets.peers import is_closed, will_send_no_more
from uma_trio.sockets.principal import Principal

# Idle seconds before a connection may be evicted: a client that has just connected, or read an answer, may send next.
GRACE_S = 1.0
# The same for an owner with more than a fair share of the places.
OVER_SHARE_GRACE_S = 0.1


class Occupant(Protocol):
    """A connection that holds a place. Places are shared fairly among owners."""

    @property
    def owner(self) -> Hashable: ...

    @property
    def idle_since(self) -> float | None:
        """When the client last sent something, if it is the client's turn to send; None otherwise."""


P = TypeVar("P", bound=Occupant)


def is_quiet(place: Occupant, now: float, grace_s: float = GRACE_S) -> bool:
    """Return whether a connection has been idle for `grace_s` seconds."""
    since = place.idle_since
    return since is not None and now - since >= grace_s


def connection_to_evict(places: Iterable[P], owner: Hashable, now: float) -> P | None:
    """Return the idle connection to close for a new connection of `owner`; None if there is none. Pure.

    Candidates are the owner's own connections and those of owners with more places than `owner`. The owner with the
    most places loses the connection that has been idle longest. Above an equal share of all places, an idle connection
    is kept for :data:`OVER_SHARE_GRACE_S` only, so that an owner of hundreds excludes nobody. Linear in the places.
    """
    every = list(places)
    held = Counter(place.owner for place in every)
    fair = len(every) / len(held.keys() | {owner})
    chosen: tuple[int, float] | None = None
    found: P | None = None
    for place in every:
        since, n = place.idle_since, held[place.owner]
        if since is None or not is_quiet(place, now, OVER_SHARE_GRACE_S if n > fair else GRACE_S):
            continue
        if place.owner != owner and n <= held[owner]:
            continue
        rank = (-n, since)
        if chosen is None or rank < chosen:
            chosen, found = rank, place
    return found


# Seconds between two log lines about failing accepts (ten a second while it lasts; a metric counts each).
_ACCEPT_WARNING_S = 60.0
# Maximum number of evicted connections that have not closed yet.
MOST_LEAVING = 64
# Clients admitted before other tasks run. To set one up, with its first request, takes about 0.6 ms.
_ADMITTED_PER_PASS = 4
# Seconds between two polls of an emptying front, and between two searches for a place for the same owner.
_POLL_S = 0.05
# Maximum number of owners whose latest failed search is kept.
_MAX_FAILED_SEARCHES = 64


class Accepts(Protocol):
    """Accepts clients until it is stopped."""

    async def accept_forever(
        self, handle: Callable[[socket.socket], None], failed: Callable[[OSError], None]
    ) -> None:
        """Hand each new client to `handle`, which must not block; never returns."""

    def stop(self) -> None:
        """Accept no more. Idempotent."""


class FrontListener(Accepts, Protocol):
    """One listening socket.

    `sock` and the lock of its name, -1 if it has none, can be handed to another daemon.
    """

    @property
    def sock(self) -> socket.socket:
        """The listening socket."""

    @property
    def lock_fd(self) -> int:
        """The lock of its name."""

    def own(self) -> None:
        """Keep its name, which another daemon has handed over."""

    def disown(self) -> None:
        """Leave its name to the process that has the socket now."""


class FrontConnection(Occupant, Protocol):
    """An accepted client."""

    async def run(self) -> None:
        """Serve the client until it leaves or :meth:`end` is called."""

    def end(self) -> None:
        """Close the connection after all pending bytes are written. Idempotent."""

    def leave(self) -> None:
        """Close the connection between two requests, or when it has been idle for a while.

        Its client reconnects, to another daemon. Called repeatedly until the connection has ended.
        """

    def make_room(self) -> None:
        """Close the idle connection for another client, with an error that says so. Idempotent."""


S = TypeVar("S", bound=FrontConnection)


class Front(ABC, Generic[S]):
    """The clients of one front end. `option` is the flag that limits their number."""

    def __init__(self, telemetry: Metrics, log: Log, option: str) -> None:
        self._telemetry = telemetry
        self._log = log
        self._option = option
        self._sessions: set[S] = set()
        # Sessions with a place, and the function to call once when it is released.
        self._placed: dict[S, Callable[[], None]] = {}
        # Time of the latest failed search, by owner: a search is linear in the places.
        self._failed_searches: dict[Hashable, float] = {}
        self._next_warning_at = -math.inf
        self._arrivals = Arrivals()
        self._accepting = trio.CancelScope()
        self._resumed = trio.Event()
        self._resumed.set()
        self._ended = False

    @property
    def n_connections(self) -> int:
        """How many clients are connected."""
        return len(self._sessions)

    async def serve(
        self,
        listener: Accepts,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until :meth:`stop_accepting`, and then until the last client has left.

        If it is cancelled, it closes every connection at once. It stops the listener, but the
        caller must close it.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            with closing(self._arrivals):
                await nursery.start(self._admit_arrivals)
                await self._accept(listener)
                listener.stop()
                await self._arrivals.until_empty()
            self._admitting.cancel()

    async def serve_accepted(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve only the sockets given to :meth:`admit_at_once`, until cancelled. For tests."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def pause_accepting(self) -> None:
        """Leave further clients in the backlog until :meth:`resume_accepting`."""
        self._resumed = trio.Event()
        self._accepting.cancel()

    def resume_accepting(self) -> None:
        """Accept clients again."""
        self._resumed.set()

    def stop_accepting(self) -> None:
        """Accept no further clients."""
        self._ended = True
        self._accepting.cancel()
        self._resumed.set()

    def drain_connections(self) -> None:
        """Ask every connection to end between two requests; to be called repeatedly."""
        for session in tuple(self._sessions):
            session.leave()

    async def empty(self) -> None:
        """Leave further clients in the backlog; return when all accepted ones were answered and have left."""
        self.pause_accepting()
        await trio.lowlevel.checkpoint()  # also takes a client that the kernel is delivering now
        while self._sessions or len(self._arrivals):
            self.drain_connections()
            await trio.sleep(_POLL_S)

    def end_connections(self) -> None:
        """Close every connection after its pending bytes are written."""
        for session in tuple(self._sessions):
            session.end()

    @abstractmethod
    def principal_for(self, sock: socket.socket) -> Principal:
        """Return the principal of a client.

        Raises:
            OSError: the client has left.
        """

    @abstractmethod
    def admit(self, sock: socket.socket, principal: Principal) -> None:
        """Accept or refuse a client. Never blocks."""

    def admit_at_once(self, sock: socket.socket) -> None:
        """Admit a client immediately. For tests."""
        try:
            self._admit_or_close(sock, self.principal_for(sock))
        except OSError:
            sock.close()  # the client has left already

    async def _accept(self, listener: Accepts) -> None:
        while not self._ended:
            with trio.CancelScope() as self._accepting:
                await listener.accept_forever(self._arrived, self._accept_failed)
            await self._resumed.wait()

    def _arrived(self, sock: socket.socket) -> None:
        try:
            principal = self.principal_for(sock)
        except OSError:
            sock.close()  # the client has left already
            return
        self._arrivals.add(sock, principal)

    async def _admit_arrivals(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.CancelScope() as self._admitting:
            task_status.started()
            while True:
                await self._arrivals.wait()
                for _ in range(min(_ADMITTED_PER_PASS, len(self._arrivals))):
                    sock, principal = self._arrivals.take()
                    if is_closed(sock):
                        sock.close()
                        continue
                    # A client that sends no more has probably left: admit one of these per pass.
                    last = will_send_no_more(sock)
                    self._admit_or_close(sock, principal)
                    if last:
                        break
                await trio.lowlevel.checkpoint()

    def _admit_or_close(self, sock: socket.socket, principal: Principal) -> None:
        """Admit a client; a bug ends its connection and not the daemon."""
        try:
            self.admit(sock, principal)
        except Exception:
            self._log.exception("a client was not admitted: internal error")
            sock.close()

    def _add_session(self, session: S, left: Callable[[], None] = lambda: None) -> None:
        """Give a client a place; `left` is called once when the place is released."""
        self._placed[session] = left
        self._start_session(session)

    def _start_session(self, session: S) -> None:
        self._sessions.add(session)
        self._telemetry.session_opened()
        self._nursery.start_soon(self._run, session)

    def _make_room(self, owner: Hashable, among: Iterable[S] | None = None) -> bool:
        """Free the place of an idle client for a new client of `owner`; return whether one was freed."""
        now = trio.current_time()
        if len(self._sessions) >= len(self._placed) + MOST_LEAVING:
            return False
        if now < self._failed_searches.get(owner, -math.inf) + _POLL_S:
            return False
        session = connection_to_evict(self._placed if among is None else among, owner, now)
        if session is None:
            if len(self._failed_searches) >= _MAX_FAILED_SEARCHES:
                self._failed_searches.clear()
            self._failed_searches[owner] = now
            return False
        self._release_place(session)
        session.make_room()
        return True

    def _release_place(self, session: S) -> None:
        left = self._placed.pop(session, None)
        if left is not None:
            left()

    async def _run(self, session: S) -> None:
        try:
            await session.run()
        except Exception:
            # A bug in one session must not end the others.
            self._log.exception("connection ended by an internal error")
        finally:
            self._sessions.discard(session)
            self._release_place(session)
            self._telemetry.session_closed()

    def _accept_failed(self, exc: OSError) -> None:
        self._telemetry.accept_failed()
        if trio.current_time() >= self._next_warning_at:
            self._next_warning_at = trio.current_time() + _ACCEPT_WARNING_S
            fix = f"raise ulimit -n, or lower {self._option}"
            self._log.warning("cannot accept clients", why=exc.strerror, fix=fix)
