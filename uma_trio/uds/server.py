"""The front end of the framed protocol: admits, refuses and ends clients."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection

import trio

import uma_protocol
from uma_protocol import Code, ConnectionClosed, Error, Hello, RemoteProtocolError, Role
from uma_protocol.connection import MAX_HELLO_BYTES
from uma_trio.service.front import Front
from uma_trio.sockets.peers import is_tcp, own_uid, principal_of
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.transport import Rejector, Transport
from uma_trio.uds.connection import Connection, too_many
from uma_trio.uds.settings import Settings, Shared
from uma_trio.uds.wire import error_event

Admit = Callable[[Transport, Principal, uma_protocol.Connection], None]
"""Takes over a client that has shown the token, with the protocol object that heard it."""
Refuse = Callable[[Transport, Error], None]
"""Sends a client the reason why it is refused, and closes its socket."""


class Doorway:
    """Waits for the hello of each client, for a limited time, in limited memory.

    If too many wait, the oldest is closed: a client that sends its hello at once is admitted
    before that.
    """

    def __init__(self, token: str, settings: Settings, admit: Admit, refuse: Refuse) -> None:
        self._token = token
        self._settings = settings
        self._admit = admit
        self._refuse = refuse
        self._closed = False
        self._waiting: dict[Transport, trio.CancelScope] = {}

    def receive(self, transport: Transport, principal: Principal, nursery: trio.Nursery) -> None:
        """Take a client. Never blocks."""
        if self._closed:
            transport.close()
            return
        if len(self._waiting) >= self._settings.most_unknown:
            first = next(iter(self._waiting))
            self._waiting.pop(first).cancel()
        self._waiting[transport] = trio.CancelScope()
        nursery.start_soon(self._hear, transport, principal, self._waiting[transport])

    def close(self) -> None:
        """Close all waiting clients, and accept no more."""
        self._closed = True
        for scope in self._waiting.values():
            scope.cancel()

    async def _hear(
        self, transport: Transport, principal: Principal, scope: trio.CancelScope
    ) -> None:
        protocol = uma_protocol.Connection(Role.SERVER, token=self._token)
        scope.deadline = trio.current_time() + self._settings.hello_timeout_s
        kept = False
        try:
            with scope:
                try:
                    kept = await self._shown(transport, protocol)
                except RemoteProtocolError as fault:
                    kept = True
                    self._refuse(transport, protocol.error_event(fault))
                    return
            if scope.cancelled_caught:
                kept = True
                why = "no hello came in time, or too many clients that sent none were waiting"
                self._refuse(transport, error_event(Code.E_PROTO_006, why))
            elif kept:
                self._admit(transport, principal.with_token(), protocol)
        finally:
            self._waiting.pop(transport, None)
            if not kept:
                transport.close()

    async def _shown(self, transport: Transport, protocol: uma_protocol.Connection) -> bool:
        """Wait for the hello; False if the client leaves. Raises RemoteProtocolError for any other frame."""
        while True:
            event = protocol.next_event()
            if isinstance(event, Hello):
                return True
            if isinstance(event, ConnectionClosed):
                return False
            try:
                # Bytes after the hello stay in the kernel: unauthenticated clients use no memory.
                protocol.receive_data(await transport.receive_some(MAX_HELLO_BYTES))
            except trio.BrokenResourceError:
                return False


class Server(Front[Connection]):
    """Accepts clients and runs a task for each.

    `allowed_uids` are the users admitted on a Unix socket; over TCP, clients authenticate with the `token`.
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
        self._rejector = Rejector()
        self._doorway = (
            None if token is None else Doorway(token, shared.settings, self._admit, self._refuse)
        )
        self._operators: set[Connection] = set()  # those in the places of operators

    def principal_for(self, sock: socket.socket) -> Principal:
        return principal_of(sock, own_uid())

    def admit(self, sock: socket.socket, principal: Principal) -> None:
        """Take over a client's socket: let it in or turn it away. Never blocks."""
        transport = Transport(sock)
        if is_tcp(sock):
            transport.send_at_once()
        if is_tcp(sock) and self._doorway is not None:
            self._doorway.receive(transport, principal, self._nursery)
        elif principal.uid not in self._allowed:
            user = (
                "a user of another user namespace"
                if principal.uid is None
                else f"user {principal.uid}"
            )
            why = f"{user} may not use this daemon"
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
        if self._has_place(principal):
            self._add_session(Connection(transport, principal, self._shared, protocol=protocol))
        elif principal.is_operator and self._has_operator_place():
            self._let_operator_in(transport, principal, protocol)
        else:
            self._refuse(transport, too_many(self._shared.settings))

    def _has_place(self, principal: Principal) -> bool:
        return len(self._placed) < self._shared.settings.max_sessions or self._make_room(
            principal.counts_as
        )

    def _has_operator_place(self) -> bool:
        """Return whether a place for operators is free, if need be by closing one that only receives metrics."""
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
        self._start_session(connection)

    def _refuse(self, transport: Transport, error: Error) -> None:
        word = uma_protocol.Connection(Role.SERVER).send(error)
        self._shared.service.telemetry.error_sent(error.code)
        self._rejector.send(transport, word, self._nursery, self._shared.settings.linger_s)
