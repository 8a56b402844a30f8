"""Passing listening sockets, and the locks of their names, from a daemon to the one that replaces it.

The old daemon listens on ``<socket>.handover``, which only its own user can reach. The conversation has
five steps, each bounded in time. If the new daemon ends before the last one, the old one continues to serve; if the
old one ends after the second, the new one serves:

1. The new daemon connects when its model is loaded, and sends ``T`` (take). A connection that is
   closed without it was only a probe (:func:`offers_handover`).
2. The old one stops accepting, and sends every listening socket with the lock of its name in one message
   (SCM_RIGHTS, unix(7)). A lock of flock(2) belongs to the open file, so that no name is free for an
   instant; clients that connect meanwhile wait in the backlog.
3. The new one makes its fronts of them, and sends ``S``: it could accept.
4. The old one sends ``C`` (confirmed): it will not accept again. If the time is over it sends ``N``, and
   serves on.
5. The new one reads that, closes its end and accepts. If it ends with the ``C`` unread, the old one sees
   ECONNRESET and not an orderly end (Linux), and accepts again.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import socket
from collections.abc import Sequence
from typing import Final, Literal, Self

import trio
from attrs import frozen

from uma_trio.sockets.accepting import accept_one
from uma_trio.sockets.address import FRAMED_TCP
from uma_trio.sockets.listener import too_long
from uma_trio.sockets.path import default_socket
from uma_trio.sockets.peers import HAS_UNIX_SOCKETS, peer_of

Role = Literal["framed", "shared", "http", "agent"]
_TAKE: Final = b"T"
_SERVING: Final = b"S"
_CONFIRMED: Final = b"C"
_NOT_YOURS: Final = b"N"
_MOST_BYTES: Final = 65_536
_MOST_FDS: Final = 16
# For the first byte of a process of this user that has connected: it sends it at once.
_TO_ASK_S: Final = 2.0
# From the sockets to `S`: the new daemon has loaded its model, and only makes its fronts. Nobody is accepted then.
_TO_SERVE_S: Final = 15.0
# To read one byte.
_TO_READ_S: Final = 2.0
# More than an old daemon takes that first waits for another one, which fails.
_PATIENCE_S: Final = 30.0
_BACKLOG: Final = 1
_CLOEXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # or a child started now would keep them


@frozen
class Handed:
    """A listening socket: what it is for, its name, and the descriptor of the lock; -1 if it has none."""

    role: Role
    name: str
    sock: socket.socket
    lock_fd: int = -1

    def close(self) -> None:
        """Close the socket, and let go of its name. Once."""
        self.sock.close()
        if self.lock_fd != -1:
            os.close(self.lock_fd)


class HandoverFailed(Exception):
    """The running daemon did not hand over; the message is one sentence for the operator."""


def handover_path(path: str) -> str:
    """Return where the daemon on `path`, which may be ``tcp:HOST:PORT``, accepts requests to hand over.

    A port has no folder, so that its name is in that of the default socket.
    """
    if path.startswith(FRAMED_TCP):
        folder = os.path.dirname(default_socket())
        path = os.path.join(folder, f"uma-{path.replace(':', '-')}")
    return f"{path}.handover"


class Giver:
    """The old daemon's end. Made by :meth:`at`; close it."""

    def __init__(self, listening: socket.socket, path: str) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._path = path
        self._ours = True

    @classmethod
    def at(cls, path: str) -> Self:
        """Listen on ``PATH.handover``; the lock of `path` must be held.

        Raises:
            OSError: that cannot be; `strerror` is why, `filename` the name.
        """
        name = handover_path(path)
        if problem := too_long(name):
            raise OSError(errno.ENAMETOOLONG, problem, name)
        if not HAS_UNIX_SOCKETS:
            raise OSError(errno.EAFNOSUPPORT, "Python has no Unix sockets on this system", name)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if path.startswith(FRAMED_TCP):
                os.makedirs(os.path.dirname(name), mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)  # of a daemon that was killed, or that we replace
            os.fchmod(sock.fileno(), 0o600)
            sock.bind(name)
            os.chmod(name, 0o600)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            why = error.strerror or str(error)
            raise OSError(error.errno or errno.EIO, why, name) from error
        except BaseException:
            sock.close()
            raise
        return cls(sock, name)

    async def asked(self) -> Asked:
        """Wait for a daemon of this user that requests the sockets.

        Cancelled, it keeps no connection. Out of descriptors, it tries again a little later.

        Raises:
            OSError: the listening socket itself is broken.
        """
        while True:
            sock = await accept_one(self._listening)
            if _is_ours(sock) and await _requests_handover(sock):
                return Asked(trio.socket.from_stdlib_socket(sock))
            sock.close()

    def disown(self) -> None:
        """Leave the name to the new daemon, which creates it again."""
        self._ours = False

    def close(self) -> None:
        """Listen no more, and remove the name unless it was disowned. Idempotent."""
        if self._ours:
            self._ours = False
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._listening.close()


class Asked:
    """A new daemon that waits for the sockets."""

    def __init__(self, channel: trio.socket.SocketType) -> None:
        self._channel = channel

    async def give(self, handed: Sequence[Handed]) -> bool:
        """Send the sockets; return whether the new daemon has confirmed them, and accepts.

        The sockets of this process stay open. Takes at most 15 s, after which the new daemon is ignored; 2 s more if it does not read
        that it can begin. Cancelled before that, it is as False.
        """
        handed_over = False
        try:
            with trio.move_on_after(_TO_SERVE_S):
                await self._send(handed)
                if await self._channel.recv(1) == _SERVING:
                    await self._channel.send(_CONFIRMED)
                    handed_over = True
                    handed_over = await self._was_read()
        except OSError:
            handed_over = False
        finally:
            if not handed_over:
                self._take_back()
            self._channel.close()
        return handed_over

    async def _send(self, handed: Sequence[Handed]) -> None:
        about = [
            {"role": each.role, "name": each.name, "lock": each.lock_fd != -1} for each in handed
        ]
        fds = [fd for each in handed for fd in (each.sock.fileno(), each.lock_fd) if fd != -1]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        await self._channel.sendmsg([json.dumps(about).encode() + b"\n"], rights)

    def _take_back(self) -> None:
        """Notify the new daemon that this one continues to serve. Never waits."""
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._channel.fileno())) as sock,
        ):
            sock.send(_NOT_YOURS)

    async def _was_read(self) -> bool:
        """Whether the other end has read what was sent last, or still may. Never cancelled half-way."""
        with trio.move_on_after(_TO_READ_S, shield=True):
            try:
                await self._channel.recv(1)
            except ConnectionResetError:
                return False
        return True


class TakenSockets:
    """The new daemon's end: the sockets, and the connection to confirm them. Must be closed."""

    def __init__(self, handed: Sequence[Handed], channel: trio.socket.SocketType) -> None:
        self.handed = tuple(handed)
        self._channel = channel

    async def serving(self) -> None:
        """Say that everything is there to accept, and wait until the old daemon has let go, or died.

        To be called before a client is accepted. Cancelled, the old daemon continues to serve.

        Raises:
            HandoverFailed: it serves on; the sockets are its own.
        """
        verdict = _NOT_YOURS
        try:
            with trio.move_on_after(_TO_SERVE_S):
                with contextlib.suppress(BrokenPipeError):  # its last bytes can still be read
                    await self._channel.send(_SERVING)
                try:
                    verdict = await self._channel.recv(1)
                except ConnectionResetError:
                    verdict = b""
        finally:
            self.close()
        # A living daemon sends C or N. A dead one has left the sockets to this process alone.
        if verdict not in (_CONFIRMED, b""):
            raise HandoverFailed(
                "the running daemon has taken its sockets back and serves on: this one was not ready within"
                f" {_TO_SERVE_S:g} s; try again, or stop it with `uma-trio stop`"
            )

    def close(self) -> None:
        """Close the connection: unless confirmed, the old daemon continues to serve. Idempotent."""
        self._channel.close()


async def offers_handover(path: str) -> bool:
    """Return whether a daemon of this user serves on `path` and would hand its sockets over.

    Raises:
        HandoverFailed: another user's process listens there, or it does not answer.
    """
    channel = await _reached(path)
    if channel is None:
        return False
    channel.close()
    return True


async def take_over(path: str) -> TakenSockets | None:
    """Take the sockets of the daemon that serves on `path`; None if none does that could hand them over.

    None, too, if it ends first, or hands over to another one. The caller owns the sockets and the locks.

    Raises:
        HandoverFailed: there is one, and it does not hand over.
    """
    channel = await _reached(path)
    if channel is None:
        return None
    try:
        with trio.fail_after(_PATIENCE_S):
            await channel.send(_TAKE)
            handed = await _received(channel)
    except (BrokenPipeError, ConnectionResetError):
        channel.close()
        return None
    except (trio.TooSlowError, OSError, ValueError, LookupError) as error:
        channel.close()
        why = "it said nothing" if isinstance(error, trio.TooSlowError) else error
        raise HandoverFailed(
            f"the daemon on {path} did not hand over ({why}); it serves on: stop it with"
            " `uma-trio stop`, or try again"
        ) from error
    except BaseException:
        channel.close()
        raise
    if handed is None:
        channel.close()
        return None
    return TakenSockets(handed, channel)


async def _reached(path: str) -> trio.socket.SocketType | None:
    """Return a connection to the daemon on `path`, of this user; None if there is none. Never waits."""
    name = handover_path(path)
    await trio.lowlevel.checkpoint()
    if too_long(name) or not HAS_UNIX_SOCKETS:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(name)
        if _is_ours(sock):
            return trio.socket.from_stdlib_socket(sock)
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except BlockingIOError:
        sock.close()
        raise HandoverFailed(f"{name}: other daemons wait there already; try again later") from None
    except OSError as error:
        sock.close()
        raise HandoverFailed(f"{name}: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise
    sock.close()
    raise HandoverFailed(f"{name} is another user's; nothing was taken")


async def _requests_handover(sock: socket.socket) -> bool:
    """Return whether the peer sends the byte that requests the sockets. Cancelled, `sock` is closed."""
    sock.setblocking(False)
    said = b""
    try:
        with trio.move_on_after(_TO_ASK_S):
            await trio.lowlevel.wait_readable(sock)
            said = sock.recv(1)
    except OSError:
        return False
    except BaseException:
        sock.close()
        raise
    return said == _TAKE


async def _received(channel: trio.socket.SocketType) -> list[Handed] | None:
    """Return the next bytes; None if the other end has closed. Cancelled, it keeps nothing."""
    size = socket.CMSG_SPACE(_MOST_FDS * array.array("i").itemsize)
    text, rights, _flags, _address = await channel.recvmsg(_MOST_BYTES, size, _CLOEXEC)
    if not text:
        return None
    fds: list[int] = []
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received = array.array("i")
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
            fds += received
    try:
        while not text.endswith(b"\n"):
            more = await channel.recv(_MOST_BYTES)
            if not more:
                raise ValueError("it closed the connection")
            text += more
        about = [(each["role"], each["name"], bool(each["lock"])) for each in json.loads(text)]
        if len(fds) != sum(1 + has_lock for _, _, has_lock in about):
            raise ValueError("descriptors are missing")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    places = iter(fds)
    return [
        Handed(role, name, _as_socket(next(places)), next(places) if has_lock else -1)
        for role, name, has_lock in about
    ]


def _is_ours(sock: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    return peer_of(sock).uid == os.geteuid()


def _as_socket(fd: int) -> socket.socket:
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return sock
