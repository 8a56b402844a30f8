"""Listening sockets that a supervisor made before it started the daemon (sd_listen_fds(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import Final

from attrs import frozen

from uma_trio.sockets.address import Address

_FIRST_FD: Final = 3  # SD_LISTEN_FDS_START
_MOST: Final = 16
_HTTP: Final = "http"  # the name of its socket
_FRAMED_FRONT: Final = "the framed protocol"
_HTTP_FRONT: Final = "HTTP"


@frozen
class Inherited:
    """The sockets of the two fronts, as far as a supervisor passed them. They are non-blocking."""

    framed: socket.socket | None = None
    http: socket.socket | None = None

    @property
    def path(self) -> str | None:
        """The path that the framed protocol is served on."""
        return None if self.framed is None else os.fsdecode(self.framed.getsockname())

    @property
    def http_address(self) -> str | None:
        """The address that HTTP is served on, as it would be typed."""
        return None if self.http is None else _typed(self.http)

    def close(self) -> None:
        """Close what was passed. Idempotent; the supervisor keeps its own descriptors."""
        for sock in (self.framed, self.http):
            if sock is not None:
                sock.close()


NONE: Final = Inherited()


class NotUsable(Exception):
    """What was passed cannot be served on; the message is one sentence for the operator."""


def inherited_sockets(env: MutableMapping[str, str], first_fd: int = _FIRST_FD) -> Inherited:
    """Take the sockets that were passed to this process, and their variables out of `env`.

    A socket named ``http`` is for HTTP, as is one of TCP; a Unix socket of any other name is for the
    framed protocol.

    Raises:
        NotUsable: two sockets are for the same front, or one is no listening stream socket.
    """
    pid, count, names = (
        env.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
    )
    if pid != str(os.getpid()) or not count.isdecimal():
        return NONE
    if int(count) > _MOST:
        raise NotUsable(f"LISTEN_FDS: {count} sockets were passed; the daemon has use for two")
    named = [*names.split(":"), *[""] * int(count)] if names else [""] * int(count)
    with ExitStack() as adopted:
        found: dict[str, socket.socket] = {}
        for fd, name in zip(range(first_fd, first_fd + int(count)), named, strict=False):
            sock = adopted.enter_context(_adopted(fd))
            is_http = name == _HTTP or sock.family != socket.AF_UNIX
            front = _HTTP_FRONT if is_http else _FRAMED_FRONT
            if found.setdefault(front, sock) is not sock:
                raise NotUsable(
                    f"LISTEN_FDS: two sockets were passed for {front}; pass one for each"
                )
            if sock.type != socket.SOCK_STREAM or not _listens(sock):
                raise NotUsable(f"LISTEN_FDS: descriptor {fd} is no listening stream socket")
            sock.setblocking(False)
        adopted.pop_all()
        return Inherited(found.get(_FRAMED_FRONT), found.get(_HTTP_FRONT))


def _adopted(fd: int) -> socket.socket:
    try:
        os.set_inheritable(fd, False)
        return socket.socket(fileno=fd)
    except OSError as error:
        raise NotUsable(f"LISTEN_FDS: descriptor {fd} is no socket: {error.strerror}") from None


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _typed(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return Address(path=os.fsdecode(sock.getsockname())).url
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
