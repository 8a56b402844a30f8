"""Accepting clients for as long as the daemon lives, whatever it is short of."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import trio

BACKLOG = 1024  # the kernel takes less where net.core.somaxconn is less
# Clients accepted before other tasks have their turn: to accept one and to ask whose it is takes 0.06 ms.
_AT_ONCE = 24
# The accept errors that are those of one client, which is gone, and not of the listening socket:
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
# Those that say "not now" rather than "never"; trio.serve_listeners has the same.
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
_PAUSE_S = 0.1


async def accept_forever(
    listening: socket.socket,
    handle: Callable[[socket.socket], None],
    failed: Callable[[OSError], None],
) -> None:
    """Hand each new client of `listening` to `handle`, which must not block; never returns.

    Out of descriptors or memory, it tells `failed`, leaves the client in the backlog and tries
    again a little later: those who are connected are not disturbed. A client whose connection failed
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
                break  # the client gave up before we came, or there is no other
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
