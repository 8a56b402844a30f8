"""Where the daemon is, and how a socket is connected to it: a Unix socket, or a TCP port with a token."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
import stat

from uma_trio.client.errors import ConnectionFailed
from uma_trio.sockets.address import FRAMED_TCP, LOCALHOST, parse_framed
from uma_trio.sockets.path import default_socket, holder_of, socket_to_connect
from uma_trio.sockets.peers import HAS_UNIX_SOCKETS, own_uid, peer_of
from uma_trio.sockets.sock_diag import listener_uid
from uma_trio.sockets.token import TokenUnusable, read_token, token_file

TCP_S = 10.0
"""How long a connection to a TCP port may take."""


def socket_path_of(path: str | os.PathLike[str] | None) -> str:
    """Return `path`, or the default path of a daemon."""
    return os.fspath(
        path or os.environ.get("UMA_SOCKET") or os.environ.get("UMA_SOCK") or socket_to_connect()
    )


class DaemonAddress:
    """Where a daemon serves. `token` is what its clients show: None on a Unix socket.

    Raises:
        ConnectionFailed: it is no address that a daemon serves on, or its token cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.token: str | None = None
        self._owner: int | None = None
        try:
            self._address = parse_framed(path)
            if self.is_tcp:
                self.token, self._owner = read_token(token_file())
        except ValueError as error:
            raise ConnectionFailed(f"{path} is not {error}") from None
        except TokenUnusable as error:
            raise ConnectionFailed(str(error)) from None
        if not self.is_tcp and not HAS_UNIX_SOCKETS:
            raise ConnectionFailed(
                f"{path}: Python has no Unix sockets on this system; serve on {FRAMED_TCP}{LOCALHOST}:PORT"
            )

    @property
    def is_tcp(self) -> bool:
        """Whether it is a port, and not a path."""
        return not self._address.path

    def new_socket(self) -> socket.socket:
        """Return a socket that is not connected yet."""
        if not self.is_tcp:
            return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        family = socket.AF_INET6 if ":" in self._address.host else socket.AF_INET
        return socket.socket(family, socket.SOCK_STREAM)

    @property
    def address(self) -> str | tuple[str, int]:
        """What a socket is connected to."""
        return (self._address.host, self._address.port) if self.is_tcp else self.path

    def connect(self, sock: socket.socket) -> None:
        """Connect a blocking socket, or a non-blocking one of a Unix socket, to the daemon of this user.

        Raises:
            ConnectionFailed: no daemon serves there, or another user's process does.
            BlockingIOError: the daemon is too busy to accept (non-blocking sockets only).
        """
        try:
            sock.connect(self.address)
        except BlockingIOError:
            raise
        except OSError as exc:
            raise self._failed(exc) from exc
        self.check(sock)

    def refused(self, number: int) -> ConnectionFailed:
        """Return the error for a connection that ended with this number of the system."""
        return self._failed(OSError(number, os.strerror(number)))

    def check(self, sock: socket.socket) -> None:
        """Check which user's process serves there, before anything is sent. Raises :class:`ConnectionFailed`."""
        if not self.is_tcp:
            uid = peer_of(sock).uid
            if uid != own_uid():
                raise ConnectionFailed(
                    f"{self.path} is served by user {uid}, not by you; nothing was sent"
                )
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = sock.getpeername()[:2]
        there = listener_uid(ipaddress.ip_address(host), port)
        if there is not None and self._owner is not None and there != self._owner:
            raise ConnectionFailed(
                f"{self.path} is served by user {there}, and the token is of user {self._owner}; nothing "
                "was sent"
            )

    def _failed(self, error: OSError) -> ConnectionFailed:
        why = error.strerror or str(error)
        holder = None if self.is_tcp else _holder(self.path, error)
        what = _what_to_do(self.path, error, holder)
        return ConnectionFailed(
            f"cannot reach the daemon at {self.path}: {why}; {what}", holder=holder
        )


def _holder(path: str, error: OSError) -> int | None:
    """Return the process that is starting or stopping at `path`; None if there is none."""
    if isinstance(error, PermissionError) or _is_something_else(path):
        return None
    return holder_of(path)


def _what_to_do(path: str, error: OSError, holder: int | None) -> str:
    """Return the next step for a user that cannot connect."""
    if isinstance(error, PermissionError):
        return "it is another user's, or in a folder that is closed to you"
    if isinstance(error, ConnectionRefusedError) and _is_something_else(path):
        return "that is not a socket; check the path"
    if holder is not None:
        return f"pid {holder} is starting or stopping there; try again in a moment"
    where = "" if path == default_socket() else f" --socket {shlex.quote(path)}"
    return f"start it with `uma-trio serve{where}`"


def _is_something_else(path: str) -> bool:
    """Whether something other than a socket is at `path`; a daemon that stops removes its socket."""
    try:
        return not stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False
