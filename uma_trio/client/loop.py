"""What the client needs of an event loop; `on_trio` and `on_asyncio` have it."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from uma_trio.client.reach import DaemonAddress


class Stream(Protocol):
    """A connected socket of one task. Methods raise OSError if the peer has closed."""

    def send_nowait(self, data: bytes) -> int:
        """Give the kernel as much of `data` as it takes now; return how much, maybe 0."""

    async def send_all(self, data: bytes) -> None:
        """Give the kernel all of `data`. If it is cancelled, a part may be sent."""

    async def receive_some(self) -> bytes:
        """Wait for bytes; b"" if the peer sends no more or the stream is closed.

        If it is cancelled, the bytes are left for the next call. Between calls at most one piece
        is taken from the socket, so that a slow consumer stops the daemon.
        """

    def close(self) -> None:
        """Close the socket and wake the tasks that wait for it. Idempotent."""


class Loop(Protocol):
    """The verbs of an event loop, under trio's names.

    `cancelled` is what a cancelled task gets. `busy` is raised if two tasks use one connection.
    """

    cancelled: type[BaseException]
    busy: type[Exception]

    async def sleep(self, seconds: float) -> None:
        """Wait so long."""

    async def checkpoint(self) -> None:
        """Let other tasks run, and deliver a cancellation."""

    async def checkpoint_if_cancelled(self) -> None:
        """Deliver a cancellation that was requested before."""

    async def cancel_shielded_checkpoint(self) -> None:
        """Let other tasks run, and deliver no cancellation."""

    async def shielded(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` to its end, or cancel it after so long. A cancellation waits for that."""

    async def reach(self, place: DaemonAddress, sock: socket.socket) -> Stream:
        """Connect a non-blocking socket.

        Raises:
            ConnectionFailed: no daemon serves there, or another user's process does.
            BlockingIOError: the daemon is too busy to accept.
        """
