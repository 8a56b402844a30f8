"""All clients of the HTTP side together: who is let in, who is turned away, and how it ends."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable

from uma_trio.http.connection import Connection
from uma_trio.http.guard import is_listed
from uma_trio.http.router import Router
from uma_trio.http.settings import ServerContext
from uma_trio.service.front import Front
from uma_trio.sockets.peers import principal_of
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.transport import Rejector, Transport

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Type: application/json\r\nContent-Length: 108\r\n\r\n"
    b'{"error":{"message":"too many connections are open","type":"server_error","code":"overloaded"'
    b',"param":null}}'
)


class Server(Front[Connection]):
    """Accepts clients and runs a task for each.

    `allowed_uid` is the user let in on a Unix socket; None for a TCP port. `who` says whom a socket
    belongs to, given the operator's uid.
    """

    def __init__(
        self,
        context: ServerContext,
        router: Router,
        allowed_uid: int | None = None,
        who: Callable[[socket.socket, int], Principal] = principal_of,
    ) -> None:
        super().__init__(context.metrics, context.log, "--http-max-connections")
        self._context = context
        self._router = router
        self._allowed_uid = allowed_uid
        self._who = who
        self._rejector = Rejector()
        self._per_host: Counter[str] = Counter()

    def stop_accepting(self) -> None:
        """Let nobody else in; who is connected gets the answer that is under way, and the end."""
        super().stop_accepting()
        self.end_connections()

    def principal_for(self, sock: socket.socket) -> Principal:
        """Return whom a client is for. Raises OSError if it has left."""
        principal = self._who(sock, os.geteuid())
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return principal

    def admit(self, sock: socket.socket, principal: Principal) -> None:
        """Take over a client's socket: let it in or turn it away. Never blocks."""
        transport = Transport(sock)
        host, by_socket = principal.host, sock.family == socket.AF_UNIX
        if by_socket and principal.uid != self._allowed_uid:
            transport.close()
            return
        if not self._has_place(principal):
            self._rejector.send(
                transport, _BUSY, self._nursery, self._context.settings.linger_quiet_s
            )
            return
        connection = Connection(
            transport,
            self._context,
            self._router,
            principal,
            by_socket=by_socket,
        )
        self._per_host[host] += 1
        self._add_session(connection, lambda: self._left(host))

    def _left(self, host: str) -> None:
        self._per_host[host] -= 1
        if not self._per_host[host]:
            del self._per_host[host]

    def _has_place(self, principal: Principal) -> bool:
        host, owner = principal.host, principal.counts_as
        settings = self._context.settings
        local = host in ("", "127.0.0.1", "::1") or is_listed(host, settings.proxies)
        most = settings.max_connections if local else settings.max_per_host
        if self._per_host[host] >= most:
            return self._make_room(owner, (one for one in self._placed if one.host == host))
        return len(self._placed) < settings.max_connections or self._make_room(owner)
