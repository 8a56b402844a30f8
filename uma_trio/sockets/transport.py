"""A connected stream socket as trio tasks use it: sending never waits, receiving does.

The hot path of the daemon is one small ``send`` for each token. Trio's own streams take two
checkpoints for it; here the bytes go to the kernel at once, in the middle of whatever task
has them, and only a full buffer is worth a wait. No other module touches a client's socket.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
from math import inf

import trio

from uma_trio.sockets.peers import is_closed

try:
    import fcntl
    import termios

    _TELLS_UNREAD = True
except ImportError:  # Windows
    _TELLS_UNREAD = False

_RECEIVE_BYTES = 65536
_GONE_POLL_S = 0.1


class Transport:
    """Owns the non-blocking socket `sock`; the creator closes the transport."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    def limit_send_buffer(self, n_bytes: int) -> None:
        """Let the kernel hold only about `n_bytes` that the peer has not read."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, n_bytes)

    def send_at_once(self) -> None:
        """Have TCP send each token immediately; ignores a closed peer."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send_nowait(self, data: bytes | memoryview) -> int:
        """Give the kernel as much of `data` as it takes now; return how much, maybe 0.

        Raises:
            trio.BrokenResourceError: the peer has closed.
            trio.ClosedResourceError: `close` was called.
        """
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as exc:
            raise self._translated(exc) from exc

    def unread_bytes(self) -> int:
        """Return what the kernel holds for the peer, in its own bookkeeping; 0 if unknown."""
        if not _TELLS_UNREAD:
            return 0
        try:
            raw = fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4))
        except OSError:
            return 0
        return int.from_bytes(raw, sys.byteorder)

    async def wait_sendable(self) -> None:
        """Wait until the kernel takes more, or the peer has closed."""
        await trio.lowlevel.wait_writable(self._sock)

    async def receive_some(self, max_bytes: int = _RECEIVE_BYTES) -> bytes:
        """Wait for bytes; b"" when the peer has ended its sending side.

        Cancelled, it has taken nothing from the socket.

        Raises:
            trio.BrokenResourceError: the peer has closed.
            trio.ClosedResourceError: `close` was called, also while waiting.
        """
        while True:
            if self._sock.fileno() == -1:
                raise trio.ClosedResourceError("this side closed the socket")
            await trio.lowlevel.wait_readable(self._sock)
            try:
                return self._sock.recv(max_bytes)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as exc:
                raise self._translated(exc) from exc

    def is_closed(self) -> bool:
        """Whether the peer has closed its socket, and not only its sending side."""
        return is_closed(self._sock)

    async def wait_until_closed(self) -> None:
        """After EOF, wait until the peer has closed its socket altogether."""
        await wait_until_closed(self._sock)

    def end_sending(self) -> None:
        """End the sending side; ignores a closed peer."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return  # not connected any more

    def end_receiving(self) -> None:
        """Let a Unix socket's peer send no more: it gets EPIPE. What it has sent can still be read (Linux).

        Elsewhere what is unread is lost.
        """
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    async def linger(self, max_bytes: int, quiet_s: float = inf) -> None:
        """End sending, and read and drop the peer's bytes until it closes, too.

        Closing a socket with unread bytes makes the peer lose the last bytes sent to it. Ends
        after `max_bytes`, or `quiet_s` without bytes; the caller sets the total time.
        """
        self.end_sending()
        try:
            while max_bytes > 0:
                data = b""
                with trio.move_on_after(quiet_s):
                    data = await self.receive_some()
                if not data:
                    return
                max_bytes -= len(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    def drop_received(self, max_bytes: int) -> None:
        """Drop the unread bytes: closing with them would reset the connection."""
        try:
            while max_bytes > 0 and (data := self._sock.recv(_RECEIVE_BYTES)):
                max_bytes -= len(data)
        except OSError:
            return  # nothing more to read, or the peer has closed

    def close(self) -> None:
        """Close the socket and wake the tasks that wait for it. Idempotent."""
        if self._sock.fileno() == -1:
            return
        trio.lowlevel.notify_closing(self._sock)
        self._sock.close()

    def _translated(self, exc: OSError) -> Exception:
        if self._sock.fileno() == -1:
            return trio.ClosedResourceError("this side closed the socket")
        return trio.BrokenResourceError(f"the peer has closed: {exc.strerror}")


async def wait_until_closed(sock: socket.socket) -> None:
    """Wait, after EOF, until the peer closes its socket altogether.

    After EOF a socket stays readable and writable, so trio's own waits cannot be used. On
    Linux a second epoll without events sees only the hang-up, and is itself a
    descriptor that trio can wait for; elsewhere we look ten times a second.
    """
    if sys.platform == "linux":
        with select.epoll() as hangup:
            hangup.register(sock, 0)
            await trio.lowlevel.wait_readable(hangup.fileno())
    else:
        while not is_closed(sock):  # noqa: ASYNC110 - nothing there to wait for, see above
            await trio.sleep(_GONE_POLL_S)


# Refused clients that are read from for a moment after the error, so that no reset loses it. With
# more at once a socket is closed as soon as what had come is read.
MOST_AT_ONCE = 64
_UNREAD_BYTES = 1 << 18


class Rejector:
    """Sends clients that are refused an error, and closes their sockets."""

    def __init__(self) -> None:
        self._n_lingering = 0

    def send(
        self, transport: Transport, word: bytes, nursery: trio.Nursery, linger_s: float
    ) -> None:
        """Send `word`, which must fit into the buffer of a new socket, and close. Never blocks."""
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
