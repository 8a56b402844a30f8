"""Listening on a TCP port."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable
from typing import Self

import trio

from uma_trio.sockets.accepting import BACKLOG, accept_forever
from uma_trio.sockets.address import Address

_OTHER_LOOPBACK = {"127.0.0.1": "::1", "::1": "127.0.0.1"}
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class PortUnusable(Exception):
    """The daemon cannot listen there; the message is one sentence for the operator.

    `is_missing` is whether the machine does not have the address, as `::1` where IPv6 is switched off.
    """

    def __init__(self, message: str, *, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_missing = is_missing


class TcpListener:
    """A listening TCP port, which has no lock. `path` is the address that clients use."""

    lock_fd = -1

    def __init__(self, sock: socket.socket, path: str = "") -> None:
        self.sock = sock
        self.path = path

    @property
    def port(self) -> int:
        """Which it is."""
        return int(self.sock.getsockname()[1])

    async def accept_forever(
        self, handle: Callable[[socket.socket], None], failed: Callable[[OSError], None]
    ) -> None:
        """Hand each new client to `handle`; see :func:`uma_trio.sockets.accepting.accept_forever`."""
        await accept_forever(self.sock, handle, failed)

    async def until_lost(self) -> None:
        """Wait forever: no process can take a port from its listener."""
        await trio.sleep_forever()

    def own(self) -> None:
        """Keep the port that another daemon has handed over; there is no name to remove."""

    def disown(self) -> None:
        """Do nothing: there is no name to remove."""

    def stop(self) -> None:
        """Accept no more. Idempotent."""
        self.sock.close()

    def close(self) -> None:
        """Stop. Idempotent."""
        self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class PortClaim:
    """The claim to a port, as :class:`uma_trio.sockets.listener.Claim` is to a name."""

    def __init__(self, address: Address, flag: str, handed: socket.socket | None = None) -> None:
        """Take the port, which was chosen by `flag`. Raises :class:`PortUnusable`.

        Clients that connect before :meth:`listen` wait in the backlog: only listening claims a port. A
        socket that was `handed` over listens there already.
        """
        self.path = address.framed
        self._sock = bound(address, flag) if handed is None else handed

    def listen(self) -> TcpListener:
        """Return what accepts on it."""
        return TcpListener(self._sock, self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()


def bound(address: Address, flag: str) -> socket.socket:
    """Return a socket that listens on a port, which was chosen by `flag`. Raises :class:`PortUnusable`."""
    where = address.url.removeprefix("http://")
    try:
        family, kind, protocol, _, found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise PortUnusable(
            f"{flag} {where}: {error.strerror}; name another host",
            is_missing=error.errno in _NO_SUCH_ADDRESS,
        ) from None
    try:
        sock.setblocking(False)
        if sys.platform == "win32":
            # There SO_REUSEADDR would let a second process take the port from the first.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(found)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        taken = error.errno == errno.EADDRINUSE
        why = "something else listens there" if taken else error.strerror
        raise PortUnusable(
            f"{flag} {where}: {why}; choose another port",
            is_missing=error.errno in _NO_SUCH_ADDRESS,
        ) from None
    return sock


def other_loopback(sock: socket.socket) -> Address | None:
    """Return the port of a listening socket at the other loopback address; None if it does not listen on one.

    Some clients take `localhost` for 127.0.0.1, others for ::1.
    """
    if sock.family == socket.AF_UNIX:
        return None
    host, port = sock.getsockname()[:2]
    other = _OTHER_LOOPBACK.get(host)
    return None if other is None else Address(other, port)
