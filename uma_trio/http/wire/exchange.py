"""One request and the way back: its body, once, and a stream, a piece at a time, over h11 and the writer.

h11 writes the head and the end of the answer. The chunks between them are written here: h11 takes
2.5 µs for one, which is more than all else that a token costs in Python, and keeps no account of
them. What is sent as a chunk leaves h11 in its state SEND_BODY.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate

import h11
import trio

from uma_trio.http.wire.message import Head, Headers
from uma_trio.sockets.principal import Principal
from uma_trio.sockets.writer import Writer

_STREAM: Headers = (
    ("Cache-Control", "no-cache"),
    ("X-Accel-Buffering", "no"),
    ("X-Content-Type-Options", "nosniff"),
)


class Exchange:
    """One request and the way back. A handler either returns a reply or streams, not both.

    It is a request of `principal` that passed the guard; `number` is unique for the daemon's life. `opened` is whether the head of a stream is out, so that there is no other status to answer. `is_late` is
    whether the request asked for a head that waits for the first part of the answer.
    """

    def __init__(
        self,
        head: Head,
        principal: Principal,
        number: int,
        body: bytes,
        give_back: Callable[[], None],
        http: h11.Connection,
        writer: Writer,
        headers: Headers,
        keep_alive_s: float,
        *,
        late: bool = False,
    ) -> None:
        self.head = head
        self.principal = principal
        self.number = number
        self.opened = False
        self.is_late = late
        self._delayed: tuple[Headers, bytes] | None = (
            None  # a head that waits for the first part behind it
        )
        self._body = body
        self._give_back = give_back
        self._http = http
        self._writer = writer
        self._headers = headers
        self._keep_alive_s = keep_alive_s
        self._opening = trio.Event()
        self._said = 0.0
        self._sign_of_life: Callable[[], bytes] = bytes
        # A client of HTTP/1.0 reads to the end of the connection instead.
        self._chunked = head.version == "1.1"

    @contextmanager
    def body(self) -> Iterator[bytes]:
        """Return the body, once. Behind the block its memory and its place among all bodies are given back.

        Whoever enters the block must not keep the body: an answer may take hours.
        """
        data, self._body = self._body, b""
        try:
            yield data
        finally:
            del data
            self._give_back()

    def open(self, headers: Headers, keep_alive: Callable[[], bytes], data: bytes = b"") -> None:
        """Send the head of a stream, of which `headers` name the type, and its first part.

        From here on there is no other status to answer, unless the request asked for a late head: then both wait
        for the next part, or for the first sign of life. Of a stream that is open already only the first part is sent.
        What `keep_alive` returns breaks every long silence.
        """
        self._sign_of_life = keep_alive
        if self.opened:  # while its model was loaded
            self._put(self._chunk(data))
            return
        self._delayed = (headers, data)
        self._said = trio.current_time()
        if not self.is_late:
            self._put(b"")
        self._opening.set()

    def send(self, data: bytes) -> bool:
        """Send a part of the stream; False if the client reads slower than we write."""
        return self._put(self._chunk(data))

    def _head(self) -> bytes:
        """Return the head and the first part of the stream if they have not been sent; b"" if they have."""
        if self._delayed is None:
            return b""
        (headers, data), self._delayed = self._delayed, None
        every = [("Date", formatdate(usegmt=True)), *_STREAM, *headers, *self._headers]
        self.opened = True
        head = self._http.send(h11.Response(status_code=200, headers=every)) or b""
        return head + self._chunk(data)

    async def sent(self) -> None:
        """Wait until the kernel has all that was sent."""
        await self._writer.flushed()

    async def close(self, data: bytes) -> None:
        """Send the last part of the stream and its end, in one piece."""
        head = self._head()
        self._put(head + self._chunk(data) + (self._http.send(h11.EndOfMessage()) or b""))
        await self._writer.flushed()

    async def keep_alive(self) -> None:
        """Break every long silence of the stream, so that nobody takes it for dead."""
        await self._opening.wait()
        while self._delayed is not None or self._http.our_state is h11.SEND_BODY:
            await trio.sleep_until(self._said + self._keep_alive_s)
            if trio.current_time() < self._said + self._keep_alive_s:
                continue
            if self._writer.waiting_bytes:
                self._said = trio.current_time()  # the silence is the reader's
            else:
                self._put(self._chunk(self._sign_of_life()))

    def _chunk(self, data: bytes) -> bytes:
        """Return `data` as the body has it; a chunk of nothing would be its end (RFC 9112, 7.1)."""
        if not self._chunked or not data:
            return data
        return b"%x\r\n%b\r\n" % (len(data), data)

    def _put(self, data: bytes) -> bool:
        """Write; True if the kernel has it all."""
        self._said = trio.current_time()
        return self._writer.write(self._head() + data if self._delayed is not None else data)
