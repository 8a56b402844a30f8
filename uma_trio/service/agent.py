"""The agent of HAProxy's `agent-check`: a port that sends every client one line about this machine.

The line is ``up ready 37%``, ``drain`` or ``down #why``. A proxy that cannot reach an agent leaves the weight as
it was, so that the daemon itself must answer: a separate agent process could outlive it, or die alone.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from uma_trio.observe.log import Log
from uma_trio.service.ask import Refusal
from uma_trio.service.load import LoadReading
from uma_trio.sockets.accepting import accept_forever

#: Maximum number of clients. A further one is closed without a line, which changes nothing for a proxy.
MAX_CLIENTS: Final = 32
#: Maximum seconds to send the line.
SEND_S: Final = 1.0


def line_of(reading: LoadReading | None, *, draining: bool) -> str:
    """Return the state for HAProxy; `reading` is None if the engine has stopped."""
    if draining:
        return "drain"
    if reading is None:
        return "down #the engine has stopped"
    if reading.hangs:
        return f"down #the engine has not answered for {reading.silent_s:.0f} s"
    return f"up ready {max(1, round(100 * reading.weight))}%"


class Agent:
    """Sends the state to every client. `read` returns the load, `draining` whether new requests are refused."""

    def __init__(
        self, read: Callable[[], Awaitable[LoadReading]], draining: Callable[[], bool], log: Log
    ) -> None:
        self._read = read
        self._draining = draining
        self._log = log
        self._open = 0
        self._accepting = trio.CancelScope()
        self._resumed = trio.Event()
        self._resumed.set()

    def pause_accepting(self) -> None:
        """Leave further clients in the backlog until :meth:`resume_accepting`."""
        self._resumed = trio.Event()
        self._accepting.cancel()

    def resume_accepting(self) -> None:
        """Accept clients again."""
        self._resumed.set()

    async def serve(
        self,
        listening: socket.socket,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Answer the clients of a listening socket until cancelled. The caller closes the socket."""
        async with trio.open_nursery() as nursery:

            def handle(sock: socket.socket) -> None:
                if self._open >= MAX_CLIENTS:
                    sock.close()
                    return
                self._open += 1
                nursery.start_soon(self._send_status, sock)

            task_status.started()
            while True:
                with trio.CancelScope() as self._accepting:
                    await accept_forever(listening, handle, self._failed)
                await self._resumed.wait()

    async def _send_status(self, sock: socket.socket) -> None:
        try:
            with trio.move_on_after(SEND_S), trio.socket.from_stdlib_socket(sock) as client:
                await client.send(f"{await self._line()}\n".encode())
        except OSError:
            return  # it has left
        finally:
            self._open -= 1

    async def _line(self) -> str:
        try:
            return line_of(await self._read(), draining=self._draining())
        except Refusal:
            return line_of(None, draining=self._draining())

    def _failed(self, error: OSError) -> None:
        self._log.warning("the agent cannot accept a client", why=error.strerror)
