"""The way back of one request: an event stream, a piece at a time, over h11 and the writer."""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate

import h11
import trio

from uma_trio.http.message import Headers, Request
from uma_trio.sockets.writer import Writer

_STREAM: Headers = (
    ("Content-Type", "text/event-stream"),
    ("Cache-Control", "no-cache"),
    ("X-Accel-Buffering", "no"),
    ("X-Content-Type-Options", "nosniff"),
)


class Answering:
    """What a handler streams with; see :class:`uma_trio.http.message.Exchange`."""

    def __init__(
        self,
        request: Request,
        http: h11.Connection,
        writer: Writer,
        headers: Headers,
        keep_alive_s: float,
    ) -> None:
        self.request = request
        self.opened = False
        self._http = http
        self._writer = writer
        self._headers = headers
        self._keep_alive_s = keep_alive_s
        self._opening = trio.Event()
        self._said = 0.0
        self._sign_of_life: Callable[[], bytes] = bytes

    def open(self, headers: Headers, keep_alive: Callable[[], bytes]) -> None:
        """Send the head of an event stream. From here on there is no other status to answer."""
        every = [("Date", formatdate(usegmt=True)), *_STREAM, *headers, *self._headers]
        self.opened = True
        self._sign_of_life = keep_alive
        self._put(self._http.send(h11.Response(status_code=200, headers=every)))
        self._opening.set()

    async def send(self, data: bytes) -> None:
        """Send a part of the stream; wait while the client reads slower than we write."""
        self.write(data)
        await self._writer.flushed()

    def write(self, data: bytes) -> None:
        """Send a part of the stream from beside the handler, without waiting."""
        self._put(self._http.send(h11.Data(data=data)))

    async def close(self, data: bytes) -> None:
        """Send the last part of the stream and its end, in one piece."""
        last = self._http.send(h11.Data(data=data)) or b""
        self._put(last + (self._http.send(h11.EndOfMessage()) or b""))
        await self._writer.flushed()

    async def keep_alive(self) -> None:
        """Break every long silence of the stream, so that nobody takes it for dead."""
        await self._opening.wait()
        while self._http.our_state is h11.SEND_BODY:
            await trio.sleep_until(self._said + self._keep_alive_s)
            if trio.current_time() - self._said < self._keep_alive_s:
                continue
            if self._writer.waiting_bytes:
                self._said = trio.current_time()  # the silence is the reader's
            else:
                self.write(self._sign_of_life())

    def _put(self, data: bytes | None) -> None:
        self._said = trio.current_time()
        if data:
            self._writer.write(data)
