"""Clients that cannot come in: each is told why before its socket is closed."""

from __future__ import annotations

import trio

from uma_trio.sockets.transport import Transport

# Clients that are listened to for a moment behind the word, so that it is not lost by a reset. With
# more at once a socket is closed as soon as what had come is read.
MOST_AT_ONCE = 64
_UNREAD_BYTES = 1 << 18


class Rejector:
    """Tells clients a last word, and closes their sockets."""

    def __init__(self) -> None:
        self._n_lingering = 0

    def send(
        self, transport: Transport, word: bytes, nursery: trio.Nursery, linger_s: float
    ) -> None:
        """Tell a client `word`, which fits into the buffer of a new socket. Never blocks."""
        try:
            transport.send_nowait(word)
        except trio.BrokenResourceError:
            transport.close()
            return
        if self._n_lingering < MOST_AT_ONCE:
            self._n_lingering += 1
            nursery.start_soon(self._listen, transport, linger_s)
            return
        transport.end_sending()
        transport.drop_received(_UNREAD_BYTES)
        transport.close()

    async def _listen(self, transport: Transport, linger_s: float) -> None:
        try:
            with trio.move_on_after(linger_s):
                await transport.linger(_UNREAD_BYTES)
        finally:
            self._n_lingering -= 1
            transport.close()
