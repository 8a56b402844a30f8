"""All clients of the HTTP side together: who is let in, who is turned away, and how it ends."""

from __future__ import annotations

import math
import socket
from collections import Counter

import trio

from uma_trio.http.clients import Clients
from uma_trio.http.connection import Connection
from uma_trio.http.listener import Listener
from uma_trio.http.router import Router
from uma_trio.http.settings import Shared
from uma_trio.sockets.peers import Peer
from uma_trio.sockets.transport import Transport

_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Type: application/json\r\nContent-Length: 108\r\n\r\n"
    b'{"error":{"message":"too many connections are open","type":"server_error","code":"overloaded"'
    b',"param":null}}'
)
# It fails ten times a second while it lasts; the metric counts each, the log tells it this often.
_ACCEPT_TOLD_S = 60.0


class Server:
    """Accepts clients and runs a task for each.

    `allowed_uid` is the user let in on a Unix socket; None for a TCP port.
    """

    def __init__(self, shared: Shared, router: Router, allowed_uid: int | None = None) -> None:
        self._shared = shared
        self._router = router
        self._allowed_uid = allowed_uid
        self._connections: set[Connection] = set()
        self._per_host: Counter[str] = Counter()
        self._clients = Clients(shared.service.new_client)
        self._told_again = -math.inf
        self._accepting = trio.CancelScope()

    @property
    def n_connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    async def serve(
        self,
        listener: Listener,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until :meth:`stop_accepting`, and then until the last client is gone.

        Cancelled, it closes every connection without a further word. It stops the listener,
        which stays the caller's to close.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            with self._accepting:
                task_status.started()
                await listener.accept_forever(self.welcome, self._accept_failed)
            listener.stop()

    async def attend(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve only the sockets given to :meth:`welcome`, until cancelled: for tests."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def stop_accepting(self) -> None:
        """Let nobody else in; who is connected gets the answer that is under way, and the end."""
        self._accepting.cancel()
        self.end_connections()

    def end_connections(self) -> None:
        """Close every connection once the request on it is answered."""
        for connection in tuple(self._connections):
            connection.end()

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
        self._connections.add(connection)
        self._per_host[host] += 1
        self._shared.service.telemetry.session_opened()
        self._nursery.start_soon(self._run, connection, host)

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
        return len(self._connections) >= settings.max_connections or self._per_host[host] >= most

    def _turn_away(self, transport: Transport) -> None:
        try:
            # It fits: nothing was sent on this socket before.
            transport.send_nowait(_BUSY)
            transport.end_sending()
        except trio.BrokenResourceError:
            return
        finally:
            transport.close()

    async def _run(self, connection: Connection, host: str) -> None:
        try:
            await connection.run()
        except Exception:
            # A fault of ours in one client's session is no reason to drop the others.
            self._shared.log.exception("connection ended by a fault")
        finally:
            self._connections.discard(connection)
            self._per_host[host] -= 1
            if not self._per_host[host]:
                del self._per_host[host]
            self._shared.service.telemetry.session_closed()

    def _accept_failed(self, exc: OSError) -> None:
        self._shared.service.telemetry.accept_failed()
        if trio.current_time() >= self._told_again:
            self._told_again = trio.current_time() + _ACCEPT_TOLD_S
            fix = "raise ulimit -n, or lower --http-max-connections"
            self._shared.log.warning("cannot accept clients", why=exc.strerror, fix=fix)
