"""One connection to the daemon: a stream of an event loop and a protocol object."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import uma_protocol
from uma_protocol import (
    ClientState,
    ConnectionClosed,
    Error,
    Event,
    Pause,
    ProtocolError,
    RemoteProtocolError,
    Request,
    Role,
)
from uma_trio.client.errors import ConnectionFailed, ConnectionLost, ServerError
from uma_trio.client.loop import Loop, Stream
from uma_trio.client.reach import DaemonAddress

_ATTEMPTS = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_CLOSED = "the daemon closed the connection"


def pauses() -> Iterator[float]:
    """Yield the pause before each further attempt: growing, jittered, and finite in number.

    The jitter spreads the attempts of clients that lost the same daemon at the same moment.
    """
    pause = _FIRST_PAUSE_S
    for _ in range(_ATTEMPTS):
        yield random.uniform(pause / 2, pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def parsed(protocol: uma_protocol.Connection) -> Event | None:
    """Return the next received event, or None if more bytes are needed.

    Raises:
        ConnectionFailed: the connection has ended, or the bytes are not an event.
    """
    if protocol.state is ClientState.DONE:
        protocol.start_next_cycle()
    try:
        event = protocol.next_event()
    except RemoteProtocolError as exc:
        raise ConnectionFailed(f"{_CLOSED} or broke the protocol: {exc.message}") from exc
    if isinstance(event, ConnectionClosed):
        raise ConnectionLost(f"{_CLOSED}; if it has ended, start it with `uma-trio serve`")
    if isinstance(event, Pause):
        return None
    return event  # type: ignore[return-value]  # a client never gets requests


class Link:
    """A connection for one task at a time. Made by :meth:`dial`; `close` it."""

    def __init__(self, loop: Loop, stream: Stream, token: str | None = None) -> None:
        self._loop = loop
        self._stream = stream
        self._protocol = uma_protocol.Connection(Role.CLIENT, token=token)
        self._unsent = self._protocol.opening()
        self.broken = False

    @classmethod
    async def dial(cls, loop: Loop, path: str) -> Link:
        """Connect to the daemon of this user at `path`, waiting a little if it is busy.

        Raises:
            ConnectionFailed: see :class:`uma_trio.client.reach.DaemonAddress`.
        """
        await loop.checkpoint()
        place = DaemonAddress(path)
        for pause in pauses():
            sock = place.new_socket()
            try:
                sock.setblocking(False)
                return cls(loop, await loop.reach(place, sock), place.token)
            except BlockingIOError:  # its backlog is full
                sock.close()
            except BaseException:
                sock.close()
                raise
            await loop.sleep(pause)
        raise ConnectionFailed(f"the daemon at {path} is too busy to accept a connection")

    async def send(self, request: Request) -> None:
        """Send a whole request. Not a checkpoint if the kernel takes it at once.

        If sending fails or is cancelled, the connection is closed, because a part of the frame may
        be sent.

        Raises:
            ServerError: the daemon closed the connection and sent the reason.
            ConnectionFailed: the daemon closed the connection.
            uma_protocol.LocalProtocolError: the request is not allowed at this time, or has an invalid
                value. Nothing was sent, and the connection is unchanged.
        """
        if self.broken:
            raise ConnectionLost(_CLOSED)
        data = self._unsent + self._encoded(request)
        self._unsent = b""
        try:
            await self._stream.send_all(data)
        except OSError:
            await self._read_last_word()
        except BaseException:
            self.close()
            raise

    def send_nowait(self, request: Request) -> bool:
        """Send as much of a request as the kernel takes; the next call sends the rest."""
        if self.broken:
            return False
        try:
            data = self._unsent + self._encoded(request)
            self._unsent = data[self._stream.send_nowait(data) :]
        except (ProtocolError, OSError):
            return False
        return True

    async def next_event(self) -> Event:
        """Return the next event. If it is cancelled, no event is lost.

        Raises:
            ConnectionFailed: the connection has ended; it is closed.
        """
        while True:
            await self._loop.checkpoint_if_cancelled()
            try:
                event = parsed(self._protocol)
            except ConnectionFailed:
                self.close()
                raise
            if event is not None:
                await self._loop.cancel_shielded_checkpoint()
                return event
            data = b""
            with contextlib.suppress(OSError):
                data = await self._stream.receive_some()
            self._protocol.receive_data(data)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self.broken = True
        self._stream.close()

    def _encoded(self, request: Request) -> bytes:
        if self._protocol.state is ClientState.DONE:
            self._protocol.start_next_cycle()
        return self._protocol.send(request)

    async def _read_last_word(self) -> None:
        """Raise the reason that the daemon sent before it closed; it can still be read."""
        try:
            while True:
                event = await self.next_event()
                if isinstance(event, Error) and event.fatal:
                    raise ServerError.of(event)
        finally:
            self.close()
