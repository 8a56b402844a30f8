"""All clients together: who is let in, who is turned away, and how it ends for everybody."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import trio

import uma_protocol
from uma_protocol import Code, Role
from uma_trio.net.connection import Connection
from uma_trio.service.front import Front
from uma_trio.sockets.peers import principal_of
from uma_trio.sockets.transport import Transport
from uma_trio.wire import error_event

if TYPE_CHECKING:
    from collections.abc import Collection

    from uma_trio.net.settings import Shared
    from uma_trio.sockets.principal import Principal

# Clients being told that they cannot come in. More at once than this are just closed.
_MAX_TURNED_AWAY = 64


class Server(Front[Connection]):
    """Accepts clients and runs a task for each. `allowed_uids` are the users let in."""

    def __init__(self, shared: Shared, allowed_uids: Collection[int] | None = None) -> None:
        super().__init__(shared.service.telemetry, shared.log, "--max-sessions")
        self._shared = shared
        self._allowed = {os.geteuid()} if allowed_uids is None else frozenset(allowed_uids)
        self._turned_away = 0

    def welcome(self, sock: socket.socket) -> None:
        """Take over a client's socket: let it in or turn it away. Never blocks."""
        transport = Transport(sock)
        try:
            principal = principal_of(sock, os.geteuid())
        except OSError:
            transport.close()  # it is gone already
            return
        code, message = self._objection(principal)
        if code is not None:
            self._nursery.start_soon(self._turn_away, transport, code, message)
            return
        self._let_in(Connection(transport, principal, self._shared))

    def _objection(self, principal: Principal) -> tuple[Code | None, str]:
        if principal.uid not in self._allowed:
            return Code.E_AUTH_001, f"user {principal.uid} may not use this daemon"
        most = self._shared.settings.max_sessions
        if self.n_connections >= most:
            return (
                Code.E_LIMIT_002,
                f"the most connections, {most}, are open already; close one, or raise --max-sessions",
            )
        return None, ""

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
