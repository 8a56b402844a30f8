"""All clients together: who is let in, who is turned away, and how it ends for everybody."""

from __future__ import annotations

import itertools
import math
import os
import socket
from typing import TYPE_CHECKING

import trio

import uma_protocol
from uma_protocol import Code, Role
from uma_trio.net.connection import Connection
from uma_trio.sockets.transport import Transport
from uma_trio.wire import error_event

if TYPE_CHECKING:
    from collections.abc import Collection

    from uma_trio.net.settings import Shared
    from uma_trio.sockets.listener import Listener
    from uma_trio.sockets.peers import Peer

# Clients being told that they cannot come in. More at once than this are just closed.
_MAX_TURNED_AWAY = 64
# It fails ten times a second while it lasts; the metric counts each, the log tells it this often.
_ACCEPT_TOLD_S = 60.0


class Server:
    """Accepts clients and runs a task for each. `allowed_uids` are the users let in."""

    def __init__(self, shared: Shared, allowed_uids: Collection[int] | None = None) -> None:
        self._shared = shared
        self._allowed = {os.geteuid()} if allowed_uids is None else frozenset(allowed_uids)
        self._connections: set[Connection] = set()
        self._numbers = itertools.count(1)
        self._turned_away = 0
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
        """Let nobody else in."""
        self._accepting.cancel()

    def end_connections(self) -> None:
        """Close every connection once all that was said on it is written."""
        for connection in tuple(self._connections):
            connection.end()

    def welcome(self, sock: socket.socket) -> None:
        """Take over a client's socket: let it in or turn it away. Never blocks."""
        transport = Transport(sock)
        try:
            peer = transport.peer
        except OSError:
            transport.close()  # it is gone already
            return
        code, message = self._objection(peer)
        if code is not None:
            self._nursery.start_soon(self._turn_away, transport, code, message)
            return
        connection = Connection(transport, peer, next(self._numbers), self._shared)
        self._connections.add(connection)
        self._shared.service.telemetry.session_opened()
        self._nursery.start_soon(self._run, connection)

    def _objection(self, peer: Peer) -> tuple[Code | None, str]:
        if peer.uid not in self._allowed:
            return Code.E_AUTH_001, f"user {peer.uid} may not use this daemon"
        most = self._shared.settings.max_sessions
        if len(self._connections) >= most:
            return (
                Code.E_LIMIT_002,
                f"{most} connections are open already; close one, or raise --max-sessions",
            )
        return None, ""

    async def _run(self, connection: Connection) -> None:
        try:
            await connection.run()
        except Exception:
            # A fault of ours in one client's session is no reason to drop the others.
            self._shared.log.exception("connection ended by a fault", number=connection.number)
        finally:
            self._connections.discard(connection)
            self._shared.service.telemetry.session_closed()

    async def _turn_away(self, transport: Transport, code: Code, message: str) -> None:
        settings = self._shared.settings
        self._turned_away += 1
        try:
            if self._turned_away > _MAX_TURNED_AWAY:
                return
            protocol = uma_protocol.Connection(Role.SERVER)
            # It fits: nothing was sent on this socket before.
            transport.send_nowait(protocol.send(error_event(code, message)))
            self._shared.service.telemetry.error_sent(code.value)
            with trio.move_on_after(settings.linger_s):
                await transport.linger(settings.linger_bytes)
        except trio.BrokenResourceError:
            return
        finally:
            self._turned_away -= 1
            transport.close()

    def _accept_failed(self, exc: OSError) -> None:
        self._shared.service.telemetry.accept_failed()
        if trio.current_time() >= self._told_again:
            self._told_again = trio.current_time() + _ACCEPT_TOLD_S
            fix = "raise ulimit -n, or lower --max-sessions"
            self._shared.log.warning("cannot accept clients", why=exc.strerror, fix=fix)
