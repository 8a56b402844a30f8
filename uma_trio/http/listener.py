"""The port or the socket file that the HTTP side listens on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from uma_trio.service.front import Listener
from uma_trio.sockets import listener as unix
from uma_trio.sockets.accepting import BACKLOG, accept_forever
from uma_trio.sockets.address import Address


class PortUnusable(Exception):
    """The daemon cannot listen there; the message is one sentence for the operator."""


class TcpListener:
    """A listening TCP port. It has no lock, and belongs to `ours` unless a supervisor made it."""

    lock_fd = -1

    def __init__(self, sock: socket.socket, *, ours: bool = True) -> None:
        self.sock = sock
        self.may_be_handed = ours

    @property
    def port(self) -> int:
        """Which it is."""
        return int(self.sock.getsockname()[1])

    async def accept_forever(
        self, handle: Callable[[socket.socket], None], failed: Callable[[OSError], None]
    ) -> None:
        """Hand each new client to `handle`; see :func:`uma_trio.sockets.accepting.accept_forever`."""
        await accept_forever(self.sock, handle, failed)

    def disown(self) -> None:
        """Leave the port to who has the socket now; there is no name to remove."""

    def stop(self) -> None:
        """Accept no more. Idempotent."""
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def listening(
    address: Address, inherited: socket.socket | None = None, lock_fd: int = -1
) -> Iterator[Listener]:
    """Listen on an address until the block ends; an `inherited` socket does so already.

    With `lock_fd`, the lock of its name, it is ours from now on.

    Raises:
        PortUnusable: it is taken, or cannot be had.
        uma_trio.sockets.listener.SocketTaken: the Unix socket is another daemon's.
        uma_trio.sockets.listener.SocketUnusable: it cannot be made there.
    """
    if address.path:
        if inherited is not None and lock_fd != -1:
            taken = unix.handed_claim(address.path, inherited, lock_fd)
        else:
            taken = unix.claim(address.path, "--http unix:PATH", inherited=inherited)
        with taken as name, name.listen() as listener:
            yield listener
    else:
        with TcpListener(_bind(address) if inherited is None else inherited) as listener:
            yield listener


def _bind(address: Address) -> socket.socket:
    where = f"{address.host}:{address.port}"
    try:
        family, kind, protocol, _, found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise PortUnusable(f"--http {where}: {error.strerror}; name another host") from None
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(found)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        taken = error.errno == errno.EADDRINUSE
        why = "something else listens there" if taken else error.strerror
        raise PortUnusable(f"--http {where}: {why}; choose another port") from None
    return sock
