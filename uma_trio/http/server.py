"""All clients of the HTTP side together: who is let in, who is turned away, and how it ends."""

from __future__ import annotations

import socket
from collections import Counter

import trio

from uma_trio.http.clients import Clients
from uma_trio.http.connection import Connection
from uma_trio.http.router import Router
from uma_trio.http.settings import Shared
from uma_trio.service.front import Front
from uma_trio.sockets.peers import Peer
from uma_trio.sockets.transport import Transport

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Type: application/json\r\nContent-Length: 108\r\n\r\n"
    b'{"error":{"message":"too many connections are open","type":"server_error","code":"overloaded"'
    b',"param":null}}'
)


class Server(Front[Connection]):
    """Accepts clients and runs a task for each.

    `allowed_uid` is the user let in on a Unix socket; None for a TCP port.
    """

    def __init__(self, shared: Shared, router: Router, allowed_uid: int | None = None) -> None:
        super().__init__(shared.service.telemetry, shared.log, "--http-max-connections")
        self._shared = shared
        self._router = router
        self._allowed_uid = allowed_uid
        self._per_host: Counter[str] = Counter()
        self._clients = Clients(shared.service.new_client)

    def stop_accepting(self) -> None:
        """Let nobody else in; who is connected gets the answer that is under way, and the end."""
        super().stop_accepting()
        self.end_connections()

    def welcome(self, sock: socket.socket) -> None:
        """Take over a client's socket: let it in or turn it away. Never blocks."""
        transport = Transport(sock)
        try:
            host, peer = self._who(sock, transport)
        except OSError:
            transport.close()  # it is gone already
            return
        if self._is_full(host):
            self._turn_away(transport)
            return
        if peer is not None and peer.uid != self._allowed_uid:
            transport.close()
            return
        connection = Connection(
            transport,
            self._shared,
            self._router,
            self._clients.identifier(host, peer),
            by_socket=peer is not None,
        )
        self._per_host[host] += 1
        self._let_in(connection, lambda: self._left(host))

    def _left(self, host: str) -> None:
        self._per_host[host] -= 1
        if not self._per_host[host]:
            del self._per_host[host]

    def _who(self, sock: socket.socket, transport: Transport) -> tuple[str, Peer | None]:
        """Return the address of the other end, and the process if the kernel attests one."""
        if sock.family == socket.AF_UNIX:
            return "", transport.peer
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return str(sock.getpeername()[0]), None

    def _is_full(self, host: str) -> bool:
        settings = self._shared.settings
        local = host in ("", "127.0.0.1", "::1")
        most = settings.max_connections if local else settings.max_per_host
        return self.n_connections >= settings.max_connections or self._per_host[host] >= most

    def _turn_away(self, transport: Transport) -> None:
        try:
            # It fits: nothing was sent on this socket before.
            transport.send_nowait(_BUSY)
            transport.end_sending()
        except trio.BrokenResourceError:
            return
        finally:
            transport.close()
