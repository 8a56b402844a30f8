"""The client under asyncio, on every event loop that has `sock_recv`: selectors, proactor, uvloop.

It imports no trio.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from uma_trio.client.loop import Stream
from uma_trio.client.reach import TCP_S, DaemonAddress
from uma_trio.client.streaming import AnyClient

_RECEIVE_BYTES = 65536


@asynccontextmanager
async def connect(
    socket_path: str | os.PathLike[str] | None = None, *, reconnect: bool = False
) -> AsyncIterator[Client]:
    """Connect to the daemon. Leaving the block closes the connection and cancels its request.

    Arguments and errors are those of :func:`uma_trio.client.connect`.
    """
    client = Client(socket_path, reconnect=reconnect)
    try:
        await client.open()
        yield client
    finally:
        client.close()


class AsyncioLoop:
    """What the client needs of asyncio."""

    cancelled: type[BaseException] = asyncio.CancelledError
    busy: type[Exception] = RuntimeError

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""
        await asyncio.sleep(seconds)

    async def checkpoint(self) -> None:
        """Let other tasks run, and deliver a cancellation."""
        await asyncio.sleep(0)

    async def checkpoint_if_cancelled(self) -> None:
        """Let other tasks run, too: asyncio delivers a cancellation only when the task is resumed."""
        await asyncio.sleep(0)

    async def cancel_shielded_checkpoint(self) -> None:
        """Nothing: a cancellation here would lose an event, and other tasks have run already."""

    async def shielded(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` to its end, or cancel it after so long. A cancellation waits for that.

        asyncio has no shield against repeated cancellation, so `work` runs in a task of its own.
        """

        async def run() -> None:
            await work()

        task = asyncio.create_task(run())
        timer = asyncio.get_running_loop().call_later(seconds, task.cancel)
        interrupted: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as exc:
                interrupted = exc
        timer.cancel()
        error = None if task.cancelled() else task.exception()
        if interrupted is not None:
            raise interrupted
        if error is not None:
            raise error

    async def reach(self, place: DaemonAddress, sock: socket.socket) -> Stream:
        """Connect a non-blocking socket. Raises as :meth:`DaemonAddress.connect`."""
        if not place.is_tcp:
            # sock_connect() would take a full backlog (EAGAIN) for a connection.
            place.connect(sock)
            return AsyncioStream(sock)
        try:
            async with asyncio.timeout(TCP_S):
                await asyncio.get_running_loop().sock_connect(sock, place.address)
        except OSError as exc:
            raise place.refused(exc.errno or errno.ETIMEDOUT) from exc
        place.check(sock)
        return AsyncioStream(sock)


class AsyncioStream:
    """A connected non-blocking socket of one event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._receiving: asyncio.Task[bytes] | None = None

    def send_nowait(self, data: bytes) -> int:
        """Give the kernel as much of `data` as it takes now; return how much, maybe 0."""
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    async def send_all(self, data: bytes) -> None:
        """Give the kernel all of `data`. If it is cancelled, a part may be sent."""
        await self._loop.sock_sendall(self._sock, data)

    async def receive_some(self) -> bytes:
        """Wait for bytes; b"" if no more come. If it is cancelled, the next call returns them.

        `sock_recv` would lose what it took if it were cancelled in the same turn of the loop. So it
        runs in a task of its own, which only :meth:`close` or the end of the loop cancels.
        """
        if self._sock.fileno() == -1:
            return b""
        if self._receiving is None:
            self._receiving = self._loop.create_task(self._receive())
        task = self._receiving
        await asyncio.wait({task})
        self._receiving = None
        return b"" if task.cancelled() else task.result()

    async def _receive(self) -> bytes:
        try:
            return await self._loop.sock_recv(self._sock, _RECEIVE_BYTES)
        except OSError:
            return b""

    def close(self) -> None:
        task, self._receiving = self._receiving, None
        if task is not None:
            task.cancel()
            if not self._loop.is_closed():
                # At once: the number of the socket may be another's when the task sees it.
                with contextlib.suppress(NotImplementedError):  # the proactor forgets it by itself
                    self._loop.remove_reader(self._sock)
        self._sock.close()


class Client(AnyClient):
    """A client of asyncio; `connect` opens and closes it."""

    loop = AsyncioLoop()
