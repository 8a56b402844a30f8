"""The daemon's socket file: taken by one daemon, reached by one user, removed by its owner.

Who holds the lock on the sibling file ``<socket>.lock`` owns the name. The kernel drops that
lock when the process ends, however it ends, so a killed daemon leaves a stale socket file but
never a false lock. The lock file itself stays: removing it would let two daemons lock two
different files of one name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

import trio

from uma_trio.sockets.accepting import BACKLOG, accept_forever
from uma_trio.sockets.path import lock_of
from uma_trio.sockets.peers import peer_of
from uma_trio.sockets.port import TcpListener

# sizeof(sun_path) less the closing NUL, which Linux would let us do without.
_LONGEST_PATH = 107 if sys.platform == "linux" else 103
_LOOK_S = 2.0
_SOCKET_FLAG = "--socket"


class SocketTaken(Exception):
    """Another process serves on this socket; `pid` is None if unknown.

    `flag` is where the operator chose the path.
    """

    def __init__(self, path: str, pid: int | None, flag: str = _SOCKET_FLAG) -> None:
        holder = f"pid {pid}" if pid is not None else "another process"
        what = f"{path} is already served by {holder}; use that, or {_elsewhere(flag)}"
        if not os.path.lexists(path):
            what = (
                f"{path} is taken by {holder}, and there is no socket there: it is starting, or its "
                f"socket file was removed; wait, end it, or {_elsewhere(flag)}"
            )
        elif _refuses(path):
            what = (
                f"{path} is held by {holder}, which takes no more clients: it is stopping; try again "
                f"when it has ended, or {_elsewhere(flag)}"
            )
        super().__init__(what)
        self.path = path
        self.pid = pid


class SocketUnusable(Exception):
    """The socket cannot be made there; the message is one sentence for the operator."""


class Claim:
    """The right of this process to serve on a path; made by :func:`claim`.

    Held before the model is loaded, so that a second daemon learns at once that it is one.
    """

    def __init__(
        self,
        path: str,
        lock_fd: int,
        inherited: socket.socket | None = None,
        *,
        ours: bool = True,
    ) -> None:
        self._lock_fd = lock_fd
        self._inherited = inherited
        self._ours = ours
        self.path = path

    def listen(self) -> Listener:
        """Make the socket, or take the inherited one.

        Only this user can connect to one that is made: the file is born with mode 0600.

        Raises:
            SocketUnusable: it cannot be created there; no file remains.
        """
        if self._inherited is not None:
            return Listener(self._inherited, self.path, lock_fd=self._lock_fd, ours=self._ours)
        sock = _bind(self.path)
        try:
            return Listener(sock, self.path, lock_fd=self._lock_fd)
        except BaseException:
            sock.close()
            raise

    def release(self) -> None:
        """Let another daemon have the path. Idempotent."""
        if self._lock_fd != -1:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Listener:
    """A listening Unix socket; made by :meth:`Claim.listen`, and good while the claim is held.

    The name is removed in the end if it is `ours`, and not that of a supervisor, which listens on.
    """

    def __init__(
        self, sock: socket.socket, path: str, *, lock_fd: int = -1, ours: bool = True
    ) -> None:
        self.sock = sock
        self.lock_fd = lock_fd
        self._identity: tuple[int, int] | None = _identity(path)
        self._ours = ours
        self.path = path

    def own(self) -> None:
        """Keep the name that another daemon has handed over: its lock file names us, and we remove it."""
        note_holder(self.lock_fd)
        self._ours = True

    def disown(self) -> None:
        """Leave the name to the process that has the socket now: :meth:`close` does not remove it."""
        self._ours = False

    def is_linked(self) -> bool:
        """Whether the name still leads to our socket, and not to a stranger's or nowhere."""
        try:
            return _identity(self.path) == self._identity
        except OSError:
            return False

    async def until_lost(self) -> None:
        """Wait until the name does not lead to this socket any more, so that no client can connect."""
        while self.is_linked():  # noqa: ASYNC110 - no portable notification of file systems
            await trio.sleep(_LOOK_S)

    async def accept_forever(
        self, handle: Callable[[socket.socket], None], failed: Callable[[OSError], None]
    ) -> None:
        """Hand each new client to `handle`; see :func:`uma_trio.sockets.accepting.accept_forever`."""
        await accept_forever(self.sock, handle, failed)

    def stop(self) -> None:
        """Refuse new clients and those in the backlog. Idempotent.

        To be called when no task is in `accept_forever`.
        """
        self.sock.close()

    def close(self) -> None:
        """Stop, and remove the name unless another socket has it. Idempotent."""
        if self._ours and self._identity is not None and self.is_linked():
            os.unlink(self.path)
        self._identity = None
        self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Listeners:
    """One front under several names: the first one is announced and watched.

    `missing` is the reason why a further name is not available.
    """

    def __init__(
        self,
        first: Listener | TcpListener,
        *others: Listener | TcpListener,
        missing: str = "",
    ) -> None:
        self.all = (first, *others)
        self.missing = missing
        self.path = first.path
        self.until_lost = first.until_lost

    async def accept_forever(
        self, handle: Callable[[socket.socket], None], failed: Callable[[OSError], None]
    ) -> None:
        """Hand each new client of any name to `handle`; see :meth:`Listener.accept_forever`."""
        async with trio.open_nursery() as nursery:
            for listener in self.all:
                nursery.start_soon(listener.accept_forever, handle, failed)

    def stop(self) -> None:
        """Accept no more under any name. Idempotent."""
        for listener in self.all:
            listener.stop()

    def close(self) -> None:
        """Stop, and remove the names unless other sockets have them. Idempotent."""
        for listener in self.all:
            listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def claim(
    path: str | os.PathLike[str],
    flag: str = _SOCKET_FLAG,
    *,
    inherited: socket.socket | None = None,
) -> Claim:
    """Take `path`, which was chosen by `flag`, for this process; remove a stale socket there.

    With an `inherited` socket, which listens there already, nothing is removed. When it raises, only
    the lock file remains.

    Raises:
        SocketTaken: another daemon holds the lock, or some process answers on the socket.
        SocketUnusable: the path is too long, or holds something that we must not remove.
    """
    name = os.fspath(path)
    if problem := too_long(name):
        raise SocketUnusable(f"{problem}; {_elsewhere(flag)}")
    lock_fd = _take_lock(name, flag)
    try:
        if inherited is None:
            _remove_stale(name, flag)
    except BaseException:
        os.close(lock_fd)
        raise
    return Claim(name, lock_fd, inherited, ours=inherited is None)


def handed_claim(path: str, sock: socket.socket, lock_fd: int) -> Claim:
    """Return the claim to a name whose lock and socket another daemon is handing over.

    Until :meth:`Listener.own` the name is the other's: it is not removed, and its lock file not changed.
    """
    return Claim(path, lock_fd, sock, ours=False)


def note_holder(lock_fd: int) -> None:
    """Write this process into the lock file that it holds; nothing if `lock_fd` is -1."""
    if lock_fd != -1:
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)


def too_long(path: str | os.PathLike[str]) -> str:
    """Say by how much a path is longer than the system takes for a socket; "" if it is not."""
    excess = len(os.fsencode(path)) - _LONGEST_PATH
    if excess <= 0:
        return ""
    return f"{path} is {excess} bytes too long: the system takes {_LONGEST_PATH} for a socket"


def _identity(path: str) -> tuple[int, int]:
    info = os.lstat(path)
    return info.st_dev, info.st_ino


def _elsewhere(flag: str) -> str:
    return f"choose another path with {flag}"


def _take_lock(path: str, flag: str) -> int:
    lock_path = lock_of(path)
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno == errno.ENOENT:
            folder = os.path.dirname(path)
            what = f"there is no folder {folder}; create it, or {_elsewhere(flag)}"
            raise SocketUnusable(what) from exc
        why = "it is a symbolic link" if exc.errno == errno.ELOOP else exc.strerror
        what = f"cannot open the lock file {lock_path}: {why}; mend that, or {_elsewhere(flag)}"
        raise SocketUnusable(what) from exc
    try:
        info = os.fstat(fd)
        # A second link could be any file of this user, and it is written below.
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink != 1:
            raise SocketUnusable(f"{lock_path} is not a plain file of this user; remove it")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SocketTaken(path, _read_pid(fd), flag) from None
        note_holder(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_pid(lock_fd: int) -> int | None:
    try:
        return int(os.pread(lock_fd, 32, 0))
    except ValueError:
        return None  # the holder has the lock and has not written yet


def _remove_stale(path: str, flag: str) -> None:
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise SocketUnusable(f"cannot look at {path}: {exc.strerror}") from exc
    if not stat.S_ISSOCK(info.st_mode):
        raise SocketUnusable(f"{path} exists and is not a socket; {_elsewhere(flag)}")
    if info.st_uid != os.geteuid():
        raise SocketUnusable(f"{path} belongs to user {info.st_uid}; {_elsewhere(flag)}")
    _refuse_if_answered(path, flag)
    os.unlink(path)


def _refuse_if_answered(path: str, flag: str) -> None:
    # This process holds the lock, so no uma-trio serves there; another program may.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            raise SocketTaken(path, None, flag) from None  # its backlog is full: it is alive
        except OSError as exc:
            raise SocketUnusable(f"cannot probe {path}: {exc.strerror}") from exc
        raise SocketTaken(path, peer_of(probe).pid, flag)


def _refuses(path: str) -> bool:
    """Return whether there is a socket without a listener."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def _bind(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if sys.platform == "linux":
            os.fchmod(sock.fileno(), 0o600)  # the file is then born with this mode
        try:
            sock.bind(path)
        except OSError as exc:
            where = Path(path).parent
            raise SocketUnusable(f"cannot make a socket in {where}: {exc.strerror}") from exc
        if sys.platform != "linux":
            os.chmod(path, 0o600)  # before listen, so that no client can connect earlier
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock
