"""All clients together: who is let in, who is turned away, and how it ends for everybody."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import uma_protocol
from uma_protocol import Code, Error, Role
from uma_trio.service.front import Front
from uma_trio.sockets.peers import principal_of
from uma_trio.sockets.platform import is_tcp, own_uid
from uma_trio.sockets.refusing import Refusing
from uma_trio.sockets.transport import Transport
from uma_trio.uds.connection import Connection, too_many
from uma_trio.uds.doorway import Doorway
from uma_trio.uds.wire import error_event

if TYPE_CHECKING:
    from collections.abc import Collection

    from uma_trio.sockets.principal import Principal
    from uma_trio.uds.settings import Shared


class Server(Front[Connection]):
    """Accepts clients and runs a task for each.

    `allowed_uids` are the users let in on a Unix socket; over TCP it is who shows the `token`.
    """

    def __init__(
        self,
        shared: Shared,
        allowed_uids: Collection[int] | None = None,
        token: str | None = None,
    ) -> None:
        super().__init__(shared.service.telemetry, shared.log, "--max-sessions")
        self._shared = shared
        self._allowed = {own_uid()} if allowed_uids is None else frozenset(allowed_uids)
        self._refusing = Refusing()
        self._doorway = (
            None if token is None else Doorway(token, shared.settings, self._admit, self._refuse)
        )
        self._operators: set[Connection] = set()  # those in the places of operators

    def whose(self, sock: socket.socket) -> Principal:
        """Return whom a client is for. Raises OSError if it has left."""
        return principal_of(sock, own_uid())

    def let_in(self, sock: socket.socket, principal: Principal) -> None:
        """Take over a client's socket: let it in or turn it away. Never blocks."""
        transport = Transport(sock)
        if is_tcp(sock):
            transport.send_at_once()
        if is_tcp(sock) and self._doorway is not None:
            self._doorway.receive(transport, principal, self._nursery)
        elif principal.uid not in self._allowed:
            who = (
                "a user of another user namespace"
                if principal.uid is None
                else f"user {principal.uid}"
            )
            why = f"{who} may not use this daemon"
            self._refuse(transport, error_event(Code.E_AUTH_001, why))
        else:
            self._admit(transport, principal)

    def stop_accepting(self) -> None:
        """Accept no further clients, and none that has not shown its token yet."""
        super().stop_accepting()
        if self._doorway is not None:
            self._doorway.close()

    def _admit(
        self,
        transport: Transport,
        principal: Principal,
        protocol: uma_protocol.Connection | None = None,
    ) -> None:
        """Give a client that may come in a place, if there is one."""
        if self._has_place(principal):
            self._let_in(Connection(transport, principal, self._shared, protocol=protocol))
        elif principal.is_operator and self._has_operator_place():
            self._let_operator_in(transport, principal, protocol)
        else:
            self._refuse(transport, too_many(self._shared.settings))

    def _has_place(self, principal: Principal) -> bool:
        """Whether one more client may come in, if need be in place of an idle one."""
        return len(self._placed) < self._shared.settings.max_sessions or self._make_room(
            principal.counts_as
        )

    def _has_operator_place(self) -> bool:
        """Whether a place of operators is free; one who only watches the metrics gives way."""
        self._operators = {one for one in self._operators if one in self._sessions}
        there = [one for one in self._operators if not one.is_over]
        if len(there) < self._shared.settings.operator_places:
            return True
        watching = next((one for one in there if one.watches), None)
        if watching is not None:
            watching.end(too_many(self._shared.settings))
        return watching is not None

    def _let_operator_in(
        self,
        transport: Transport,
        principal: Principal,
        protocol: uma_protocol.Connection | None,
    ) -> None:
        def takes_place() -> bool:
            if not self._has_place(principal):
                return False
            self._operators.discard(connection)
            self._placed[connection] = lambda: None
            return True

        connection = Connection(transport, principal, self._shared, takes_place, protocol)
        self._operators.add(connection)
        self._attend(connection)

    def _refuse(self, transport: Transport, error: Error) -> None:
        word = uma_protocol.Connection(Role.SERVER).send(error)
        self._shared.service.telemetry.error_sent(error.code)
        self._refusing.tell(transport, word, self._nursery, self._shared.settings.linger_s)
