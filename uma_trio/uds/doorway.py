"""Clients of a TCP port until they have shown the daemon's token. They hold no client's place."""

from __future__ import annotations

from collections.abc import Callable

import trio

import uma_protocol
from uma_protocol import Code, ConnectionClosed, Error, Hello, RemoteProtocolError, Role
from uma_protocol.connection import MAX_HELLO_BYTES
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.transport import Transport
from uma_trio.uds.settings import Settings
from uma_trio.uds.wire import error_event

LetIn = Callable[[Transport, Principal, uma_protocol.Connection], None]
"""Takes over a client that has shown the token, with the protocol object that heard it."""
Refuse = Callable[[Transport, Error], None]
"""Tells a client why it is not let in, and closes its socket."""


class Doorway:
    """Waits for the hello of each client, for a limited time, in limited memory.

    If too many wait the one that came first gives way: whoever sends its hello at once is heard
    before that.
    """

    def __init__(self, token: str, settings: Settings, let_in: LetIn, refuse: Refuse) -> None:
        self._token = token
        self._settings = settings
        self._let_in = let_in
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
        """Wait for nobody any more, and take nobody."""
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
                self._let_in(transport, principal.with_token(), protocol)
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
                # What comes behind the hello stays in the kernel: no memory is held for strangers.
                protocol.receive_data(await transport.receive_some(MAX_HELLO_BYTES))
            except trio.BrokenResourceError:
                return False
