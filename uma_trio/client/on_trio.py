"""The client under trio."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from uma_trio.client.loop import Stream
from uma_trio.client.reach import TCP_S, DaemonAddress
from uma_trio.client.streaming import AnyClient
from uma_trio.sockets.transport import Transport


@asynccontextmanager
async def connect(
    socket_path: str | os.PathLike[str] | None = None, *, reconnect: bool = False
) -> AsyncIterator[Client]:
    """Connect to the daemon. Leaving the block closes the connection and cancels its request.

    Args:
        socket_path: the daemon's socket; default ``$UMA_SOCKET``, else the
            one in ``$XDG_RUNTIME_DIR/uma-trio``, else ``/tmp/uma.sock``. ``tcp:127.0.0.1:PORT`` is a
            port; its token is read from ``$UMA_TOKEN_FILE``, else from the daemon's default place.
        reconnect: try again a few times, with growing and jittered pauses, if the daemon cannot be
            reached, the connection is lost or the daemon answers "retry later". A generation is
            repeated only if no token of it has arrived. Without it a client is of no further use
            after a fatal error, such as a prompt that is too long.

    Raises:
        ConnectionFailed: no daemon serves there, or another user's process does.
    """
    client = Client(socket_path, reconnect=reconnect)
    try:
        await client.open()
        yield client
    finally:
        client.close()


class TrioLoop:
    """What the client needs of trio."""

    cancelled: type[BaseException] = trio.Cancelled
    busy: type[Exception] = trio.BusyResourceError

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        await trio.sleep(seconds)

    async def checkpoint(self) -> None:
        """Let other tasks run, and deliver a cancellation."""
        await trio.lowlevel.checkpoint()

    async def checkpoint_if_cancelled(self) -> None:
        """Deliver a cancellation that was requested before."""
        await trio.lowlevel.checkpoint_if_cancelled()

    async def cancel_shielded_checkpoint(self) -> None:
        """Let other tasks run, and deliver no cancellation."""
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def shielded(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` to its end, or cancel it after so long. A cancellation waits for that."""
        with trio.move_on_after(seconds, shield=True):
            await work()

    async def reach(self, place: DaemonAddress, sock: socket.socket) -> Stream:
        """Connect a non-blocking socket. Raises as :meth:`DaemonAddress.connect`."""
        if not place.is_tcp:
            place.connect(sock)
            return TrioStream(Transport(sock))
        number = sock.connect_ex(place.address)
        if number in (errno.EINPROGRESS, getattr(errno, "WSAEWOULDBLOCK", errno.EINPROGRESS)):
            number = errno.ETIMEDOUT
            with trio.move_on_after(TCP_S):
                await trio.lowlevel.wait_writable(sock)
                number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise place.refused(number)
        place.check(sock)
        return TrioStream(Transport(sock))


class TrioStream:
    """A transport that raises OSError."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send_nowait(self, data: bytes | memoryview) -> int:
        """Give the kernel as much of `data` as it takes now; return how much, maybe 0."""
        try:
            return self._transport.send_nowait(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            raise ConnectionError(str(exc)) from exc

    async def send_all(self, data: bytes) -> None:
        """Give the kernel all of `data`. Not a checkpoint if it takes them at once."""
        rest = memoryview(data)
        while rest := rest[self.send_nowait(rest) :]:
            try:
                await self._transport.wait_sendable()
            except trio.ClosedResourceError as exc:
                raise ConnectionError(str(exc)) from exc

    async def receive_some(self) -> bytes:
        """Wait for bytes; b"" if no more come. If it is cancelled, it has taken none."""
        try:
            return await self._transport.receive_some()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    def close(self) -> None:
        self._transport.close()


class Client(AnyClient):
    """A client of trio; `connect` opens and closes it."""

    loop = TrioLoop()
