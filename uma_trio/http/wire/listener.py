"""The port or the socket file that the HTTP side listens on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from uma_trio.service.front import FrontListener
from uma_trio.sockets import listener as unix
from uma_trio.sockets.address import Address
from uma_trio.sockets.port import TcpListener, bound


@contextmanager
def listening(
    address: Address, inherited: socket.socket | None = None, lock_fd: int = -1
) -> Iterator[FrontListener]:
    """Listen on an address until the block ends; an `inherited` socket does so already.

    With `lock_fd`, the lock of its name, it is ours from now on.

    Raises:
        uma_trio.sockets.port.PortUnusable: it is taken, or cannot be had.
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
        with TcpListener(bound(address, "--http") if inherited is None else inherited) as listener:
            yield listener
