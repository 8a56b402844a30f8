"""Passing listening sockets, and the locks of their names, from a daemon to the one that replaces it.

The old daemon listens on ``<socket>.handover``, which only its own user can reach. The new one connects
when its model is loaded. The old one stops accepting and sends every listening socket with the lock of
its name in one message (SCM_RIGHTS, unix(7)). A lock of flock(2) belongs to the open file, so that no
name is free for an instant; and who connects meanwhile waits in the backlog. When the new one
serves it says so, and the old one drains. If it ends before, the old one accepts again.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from collections.abc import Sequence
from typing import Final, Literal, Self

import trio
from attrs import frozen

from uma_trio.sockets.peers import peer_of

Role = Literal["framed", "shared", "http"]
_SERVING: Final = b"S"
_MOST_BYTES: Final = 65_536
_MOST_FDS: Final = 16
_PATIENCE_S: Final = 30.0
_BACKLOG: Final = 1


@frozen
class Handed:
    """A listening socket: what it is for, its name, and the descriptor of the lock; -1 if it has none."""

    role: Role
    name: str
    sock: socket.socket
    lock_fd: int = -1


class HandoverFailed(Exception):
    """The running daemon did not hand over; the message is one sentence for the operator."""


def handover_path(path: str) -> str:
    """Return where the daemon on `path` can be asked to hand over."""
    return f"{path}.handover"


class Giver:
    """The old daemon's end. Made by :meth:`at`; close it."""

    def __init__(self, listening: socket.socket, path: str) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._path = path
        self._ours = True

    @classmethod
    def at(cls, path: str) -> Self | None:
        """Listen beside the socket at `path`, whose lock must be held; None if that cannot be."""
        name = handover_path(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if os.path.lexists(name):
                os.unlink(name)  # of a daemon that was killed, or that we replace
            os.fchmod(sock.fileno(), 0o600)
            sock.bind(name)
            os.chmod(name, 0o600)
            sock.listen(_BACKLOG)
            return cls(sock, name)
        except OSError:
            sock.close()
            return None

    async def asked(self) -> Asked:
        """Wait for a daemon of this user that wants to take over."""
        while True:
            await trio.lowlevel.wait_readable(self._listening)
            with contextlib.suppress(OSError):  # it has left again
                sock, _ = self._listening.accept()
                if _is_ours(sock):
                    return Asked(trio.socket.from_stdlib_socket(sock))
                sock.close()

    def disown(self) -> None:
        """Leave the name to who has taken over, and makes it anew."""
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

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._sock = sock

    async def give(self, handed: Sequence[Handed]) -> bool:
        """Send the sockets; whether the other serves now. Ours stay open. Cancelled, it is as False."""
        about = [
            {"role": each.role, "name": each.name, "lock": each.lock_fd != -1} for each in handed
        ]
        fds = [fd for each in handed for fd in (each.sock.fileno(), each.lock_fd) if fd != -1]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            await self._sock.sendmsg([json.dumps(about).encode() + b"\n"], rights)
            return await self._sock.recv(1) == _SERVING
        except OSError:
            return False
        finally:
            self._sock.close()


class Taken:
    """The new daemon's end: the sockets, and the way to say that they are served. Close it."""

    def __init__(self, handed: Sequence[Handed], channel: socket.socket) -> None:
        self.handed = tuple(handed)
        self._channel: socket.socket | None = channel

    def serving(self) -> None:
        """Let the old daemon go. Idempotent."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(_SERVING)
            self.close()

    def close(self) -> None:
        """End the conversation: the old daemon goes on, unless :meth:`serving` was called. Idempotent."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


async def take_over(path: str) -> Taken | None:
    """Take the sockets of the daemon that serves on `path`; None if none does that could give them.

    The caller owns the sockets and the locks.

    Raises:
        HandoverFailed: there is one, and it does not hand over.
    """
    name = handover_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(name)  # local, and never waits but for a full backlog
        ours = _is_ours(sock)
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise HandoverFailed(f"{name}: {error.strerror}") from error
    if not ours:
        sock.close()
        raise HandoverFailed(f"{name} is another user's; nothing was taken")
    sock.setblocking(False)
    channel = trio.socket.from_stdlib_socket(sock)
    try:
        with trio.fail_after(_PATIENCE_S):
            handed = await _received(channel)
    except (trio.TooSlowError, OSError, ValueError, LookupError) as error:
        channel.close()
        raise HandoverFailed(
            f"the daemon on {path} did not hand over ({error or 'it said nothing'}); it serves on: stop it with"
            " `uma-trio stop`, or try again"
        ) from error
    except BaseException:
        channel.close()
        raise
    return Taken(handed, socket.socket(fileno=channel.detach()))


async def _received(channel: trio.socket.SocketType) -> list[Handed]:
    size = socket.CMSG_SPACE(_MOST_FDS * array.array("i").itemsize)
    text, rights, _flags, _address = await channel.recvmsg(_MOST_BYTES, size)
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
        about = json.loads(text)
        if len(fds) != sum(1 + bool(each["lock"]) for each in about):
            raise ValueError("descriptors are missing")
        places = iter(fds)
        for fd in fds:
            os.set_inheritable(fd, False)
        return [
            Handed(
                each["role"],
                each["name"],
                _adopted(next(places)),
                next(places) if each["lock"] else -1,
            )
            for each in about
        ]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _is_ours(sock: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    return peer_of(sock).uid == os.geteuid()


def _adopted(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return sock
