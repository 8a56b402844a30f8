"""The peer of a connected socket: its process, its user, and whether it has closed.

Imports no trio: clients without it use this module, too. The branches for Windows were never run.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import struct
import sys
from typing import Final

from attrs import frozen

from uma_trio.sockets import sock_diag
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.sock_diag import ends_of, uid_of

# sys/un.h on macOS: level 0 is SOL_LOCAL; struct xucred begins with version and uid.
_SOL_LOCAL = 0
_LOCAL_PEERCRED = 0x001
_LOCAL_PEERPID = 0x002
_XUCRED_HEAD = struct.Struct("=II")
_XUCRED_SIZE = 76

_connections = itertools.count(1)


@frozen
class Peer:
    """The process at the other end, as the kernel attests it.

    These are the credentials at the time of ``connect()``: a descriptor that was passed on or
    inherited keeps them. `pid` is None where the platform does not report it.
    """

    uid: int
    pid: int | None


def peer_of(sock: socket.socket) -> Peer:
    """Return the process at the other end of the connected Unix socket `sock`.

    Raises:
        OSError: if `sock` is not a connected Unix socket.
    """
    if sys.platform == "linux":
        size = struct.calcsize("iII")
        pid, uid, _ = struct.unpack(
            "iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        return Peer(uid, pid if pid > 0 else None)
    else:  # noqa: RET505 - the platform check has to span both for the type checker
        return _peer_of_bsd(sock)


def _peer_of_bsd(sock: socket.socket) -> Peer:
    raw = sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_SIZE)
    _, uid = _XUCRED_HEAD.unpack_from(raw)
    try:
        pid: int | None = sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
    except OSError:
        pid = None
    return Peer(uid, pid)


def principal_of(sock: socket.socket, operator_uid: int) -> Principal:
    """Return a client's principal as the kernel attests it when the client connects. Never waits.

    A user is the same principal on a Unix socket and on a TCP port of this machine. The user `operator_uid`, which
    runs the daemon, is an operator.

    Raises:
        OSError: `sock` is not connected any more.
    """
    connection = next(_connections)
    if not is_tcp(sock):
        peer = peer_of(sock)
        # All users outside this user namespace share one number, which identifies none.
        known = None if peer.uid == sock_diag.unmapped_uid() else peer.uid
        return Principal(
            connection=connection, uid=known, pid=peer.pid, is_operator=known == operator_uid
        )
    ends = ends_of(sock)
    uid = uid_of(ends)
    return Principal(
        connection=connection, host=str(ends.source), uid=uid, is_operator=uid == operator_uid
    )


def attests_users() -> bool:
    """Return whether the kernel reports the user of a connection to a local port; tries it with one."""
    with socket.socket() as listening, socket.socket() as client:
        try:
            listening.bind(("127.0.0.1", 0))
            listening.listen(1)
            client.connect(listening.getsockname())
            accepted, _ = listening.accept()
            with accepted:
                return uid_of(ends_of(accepted)) == os.geteuid()
        except OSError:
            return False


def is_closed(sock: socket.socket) -> bool:
    """Return whether the peer has closed its socket, and not only ended its sending side.

    Both read as EOF. ``poll`` reports POLLHUP for the first only (the second is POLLRDHUP).
    """
    poller = select.poll()
    poller.register(sock, 0)  # POLLHUP and POLLERR are always reported
    return any(mask & (select.POLLHUP | select.POLLERR) for _, mask in poller.poll(0))


def will_send_no_more(sock: socket.socket) -> bool:
    """Whether the peer has ended its sending side, if not its whole socket. Never on systems other than Linux."""
    wanted = getattr(select, "POLLRDHUP", 0)
    poller = select.poll()
    poller.register(sock, wanted)
    return any(mask & wanted for _, mask in poller.poll(0))


HAS_UNIX_SOCKETS: Final = hasattr(socket, "AF_UNIX")
NO_UID: Final = -1
"""The uid of this process where users have no number: equals no attested uid."""


def own_uid() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else NO_UID


def is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)
