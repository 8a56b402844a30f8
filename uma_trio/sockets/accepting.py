"""Accepting clients for as long as the daemon lives, whatever it is short of, and letting them in by turns of their users."""

from __future__ import annotations

import errno
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

import trio

from uma_trio.sockets.principal import Principal

BACKLOG = 1024  # the kernel takes less where net.core.somaxconn is less
# Clients accepted before other tasks run: to accept one and look up its user takes 0.06 ms.
_AT_ONCE = 24
# Each client that arrived holds a descriptor. Twice the connections that HTTP admits by default.
MOST_ARRIVALS = 512
# Errors of accept(2) that concern one client, which has left, and not the listening socket:
# accept(2), "Error handling", and BSDs; trio's SocketListener.accept passes over the same. Not every
# platform has all of these names.
_OF_ONE_CLIENT = {
    number
    for name in (
        *("EPERM", "ECONNABORTED", "EPROTO", "ENETDOWN", "ENOPROTOOPT", "EHOSTDOWN", "ENONET"),
        *("EHOSTUNREACH", "EOPNOTSUPP", "ENETUNREACH", "ENOSR", "ESOCKTNOSUPPORT"),
        *("EPROTONOSUPPORT", "ETIMEDOUT", "ECONNRESET"),
    )
    if (number := getattr(errno, name, None)) is not None
}
# Temporary errors, as in trio.serve_listeners.
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
_PAUSE_S = 0.1


async def accept_forever(
    listening: socket.socket,
    handle: Callable[[socket.socket], None],
    failed: Callable[[OSError], None],
) -> None:
    """Hand each new client of `listening` to `handle`, which must not block; never returns.

    Out of descriptors or memory, it calls `failed`, leaves the client in the backlog and tries
    again a little later; connected clients are not affected. A client whose connection failed
    before it was accepted is passed over.

    Raises:
        OSError: the listening socket itself cannot accept any more.
    """
    while True:
        await trio.lowlevel.wait_readable(listening)
        for _ in range(_AT_ONCE):
            try:
                client, _address = listening.accept()
            except (BlockingIOError, InterruptedError):
                break  # the client has left, or there is no other
            except OSError as exc:
                if exc.errno in _OF_ONE_CLIENT:
                    continue
                if exc.errno not in _OUT_OF_RESOURCES:
                    raise
                failed(exc)
                await trio.sleep(_PAUSE_S)
                break
            handle(client)


async def accept_one(listening: socket.socket) -> socket.socket:
    """Wait for one client of `listening`, which is rarely connected to, and return it, non-blocking.

    Out of descriptors or memory, it leaves the client in the backlog and tries again a little later.

    Raises:
        OSError: the listening socket itself cannot accept any more.
    """
    while True:
        await trio.lowlevel.wait_readable(listening)
        try:
            client, _address = listening.accept()
        except (BlockingIOError, InterruptedError):
            continue
        except OSError as exc:
            if exc.errno in _OF_ONE_CLIENT:
                continue
            if exc.errno not in _OUT_OF_RESOURCES:
                raise
            await trio.sleep(_PAUSE_S)
            continue
        client.setblocking(False)
        return client


class Arrivals:
    """A queue of connected sockets, one lane for each user. For trio's thread only.

    The kernel's backlog is first come, first served, so that it must be kept short. If this queue is full, the
    latest client of the user with the most in it is closed.
    """

    def __init__(self) -> None:
        self._lanes: OrderedDict[Hashable, deque[tuple[socket.socket, Principal]]] = OrderedDict()
        self._length = 0
        self._some = trio.Event()
        self._none = trio.Event()
        self._none.set()

    def __len__(self) -> int:
        return self._length

    def add(self, sock: socket.socket, principal: Principal) -> None:
        """Append a client to the queue of its user."""
        self._lanes.setdefault(_user(principal), deque()).append((sock, principal))
        self._length += 1
        if self._length == 1:
            self._some.set()
            self._none = trio.Event()
        if self._length > MOST_ARRIVALS:
            max(self._lanes.values(), key=len).pop()[0].close()
            self._length -= 1

    def take(self) -> tuple[socket.socket, Principal]:
        """Return the first client of the next user. There must be one."""
        user, lane = self._lanes.popitem(last=False)
        first = lane.popleft()
        if lane:
            self._lanes[user] = lane
        self._length -= 1
        if not self._length:
            self._some = trio.Event()
            self._none.set()
        return first

    async def wait(self) -> None:
        """Wait until there is a client."""
        await self._some.wait()

    async def until_empty(self) -> None:
        await self._none.wait()

    def close(self) -> None:
        """Close the sockets of all waiting clients."""
        while self._length:
            self.take()[0].close()


def _user(principal: Principal) -> Hashable:
    """Return the key of a client's queue: its user and, if known, its process."""
    return (principal.counts_as, principal.pid)
